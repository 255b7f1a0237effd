"""Sites counted in as many passes as memory asks for, each of which can be resumed, and solved at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from torch import nn

from pca_torch.checkpoint import Checkpoint
from pca_torch.pipeline.keeping import Keeping
from pca_torch.pipeline.measuring import Batch, Progress, measure
from pca_torch.pipeline.reports import Facts, Reports, solve_sites
from pca_torch.report import report_dict
from pca_torch.selection import TokenSelection
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site

__all__ = ["Counted", "count_sites"]


@dataclass
class Counted:
    """What a run over a model found."""

    reports: Reports = field(default_factory=Reports)
    sites: dict[str, Facts] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # by site that saw what another saw, that one
    empty: list[str] = field(default_factory=list)  # experts that no token reached, or a single one
    excluded: dict[str, int] = field(default_factory=dict)  # tokens by reason, and those "kept"

    def facts(self) -> dict[str, Any]:
        """All but the reports, as JSON types."""
        return {"shared": self.shared, "empty": self.empty, "excluded": self.excluded}

    def left_out(self) -> dict[str, int]:
        """Tokens that did not count, by reason."""
        return {reason: n for reason, n in self.excluded.items() if n and reason != "kept"}

    def summary(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The report.

        Args:
            about: `model`, `tokens` and `settings` of the run, in JSON types.
        """
        points = {name: asdict(fact) for name, fact in self.sites.items()}
        return report_dict(
            self.reports,
            about["model"],
            about["tokens"] | {"excluded": self.left_out()},
            about["settings"] | {"points": points},
            empty=self.empty,
            shared=self.shared,
        )

    def metadata(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What a file of statistics says of the run.

        Args:
            about: as for `summary`; what else is in it is kept.
        """
        tokens = about.get("tokens", {}) | {"excluded": self.left_out()}
        sites = {name: asdict(fact) for name, fact in self.sites.items()}
        return dict(about) | {"tokens": tokens, "sites": sites, "shared": self.shared, "empty": self.empty}

    def add(self, facts: Mapping[str, Any]) -> None:
        """Join what another pass found; tokens are the same in each.

        Args:
            facts: what `facts` of the pass gave.
        """
        self.shared |= facts["shared"]
        self.empty += facts["empty"]
        self.excluded = dict(facts["excluded"])


def count_sites(
    model: nn.Module,
    batches: Callable[[], Iterable[Batch]],
    passes: Sequence[Sequence[Site]],
    make: Callable[[Site], SiteStatistic],
    select: Callable[[], TokenSelection],
    *,
    n_components: float | None,
    keeping: Keeping | None = None,
    metadata: Mapping[str, Any] | None = None,
    stop_early: bool | None = None,
    progress: Progress | None = None,
) -> Counted:
    """Count what every site sees, and decompose it.

    Args:
        model: any module.
        batches: gives the batches, from the first one, for each pass.
        passes: the sites of each.
        make: makes the empty statistic of a site.
        select: makes the selection of a pass, which counts the tokens.
        n_components: directions kept.
        keeping: what stays on disk.
        metadata: about the run, for the file of statistics.
        stop_early: as `measure` takes it.
        progress: told the tokens of each batch after it, once for each pass.

    Raises:
        ValueError: no batch, or a site refused its rows or saw too few.
    """
    keeping = keeping or Keeping()
    if len(passes) > 1 and keeping.statistics is not None and keeping.folder is None:
        raise ValueError("`keeping` must have a folder to save the statistics of several passes; give one.")
    sites = [site for group in passes for site in group]
    counted = Counted(sites={site.name: Facts.of(site) for site in sites})
    for index, group in enumerate(passes):
        names = [site.name for site in group]
        done = keeping.finished(index, names)
        if done is not None:
            found, views = done.metadata, dict(done)
        else:
            sinks, selection = {site: make(site) for site in group}, select()
            checkpoint = keeping.checkpoint(index, names)
            if checkpoint is not None and keeping.resume:
                _restore(sinks, selection, checkpoint)
            options = {"stop_early": stop_early, "progress": progress}
            found = _count(model, batches(), sinks, selection, checkpoint, **options)
            views = _views(sinks)
            del sinks  # solving frees them one by one
        counted.add(found)
        if len(passes) > 1:
            keeping.finish(index, names, views, found)
        else:
            keeping.save(views, counted.metadata(metadata or {}))
        known = {name: of for name, of in views.items() if name not in found["empty"]}
        views.clear()
        counted.reports |= solve_sites(known, counted.sites, n_components)
    if len(passes) > 1:
        keeping.save(None, counted.metadata(metadata or {}), len(passes))
    for follower, leader in counted.shared.items():
        counted.reports[follower] = counted.reports[leader]
    counted.reports = Reports({
        site.name: counted.reports[site.name] for site in sites if site.name in counted.reports
    })
    return counted


def _count(
    model: nn.Module,
    batches: Iterable[Batch],
    sinks: Mapping[Site, SiteStatistic],
    selection: TokenSelection,
    checkpoint: Checkpoint | None,
    **options: Any,
) -> dict[str, Any]:
    """One pass, from where its checkpoint is; what it found as JSON types.

    Raises:
        ValueError: a site that should have saw no token that counts.
    """
    shared = {} if checkpoint is None else dict(checkpoint.progress.get("shared", {}))

    def save(now: Mapping[str, str]) -> None:
        if checkpoint is not None:
            checkpoint.tick(_views(sinks), {"shared": dict(now), "excluded": selection.counts})

    left = iter(batches if checkpoint is None else checkpoint.remaining(batches))
    first = next(left, None)
    if first is not None or checkpoint is None or not checkpoint.done:  # else all were counted before
        ahead = [] if first is None else [first]
        shared = measure(model, chain(ahead, left), sinks, selection, shared=shared, counted=save, **options)
    empty = [site for site in sinks if site.name not in shared and _too_few(site, sinks[site])]
    for site in empty:
        if not site.may_be_empty:
            raise ValueError(
                f"site {site.name!r} saw no token that counts; check the attention mask and what is left out."
            )
    return {"shared": shared, "empty": [site.name for site in empty], "excluded": selection.counts}


def _restore(sinks: Mapping[Site, SiteStatistic], selection: TokenSelection, checkpoint: Checkpoint) -> None:
    """Go on from a checkpoint, if there is one."""
    found = checkpoint.load()
    for site, sink in sinks.items():
        sink.views = found.get(site.name, sink.views)  # pyright: ignore[reportAttributeAccessIssue]
    selection.merge(checkpoint.progress.get("excluded", {}))


def _too_few(site: Site, sink: SiteStatistic) -> bool:
    """Whether a site saw nothing; of an expert one token is none either, since it has no variance."""
    return sink.n_samples < (2 if site.may_be_empty else 1)


def _views(sinks: Mapping[Site, SiteStatistic]) -> dict[str, Any]:
    """What was counted, by site; not of those that saw nothing or what another saw."""
    return {site.name: sink.views for site, sink in sinks.items() if sink.n_samples}
