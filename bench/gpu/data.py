"""One set of samples on the device, with its truth, and what answers about it are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.record import Verdict
from bench.gpu.samples import Truth, samples, truth_of
from pca_torch.result import PCAResult

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, eq=False)
class Data:
    """One set of samples with its truth, and what rows about it are called."""

    x: Tensor
    truth: Truth
    k: int
    spectrum: str

    @classmethod
    def make(cls, spectrum: str, n: int, d: int, k: int, dtype: torch.dtype, device: torch.device) -> Data:
        """Draw samples and work out their truth.

        Args:
            spectrum: one of those of `bench/spectra.py`.
            n: N.
            d: D.
            k: K.
            dtype: of the samples.
            device: where.
        """
        x = samples(spectrum, n, d, k, dtype=dtype, device=device)
        return cls(x, truth_of(x), k, spectrum)

    @property
    def facts(self) -> dict:
        """Size, dtype and spectrum for the record."""
        n, d = self.x.shape
        return {"n": n, "d": d, "k": self.k, "dtype": NAMES[self.x.dtype], "spectrum": self.spectrum}

    @property
    def size(self) -> tuple[int, int]:
        """N and D."""
        return self.x.shape[0], self.x.shape[1]

    def leading(self, result: PCAResult) -> Verdict:
        """Of K directions, against their certificate."""
        _on_device(result.components, self.x)
        certificate = result.certificate
        verdict = self.truth.of_directions(result.components, certificate.missed_ratio_bound)
        return Verdict(verdict.error, verdict.bound, {**verdict.facts, "bound_kind": certificate.bound_kind})

    def every(self, result: PCAResult) -> Verdict:
        """Of all variances, against their certificate."""
        _on_device(result.components, self.x)
        return self.truth.of_values(result.spectrum, max(result.certificate.variance_error))


def _on_device(result: Tensor, x: Tensor) -> None:
    """Refuse an answer that was brought elsewhere.

    Raises:
        RuntimeError: it lies on another device than the samples.
    """
    if result.device != x.device:
        raise RuntimeError(f"the answer lies on {result.device}, the samples on {x.device}.")
