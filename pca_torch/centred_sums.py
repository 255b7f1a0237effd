"""Count, mean and centred scatter of rows, of one matrix or of several at once: what all scatters share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from pca_torch._checks import LARGEST
from pca_torch._state import Saved, State, dtype_name
from pca_torch.linalg import rademacher
from pca_torch.precision import unit_roundoff

__all__ = ["PROBES", "PROBE_SAFETY", "CentredSums"]

U64 = unit_roundoff(torch.float64)
PROBES = 8  # columns that measure the rounding of float32 products
PROBE_SAFETY = 4.0  # eight signs estimate ‖E‖_F to about a third; E is judged by four times that
FAR = 4.0  # rows this many medians from the mean are summed apart in float64
WEIGHTS = "weight", "weight_sq"  # both are n, unless rows came with weights or were discounted
FAINT = 1e-100  # Σw does not sink below it: nothing beside rows of any weight allowed, and its square exists


class CentredSums(ABC):
    """Sums of rows (n, *shape), one D×D matrix for each row (D,) in `shape`.

    Args:
        shape: (D,), or (H, D) for H matrices at once.
        device: where the sums lie.
        dtype: arithmetic of the products, float32 or float64; the sums are float64.
    """

    _axes: ClassVar[int]  # length of `shape`
    _counts: ClassVar[tuple[str, ...]]  # the facts of a saved one, beside its dtype, and WEIGHTS if not n

    def __init__(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> None:
        d = shape[-1]
        self.dtype = dtype
        self.n = 0
        self.torn = False  # rows are being counted
        self.weight = 0.0  # Σw
        self.weight_sq = 0.0  # Σw²
        self.depth = 0  # longest chain of additions behind an entry of the scatter
        self.merges = 0  # shifts of the mean so far
        self.mean = torch.zeros(*shape, dtype=torch.float64, device=device)
        self._between = torch.zeros_like(self.mean)  # Σ f δ² per column, f δδᵀ being the shifts so far
        self._slip = torch.zeros_like(self.mean)  # Σ f t² per column, t what δ may be off by
        self._upper = torch.zeros(*shape, d, dtype=torch.float64, device=device)  # upper triangle of S
        self._signs = rademacher(d, 0 if dtype == torch.float64 else PROBES, device)  # Z
        self._probe = self._upper @ self._signs  # P, what S Z would be without rounding

    @property
    def measured(self) -> bool:
        """Whether float32 products came in, so that their rounding is measured."""
        return self._signs.shape[1] > 0

    @property
    @abstractmethod
    def matrix(self) -> Tensor:
        """(*shape, D) S = Σ w (x - mean)(x - mean)ᵀ, a copy."""

    @property
    def diagonal(self) -> Tensor:
        """(*shape) diagonal of S."""
        return self._upper.diagonal(dim1=-2, dim2=-1)

    def add(self, rows: Tensor, w: Tensor | None = None, *, owned: bool = False) -> None:
        """Add a chunk of rows of any real dtype.

        Where products are float32, rows far from the others are summed apart in float64: one sink
        token would drown the rest in its rounding, and drag the mean that they are centred by.
        Where memory runs out nothing was added, or `torn` says so.

        Args:
            rows: (n, D), or (n, H·D).
            w: (n,) weights > 0, or None.
            owned: `rows` are float64 and no one else's: they are overwritten.

        Raises:
            RuntimeError: a chunk before was added in part, and would be added again.
        """
        if self.torn:
            raise RuntimeError("these sums hold a chunk of rows in part; start new ones.")
        x = rows if owned else rows.to(torch.float64, copy=True)  # mixed dtypes are far slower
        x = x.view(-1, *self.mean.shape)
        near = x.mean(0)
        x -= near
        if self.dtype == torch.float64:
            self._add_shifted(x, near, w, torch.float64)
            return
        size = torch.linalg.vector_norm(x, dim=-1)
        far = (size > FAR * size.median(0).values).view(len(x), -1).any(1)
        if not bool(far.any()):
            self._add_shifted(x, near, w, self.dtype)
            return
        parts = [
            (x[where], None if w is None else w[where], dtype)
            for where, dtype in ((~far, self.dtype), (far, torch.float64))
        ]
        for part, of_part, dtype in parts:
            if len(part):  # every row may be far in one of several matrices
                self._add_shifted(part, near, of_part, dtype)
                self.torn = True  # until the second is in as well
        self.torn = False

    def merge(self, other: Self) -> None:
        """Add the rows of `other`, which stays as it is.

        Args:
            other: sums of rows of the same shape.
        """
        if other.n == 0:
            return
        device = self.mean.device
        if other.measured and not self.measured:  # from here on: what is here is exact, its P is S Z
            self._signs = other._signs.to(device)
            self._probe = self.matrix @ self._signs
        self.torn = True
        self._shift(other.n, other.weight, other.weight_sq, other.mean.to(device))
        self.depth = max(self.depth, other.depth) + 1
        self.merges = max(self.merges, other.merges) + 1
        self._between += other._between.to(device)
        self._slip += other._slip.to(device)
        self._upper += other._upper.to(device)
        if self.measured:
            probe = other._probe.to(device) if other.measured else other.matrix.to(device) @ self._signs
            self._probe += probe
        self.torn = False

    def discount(self, factor: float) -> None:
        """Let every row so far weigh `factor` times as much.

        The rounding of each product is one more in the chain behind an entry, and one more that the next
        shift of the mean, whose share comes from the weights, may be off by.

        Args:
            factor: above 0, at most 1. Where Σw would sink below 1e-100 it stays there.
        """
        if factor == 1 or self.n == 0:
            return
        factor = min(1.0, max(factor, FAINT / self.weight))
        self.torn = True
        self.weight *= factor
        self.weight_sq *= factor * factor
        self.depth += 1
        self.merges += 1
        for sums in (self._between, self._slip, self._upper, self._probe):
            sums *= factor
        self.torn = False

    @abstractmethod
    def check_possible(self) -> None:
        """Refuse sums that no rows have.

        Raises:
            ValueError: the first thing that is impossible.
        """

    # --- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def _add_products(self, z: Tensor, dtype: torch.dtype) -> None:
        """Add zᵀz of z (…, n, D), formed in `dtype`, to the upper triangle.

        Raises:
            OutOfMemoryError: nothing was added.
        """

    @staticmethod
    @abstractmethod
    def _add_outer(target: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        """Add factor·abᵀ of a (*shape) and b (…, P) to `target` (*shape, P)."""

    @abstractmethod
    def _packed(self) -> Tensor:
        """Upper triangle of S, of each matrix row by row."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> None:
        """Take over what `_packed` gave."""

    def _add_shifted(self, x: Tensor, near: Tensor, w: Tensor | None, dtype: torch.dtype) -> None:
        """Centre rows x + near by their own mean, in place, and add their products, formed in `dtype`.

        They were shifted before: the mean of what is left shows the last digit t of the first, which would
        add n·ttᵀ, beyond which no column can be seen that varies less.

        Raises:
            OutOfMemoryError: nothing was added.
        """
        if w is None:
            weight = weight_sq = float(len(x))
            low = x.mean(0)
            x -= low
        else:
            weight, weight_sq = w.sum().item(), w.square().sum().item()
            low = _centre_weighted(x.view(len(x), -1), w, weight).view_as(near)
        z = x.movedim(0, -2)
        probe = z.mT @ (z @ self._signs) if self.measured else None
        torn, self.torn = self.torn, True
        try:
            self._add_products(z, dtype)
        except torch.OutOfMemoryError:  # memory is taken before anything is added
            self.torn = torn
            raise
        if probe is not None:
            self._probe += probe
        self.depth = max(self.depth, len(x)) + 1
        self._shift(len(x), weight, weight_sq, near + low)
        self.torn = False

    def _shift(self, n: int, weight: float, weight_sq: float, mean: Tensor) -> None:
        """Move to the mean that includes `n` more rows around `mean` (Chan, Golub & LeVeque, 1983)."""
        total = self.weight + weight
        delta = mean - self.mean
        factor = self.weight * weight / total
        doubt = 2 * (self.merges + 8) * U64 * (self.mean.abs() + mean.abs())
        self._between += factor * delta.square()
        self._slip += factor * doubt.square()
        self.merges += 1
        self._add_outer(self._upper, delta, delta, factor)
        if self.measured:
            self._add_outer(self._probe, delta, delta @ self._signs, factor)
        self.mean += delta * (weight / total)
        self.n += n
        self.weight = total
        self.weight_sq += weight_sq

    def _bound(self, trace: Tensor, between: Tensor, slip: Tensor) -> Tensor:
        """What products in float64 and the shifts of the mean are off by; `Scatter.error` has the reasons."""
        rounding = (min(self.depth, 8 * math.sqrt(self.depth)) + 4) * U64 * trace
        return rounding + 2 * (between * slip).sqrt() + slip

    # --- as a file ---------------------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` makes sums that go on bit for bit as these.

        Returns:
            Tensors, which may share the memory of the sums, and facts in JSON types. `scatter` is the upper
            triangle of S, of each matrix row by row.

        Raises:
            RuntimeError: rows are counted in part.
        """
        if self.torn:
            raise RuntimeError("these sums were interrupted while they counted rows; they cannot be saved.")
        tensors = {"mean": self.mean, "between": self._between, "slip": self._slip, "scatter": self._packed()}
        if self.measured:
            tensors |= {"signs": self._signs, "probe": self._probe}
        counts = self._counts
        if not self.weight == self.weight_sq == self.n:
            counts = dict.fromkeys(counts + WEIGHTS)  # each once
        facts = {"dtype": dtype_name(self.dtype)}
        return tensors, facts | {name: getattr(self, name) for name in counts}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: Any) -> Self:
        """The sums that `to_state` told of.

        Args:
            tensors: by name, on the device where the sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no sums can be like that.
        """
        state = State(tensors, facts)
        mean = state.tensor("mean", [None] * cls._axes)
        *several, d = shape = mean.shape
        if not mean.numel():
            raise ValueError(f"`mean` must have at least one feature, got shape {tuple(shape)}.")
        packed = state.tensor("scatter", [*several, d * (d + 1) // 2])  # before D×D numbers are made
        sums = cls(shape, mean.device, state.product_dtype("dtype"))
        sums.mean = mean
        sums.n, sums.depth, sums.merges = (state.count(name) for name in ("n", "depth", "merges"))
        sums.weight = sums.weight_sq = float(sums.n)
        for name in WEIGHTS:
            if name in cls._counts or state.has(name):
                setattr(sums, name, state.number(name, most=LARGEST**2))
        sums._between = state.tensor("between", shape, least=0)
        sums._slip = state.tensor("slip", shape, least=0)
        if sums.measured or state.has("signs"):
            sums._signs = state.tensor("signs", [d, PROBES])
            sums._probe = state.tensor("probe", [*shape, PROBES])
        state.done()
        sums._unpack(packed)
        sums.check_possible()
        return sums


def _centre_weighted(x: Tensor, w: Tensor, weight: float) -> Tensor:
    """Centre rows (n, D) by their weighted mean (D,) and multiply them by √w, in place; the mean."""
    first = (w @ x) / weight  # weighted, it is far from zero
    x -= first
    low = (w @ x) / weight
    x -= low
    x *= w.sqrt()[:, None]
    return first + low
