"""What statistics of a stream of rows share: rows are checked, wait for company, and are summed whole."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor

from pca_torch._checks import check_choice, check_number, divisor_of, require_square
from pca_torch._state import Saved, State, prefixed
from pca_torch.centred_sums import CentredSums
from pca_torch.intake import BUFFER_ROWS, UNCOUNTED, Intake, by_parts, chunk_rows
from pca_torch.precision import Precision, exact_products, product_dtype

__all__ = ["RowStream"]

S = TypeVar("S", bound=CentredSums)


class RowStream(ABC, Generic[S]):
    """Rows with D features on their way into sums, of one group of rows or of several.

    Args:
        shape: of the mean, D numbers; the sums are a square matrix for each of its rows.
        groups: how many.
        precision: arithmetic of the products, "auto", "float32" or "float64"; sums are float64.
        device: where the sums lie; None takes the device of the first batch.
        nonfinite: "raise" refuses a batch with NaN or inf whole, "drop" skips and counts such rows.

    Raises:
        ValueError: the sums do not fit in memory, or an argument is out of range.
    """

    _kind: type[S]
    _part: ClassVar[str]  # what the sums of group {} are saved as
    _advice: ClassVar[str]  # what to do where the sums do not fit

    def __init__(
        self,
        shape: tuple[int, ...],
        groups: int,
        precision: Precision,
        device: torch.device | str | None,
        nonfinite: Literal["raise", "drop"],
    ) -> None:
        self._intake = Intake(math.prod(shape), nonfinite)
        check_choice(precision, "precision", ("auto", "float32", "float64"))
        self.n_features = self._intake.n_features
        self._shape = shape
        self._groups = groups
        self.precision: Precision = precision
        self.product_dtype: torch.dtype | None = None
        self.device: torch.device | None = None if device is None else torch.device(device)
        self._sums: list[S] = []  # one for each group, once the first rows said where
        self._pending_group = 0  # that of the rows that wait
        self._torn = False  # an interrupt or a failure left rows counted in part
        self._require_memory(torch.device(device or "cpu"))

    # --- reading -----------------------------------------------------------------------------------

    @property
    def n_samples(self) -> int:
        """Rows counted so far."""
        return sum(s.n for s in self._sums) + len(self._intake)

    @property
    def n_effective(self) -> float:
        """(Σw)² / Σw², Kish's effective number of rows; N where all weigh the same."""
        total = self._total()
        return total.weight**2 / total.weight_sq if total.weight_sq else 0.0

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
        return self._total().mean.flatten().clone()

    @property
    def trace(self) -> float:
        """Σ w‖x - mean‖² over all rows: the trace of the scatter, not divided by anything."""
        return self._total().diagonal.sum().item()

    def divisor(self, ddof: float = 1) -> float:
        """Σw - ddof·Σw²/Σw, which is N - ddof without weights.

        Args:
            ddof: delta degrees of freedom.

        Raises:
            ValueError: nothing would be left to divide by.
        """
        total = self._total()
        return divisor_of(total.n, total.weight, total.weight_sq, ddof, UNCOUNTED)

    # --- writing -----------------------------------------------------------------------------------

    def absorb(self, rows: Tensor, dtype: torch.dtype) -> None:
        """Count rows that the caller vouches for and gives up: `update` without its checks and its copy.

        Args:
            rows: (n, D) in float64, finite and at most 1e70 in size; they are overwritten.
            dtype: that they came in.
        """
        if len(rows) < BUFFER_ROWS:  # they wait in as little memory as they came in
            self._take(rows.to(dtype))
            return
        with exact_products(rows.device):
            self._ready(rows.device, dtype, 0)
            self._add(rows, None, 0, owned=True)

    def merge(self, other: Self) -> Self:
        """Count the rows of `other`, which keeps its own.

        Args:
            other: a statistic of the same kind of rows.

        Returns:
            `self`.

        Raises:
            ValueError: it is of other rows.
            RuntimeError: an interrupt left rows of the one or the other counted in part.
        """
        if (this := self._describe()) != (that := other._describe()):
            raise ValueError(
                f"`other` has {that}, this statistic has {this}; merge statistics of the same kind."
            )
        for one in (other, self):
            one.flush()
            one._check_whole()
        if not other.n_samples:
            self._intake.n_dropped += other.n_dropped
            return self
        device, dtype = other._sums[0].mean.device, other.input_dtype or torch.float64
        with exact_products(device):
            self._start(self.device or device, dtype)
            self._torn = True  # until all of it is in
            for mine, theirs in zip(self._sums, other._sums, strict=True):
                mine.merge(theirs)
            self._intake.note(dtype)
            self._intake.n_dropped += other.n_dropped
            if other.product_dtype == torch.float32:  # the sums are as exact as the coarser of the two
                self.product_dtype = torch.float32
            self._torn = False
        return self

    def discount(self, factor: float) -> Self:
        """Let every row counted so far weigh `factor` times as much: `m.discount(0.9).merge(new)`.

        Repeated, that is an exponentially weighted statistic. `n_samples` goes on counting all rows,
        `n_effective` says what they come to.

        Args:
            factor: above 0, at most 1.

        Returns:
            `self`.

        Raises:
            ValueError: `factor` is out of range.
            RuntimeError: an interrupt left rows counted in part.
        """
        fits = isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < factor <= 1
        check_number(factor, "factor", "a number above 0, at most 1", fits)
        self.flush()  # rows that wait have no weight yet
        self._check_whole()
        self._torn = True  # until all groups are discounted
        for sums in self._sums:
            sums.discount(float(factor))
        self._torn = False
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

    # --- for subclasses ----------------------------------------------------------------------------

    @abstractmethod
    def _describe(self) -> str:
        """The features and groups of its rows, which must be alike to be merged."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """The facts of a saved statistic, beside those of its parts."""

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

    def _take(self, rows: Tensor, w: Tensor | None = None, group: int = 0) -> None:
        """Sum long batches now, let short ones wait."""
        if not len(rows):
            return
        with exact_products(rows.device):
            self._ready(rows.device, rows.dtype, group)
            if len(rows) >= BUFFER_ROWS:
                self._add(rows, w, group)
                return
            self._pending_group = group
            if self._intake.wait(rows, w) >= BUFFER_ROWS:
                self.flush()

    def _ready(self, device: torch.device, dtype: torch.dtype, group: int) -> None:
        """Before rows are taken: those that wait are of the same kind, and there are sums."""
        waiting = self._intake.waiting
        if waiting and (group != self._pending_group or device != waiting[0][0].device):
            self.flush()
        self._start(self.device or device, dtype)
        self._intake.note(dtype)
        self._check_whole()

    def _require_memory(self, device: torch.device) -> None:
        count = self._groups * math.prod(self._shape[:-1])
        require_square(self._shape[-1], count, device, self._advice)

    def _start(self, device: torch.device, dtype: torch.dtype) -> None:
        """Make the sums, unless there are some: the first rows settle the device and the arithmetic."""
        if self._sums:
            return
        self._require_memory(device)
        with torch.inference_mode(False):
            self.device = device
            self.product_dtype = product_dtype(dtype, device, self.precision)
            self._sums = [self._kind(self._shape, device, self.product_dtype) for _ in range(self._groups)]

    def _add(self, rows: Tensor, w: Tensor | None, group: int, *, owned: bool = False) -> None:
        """Sum rows; `owned` ones are overwritten, so that they are not halved where memory runs out."""
        sums = self._sums[group]
        device, before = sums.mean.device, sums.n
        self._torn = True

        def add(part: slice) -> None:
            sums.add(rows[part].to(device), None if w is None else w[part].to(device), owned=owned)

        step = chunk_rows(self.n_features, device)
        try:
            if owned:
                for start in range(0, len(rows), step):
                    add(slice(start, start + step))
            else:
                by_parts(len(rows), step, add)
        except BaseException:  # a Ctrl-C too
            self._torn = sums.torn or sums.n != before
            raise
        self._torn = False

    def _total(self) -> S:
        """The sums over all groups; not to be changed by the caller."""
        self.flush()
        self._check_whole()
        if not self._sums:
            return self._kind(self._shape, torch.device("cpu"), torch.float64)
        if len(self._sums) == 1:
            return self._sums[0]
        total = copy.deepcopy(self._sums[0])
        for sums in self._sums[1:]:
            total.merge(sums)
        return total

    # --- as a file ---------------------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` makes a statistic that goes on bit for bit as this one.

        Rows of small batches that wait are part of it: nothing is summed earlier than it would have been.

        Returns:
            Tensors, which may share the memory of this statistic, and facts in JSON types.

        Raises:
            RuntimeError: an interrupt left rows counted in part.
        """
        self._check_whole()
        facts = self._facts()
        tensors, facts["intake"] = self._intake.to_state()
        tensors = prefixed("intake", tensors)
        for index, sums in enumerate(self._sums):
            name = self._part.format(index)
            part, facts[name] = sums.to_state()
            tensors |= prefixed(name, part)
        return tensors, facts

    def _restore(self, state: State, intake: Intake) -> None:
        """Take over what `to_state` told of, but for what this statistic was made with.

        Raises:
            ValueError: no statistic can be like that.
        """
        self._intake = intake
        self.product_dtype = state.dtype("product_dtype")
        if self.product_dtype is not None:
            parts = [state.part(self._part.format(index)) for index in range(self._groups)]
            self._sums = [self._kind.from_state(*part) for part in parts]
            self.device = self._sums[0].mean.device
        state.done()
        if (intake.dtype is None) != (self.product_dtype is None):
            raise ValueError("sums and rows that wait must both have a dtype, or none.")
        if intake.n_features != self.n_features or any(s.mean.shape != self._shape for s in self._sums):
            raise ValueError(f"sums and rows that wait must be of {self._describe()}.")
