"""The covariance of samples in memory, multiplied without being formed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pca_torch._checks import divisor_of, free_memory
from pca_torch.linalg import add_gram, mirror, two_sum
from pca_torch.operators.columns import Columns, facts
from pca_torch.precision import exact_products, unit_roundoff
from pca_torch.problem import product_noise

__all__ = ["Rows"]

U64 = unit_roundoff(torch.float64)
COPY_SHARE = 0.25  # of the free memory that a centred float64 copy may take
CHUNK_BYTES = 2**27  # of float64 rows that are centred at a time: 4096 rows of D = 4096
EVERY = slice(None)


class Rows:
    """C = Xcᵀ Xc / divisor of the centred rows Xc (N, D) in float64; D×D is never formed.

    A centred copy is kept where it is small beside the free memory. Otherwise every product centres the
    rows again, a chunk at a time, and the samples are held by reference: leave them as they are.

    Args:
        x: finite samples (N, D) of any real dtype.
        weights: (N,) float64, positive; None is 1.
        center: subtract the mean; without it the second moment is multiplied.
        standardize: divide each column by its standard deviation.
        ddof: delta degrees of freedom of the divisor.

    Raises:
        ValueError: too few rows for `ddof`, or the total variance overflowed.
    """

    matrix: Tensor | None = None

    def __init__(
        self,
        x: Tensor,
        weights: Tensor | None = None,
        *,
        center: bool = True,
        standardize: bool = False,
        ddof: float = 1,
    ) -> None:
        self._x = x.detach()
        self.n_rows = len(x)  # of what `gather` takes
        self._shifts: list[Tensor] = []
        self._scale: Tensor | None = None
        self._root: Tensor | None = None  # (N, 1) √w
        self._prepared = False  # whether `_x` is centred, scaled and weighted already
        with exact_products(x.device):
            columns = self._columns(weights, ddof)
            self.problem = facts(columns, center=center, standardize=standardize, ddof=ddof)
            self._scale = self.problem.scale
            self._root = None if weights is None else weights.sqrt()[:, None]
            if not center:
                self._shifts = []
            free = free_memory(x.device)
            if free is not None and 8 * x.numel() <= COPY_SHARE * free:
                self._keep_copy()

    @property
    def noise(self) -> float:
        """Rounding of one product over λ₁: that of sums over D, then over N."""
        return product_noise(self._x.shape[1]) + product_noise(len(self._x))

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) → v C (b, D).

        Args:
            v: float64 rows.
        """
        out = torch.zeros_like(v)
        for rows in self._slices():
            z = self._part(rows)
            out.addmm_(v @ z.mT, z)
        return out.div_(self.problem.divisor)

    def scores(self, v: Tensor) -> Tensor:
        """Rows (b, D) → Xc vᵀ (N, b), each row times √w.

        Args:
            v: float64 rows.
        """
        return torch.cat([self._part(rows) @ v.mT for rows in self._slices()])

    def gather(self, q: Tensor) -> Tensor:
        """Columns (N, b) → qᵀ Xc (b, D), each row of Xc times √w.

        Args:
            q: float64 columns.
        """
        out = q.new_zeros(q.shape[1], self._x.shape[1])
        for rows in self._slices():
            out.addmm_(q[rows].mT, self._part(rows))
        return out

    def gram(self) -> Tensor:
        """(N, N) Xc Xcᵀ / divisor, which has the variances of C that are not zero."""
        n, d = self._x.shape
        out = torch.zeros(n, n, dtype=torch.float64, device=self._x.device)
        step = d if self._prepared else _fitting(n)
        for start in range(0, d, step):
            add_gram(out, self._part(EVERY, slice(start, start + step)).mT)
        return mirror(out).div_(self.problem.divisor)

    def _slices(self) -> Iterator[slice]:
        """Rows to work on at a time."""
        n, d = self._x.shape
        step = n if self._prepared else _fitting(d)
        return (slice(start, min(start + step, n)) for start in range(0, n, step))

    def _part(self, rows: slice, columns: slice = EVERY) -> Tensor:
        """Some entries of Xc, times √w."""
        part = self._x[rows, columns]
        if self._prepared:
            return part
        part = part.double()
        for shift in self._shifts:
            part = part - shift[columns]
        if self._scale is not None:
            part = part / self._scale[columns]
        return part if self._root is None else part * self._root[rows]

    def _keep_copy(self) -> None:
        copy = torch.empty(self._x.shape, dtype=torch.float64, device=self._x.device)
        for rows in self._slices():
            copy[rows] = self._part(rows)
        self._x, self._prepared = copy, True

    def _columns(self, weights: Tensor | None, ddof: float) -> Columns:
        """Mean and squares; the mean is kept as two numbers, so that its own last digit is no direction."""
        n, d = self._x.shape
        weight = float(n) if weights is None else weights.sum().item()
        weight_sq = float(n) if weights is None else weights.square().sum().item()
        divisor_of(n, weight, weight_sq, ddof)
        w = self._x.new_ones(n, dtype=torch.float64) if weights is None else weights
        for _ in range(2):
            self._shifts.append(self._sums(w, 1) / weight)
        mean, rest = two_sum(*self._shifts)
        self._shifts = [mean, rest]
        scatter = self._sums(w, 2)
        depth = min(n, _fitting(d)) + -(-n // _fitting(d))
        slip = depth * U64 * (scatter / weight).sqrt() + 4 * U64 * mean.abs()
        return Columns(n, weight, weight_sq, mean, scatter, slip, depth, self._x.dtype)

    def _sums(self, w: Tensor, power: int) -> Tensor:
        """(D,) Σ w (x - shifts)^power."""
        out = w.new_zeros(self._x.shape[1])
        for rows in self._slices():
            out += w[rows] @ self._part(rows).pow(power)
        return out


def _fitting(length: int) -> int:
    """How many float64 rows of `length` make a chunk."""
    return max(1, CHUNK_BYTES // (8 * length))
