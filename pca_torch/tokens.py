"""All tokens and the tokens of typical norm: two views of one site from one pass over its rows."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import as_mask, as_rows, as_tensor, check_number
from pca_torch.result import ExtremeRows

__all__ = ["NormHistogram", "TokenViews"]

BINS_PER_OCTAVE = 128
LOWEST, HIGHEST = -126, 128  # powers of two: the normal range of float32 and bfloat16
BINS = BINS_PER_OCTAVE * (HIGHEST - LOWEST)
RESOLUTION = 2 ** (1 / BINS_PER_OCTAVE) - 1  # width of a bin relative to its lower edge
EDGES = np.concatenate([[0.0], np.exp2(np.arange(BINS + 1) / BINS_PER_OCTAVE + LOWEST)])

MAD_TO_STD = 1.4826  # standard deviation of a normal distribution over its MAD
EXTREME_UNITS = 10  # a row is extreme above median + 10 · 1.4826 · MAD
HOLD_UNITS = 5  # a running threshold is not final: rows above this one wait for the end
LARGEST_SHARE = 0.05  # beyond it the norms are heavy-tailed, not a body with outliers
WARM_UP = 256  # rows before a running threshold is trusted to let any row go
CHUNK_ROWS = 2048  # rows widened to float64 at a time: bounds the temporary, not the answer

F = TypeVar("F", bound=Callable[..., Any])


class _Statistic(Protocol):
    """What `TokenViews` asks of a statistic; `update` copies what it keeps, `merge` leaves `other` alone."""

    @property
    def n_samples(self) -> int: ...
    @property
    def mean(self) -> Tensor: ...  # (D,) float64, also before the first row
    @property
    def trace(self) -> float: ...  # Σ‖x - mean‖², not divided
    def update(self, x: Tensor, mask: Tensor | None = None) -> object: ...
    def merge(self, other: Any) -> object: ...


S = TypeVar("S", bound=_Statistic)


def _plain(method: F) -> F:
    """Run `method` without autograd and outside inference mode, whose tensors could not be updated later."""
    return torch.inference_mode(mode=False)(torch.no_grad()(method))


class NormHistogram:
    """Counts of row norms in 128 bins per octave from 2⁻¹²⁶ to 2¹²⁸; quantiles to half a percent.

    Counts are integers, so neither the order of the rows nor the split into batches matters. Norms
    below the range count as zero, norms above it as the last bin. Inside a bin the rows are taken as
    spread evenly: a quantile lies in the same bin as that of the norms themselves, so it is off by at
    most 0.55 % of its value. Memory: 260 kB on the CPU.
    """

    @_plain
    def __init__(self) -> None:
        self.counts = torch.zeros(BINS + 1, dtype=torch.int64)  # the first counts zeros

    @property
    def n_samples(self) -> int:
        """N, norms counted."""
        return int(self.counts.sum())

    @_plain
    def update(self, norms: Tensor) -> Self:
        """Count `norms`.

        Args:
            norms: non-negative finite numbers (N,).

        Raises:
            ValueError: a norm is negative or not finite.
        """
        norms = norms.double().cpu()
        bad = int((~(norms.isfinite() & (norms >= 0))).sum())
        if bad:
            raise ValueError(
                f"`norms` must be finite and not negative, got {bad} of {len(norms)} others; drop them."
            )
        place = (norms.log2() - LOWEST).mul(BINS_PER_OCTAVE).floor() + 1  # a zero is at -inf
        self.counts = self.counts + place.clamp(0, BINS).long().bincount(minlength=BINS + 1)
        return self

    @_plain
    def merge(self, other: NormHistogram) -> Self:
        """Absorb the norms of `other`, which stays as it is.

        Args:
            other: counts of other rows.
        """
        self.counts = self.counts + other.counts
        return self

    def median(self) -> float:
        """Smallest norm with half of the rows at or below it.

        Raises:
            ValueError: nothing was counted.
        """
        cdf = self._cdf()
        half = cdf[-1] / 2
        if half == 0:
            raise ValueError("no rows were counted; call `update` with at least one unmasked row first.")
        edge = int(np.searchsorted(cdf, half))
        if edge == 0:  # half of the rows are zero
            return 0.0
        part = (half - cdf[edge - 1]) / (cdf[edge] - cdf[edge - 1])
        return float(EDGES[edge - 1] + part * (EDGES[edge] - EDGES[edge - 1]))

    def mad(self) -> float:
        """Median of |norm - median|: the radius around the median that holds half of the rows."""
        median, cdf = self.median(), self._cdf()
        low, high = 0.0, median  # [0, 2·median] holds all rows up to the median, which is half of them
        for _ in range(60):
            radius = (low + high) / 2
            inside = np.interp(median + radius, EDGES, cdf) - np.interp(median - radius, EDGES, cdf)
            low, high = (low, radius) if inside >= cdf[-1] / 2 else (radius, high)
        return high

    def threshold(self, units: float) -> float:
        """Median + `units` · 1.4826 · MAD, with a MAD no finer than the bins: equal norms stay below it.

        Args:
            units: robust standard deviations above the median.
        """
        median = self.median()
        return median + units * max(MAD_TO_STD * self.mad(), RESOLUTION * median)

    def _cdf(self) -> np.ndarray:
        """(BINS + 2,) rows at or below each edge; zero and the lowest edge have no rows in between."""
        below = self.counts.cumsum(0).double().numpy()
        return np.concatenate([below[:1], below])


@dataclass(frozen=True, eq=False)
class _Rows:
    """H rows with what decides and describes them; never written to, so copies may share it."""

    values: Tensor  # (H, D) dtype and device of the data
    norms: Tensor  # (H,)   float64, CPU
    positions: Tensor  # (H,)   int64, device of the data, negative = unknown

    def __len__(self) -> int:
        return len(self.norms)

    def select(self, keep: Tensor) -> _Rows:
        """Copies of the rows where `keep` (H,) holds."""
        at = keep.nonzero()[:, 0]  # indices from the CPU: a device mask would have to be counted there
        on_device = at.to(self.values.device)
        return _Rows(self.values[on_device], self.norms[at], self.positions[on_device])

    def join(self, other: _Rows) -> _Rows:
        """These rows, then those of `other`."""
        if not len(self) or not len(other):  # an empty one must not decide dtype and device
            return self if len(self) else other
        device = self.values.device
        return _Rows(
            torch.cat([self.values, other.values.to(device)]),
            torch.cat([self.norms, other.norms]),
            torch.cat([self.positions, other.positions.to(device)]),
        )


class TokenViews(Generic[S]):
    """One statistic over all rows and one over the rows of typical norm, in one pass.

    A row is extreme when its norm exceeds median + 10 · 1.4826 · MAD of the norms of the whole site,
    which is known at the end only. So rows above half that distance of the running threshold (and all
    of the first 256) are held aside and assigned by `result`; the others are counted at once. That
    makes the answer independent of the order of the rows as long as `ExtremeRows.exact` holds.

    Memory: two statistics, the rows held aside in their own dtype on their own device, 260 kB of counts.
    One batch costs one transfer of its norms to the CPU.

    Args:
        make: makes an empty statistic; to pickle the views it must be picklable.
        make_extreme: the same for the extreme rows, which deserve float64 products.
        max_held: rows held aside at most. With more, those furthest from the running threshold are
            assigned early and half of `max_held` stays.
    """

    @_plain
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
        self._held = _Rows(torch.empty(0, self.n_features), torch.empty(0), torch.empty(0, dtype=torch.int64))
        self._positions: Counter[int] = Counter()  # place in the sequence → rows assigned to `_extreme`
        self._largest_typical = 0.0  # norms assigned so far, to tell whether the end agrees
        self._smallest_extreme = math.inf

    @property
    def n_samples(self) -> int:
        """N, rows counted."""
        return self._histogram.n_samples

    @_plain
    def update(self, x: Any, mask: Any = None, positions: Any = None) -> Self:
        """Count the rows of one batch; a batch that is refused changes nothing.

        Args:
            x: activations (B, T, D) or rows (N, D), any real dtype; not changed, and copied where kept.
            mask: 0/1 with the leading shape of `x`, 1 = count the row.
            positions: integers with the leading shape of `x`, the place of each row in its sequence;
                negative = unknown. By default counted over the unmasked rows along T, so padding on
                the left does not shift it, and unknown for (N, D).
        """
        batch = self._checked(x, mask, positions)
        if not len(batch):
            return self
        histogram = copy.deepcopy(self._histogram).update(batch.norms)
        far = torch.ones_like(batch.norms, dtype=torch.bool)
        if histogram.n_samples >= WARM_UP:
            far = batch.norms > histogram.threshold(HOLD_UNITS)
        held = self._held.join(batch.select(far))
        self._add_typical(batch, ~far)  # first: should the statistic refuse, nothing has changed
        self._histogram, self._held = histogram, held
        self._fold()
        return self

    @_plain
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
        self._typical.merge(other._typical)
        if other._extreme is not None:
            self._extreme_statistic().merge(other._extreme)
        self._histogram.merge(other._histogram)
        self._positions.update(other._positions)
        self._largest_typical = max(self._largest_typical, other._largest_typical)
        self._smallest_extreme = min(self._smallest_extreme, other._smallest_extreme)
        self._held = self._held.join(other._held)
        self._fold()
        return self

    @_plain
    def result(self) -> tuple[S, S, ExtremeRows]:
        """Statistics of all rows and of the typical rows, and what lies between them.

        The statistics are copies: updates may go on afterwards. Both are one object where the views
        are the same, because no row is extreme or because more than 5 % are (heavy-tailed).
        """
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

    def _checked(self, x: Any, mask: Any, positions: Any) -> _Rows:
        """The selected rows of one batch, which may still share the memory of `x`.

        Raises:
            ValueError: NaN or inf in a selected row.
        """
        rows, shape = as_rows(x, self.n_features)
        keep = as_mask(mask, shape, rows.device)
        places = _places(positions, keep, shape, rows.device)
        if keep is not None:
            rows, places = rows[keep], places[keep]
        rows = rows if rows.is_floating_point() else rows.double()
        norms = torch.cat([
            torch.linalg.vector_norm(part.double(), dim=1) for part in rows.split(CHUNK_ROWS)
        ]).cpu()
        bad = int((~norms.isfinite()).sum())  # also a row whose square overflows: no scatter could hold it
        if bad:
            raise ValueError(
                f"`x` has {bad} of {len(rows)} samples with NaN or inf. "
                "Drop them, or capture in bfloat16: float16 overflows at 65504."
            )
        return _Rows(rows, norms, places)

    def _extreme_statistic(self) -> S:
        if self._extreme is None:
            self._extreme = self._make_extreme()
        return self._extreme

    def _add_typical(self, rows: _Rows, near: Tensor) -> None:
        """Count the rows where `near` (H,) holds as typical."""
        if near.any():
            self._typical.update(rows.values, mask=None if near.all() else near.to(rows.values.device))
            self._largest_typical = max(self._largest_typical, rows.norms[near].max().item())

    def _assign(self, rows: _Rows, cut: float) -> None:
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


def _places(positions: Any, keep: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(N,) place of each row in its sequence, -1 where unknown.

    Raises:
        ValueError: `positions` are not integers in the leading shape of `x`.
    """
    if positions is not None:
        positions = as_tensor(positions, "positions").to(device)
        if tuple(positions.shape) != shape or positions.is_floating_point() or positions.dtype == torch.bool:
            raise ValueError(
                f"`positions` must be integers in the leading shape of `x`, {shape}, "
                f"got {positions.dtype} in {tuple(positions.shape)}."
            )
        return positions.reshape(-1).long()
    if len(shape) < 2:
        return torch.full((math.prod(shape),), -1, device=device)
    counted = torch.ones(shape, dtype=torch.bool, device=device) if keep is None else keep.reshape(shape)
    place = counted.flatten(2).any(2).cumsum(1) - 1 if counted.ndim > 2 else counted.cumsum(1) - 1
    return place.reshape(place.shape + (1,) * (counted.ndim - 2)).expand(shape).reshape(-1)


def _trace_share(part: _Statistic, whole: _Statistic) -> float:
    """Share of Σ‖x - mean‖² over `whole`, around its mean, that comes from the rows of `part`."""
    if not whole.trace > 0:
        return 0.0
    shift = part.mean - whole.mean
    return min(1.0, (part.trace + part.n_samples * shift.square().sum().item()) / whole.trace)
