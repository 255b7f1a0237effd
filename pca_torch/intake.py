"""Rows on their way into a statistic: checked, counted, short batches gathered."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_mask, as_rows, as_weights, check_choice, check_whole, select_rows
from pca_torch.precision import exact_products, unit_roundoff

__all__ = ["BUFFER_ROWS", "CHUNK_ROWS", "UNCOUNTED", "Intake"]

CHUNK_ROWS = 4096  # rows of one product or factorisation; longer batches are cut
UNCOUNTED = "no rows were counted; `update` with at least one row first."
BUFFER_ROWS = 512  # shorter batches wait for company: a D×D update per row would cost as much as 256


class Intake:
    """The door of a statistic, and the room where rows of short batches wait.

    Args:
        n_features: D.
        nonfinite: "raise" refuses a batch with NaN or inf whole, "drop" skips and counts such rows.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, n_features: int, nonfinite: Literal["raise", "drop"]) -> None:
        check_whole(n_features, "n_features", 1)
        check_choice(nonfinite, "nonfinite", ("raise", "drop"))
        self.n_features = int(n_features)
        self.nonfinite: Literal["raise", "drop"] = nonfinite
        self.n_dropped = 0  # rows skipped under nonfinite="drop"
        self.dtype: torch.dtype | None = None  # the coarsest dtype that came in
        self.waiting: list[tuple[Tensor, Tensor | None]] = []

    def __len__(self) -> int:
        """Rows that wait."""
        return sum(len(rows) for rows, _ in self.waiting)

    def select(self, x: Any, mask: Any, weights: Any) -> tuple[Tensor, Tensor | None]:
        """Rows (n, D) of a batch that count and their weights (n,) in float64, or None.

        Args:
            x: samples (..., D) of any real dtype.
            mask: 0/1 with the leading shape of `x`, or None.
            weights: importance ≥ 0 of each row, same shape, or None.

        Raises:
            ValueError: the batch is refused.
        """
        rows, shape = as_rows(x, self.n_features)
        rows = rows.detach()
        with exact_products(rows.device):
            where = as_mask(mask, shape, rows.device), as_weights(weights, shape, rows.device)
            rows, w, dropped = select_rows(rows, *where, self.nonfinite)
        self.n_dropped += dropped
        return rows, w

    def note(self, dtype: torch.dtype) -> None:
        """Remember the coarsest input: it sets the quantisation floor.

        Args:
            dtype: of rows that were taken.
        """
        if not dtype.is_floating_point:
            dtype = torch.float64
        if self.dtype is None or unit_roundoff(dtype) > unit_roundoff(self.dtype):
            self.dtype = dtype

    def wait(self, rows: Tensor, w: Tensor | None) -> int:
        """Keep a copy of rows; how many wait now.

        Args:
            rows: (n, D).
            w: (n,) weights, or None.
        """
        self.waiting.append((rows.clone(), w))
        return len(self)

    def gathered(self) -> tuple[Tensor, Tensor | None]:
        """What waits as one batch in float64: batches of several dtypes have no other in common.

        It goes on waiting until `waiting` is emptied, so that a failure of what follows loses nothing.
        """
        rows = torch.cat([r.double() for r, _ in self.waiting])
        if all(w is None for _, w in self.waiting):
            return rows, None
        return rows, torch.cat([rows.new_ones(len(r)) if w is None else w for r, w in self.waiting])
