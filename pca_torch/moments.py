"""Count, mean and centred scatter of a stream of rows: one pass, mergeable, summed in float64."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import check_choice, check_number, check_whole, divisor_of, require_square
from pca_torch.intake import BUFFER_ROWS, CHUNK_ROWS, UNCOUNTED, Intake
from pca_torch.precision import Precision, exact_products, product_dtype
from pca_torch.scatter import Scatter

__all__ = ["Moments"]

CHUNK_BYTES = 2**24  # of float64 rows of one product on a CPU, whose allocator maps larger arrays afresh
LEAST_ROWS = 256  # of one product, however long they are: its D×D sums are read and written once a chunk


class Moments:
    """Mean and centred scatter of rows with D features, in one pass.

    Each chunk of rows is centred by its own float64 mean and merged by the rank-one correction of
    Chan, Golub & LeVeque (Am. Stat. 37(3), 1983), so nothing is lost to an offset, and any split
    into batches, in any order, gives the same answer up to rounding of the last digit.

    Args:
        n_features: D.
        groups: sets of rows kept apart (documents, sequences) for uncertainty; memory is groups·D².
        precision: arithmetic of the products, "auto", "float32" or "float64"; sums are float64.
        device: where the sums lie; None takes the device of the first batch.
        nonfinite: "raise" refuses a batch with NaN or inf whole, "drop" skips and counts such rows.

    Raises:
        ValueError: D·D does not fit in memory, or an argument is out of range.

    Memory: 8·groups·D² bytes. Accuracy: `scatter_error` bounds what the sums are off by.
    """

    def __init__(
        self,
        n_features: int,
        *,
        groups: int = 1,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        self._intake = Intake(n_features, nonfinite)
        check_whole(groups, "groups", 1)
        check_choice(precision, "precision", ("auto", "float32", "float64"))
        self.n_features = n_features
        self.groups = groups
        self.precision: Precision = precision
        self.product_dtype: torch.dtype | None = None
        self.device: torch.device | None = None if device is None else torch.device(device)
        self._sums: list[Scatter] = []
        self._pending_group = 0
        self._torn = False  # an interrupt or a failure left rows counted in part
        require_square(
            n_features, groups, torch.device(device or "cpu"), "use `svd_solver='full'` on the data itself"
        )

    # --- reading -----------------------------------------------------------------------------------

    @property
    def n_samples(self) -> int:
        """Rows counted so far."""
        return sum(s.n for s in self._sums) + len(self._intake)

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
    def trace(self) -> float:
        """Σ w‖x - mean‖² over all rows: the trace of the scatter, not divided by anything."""
        return self._total().diagonal.sum().item()

    @property
    def sum_weights(self) -> float:
        """Σw; the number of rows where no weights came."""
        return self._total().weight

    @property
    def n_effective(self) -> float:
        """(Σw)² / Σw², Kish's effective number of rows."""
        total = self._total()
        return total.weight**2 / total.weight_sq if total.weight_sq else 0.0

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
        """(D, D) float64 covariance with divisor Σw - ddof·Σw²/Σw.

        Args:
            ddof: delta degrees of freedom.

        Raises:
            ValueError: too few rows for `ddof`.
        """
        return self._total().matrix.div_(self.divisor(ddof))

    def second_moment(self) -> Tensor:
        """(D, D) float64 Σ w x xᵀ / Σw, from the centred sums: adding the mean back cancels nothing.

        Raises:
            ValueError: no rows yet.
        """
        self.divisor(0)
        total = self._total()
        return total.matrix / total.weight + torch.outer(total.mean, total.mean)

    def scatter_error(self, scale: Tensor | None = None) -> float:
        """Bound on ‖computed - true‖₂ of the scatter, or of S_ij / (scale_i scale_j).

        Float64 products are bounded by the depth of the sums, float32 products are measured
        (see `Scatter.error`).

        Args:
            scale: (D,) by which rows and columns are divided; None is 1.
        """
        return self._total().error(scale)

    def group(self, index: int) -> Moments:
        """The rows of one group as a statistic of its own.

        Args:
            index: the group.

        Raises:
            ValueError: there is no such group.
        """
        self._check_group(index)
        self.flush()
        alone = copy.copy(self)
        alone.groups = 1
        alone._sums = [copy.deepcopy(self._sums[index])] if self._sums else []
        alone._intake = Intake(self.n_features, self._intake.nonfinite)  # its count of dropped rows is of all
        alone._intake.dtype = self.input_dtype
        return alone

    # --- writing -----------------------------------------------------------------------------------

    def update(self, x: Any, mask: Any = None, weights: Any = None, group: int = 0) -> Moments:
        """Count the rows of `x`.

        Args:
            x: samples (..., D) of any real dtype; not changed, not kept.
            mask: 0/1 with the leading shape of `x`; rows at 0 are left out, whatever they hold.
            weights: importance ≥ 0 of each row, same shape as the mask; rows at 0 are left out.
            group: the set these rows belong to, 0 … groups - 1.

        Returns:
            `self`.

        Raises:
            ValueError: another D, a bad mask or weights, or NaN or inf in a row that counts under
                `nonfinite="raise"`. The statistic is then as it was before.
        """
        self._check_group(group)
        rows, w = self._intake.select(x, mask, weights)
        if len(rows):
            with exact_products(rows.device):
                self._take(rows, w, group)
        return self

    def merge(self, other: Moments) -> Moments:
        """Count the rows of `other`, which keeps its own.

        Args:
            other: statistic over the same D features and as many groups.

        Returns:
            `self`.

        Raises:
            ValueError: another D or another number of groups.
        """
        if (other.n_features, other.groups) != (self.n_features, self.groups):
            raise ValueError(
                f"`other` has {other.n_features} features in {other.groups} groups, "
                f"this statistic has {self.n_features} in {self.groups}; merge statistics of the same kind."
            )
        other.flush()
        self.flush()
        self._intake.n_dropped += other.n_dropped
        if not other._sums:
            return self
        with exact_products(other._sums[0].mean.device):
            if not self._sums:
                self._allocate(self.device or other._sums[0].mean.device, other.input_dtype or torch.float64)
            for mine, theirs in zip(self._sums, other._sums, strict=True):
                mine.merge(theirs)
        self._intake.note(other.input_dtype or torch.float64)
        if other.product_dtype == torch.float32:  # the sums are as exact as the coarser of the two
            self.product_dtype = torch.float32
        return self

    def flush(self) -> None:
        """Sum the rows of small batches that wait; reading does it by itself."""
        if not self._intake.waiting:
            return
        self._check_whole()
        rows, w = self._intake.gathered()
        sums = self._sums[self._pending_group]
        before, self._torn = sums.n, True  # until they are counted, or wait again
        waiting, self._intake.waiting = self._intake.waiting, []
        try:
            with exact_products(rows.device):
                self._add(rows, w, self._pending_group)
        except BaseException:  # a Ctrl-C too: what was not counted goes on waiting
            if sums.n == before and not sums.torn:
                self._intake.waiting, self._torn = waiting, False
            raise

    # --- inside ------------------------------------------------------------------------------------

    def _check_whole(self) -> None:
        """Refuse sums that an interrupt tore.

        Raises:
            RuntimeError: rows were counted in part.
        """
        if self._torn:
            raise RuntimeError(
                "this statistic was interrupted while it counted rows, and holds some of them in part; "
                "start a new one."
            )

    def _check_group(self, group: int) -> None:
        check_number(
            group,
            "group",
            f"an integer in 0..{self.groups - 1}",
            isinstance(group, int) and 0 <= group < self.groups,
        )

    def _take(self, rows: Tensor, w: Tensor | None, group: int) -> None:
        """Sum long batches now, let short ones wait."""
        waiting = self._intake.waiting
        if waiting and (group != self._pending_group or rows.device != waiting[0][0].device):
            self.flush()
        if not self._sums:
            self._allocate(self.device or rows.device, rows.dtype)
        self._intake.note(rows.dtype)
        self._check_whole()
        if len(rows) >= BUFFER_ROWS:
            self._add(rows, w, group)
            return
        self._pending_group = group
        if self._intake.wait(rows, w) >= BUFFER_ROWS:
            self.flush()

    def _add(self, rows: Tensor, w: Tensor | None, group: int) -> None:
        sums = self._sums[group]
        before, self._torn = sums.n, True
        try:
            step = CHUNK_ROWS
            if self.device is None or self.device.type == "cpu":
                step = min(step, max(LEAST_ROWS, CHUNK_BYTES // (8 * self.n_features)))
            for i in range(0, len(rows), step):
                part = rows[i : i + step].to(self.device)
                sums.add(part, None if w is None else w[i : i + step].to(self.device))
        except BaseException:  # a Ctrl-C too
            self._torn = sums.torn or sums.n != before
            raise
        self._torn = False

    def _allocate(self, device: torch.device, dtype: torch.dtype) -> None:
        require_square(self.n_features, self.groups, device, "use `svd_solver='full'` on the data itself")
        with torch.inference_mode(False):
            self.device = device
            self.product_dtype = product_dtype(dtype, device, self.precision)
            self._sums = [Scatter(self.n_features, device, self.product_dtype) for _ in range(self.groups)]

    def _total(self) -> Scatter:
        """The sums over all groups; not to be changed by the caller."""
        self.flush()
        self._check_whole()
        if not self._sums:
            return Scatter(self.n_features, torch.device("cpu"), torch.float64)
        if self.groups == 1:
            return self._sums[0]
        total = copy.deepcopy(self._sums[0])
        for sums in self._sums[1:]:
            total.merge(sums)
        return total
