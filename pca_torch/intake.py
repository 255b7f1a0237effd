"""Rows on their way into a statistic: checked, counted, short batches gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pca_torch._checks import (
    LARGEST,
    WEIGHTS,
    as_mask,
    as_rows,
    as_weights,
    check_choice,
    check_whole,
    select_rows,
)
from pca_torch._dtypes import FLOATING
from pca_torch._state import Saved, State, dtype_name
from pca_torch.precision import exact_products, unit_roundoff

__all__ = ["BUFFER_ROWS", "CHUNK_ROWS", "UNCOUNTED", "Intake", "by_parts", "chunk_rows"]

CHUNK_ROWS = 4096  # rows of one product or factorisation; longer batches are cut
CHUNK_BYTES = 2**24  # of float64 rows of one product on a CPU, whose allocator maps larger arrays afresh
LEAST_ROWS = 256  # of one product, however long they are: its D×D sums are read and written once a chunk
SMALLEST_PART = 32  # rows; where not even these fit, the rows are not what takes the memory
UNCOUNTED = "no rows were counted; `update` with at least one row first."
BUFFER_ROWS = 512  # shorter batches wait for company: a D×D update per row would cost as much as 256


def chunk_rows(d: int, device: torch.device) -> int:
    """Rows of `d` features to widen and multiply at a time on `device`.

    Args:
        d: D.
        device: where the products run.
    """
    if device.type != "cpu":
        return CHUNK_ROWS
    return min(CHUNK_ROWS, max(LEAST_ROWS, CHUNK_BYTES // (8 * d)))


def by_parts(n: int, step: int, add: Callable[[slice], object]) -> None:
    """Call `add` with one part of `n` rows after the other; parts are halved when memory runs out.

    Args:
        n: rows in all.
        step: of the first parts.
        add: counts its part whole, or raises and has counted nothing of it.

    Raises:
        OutOfMemoryError: not even a small part fits.
    """
    start = 0
    while start < n:
        stop = min(start + step, n)
        try:
            add(slice(start, stop))
            start = stop
        except torch.OutOfMemoryError:
            if stop - start <= SMALLEST_PART:
                raise
            step = (stop - start) // 2  # tried again outside: what the failed try held is then free


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

    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` makes an intake that goes on as this one.

        Returns:
            Rows that wait, if any, as one batch, and facts in JSON types.
        """
        facts = {
            "n_features": self.n_features,
            "nonfinite": self.nonfinite,
            "n_dropped": self.n_dropped,
            "dtype": dtype_name(self.dtype),
        }
        if not self.waiting:
            return {}, facts
        rows, w = self.gathered()
        dtypes = {r.dtype for r, _ in self.waiting}
        if len(dtypes) == 1 and dtypes <= {*FLOATING.values()}:  # they came in it: nothing is rounded
            rows = rows.to(dtypes.pop())
        return {"rows": rows} if w is None else {"rows": rows, "weights": w}, facts

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: Any) -> Self:
        """The intake that `to_state` told of.

        Args:
            tensors: by name.
            facts: as JSON gave them.

        Raises:
            ValueError: no intake can be like that.
        """
        state = State(tensors, facts)
        intake = cls(state.count("n_features", 1), state.choice("nonfinite", ["raise", "drop"]))
        intake.n_dropped = state.count("n_dropped")
        intake.dtype = state.dtype("dtype")
        if state.has("rows"):
            rows = state.tensor("rows", [None, intake.n_features], [*FLOATING.values()])
            weighted = state.has("weights")
            weights = state.tensor("weights", [len(rows)], least=WEIGHTS[0]) if weighted else None
            if not 0 < len(rows) < BUFFER_ROWS or rows.abs().max() > LARGEST or intake.dtype is None:
                raise ValueError(f"`rows` must be 1 to {BUFFER_ROWS - 1} rows that wait, got {len(rows)}.")
            intake.waiting = [(rows, weights)]
        state.done()
        return intake
