"""The sums behind a statistic: count, mean and centred scatter of one group of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch.linalg import add_gram, mirror, rademacher
from pca_torch.precision import unit_roundoff

__all__ = ["Scatter"]

U64 = unit_roundoff(torch.float64)
PROBES = 8  # columns that measure the rounding of float32 products
FAR = 4.0  # rows this many medians from the mean are summed apart in float64
PROBE_SAFETY = 4.0  # eight signs estimate ‖E‖_F to about a third; E is judged by four times that


class Scatter:
    """Sums of rows with D features; `add` is the merge of one chunk.

    Args:
        d: D.
        device: where the sums lie.
        dtype: arithmetic of the products, float32 or float64; the sums are float64.
    """

    def __init__(self, d: int, device: torch.device, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.n = 0
        self.torn = False  # rows are being counted
        self.weight = 0.0  # Σw
        self.weight_sq = 0.0  # Σw²
        self.depth = 0  # longest chain of additions behind an entry of the scatter
        self.merges = 0  # shifts of the mean so far
        self.mean = torch.zeros(d, dtype=torch.float64, device=device)
        self._between = torch.zeros_like(self.mean)  # Σ f δ² per column, f δδᵀ being the shifts so far
        self._slip = torch.zeros_like(self.mean)  # Σ f t² per column, t what δ may be off by
        self._upper = torch.zeros(d, d, dtype=torch.float64, device=device)  # upper block triangle of S
        self._signs = rademacher(d, 0 if dtype == torch.float64 else PROBES, device)  # Z
        self._probe = torch.zeros_like(self._signs)  # P, what S Z would be without rounding

    @property
    def measured(self) -> bool:
        """Whether float32 products came in, so that their rounding is measured."""
        return self._signs.shape[1] > 0

    @property
    def matrix(self) -> Tensor:
        """(D, D) S = Σ w (x - mean)(x - mean)ᵀ."""
        return mirror(self._upper)

    @property
    def diagonal(self) -> Tensor:
        """(D,) diagonal of S."""
        return self._upper.diagonal()

    def error(self, scale: Tensor | None = None) -> float:
        """Bound on ‖computed - true‖₂ of S, or of S_ij / (scale_i scale_j).

        A sum of float64 products obeys |E| ≤ γ |X|ᵀ|X| entrywise, and ‖|X|ᵀ|X|‖₂ ≤ tr S. γ is depth·u at
        worst (Higham 2002, §3.1) and 8√depth·u but with probability 1e-13 (Higham & Mary, SIAM J. Sci.
        Comput. 41(5), 2019); four more roundings come from centring.
        A mean is off by t, a few u·|mean|, and thus a shift f δδᵀ by f (δtᵀ + tδᵀ + ttᵀ): the larger
        part after a large offset. Over all shifts that is at most 2 √(Σf‖δ‖² Σf‖t‖²) + Σf‖t‖².
        For float32 products γ is six orders too large, so E is measured: P = Σ (x - m)((x - m)ᵀZ) was
        summed in float64 beside S for eight columns Z of random signs, and the mean of
        ‖P - SZ‖_F² is 8‖E‖_F² (Hutchinson, 1990).

        Args:
            scale: (D,) by which rows and columns are divided; None is 1.
        """
        if scale is None:
            scale = torch.ones_like(self.mean)
        squares = torch.stack([self.diagonal, self._between, self._slip]) / scale.square()
        trace, between, slip = squares.sum(1).tolist()
        rounding = (min(self.depth, 8 * math.sqrt(self.depth)) + 4) * U64 * trace
        bound = rounding + 2 * math.sqrt(between * slip) + slip
        if not self.measured:
            return bound
        seen = torch.linalg.matrix_norm((self._probe - self.matrix @ self._signs) / scale[:, None])
        return bound + PROBE_SAFETY * seen.item() / scale.min().item() / math.sqrt(PROBES)

    def add(self, rows: Tensor, w: Tensor | None = None) -> None:
        """Add a chunk of rows (n, D) of any real dtype with weights w > 0 (n,).

        Where products are float32, rows far from the others are summed apart in float64: one sink
        token would drown the rest in its rounding, and drag the mean that they are centred by.
        """
        x = rows.to(torch.float64, copy=True)  # ours to change; operations on mixed dtypes are far slower
        near = x.mean(0)
        x -= near
        if self.dtype == torch.float64:
            self._add_shifted(x, near, w, torch.float64)
            return
        size = torch.linalg.vector_norm(x, dim=1)
        far = size > FAR * size.median()
        if not bool(far.any()):
            self._add_shifted(x, near, w, self.dtype)
            return
        for part, dtype in ((far, torch.float64), (~far, self.dtype)):
            self._add_shifted(x[part], near, None if w is None else w[part], dtype)

    def _add_shifted(self, x: Tensor, near: Tensor, w: Tensor | None, dtype: torch.dtype) -> None:
        """Centre rows x + near by their own mean, in place, and add their products, formed in `dtype`.

        They were shifted before: the mean of what is left shows the last digit t of the first, which would
        add n·ttᵀ, beyond which no column can be seen that varies less.
        """
        if w is None:
            weight = weight_sq = float(len(x))
            low = x.mean(0)
            x -= low
        else:
            weight, weight_sq = w.sum().item(), w.square().sum().item()
            for_all = (w @ x) / weight  # weighted, it is far from zero
            x -= for_all
            low = (w @ x) / weight
            x -= low
            x *= w.sqrt()[:, None]
            low = for_all + low
        self.torn = True
        self._shift(len(x), weight, weight_sq, near + low)
        self.depth = max(self.depth, len(x)) + 1
        add_gram(self._upper, x, dtype)
        if self.measured:
            self._probe.addmm_(x.mT, x @ self._signs)
        self.torn = False

    def merge(self, other: Scatter) -> None:
        """Add the rows of `other`, which stays as it is."""
        if other.n == 0:
            return
        device = self.mean.device
        if other.measured and not self.measured:  # from here on: what is here is exact, its P is S Z
            self._signs = other._signs.to(device)
            self._probe = self.matrix @ self._signs
        self._shift(other.n, other.weight, other.weight_sq, other.mean.to(device))
        self.depth = max(self.depth, other.depth) + 1
        self.merges = max(self.merges, other.merges) + 1
        self._between += other._between.to(device)
        self._slip += other._slip.to(device)
        self._upper += other._upper.to(device)
        if self.measured:
            probe = other._probe.to(device) if other.measured else other.matrix.to(device) @ self._signs
            self._probe += probe

    def _shift(self, n: int, weight: float, weight_sq: float, mean: Tensor) -> None:
        """Move to the mean that includes `n` more rows around `mean` (Chan, Golub & LeVeque, 1983)."""
        total = self.weight + weight
        delta = mean - self.mean
        factor = self.weight * weight / total
        doubt = 2 * (self.merges + 8) * U64 * (self.mean.abs() + mean.abs())
        self._between += factor * delta.square()
        self._slip += factor * doubt.square()
        self.merges += 1
        self._upper.addr_(delta, delta, alpha=factor)
        if self.measured:
            self._probe.addr_(delta, delta @ self._signs, alpha=factor)
        self.mean += delta * (weight / total)
        self.n += n
        self.weight = total
        self.weight_sq += weight_sq
