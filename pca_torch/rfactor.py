"""Count, mean and triangular factor of the centred rows of a stream: one pass, mergeable, never squared."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import check_choice, divisor_of, require_square
from pca_torch.intake import BUFFER_ROWS, CHUNK_ROWS, UNCOUNTED, Intake, by_parts
from pca_torch.linalg import two_sum
from pca_torch.precision import Precision, exact_products, factor_noise, product_dtype, unit_roundoff

__all__ = ["RFactor"]

U64 = unit_roundoff(torch.float64)
COPIES = (
    7  # D×D float64: R, D rows that wait and as many centred, the stack of R and those, LAPACK's copy of it
)


class RFactor:
    """Mean and triangular factor R of the centred rows with D features, RᵀR = Σ w (x - mean)(x - mean)ᵀ.

    The scatter itself is never formed: singular values of R are those of the centred samples, where the
    eigenvalues of a scatter have lost every σ below √u·σ₁. Any split into batches, in any order, gives the
    same answer up to rounding.

    Args:
        n_features: D.
        precision: arithmetic of the factorisations, "auto", "float32" or "float64"; R is stored in float64.
        device: where R lies; None takes the device of the first batch.
        nonfinite: "raise" refuses a batch with NaN or inf whole, "drop" skips and counts such rows.

    Raises:
        ValueError: D×D does not fit in memory, or an argument is out of range.

    Memory: 8·D² bytes, seven times that during an update. Accuracy: `error` bounds what R is off by.
    Source: TSQR, Demmel et al., SIAM J. Sci. Comput. 34(1), 2012; the mean shift between two batches is
        one more row, after Chan, Golub & LeVeque, Am. Stat. 37(3), 1983.
    """

    def __init__(
        self,
        n_features: int,
        *,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        self._intake = Intake(n_features, nonfinite)
        check_choice(precision, "precision", ("auto", "float32", "float64"))
        self.n_features = n_features
        self.precision: Precision = precision
        self.product_dtype: torch.dtype | None = None
        self.device: torch.device | None = None if device is None else torch.device(device)
        self._sums: _Factor | None = None
        self._require_memory(torch.device(device or "cpu"))

    # --- reading -----------------------------------------------------------------------------------

    @property
    def n_samples(self) -> int:
        """Rows counted so far."""
        return (self._sums.n if self._sums else 0) + len(self._intake)

    @property
    def n_dropped(self) -> int:
        """Rows skipped under `nonfinite="drop"`."""
        return self._intake.n_dropped

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The coarsest dtype that came in; integers count as float64."""
        return self._intake.dtype

    @property
    def mean(self) -> Tensor:
        """(D,) float64 mean of all rows, weighted where weights came."""
        return self._total().mean.clone()

    @property
    def r(self) -> Tensor:
        """(M, D) float64 upper triangle R, M ≤ D, in activation units."""
        return self._total().r.clone()

    @property
    def trace(self) -> float:
        """Σ w‖x - mean‖² over all rows, not divided by anything."""
        return self._total().r.square().sum().item()

    @property
    def sum_weights(self) -> float:
        """Σw; the number of rows where no weights came."""
        return self._total().weight

    @property
    def n_effective(self) -> float:
        """(Σw)² / Σw², Kish's effective number of rows."""
        total = self._total()
        return total.weight**2 / total.weight_sq if total.weight_sq else 0.0

    @property
    def error(self) -> float:
        """s: R is that of centred rows that are off by at most s·σ₁ in the spectral norm.

        Columns may be scaled before σ₁ is taken. See `_merged` for the formula.
        """
        return self._total().error

    def divisor(self, ddof: float = 1) -> float:
        """Σw - ddof·Σw²/Σw, which is N - ddof without weights.

        Args:
            ddof: delta degrees of freedom.

        Raises:
            ValueError: nothing would be left to divide by.
        """
        total = self._total()
        return divisor_of(total.n, total.weight, total.weight_sq, ddof, UNCOUNTED)

    def covariance(self, ddof: float = 1) -> Tensor:
        """(D, D) float64 RᵀR / (Σw - ddof·Σw²/Σw), for looking: its eigenvalues have lost what R keeps.

        Args:
            ddof: delta degrees of freedom.

        Raises:
            ValueError: too few rows for `ddof`.
        """
        r = self._total().r
        return r.mT @ r / self.divisor(ddof)

    def second_moment(self) -> Tensor:
        """(D, D) float64 Σ w x xᵀ / Σw, from R: adding the mean back cancels nothing.

        Raises:
            ValueError: no rows yet.
        """
        mean = self._total().mean
        return self.covariance(0) + torch.outer(mean, mean)

    # --- writing -----------------------------------------------------------------------------------

    def update(self, x: Any, mask: Any = None, weights: Any = None) -> RFactor:
        """Count the rows of `x`.

        Args:
            x: samples (..., D) of any real dtype; not changed, not kept.
            mask: 0/1 with the leading shape of `x`; rows at 0 are left out, whatever they hold.
            weights: importance ≥ 0 of each row, same shape as the mask; rows at 0 are left out.

        Returns:
            `self`.

        Raises:
            ValueError: another D, a bad mask or weights, or NaN or inf in a row that counts under
                `nonfinite="raise"`. The statistic is then as it was before.
        """
        rows, w = self._intake.select(x, mask, weights)
        if not len(rows):
            return self
        with exact_products(rows.device):
            self._start(self.device or rows.device, rows.dtype)
            rows, w = rows.to(self.device), None if w is None else w.to(self.device)
            self._intake.note(rows.dtype)
            if len(rows) >= self._enough:
                self._sums = self._with(rows, w)
            elif self._intake.wait(rows, w) >= self._enough:
                self.flush()
        return self

    def merge(self, other: RFactor) -> RFactor:
        """Count the rows of `other`, which keeps its own.

        Args:
            other: statistic over the same D features.

        Returns:
            `self`.

        Raises:
            ValueError: another D.
        """
        if other.n_features != self.n_features:
            raise ValueError(
                f"`other` has {other.n_features} features, this statistic has {self.n_features}; "
                "merge statistics of the same columns."
            )
        other.flush()
        self.flush()
        theirs = other._sums
        if theirs is None:
            self._intake.n_dropped += other.n_dropped
            return self
        with exact_products(theirs.r.device):
            mine = self._start(self.device or theirs.r.device, other.input_dtype or torch.float64)
            # R is as exact as the coarser of the two
            work = torch.float32 if other.product_dtype == torch.float32 else self._work
            total = _merged(mine, theirs.to(mine.r.device), work)
        self._intake.note(other.input_dtype or torch.float64)  # before the rows: coarser is on the safe side
        dropped = self.n_dropped + other.n_dropped
        # together: an interrupt counts nothing twice
        self._sums, self.product_dtype, self._intake.n_dropped = total, work, dropped
        return self

    def flush(self) -> None:
        """Factor the rows of small batches that wait; reading does it by itself."""
        if not self._intake.waiting:
            return
        rows, w = self._intake.gathered()
        with exact_products(rows.device):
            total = self._with(rows, w)
        self._sums, self._intake.waiting = total, []  # together: an interrupt counts nothing twice

    # --- inside ------------------------------------------------------------------------------------

    @property
    def _enough(self) -> int:
        """Rows that are worth a factorisation: as many as R has, it is factored again each time."""
        return max(BUFFER_ROWS, self.n_features)

    @property
    def _work(self) -> torch.dtype:
        return self.product_dtype or torch.float64

    def _require_memory(self, device: torch.device) -> None:
        require_square(self.n_features, COPIES, device, "use `svd_solver='full'` on the data itself")

    def _start(self, device: torch.device, dtype: torch.dtype) -> _Factor:
        """What was counted so far; the first rows settle the device and the arithmetic."""
        if self._sums is None:
            self._require_memory(device)
            self.device = device
            self.product_dtype = product_dtype(dtype, device, self.precision)
            self._sums = _Factor.empty(self.n_features, device)
        return self._sums

    def _with(self, rows: Tensor, w: Tensor | None) -> _Factor:
        """The sums and these rows, in parts of equal length: a short one would cost as much as a long one."""
        total, parts = self._total_of_sums(), -(-len(rows) // max(CHUNK_ROWS, self.n_features))

        def add(part: slice) -> None:
            nonlocal total
            centred = _centred(rows[part].double(), None if w is None else w[part])
            total = _merged(total, centred, self._work)

        by_parts(len(rows), -(-len(rows) // parts), add)
        return total

    def _total_of_sums(self) -> _Factor:
        return self._sums or _Factor.empty(self.n_features, torch.device("cpu"))

    def _total(self) -> _Factor:
        self.flush()
        return self._total_of_sums()


@dataclass(frozen=True, eq=False)
class _Factor:
    """Rows as a merge sees them; never changed in place, so that it can be shared."""

    n: int
    weight: float  # Σw
    weight_sq: float  # Σw²
    mean: Tensor  # (D,) float64
    low: Tensor  # (D,) float64, what the mean has beyond its last digit
    r: Tensor  # (M, D) float64, RᵀR = Σ w (x - mean)(x - mean)ᵀ
    error: float  # s of `RFactor.error`

    @classmethod
    def empty(cls, d: int, device: torch.device) -> _Factor:
        zero = torch.zeros(d, dtype=torch.float64, device=device)
        return cls(0, 0.0, 0.0, zero, zero, zero[:0].reshape(0, d), 0.0)

    def to(self, device: torch.device) -> _Factor:
        return replace(self, mean=self.mean.to(device), low=self.low.to(device), r=self.r.to(device))


def _centred(x: Tensor, w: Tensor | None) -> _Factor:
    """Float64 rows (n, D), with weights w > 0 (n,) or None, as a factor that is not triangular yet.

    Centred twice: after an offset of 10⁴ the first mean is off by its own last digit; the second is
    what the first has beyond it.
    """
    share = None if w is None else w / w.sum()
    first = x.mean(0) if share is None else share @ x
    z = x - first
    second = z.mean(0) if share is None else share @ z
    z = z - second
    mean, low = two_sum(first, second)
    if w is None:
        return _Factor(len(x), float(len(x)), float(len(x)), mean, low, z, 0.0)
    return _Factor(len(x), w.sum().item(), w.square().sum().item(), mean, low, z * w.sqrt()[:, None], 0.0)


def _merged(a: _Factor, b: _Factor, work: torch.dtype) -> _Factor:
    """The rows of both: R of [Ra; Rb; √(wa wb / w) (mean_b - mean_a)ᵀ], factored in `work`.

    What R is off by. Householder QR of a stack A of m rows gives the exact R of A + E; each rounding
    error is relative to its own column, so columns may be scaled, and ‖E‖₂ is at most `factor_noise` times
    σ₁, as for the SVD of the samples. Centring, the weights and the shift add 8√k roundings in float64,
    k = min(m, D): a difference has a rounding relative to itself, and means carry twice the digits of
    float64, so that none is relative to the means.
    What a and b were off by stands in different rows: ‖[Ea; Eb]‖₂ ≤ hypot(‖Ea‖₂, ‖Eb‖₂). An orthogonal
    factor carries both unchanged into the error of the stack, and σ₁ grows with every row, so the
    errors of a chain of q factorisations add at most linearly.
    """
    if a.weight < b.weight:  # the mean of the heavier moves less, and so does its rounding
        a, b = b, a
    weight = a.weight + b.weight
    share = b.weight / weight
    delta = (b.mean - a.mean) + (b.low - a.low)
    stack = torch.cat([a.r, b.r, math.sqrt(a.weight * share) * delta[None]])
    mean, low = two_sum(a.mean, delta * share)
    mean, low = two_sum(mean, low + a.low)
    m, k = len(stack), min(stack.shape)
    own = factor_noise(m, k, work) + 8 * U64 * math.sqrt(k)
    return _Factor(
        n=a.n + b.n,
        weight=weight,
        weight_sq=a.weight_sq + b.weight_sq,
        mean=mean,
        low=low,
        r=_triangular(stack, work),
        error=math.hypot(a.error, b.error) + own,
    )


def _triangular(stack: Tensor, work: torch.dtype) -> Tensor:
    """R (M, D) in float64 of float64 rows, factored in `work`.

    A narrower `work` sees columns brought to 1 by powers of two, which rounds nothing and passes
    through the factorisation: values beyond 10³⁸ would be infinite in float32.
    """
    if work == stack.dtype:
        return torch.linalg.qr(stack, mode="r").R
    size = stack.abs().amax(0)
    unit = torch.where(size > 0, size.log2().floor().exp2(), 1.0)
    return torch.linalg.qr((stack / unit).to(work), mode="r").R.double() * unit
