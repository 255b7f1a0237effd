"""Count, mean and centred scatter of each head of a stream of rows: what `Moments` is for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_number, check_whole
from pca_torch._state import State, dtype_name
from pca_torch.head_scatter import HeadScatter
from pca_torch.intake import Intake
from pca_torch.moments import Moments
from pca_torch.precision import Precision
from pca_torch.row_stream import RowStream

__all__ = ["HeadMoments"]


class HeadMoments(RowStream[HeadScatter]):
    """Mean and centred scatter of H heads of E features each, from rows with the heads side by side.

    What `Moments` keeps of each head, and nothing between them: H·E² numbers where D = H·E features
    would take H²·E². All heads are summed by one batched product, however many there are.

    Args:
        heads: H.
        width: E.
        precision: arithmetic of the products, "auto", "float32" or "float64"; sums are float64.
        device: where the sums lie; None takes the device of the first batch.
        nonfinite: "raise" refuses a batch with NaN or inf whole, "drop" skips and counts such rows.

    Raises:
        ValueError: the sums do not fit in memory, or an argument is out of range.

    Memory: 8·H·E² bytes. Accuracy: `scatter_error` bounds what the sums are off by.
    """

    _kind = HeadScatter
    _part = "sums"
    _advice = "capture fewer heads"

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        precision: Precision = "auto",
        device: torch.device | str | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        check_whole(heads, "heads", 1)
        check_whole(width, "width", 1)
        self.heads = int(heads)
        self.width = int(width)
        super().__init__((self.heads, self.width), 1, precision, device, nonfinite)

    # --- reading -----------------------------------------------------------------------------------

    def covariance(self, ddof: float = 1) -> Tensor:
        """(H, E, E) float64 covariance of each head.

        Args:
            ddof: delta degrees of freedom.

        Raises:
            ValueError: too few rows for `ddof`.
        """
        return self._total().matrix.div_(self.divisor(ddof))

    def second_moment(self) -> Tensor:
        """(H, E, E) float64 Σ x xᵀ / N of each head, from the centred sums: nothing cancels.

        Raises:
            ValueError: no rows yet.
        """
        total = self._total()
        return total.matrix.div_(self.divisor(0)) + total.mean[:, :, None] * total.mean[:, None, :]

    def scatter_error(self) -> Tensor:
        """(H,) float64 bounds on ‖computed - true‖₂ of the scatter of each head."""
        return self._total().error()

    def head(self, index: int) -> Moments:
        """One head as a statistic of its own, with the same sums; nothing is shared.

        Args:
            index: the head.

        Raises:
            ValueError: there is no such head.
        """
        fits = isinstance(index, int) and 0 <= index < self.heads
        check_number(index, "index", f"an integer in 0..{self.heads - 1}", fits)
        self.flush()
        self._check_whole()
        return Moments.of_sums([sums.head(index) for sums in self._sums], self)

    # --- writing -----------------------------------------------------------------------------------

    def update(self, x: Any, mask: Any = None) -> Self:
        """Count the rows of `x`.

        Args:
            x: (..., H·E) with the heads side by side, or (..., H, E), of any real dtype; not changed, not
                kept. One head of (..., E) is rows of E.
            mask: 0/1 with the leading shape of `x`; rows at 0 are left out, whatever they hold.

        Returns:
            `self`.

        Raises:
            ValueError: other heads, a bad mask, or NaN or inf in a row that counts under
                `nonfinite="raise"`. The statistic is then as it was before.
        """
        x = as_tensor(x)
        if x.ndim >= 2 and x.shape[-1] != self.n_features and x.shape[-2:] == (self.heads, self.width):
            x = x.flatten(-2)
        rows, _ = self._intake.select(x, mask, None)
        self._take(rows)
        return self

    # --- inside ------------------------------------------------------------------------------------

    def _describe(self) -> str:
        return f"{self.heads} heads of {self.width} features"

    # --- as a file ---------------------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "head_moments", "heads": self.heads, "width": self.width}
        return facts | {"precision": self.precision, "product_dtype": dtype_name(self.product_dtype)}

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
        state.choice("kind", ["head_moments"])
        intake = Intake.from_state(*state.part("intake"))
        heads, width = state.count("heads", 1), state.count("width", 1)
        if heads * width != intake.n_features:
            raise ValueError(f"{heads} heads of {width} must make {intake.n_features} features.")
        precision = state.choice("precision", get_args(Precision))
        moments = cls(heads, width, precision=precision, nonfinite=intake.nonfinite)
        moments._restore(state, intake)
        return moments
