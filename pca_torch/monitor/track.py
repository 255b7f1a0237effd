"""One site over the whole run: from the statistics of a window to records, and what outlasts a window."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pca_torch._state import Saved, State, prefixed
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.monitor.drift import Drift
from pca_torch.monitor.metrics import Metric, measure, needs_uncentred
from pca_torch.monitor.record import VIEWS, SpectrumRecord, View, thinned
from pca_torch.precision import exact_products
from pca_torch.result import ExtremeRows, PCAResult
from pca_torch.solvers import covariance
from pca_torch.statistic_kinds import rebuilt
from pca_torch.threads import one_thread
from pca_torch.tokens import TokenViews

__all__ = ["Counted", "Settings", "SiteTrack"]


@dataclass(frozen=True)
class Settings:
    """What is measured of every site."""

    metrics: tuple[Metric, ...]
    n_components: int  # K of the V_k whose drift is followed
    fit_range: tuple[int, int]  # of alpha-ReQ
    decay: float | None  # weight of the rows of the window before; None forgets them


@dataclass(frozen=True)
class Counted:
    """What a site counted in one window, over all ranks."""

    views: TokenViews[Any]
    nonfinite: int
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class _Solved:
    """One matrix of a view: its result, and the variances around zero where a metric asks for them."""

    result: PCAResult
    uncentred: Tensor | None
    n_effective: float


class SiteTrack:
    """What is remembered of a site from one logged step to the next.

    Args:
        site: its name.
        settings: what is measured.
    """

    def __init__(self, site: str, settings: Settings) -> None:
        self.site = site
        self.settings = settings
        self.averages: dict[View, Moments | HeadMoments] = {}  # of rows that weigh less the older they are
        self.drifts: dict[tuple[View, int | None], Drift] = {}

    def age(self) -> None:
        """Let a window without rows pass: those of earlier ones weigh less."""
        for average in self.averages.values():
            average.discount(self.settings.decay or 1.0)

    def records(self, step: int, counted: Counted) -> list[SpectrumRecord]:
        """Measure what was counted; views of fewer than two rows are left out.

        Args:
            step: optimizer steps done.
            counted: in the window that ends there.
        """
        everything, typical, extreme = counted.views.result()
        solved: dict[int, list[_Solved]] = {}  # where no row is extreme both views are one statistic
        found: list[SpectrumRecord] = []
        for view, window in zip(VIEWS, (typical, everything), strict=True):
            statistic = self._averaged(view, window)
            if statistic.n_samples < 2:
                continue
            if id(statistic) not in solved:
                solved[id(statistic)] = self._solve(statistic)
            of_view = solved[id(statistic)]
            for index, one in enumerate(of_view):
                head = index if isinstance(statistic, HeadMoments) else None
                found.append(self._record(step, view, head, one, extreme, counted))
        return found

    def _averaged(self, view: View, window: Moments | HeadMoments) -> Moments | HeadMoments:
        """The rows of the window, after those of earlier ones where they go on to count."""
        if self.settings.decay is None:
            return window
        if view in self.averages:
            self.averages[view].discount(self.settings.decay).merge(window)  # pyright: ignore[reportArgumentType]
        else:  # `result` gave copies, of which both views may have got the same
            self.averages[view] = copy.deepcopy(window)
        return self.averages[view]

    def _solve(self, statistic: Moments | HeadMoments) -> list[_Solved]:
        """The spectrum of a site, or of each of its heads."""
        if isinstance(statistic, Moments):
            return [self._solve_one(statistic)]
        with one_thread(statistic.width):
            return [self._solve_one(statistic.head(index)) for index in range(statistic.heads)]

    def _solve_one(self, moments: Moments) -> _Solved:
        k = min(self.settings.n_components, moments.n_samples, moments.n_features)
        with one_thread(moments.n_features):
            with nullcontext() if moments.trace > 0 else warnings.catch_warnings():
                if not moments.trace > 0:  # of which the record tells
                    warnings.filterwarnings("ignore", "total variance is zero")
                result = covariance.solve(moments, k)
            uncentred = None
            if needs_uncentred(self.settings.metrics):
                with exact_products(result.mean.device):
                    uncentred = torch.linalg.eigvalsh(moments.second_moment()).flip(0).clamp_min(0)
        return _Solved(result, uncentred, moments.n_effective)

    def _record(
        self,
        step: int,
        view: View,
        head: int | None,
        solved: _Solved,
        extreme: ExtremeRows,
        counted: Counted,
    ) -> SpectrumRecord:
        result = solved.result
        metrics = measure(self.settings.metrics, result, solved.uncentred, self.settings.fit_range)
        if "drift" in self.settings.metrics:
            metrics |= self.drifts.setdefault((view, head), Drift(self.settings.n_components)).update(result)
        index, variance = thinned(result.spectrum)
        return SpectrumRecord(
            step=step,
            site=self.site,
            view=view,
            head=head,
            n_samples=result.n_samples,
            n_effective=solved.n_effective,
            n_features=result.n_features,
            metrics=metrics,
            index=index,
            variance=variance,
            rounding_floor=result.certificate.rounding_floor,
            trusted=result.certificate.trusted,
            extreme=extreme.count,
            extreme_share=extreme.trace_share,
            heavy_tailed=extreme.heavy_tailed,
            nonfinite=counted.nonfinite,
            tokens=dict(counted.tokens),
        )

    # --- as part of a checkpoint -------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts of what is remembered."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"averages": {}, "drifts": []}
        for view, average in self.averages.items():
            mine, facts["averages"][view] = average.to_state()
            tensors |= prefixed(f"averages.{view}", mine)
        for number, ((view, head), drift) in enumerate(self.drifts.items()):
            mine, about = drift.to_state()
            tensors |= prefixed(f"drifts.{number}", mine)
            facts["drifts"].append({"view": view, "head": head, "drift": about})
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over what `to_state` told of.

        Args:
            tensors: by name, on the device where sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no track can be like that.
        """
        state = State(tensors, facts)
        averages = state.fact("averages", "an object by view", _is_by_view)
        for view, about in averages.items():
            average = rebuilt(state.tensors(f"averages.{view}"), about)
            if isinstance(average, TokenViews):
                raise ValueError(f"the average of {view!r} must be moments, got views.")
            if self.settings.decay is not None:
                self.averages[view] = average
        for number, about in enumerate(state.fact("drifts", "a list", lambda value: isinstance(value, list))):
            own = State(prefixed("drift", state.tensors(f"drifts.{number}")), about)
            view = own.choice("view", VIEWS)
            head = own.fact("head", "an index or None", lambda n: n is None or (type(n) is int and n >= 0))
            drift = Drift.from_state(*own.part("drift"))
            drift.n_components = self.settings.n_components
            self.drifts[view, head] = drift
        state.done()


def _is_by_view(value: Any) -> bool:
    return (
        isinstance(value, dict) and {*value} <= {*VIEWS} and all(isinstance(v, dict) for v in value.values())
    )
