"""Count, mean and centred scatter of a stream of rows: one pass, mergeable, summed in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from pca_torch._checks import check_number, check_whole
from pca_torch._state import State, dtype_name
from pca_torch.intake import Intake
from pca_torch.precision import Precision
from pca_torch.row_stream import RowStream
from pca_torch.scatter import Scatter

__all__ = ["Moments"]


class Moments(RowStream[Scatter]):
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

    _kind = Scatter
    _part = "group{}"
    _advice = "use `svd_solver='full'` on the data itself"

    def __init__(
        self,
        n_features: int,
        *,
        groups: int = 1,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        check_whole(n_features, "n_features", 1)
        check_whole(groups, "groups", 1)
        self.groups = groups
        super().__init__((int(n_features),), groups, precision, device, nonfinite)

    # --- reading -----------------------------------------------------------------------------------

    @property
    def sum_weights(self) -> float:
        """Σw; the number of rows where no weights came."""
        return self._total().weight

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
        self._check_whole()
        return self.of_sums(copy.deepcopy(self._sums[index : index + 1]), self)

    @classmethod
    def of_sums(cls, sums: list[Scatter], like: RowStream[Any]) -> Self:
        """A statistic of rows that another has summed.

        Args:
            sums: their sums, which it takes over, or none.
            like: the other, for all else.
        """
        d, nonfinite = like._shape[-1], like._intake.nonfinite
        one = cls(d, precision=like.precision, device=like.device, nonfinite=nonfinite)
        one._sums, one.product_dtype = sums, like.product_dtype
        one._intake.dtype = like.input_dtype
        return one

    # --- writing -----------------------------------------------------------------------------------

    def update(self, x: Any, mask: Any = None, weights: Any = None, group: int = 0) -> Self:
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
        self._take(rows, w, group)
        return self

    # --- inside ------------------------------------------------------------------------------------

    def _describe(self) -> str:
        return f"{self.n_features} features in {self.groups} groups"

    def _check_group(self, group: int) -> None:
        check_number(
            group,
            "group",
            f"an integer in 0..{self.groups - 1}",
            isinstance(group, int) and 0 <= group < self.groups,
        )

    # --- as a file ---------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "moments", "groups": self.groups, "precision": self.precision}
        return facts | {"product_dtype": dtype_name(self.product_dtype), "pending_group": self._pending_group}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: Any) -> Self:
        """The statistic that `to_state` told of.

        Args:
            tensors: by name, on the device where the sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no statistic can be like that.
        """
        state = State(tensors, facts)
        state.choice("kind", ["moments"])
        intake = Intake.from_state(*state.part("intake"))
        groups, precision = state.count("groups", 1), state.choice("precision", get_args(Precision))
        moments = cls(intake.n_features, groups=groups, precision=precision, nonfinite=intake.nonfinite)
        moments._pending_group = state.count("pending_group")
        moments._check_group(moments._pending_group)
        moments._restore(state, intake)
        return moments
