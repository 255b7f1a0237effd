"""All tokens and the tokens of typical norm: two views of one site from one pass over its rows."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from pca_torch._checks import LARGEST, as_mask, as_rows, check_number
from pca_torch._state import Saved, State, prefixed
from pca_torch.held_rows import HeldRows, places_of
from pca_torch.intake import by_parts, chunk_rows
from pca_torch.norm_histogram import EDGES, NormHistogram, undifferentiated
from pca_torch.result import ExtremeRows

__all__ = ["NormHistogram", "TokenViews"]

EXTREME_UNITS = 10  # a row is extreme above median + 10 · 1.4826 · MAD
HOLD_UNITS = 5  # a running threshold is not final: rows above this one wait for the end
LARGEST_SHARE = 0.05  # beyond it the norms are heavy-tailed, not a body with outliers
WARM_UP = 256  # rows before a running threshold is trusted to let any row go
STALE = 9 / 8  # a running threshold serves until there are this many times as many rows


class _Statistic(Protocol):
    """What `TokenViews` asks of a statistic; `update` copies what it keeps, `merge` leaves `other` alone.

    It may also have `absorb(rows, dtype)`, as `Moments` has: rows are then widened once for norms and sums.
    """

    @property
    def n_samples(self) -> int: ...
    @property
    def n_features(self) -> int: ...  # D
    @property
    def mean(self) -> Tensor: ...  # (D,) float64, also before the first row
    @property
    def trace(self) -> float: ...  # Σ‖x - mean‖², not divided
    def update(self, x: Tensor, mask: Tensor | None = None) -> object: ...
    def merge(self, other: Any) -> object: ...
    def to_state(self) -> Saved: ...


S = TypeVar("S", bound=_Statistic)


class TokenViews(Generic[S]):
    """One statistic over all rows and one over the rows of typical norm, in one pass.

    A row is extreme when its norm exceeds median + 10 · 1.4826 · MAD of the norms of the whole site,
    which is known at the end only. So rows above half that distance of the running threshold (and all
    of the first 256) are held aside and assigned by `result`; the others are counted at once. That
    makes the answer independent of the order of the rows as long as `ExtremeRows.exact` holds. The running
    threshold only guesses which rows to hold, so it is not taken anew before an eighth more rows came.

    Memory: two statistics, the rows held aside in their own dtype on their own device, 260 kB of counts.
    One batch costs one transfer of its norms to the CPU.

    Args:
        make: makes an empty statistic; to pickle the views it must be picklable.
        make_extreme: the same for the extreme rows, which deserve float64 products.
        max_held: rows held aside at most. With more, those furthest from the running threshold are
            assigned early and half of `max_held` stays.
    """

    @undifferentiated
    def __init__(
        self, make: Callable[[], S], make_extreme: Callable[[], S] | None = None, *, max_held: int = 512
    ) -> None:
        check_number(
            max_held, "max_held", "an integer of at least 2", isinstance(max_held, int) and max_held >= 2
        )
        self._make_extreme = make_extreme or make
        self._max_held = max_held
        self._typical = make()
        self.n_features = len(self._typical.mean)  # once: reading makes a statistic sum what it has buffered
        self._extreme: S | None = None
        self._histogram = NormHistogram()
        self._held = HeldRows.none(self.n_features)
        self._positions: Counter[int] = Counter()  # place in the sequence → rows assigned to `_extreme`
        self._largest_typical = 0.0  # norms assigned so far, to tell whether the end agrees
        self._smallest_extreme = math.inf
        self._hold_above, self._hold_at = 0.0, 0  # the running threshold, and of how many rows; 0 is none
        self._torn = False  # an interrupt or a failure left rows counted in part

    @property
    def n_samples(self) -> int:
        """N, rows counted."""
        return self._histogram.n_samples

    @undifferentiated
    def update(self, x: Any, mask: Any = None, positions: Any = None) -> Self:
        """Count the rows of one batch; a batch that is refused changes nothing.

        Args:
            x: activations (B, T, D) or rows (N, D), any real dtype; not changed, and copied where kept.
            mask: 0/1 with the leading shape of `x`, 1 = count the row.
            positions: integers with the leading shape of `x`, the place of each row in its sequence;
                negative = unknown. By default counted over the unmasked rows along T, so padding on
                the left does not shift it, and unknown for (N, D).
        """
        rows, shape = as_rows(x, self.n_features)
        keep = as_mask(mask, shape, rows.device)
        places = places_of(positions, keep, shape, rows.device)
        if keep is not None:
            at = keep.nonzero()[:, 0]
            if len(at) < len(rows):
                rows, places = rows.index_select(0, at), places.index_select(0, at)
        self._count(rows, places)
        return self

    @undifferentiated
    def update_rows(self, rows: Any, positions: Any = None) -> Self:
        """Count rows that were selected before.

        Args:
            rows: (n, D), any real dtype; not changed, and copied where kept.
            positions: integers (n,), the place of each row in its sequence, negative = unknown; None is
                unknown for all.
        """
        rows, _ = as_rows(rows, self.n_features, "rows")
        self._count(rows, places_of(positions, None, (len(rows),), rows.device))
        return self

    @undifferentiated
    def merge(self, other: TokenViews[S]) -> Self:
        """Absorb the rows of `other`, which stays as it is.

        Args:
            other: views of other rows of the same site, made alike.

        Raises:
            ValueError: `other` has another number of features.
        """
        if other.n_features != self.n_features:
            raise ValueError(
                f"`other` must have {self.n_features} features, got {other.n_features}; merge the same site."
            )
        other._check_whole()
        self._check_whole()
        self._torn = True
        self._typical.merge(other._typical)
        if other._extreme is not None:
            self._extreme_statistic().merge(other._extreme)
        self._histogram.merge(other._histogram)
        self._positions.update(other._positions)
        self._largest_typical = max(self._largest_typical, other._largest_typical)
        self._smallest_extreme = min(self._smallest_extreme, other._smallest_extreme)
        self._held = self._held.join(other._held)
        self._hold_at = 0
        self._fold()
        self._torn = False
        return self

    @undifferentiated
    def result(self) -> tuple[S, S, ExtremeRows]:
        """Statistics of all rows and of the typical rows, and what lies between them.

        The statistics are copies: updates may go on afterwards. Both are one object where the views
        are the same, because no row is extreme or because more than 5 % are (heavy-tailed).
        """
        self._check_whole()
        cut = self._histogram.threshold(EXTREME_UNITS)
        end = copy.copy(self)  # not deep: the factories may hold on to a model
        mutable = (self._typical, self._extreme, self._positions)
        end._typical, end._extreme, end._positions = copy.deepcopy(mutable)
        end._assign(end._held, cut)
        everything, typical, count, share = end._typical, end._typical, 0, 0.0
        if end._extreme is not None:
            everything = copy.deepcopy(typical)
            everything.merge(end._extreme)
            count, share = end._extreme.n_samples, _trace_share(end._extreme, everything)
        heavy_tailed = count > LARGEST_SHARE * self.n_samples
        extreme = ExtremeRows(
            count=count,
            n_samples=self.n_samples,
            threshold=cut,
            positions=dict(sorted(end._positions.items())),
            trace_share=share,
            heavy_tailed=heavy_tailed,
            exact=self._largest_typical <= cut < self._smallest_extreme,
        )
        return everything, everything if heavy_tailed else typical, extreme

    @undifferentiated
    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` makes views that go on bit for bit as these.

        Rows that wait or are held aside are part of it: none is assigned earlier than it would have been.

        Returns:
            Tensors, which may share the memory of the views, and facts in JSON types.

        Raises:
            RuntimeError: an interrupt left rows counted in part.
        """
        self._check_whole()
        facts: dict[str, Any] = {"kind": "views", "max_held": self._max_held}
        facts |= {"hold_above": self._hold_above, "hold_at": self._hold_at}
        facts |= {"largest_typical": self._largest_typical, "smallest_extreme": self._smallest_extreme}
        facts["empty"] = self._make_extreme().to_state()[1]  # instead of a factory, which no file holds
        parts = {"typical": self._typical, "histogram": self._histogram}
        if self._extreme is not None:
            parts["extreme"] = self._extreme
        tensors: dict[str, Tensor] = {}
        for name, part in parts.items():
            mine, facts[name] = part.to_state()
            tensors |= prefixed(name, mine)
        if len(self._held):
            tensors |= prefixed("held", vars(self._held))
        if self._positions:
            tensors["positions"] = torch.tensor(sorted(self._positions.items()), device="cpu")
        return tensors, facts

    @classmethod
    @undifferentiated
    def from_state(
        cls,
        tensors: Mapping[str, Tensor],
        facts: Any,
        statistic: Callable[[Mapping[str, Tensor], Any], S],
    ) -> Self:
        """The views that `to_state` told of; further rows need no factory.

        Args:
            tensors: by name, on the device where the statistics shall lie.
            facts: as JSON gave them.
            statistic: the `from_state` of the statistic behind the views.

        Raises:
            ValueError: no views can be like that.
        """
        state = State(tensors, facts)
        state.choice("kind", ["views"])
        empty = state.fact("empty", "an object", lambda value: isinstance(value, dict))
        views = cls(partial(statistic, {}, empty), max_held=state.count("max_held", 2))
        views._typical = statistic(*state.part("typical"))
        if state.has("extreme"):
            views._extreme = statistic(*state.part("extreme"))
        views._histogram = NormHistogram.from_state(*state.part("histogram"))
        views._hold_above, views._hold_at = state.number("hold_above"), state.count("hold_at")
        views._largest_typical = state.number("largest_typical")
        views._smallest_extreme = state.number("smallest_extreme")
        if state.has("held.norms"):
            views._held = HeldRows.from_state(state, views.n_features, views._max_held)
        if state.has("positions"):
            views._positions = Counter(dict(state.tensor("positions", [None, 2], [torch.int64], 0).tolist()))
        state.done()
        views._check_counts()
        return views

    def _check_counts(self) -> None:
        """Refuse parts that do not belong together.

        Raises:
            ValueError: they differ in features, or do not add up.
        """
        parts = [self._typical] if self._extreme is None else [self._typical, self._extreme]
        if {part.n_features for part in parts} != {self.n_features}:
            raise ValueError(f"both views must have {self.n_features} features.")
        counted = sum(part.n_samples for part in parts) + len(self._held)
        extreme = 0 if self._extreme is None else self._extreme.n_samples
        if counted != self.n_samples or self._positions.total() > extreme:
            raise ValueError(f"`counts` must be of the {counted} rows of the views, got {self.n_samples}.")

    def _check_whole(self) -> None:
        """Refuse views that an interrupt tore.

        Raises:
            RuntimeError: rows were counted in part.
        """
        if self._torn:
            raise RuntimeError(
                "these views were interrupted while they counted rows, and hold some of them in part; "
                "start new ones."
            )

    def _count(self, rows: Tensor, places: Tensor) -> None:
        """Count rows (n, D), which may share the memory of the caller, in parts that fit in memory."""
        rows = rows.detach() if rows.is_floating_point() else rows.double()
        step = chunk_rows(self.n_features, rows.device)
        if len(rows) > step:  # all of them, before the first is counted
            _check_finite(rows, step)
        by_parts(len(rows), step, lambda part: self._count_part(rows[part], places[part]))

    def _count_part(self, rows: Tensor, places: Tensor) -> None:
        self._check_whole()
        wide = rows.to(torch.float64, copy=True)
        norms = torch.linalg.vector_norm(wide, dim=1).cpu()
        _check_norms(norms)
        above, at = self._running_threshold(norms)
        far = norms > above if at else torch.ones_like(norms, dtype=torch.bool)
        held = self._held
        if far.any():
            held = held.join(HeldRows(rows, norms, places).select(far))
        before, self._torn = self._typical.n_samples, True
        try:
            self._add_near(rows, wide, norms, far)
        except BaseException:  # a Ctrl-C too; should the statistic refuse, nothing has changed
            self._torn = self._typical.n_samples != before
            raise
        self._histogram.update(norms)
        self._held, self._hold_above, self._hold_at = held, above, at
        self._fold()
        self._torn = False

    def _running_threshold(self, norms: Tensor) -> tuple[float, int]:
        """What rows are held above, and of how many rows it is; 0 where there are too few yet."""
        n = self.n_samples + len(norms)
        if n < max(WARM_UP, STALE * self._hold_at):
            return self._hold_above, self._hold_at
        return copy.deepcopy(self._histogram).update(norms).threshold(HOLD_UNITS), n

    def _add_near(self, rows: Tensor, wide: Tensor, norms: Tensor, far: Tensor) -> None:
        """Count the rows that are not `far` (n,) as typical; `wide` is a float64 copy, and is used up."""
        some_far = bool(far.any())
        if some_far and bool(far.all()):
            return
        if absorb := getattr(self._typical, "absorb", None):
            absorb(_without(wide, far) if some_far else wide, rows.dtype)
        else:
            self._typical.update(rows, mask=(~far).to(rows.device) if some_far else None)
        nearest = norms[~far] if some_far else norms
        self._largest_typical = max(self._largest_typical, nearest.max().item())

    def _extreme_statistic(self) -> S:
        if self._extreme is None:
            self._extreme = self._make_extreme()
        return self._extreme

    def _add_typical(self, rows: HeldRows, near: Tensor) -> None:
        """Count the rows where `near` (H,) holds as typical."""
        if near.any():
            self._typical.update(rows.values, mask=None if near.all() else near.to(rows.values.device))
            self._largest_typical = max(self._largest_typical, rows.norms[near].max().item())

    def _assign(self, rows: HeldRows, cut: float) -> None:
        """Count each row on its side of `cut`."""
        far = rows.norms > cut
        self._add_typical(rows, ~far)
        if far.any():
            beyond = rows.select(far)
            self._extreme_statistic().update(beyond.values)
            self._smallest_extreme = min(self._smallest_extreme, beyond.norms.min().item())
            self._positions.update(beyond.positions[beyond.positions >= 0].tolist())

    def _fold(self) -> None:
        """With too many rows held, assign those whose side is clearest: the furthest in log norm."""
        if len(self._held) <= self._max_held:
            return
        cut = self._histogram.threshold(EXTREME_UNITS)
        distance = (self._held.norms.clamp_min(EDGES[1]).log2() - math.log2(max(cut, EDGES[1]))).abs()
        clear = torch.ones_like(distance, dtype=torch.bool)
        clear[distance.argsort()[: self._max_held // 2]] = False
        self._assign(self._held.select(clear), cut)
        self._held = self._held.select(~clear)


def _without(rows: Tensor, far: Tensor) -> Tensor:
    """The rows that are not `far` (n,) in another order: the last ones move, in place, to where those were.

    Few are far, and few are copied then.
    """
    near = len(far) - int(far.sum())
    holes, last = far[:near].nonzero()[:, 0], near + (~far[near:]).nonzero()[:, 0]
    if len(holes):
        rows[holes.to(rows.device)] = rows[last.to(rows.device)]
    return rows[:near]


def _check_finite(rows: Tensor, step: int) -> None:
    """Refuse rows (n, D) as `_check_norms` would; a sum that is finite shows that all are, in no time."""
    if rows.dtype != torch.float64 and bool(rows.sum(dtype=torch.float32).isfinite()):
        return
    _check_norms(torch.cat([torch.linalg.vector_norm(p.double(), dim=1).cpu() for p in rows.split(step)]))


def _check_norms(norms: Tensor) -> None:
    """Refuse a batch for the norms (n,) of its rows.

    Raises:
        ValueError: NaN or inf, or so large that squares of the variances leave float64.
    """
    if norms.max().item() <= LARGEST:  # not so with NaN
        return
    if bad := int((~norms.isfinite()).sum()):
        raise ValueError(
            f"`x` has {bad} of {len(norms)} samples with NaN or inf. "
            "Drop them, or capture in bfloat16: float16 overflows at 65504."
        )
    raise ValueError(
        f"`x` has samples of norm beyond {LARGEST:g}, whose squares leave float64; divide it by its largest."
    )


def _trace_share(part: _Statistic, whole: _Statistic) -> float:
    """Share of Σ‖x - mean‖² over `whole`, around its mean, that comes from the rows of `part`."""
    if not whole.trace > 0:
        return 0.0
    shift = part.mean - whole.mean
    return min(1.0, (part.trace + part.n_samples * shift.square().sum().item()) / whole.trace)
