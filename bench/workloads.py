"""What is asked of every method: the sizes, the spectra and the data."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from spectra import samples
from torch import Tensor

Kind = Literal["rows", "batches", "heads"]
BATCHES = 8  # of a stream


@dataclass(frozen=True)
class Workload:
    """One question at one size."""

    name: str
    kind: Kind  # what the data are: (N, D), a list of (N / 8, D), or (H, N, E)
    shape: tuple[int, ...]  # (N, D) or (H, N, E)
    k: int | float | None  # components, a share of the variance, or None for all
    spectra: tuple[str, ...]
    weight: float  # seconds that one spectrum takes on two cores, roughly: its share of the time

    @property
    def title(self) -> str:
        """The question in words."""
        size = "×".join(map(str, self.shape))
        if self.kind == "heads":
            heads, n, e = self.shape
            return f"all components of {heads} heads of {n}×{e}"
        if self.kind == "batches":
            return f"top {self.k} of a stream of {size}, {self.batch} rows a batch"
        what = f"top {self.k}" if isinstance(self.k, int) else f"a share of {self.k}"
        return f"{'all components' if self.k is None else what} of {size}"

    @property
    def batch(self) -> int:
        """Rows of a batch of a stream."""
        return math.ceil(self.shape[0] / BATCHES)

    @property
    def lifted(self) -> int:
        """K of a massive spectrum."""
        return self.k if isinstance(self.k, int) else min(128, self.shape[-1])


def samples_of(shape: tuple[int, ...], spectrum: str, lifted: int) -> Tensor:
    """(N, D) or (H, N, E) float32.

    Args:
        shape: of the samples.
        spectrum: one of `spectra.SPECTRA`.
        lifted: K of a massive spectrum.
    """
    return samples(spectrum, math.prod(shape[:-1]), shape[-1], lifted).reshape(shape)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("top", "rows", (4096, 2048), 128, ("power", "flat", "massive", "offset"), 70),
        Workload("share", "rows", (4096, 2048), 0.95, ("power", "offset"), 35),
        Workload("all", "rows", (4096, 2048), None, ("power", "massive"), 35),
        Workload("streaming", "batches", (16384, 2048), 128, ("power", "flat"), 130),
        Workload("heads", "heads", (256, 4096, 128), None, ("power",), 45),
        Workload("wide", "rows", (512, 16384), 64, ("power",), 20),
    )
}
LARGE = {  # `--large`: where the exponents of the methods tell
    "top": replace(WORKLOADS["top"], shape=(8192, 4096), spectra=("power", "flat", "offset"), weight=300),
    "share": replace(WORKLOADS["share"], shape=(8192, 4096), spectra=("power",), weight=240),
}
TINY = {
    "top": ((200, 64), 8),
    "share": ((200, 64), 0.8),
    "all": ((200, 64), None),
    "streaming": ((320, 48), 8),
    "heads": ((4, 100, 16), None),
    "wide": ((40, 300), 5),
}


def resized(workload: Workload, shape: tuple[int, ...] | None, k: int | None) -> Workload:
    """The same question at another size.

    Args:
        workload: with the default size.
        shape: as many sizes as it has, or None to keep them.
        k: components, of a workload that counts them, or None to keep it.

    Raises:
        ValueError: sizes of another number, or a K that they do not have.
    """
    if shape is not None and len(shape) != len(workload.shape):
        want = "x".join("HNE" if workload.kind == "heads" else "ND")
        raise ValueError(f"`--size` of {workload.name} must be {want}, got {'x'.join(map(str, shape))}.")
    new = replace(workload, shape=shape or workload.shape)
    if k is not None and isinstance(workload.k, int):
        new = replace(new, k=k)
    most = new.batch if new.kind == "batches" else new.shape[0]
    if isinstance(new.k, int) and not 1 <= new.k <= min(most, new.shape[-1]):
        raise ValueError(f"`--k` of {workload.name} must be in 1..{min(most, new.shape[-1])}, got {new.k}.")
    return new


def tiny(workload: Workload) -> Workload:
    """The same question in a few milliseconds.

    Args:
        workload: any.
    """
    shape, k = TINY[workload.name]
    return replace(workload, shape=shape, k=k)
