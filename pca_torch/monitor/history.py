"""What the table and the pictures of a run show: for each site its records step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pca_torch.monitor.alarms import is_among
from pca_torch.monitor.log_file import Log, Resumption
from pca_torch.monitor.record import VIEWS, Alert, SpectrumRecord, View
from pca_torch.sites.blocks import layer_of
from pca_torch.sites.names import listing, nearest

__all__ = ["History", "SiteHistory", "arrange"]

FIT_ENDS = ("alpha_req_from", "alpha_req_to")  # the range of a fit: a setting rather than a curve


@dataclass(frozen=True, eq=False)
class SiteHistory:
    """The records of one site in one view, in the order of their steps."""

    name: str  # "model.layers.3:output"
    records: Mapping[int, Sequence[SpectrumRecord]]  # by step: one, or one of each head

    @property
    def steps(self) -> list[int]:
        """Optimizer steps done at each record."""
        return list(self.records)

    @property
    def layer(self) -> int | None:
        """Index of the block, where the path has one."""
        return layer_of(self.name.rpartition(":")[0])

    @property
    def heads(self) -> int | None:
        """How many heads have spectra of their own; None where all features are one."""
        found = {record.head for records in self.records.values() for record in records}
        return None if found == {None} else len(found)

    @property
    def n_features(self) -> int:
        """D, of each head."""
        return next(iter(self.records.values()))[0].n_features

    @cached_property
    def n_samples(self) -> list[int]:
        """N at each step; of several heads the least."""
        return [min(record.n_samples for record in records) for records in self.records.values()]

    @property
    def n_effective(self) -> float:
        """(Σw)²/Σw² of the weights of the last window."""
        return list(self.records.values())[-1][0].n_effective

    @property
    def is_short(self) -> bool:
        """Whether some window has no more tokens than features, so that N bounds every rank."""
        return min(self.n_samples) <= self.n_features

    def values(self, metric: str) -> list[float | None]:
        """A metric at each step: of heads the mean over those that have it; None where none has.

        Args:
            metric: its name in the log.
        """
        return [_mean([r.metrics.get(metric) for r in records]) for records in self.records.values()]


@dataclass(frozen=True, eq=False, kw_only=True)
class History:
    """A run as it is shown: one view of the sites and metrics that were asked for."""

    run: Mapping[str, Any]  # settings, as logged
    view: View
    sites: Sequence[SiteHistory]  # in the order of the model
    n_logged: int  # sites in the log
    metrics: Sequence[str]  # names as logged
    chosen: bool  # whether these were asked for
    alerts: Sequence[Alert]  # of these sites, in all views
    resumed: Sequence[Resumption]  # where the run went on with other settings

    @property
    def steps(self) -> list[int]:
        """All steps with a record."""
        return sorted({step for site in self.sites for step in site.steps})

    @property
    def fit_span(self) -> str:
        """The range of alpha-ReQ in words."""
        span = self.run.get("fit_range")
        return f"{span[0]} to {span[1]}" if isinstance(span, list) and len(span) == 2 else "?"

    def to_dict(self) -> dict[str, Any]:
        """The summary in JSON types.

        Keys are `run`, the settings; `view`; `steps` with `first`, `last` and `logged`, how many; `resumed`,
        each with `step` and the settings `changed`; `sites`; and `alarms`, each as in the log. A site has
        `n_features`, `heads` (null where all features are one), `n_samples` with `first`, `last` and
        `least`, and `metrics`: by name `first` and `last`, at the first and the last step, and `least` and
        `most`, null where not defined. Of heads every number is their mean.
        """
        steps = self.steps
        return {
            "run": dict(self.run),
            "view": self.view,
            "steps": {"first": steps[0], "last": steps[-1], "logged": len(steps)},
            "resumed": [asdict(each) for each in self.resumed],
            "sites": {site.name: _summary(site, self.metrics) for site in self.sites},
            "alarms": [alert.to_dict() for alert in self.alerts],
        }


def arrange(
    log: Log,
    *,
    view: View = "typical",
    sites: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
) -> History:
    """Sort a log by site and step, and choose of it.

    Args:
        log: what `read_log` read.
        view: "typical" or "all" tokens.
        sites: names or patterns: `*` is within one segment, `**` any number of them; "**.3", "**:k".
            None is all.
        metrics: names; "rank" is all that begin with "rank_". None is all but the range of a fit.

    Raises:
        ValueError: there is no record or no metric at all, or none of what was asked for.
    """
    if not log.records:
        raise ValueError("the log has a header alone: no window of training steps is complete yet.")
    records = [record for record in log.records if record.view == view]
    if not records:
        there = listing([each for each in VIEWS if any(record.view == each for record in log.records)])
        raise ValueError(f"`--view` must be one that was logged, {there}, got {view!r}.")
    every = _by_site(records, log.run.get("sites"))
    kept = list(every) if not sites else _matching(sites, list(every))
    named = dict.fromkeys(name for record in records for name in record.metrics)
    if not named:
        raise ValueError("the log has no metric; give the monitor some, or read the spectra by `read_log`.")
    return History(
        run=log.run,
        view=view,
        sites=[every[name] for name in kept],
        n_logged=len(every),
        metrics=_named(metrics, list(named)),
        chosen=bool(metrics),
        alerts=[alert for alert in log.alerts if alert.site in kept],
        resumed=log.resumed,
    )


def _by_site(records: Sequence[SpectrumRecord], order: Any) -> dict[str, SiteHistory]:
    """Records by site and step; of two of the same head the later one counts."""
    first = [name for name in order if isinstance(name, str)] if isinstance(order, Sequence) else []
    found: dict[str, dict[int, dict[int | None, SpectrumRecord]]] = {name: {} for name in first}
    for record in records:
        found.setdefault(record.site, {}).setdefault(record.step, {})[record.head] = record
    return {
        name: SiteHistory(name, {step: list(heads.values()) for step, heads in sorted(steps.items())})
        for name, steps in found.items()
        if steps  # an expert that no token reached has no record
    }


def _matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that any of the patterns means, in their own order.

    Raises:
        ValueError: a pattern means none.
    """
    for pattern in patterns:
        if not any(is_among(name, pattern) for name in names):
            raise ValueError(
                f"`--sites` has {pattern!r}, which is no site in the log; {nearest(pattern, names)}."
            )
    return [name for name in names if is_among(name, patterns)]


def _named(asked: Sequence[str] | None, names: Sequence[str]) -> list[str]:
    """The metrics asked for, in the order asked.

    Raises:
        ValueError: one is not in the log.
    """
    if not asked:
        return [name for name in names if name not in FIT_ENDS]
    found: dict[str, None] = {}
    for word in asked:
        family = [name for name in names if name.startswith(f"{word}_") and name not in FIT_ENDS]
        matched = [word, *family] if word in names else family
        if not matched:
            raise ValueError(f"`--metrics` has {word!r}, which is not in the log; {nearest(word, names)}.")
        found |= dict.fromkeys(matched)
    return list(found)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return mean if math.isfinite(mean) else sum(value / len(known) for value in known)  # the sum overflowed


def _summary(site: SiteHistory, metrics: Sequence[str]) -> dict[str, Any]:
    n = site.n_samples
    return {
        "n_features": site.n_features,
        "heads": site.heads,
        "n_samples": {"first": n[0], "last": n[-1], "least": min(n)},
        "metrics": {metric: _ends(site.values(metric)) for metric in metrics},
    }


def _ends(values: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in values if value is not None]
    return {
        "first": values[0],
        "last": values[-1],
        "least": min(known, default=None),
        "most": max(known, default=None),
    }
