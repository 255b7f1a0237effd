"""From the statistics of sites to what is said about each."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from pca_torch.head_moments import HeadMoments
from pca_torch.heads import HeadsReport, heads_report
from pca_torch.result import ExtremeRows, SiteReport
from pca_torch.sites import Site
from pca_torch.solvers import decompose
from pca_torch.statistic_file import Statistic
from pca_torch.tokens import TokenViews

__all__ = ["Facts", "Report", "Reports", "solve_sites"]

WHOLE = "covariance_eigh"  # a report shows every variance, also of those directions that are not kept

Report = SiteReport | HeadsReport


class Reports(dict[str, Report]):
    """Reports by the name of the site; a plain path stands for its output, `model.layers.3:output`."""

    def __missing__(self, name: str) -> Report:
        if dict.__contains__(self, f"{name}:output"):
            return self[f"{name}:output"]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or dict.__contains__(self, f"{name}:output")

    def get(self, name: str, default: Any = None) -> Any:
        """The report of a site, or `default`.

        Args:
            name: of the site, or a path.
            default: where there is none.
        """
        try:
            return self[name]
        except KeyError:
            return default


@dataclass(frozen=True)
class Facts:
    """What a file says about a site beside its numbers; JSON types."""

    path: str = ""  # of the module
    point: str = ""  # in words
    kind: str = "module"
    rope: Literal["pre", "post"] | None = None
    heads: int = 1
    layer: int | None = None

    @classmethod
    def of(cls, site: Site) -> Facts:
        """Those of a site of a model.

        Args:
            site: where activations were captured.
        """
        return cls(site.path, site.point, site.kind, site.rope, site.heads, site.layer)

    @classmethod
    def from_dict(cls, values: Any) -> Facts:
        """Those that a file holds; what is not there or of another type takes its default.

        Args:
            values: of JSON.
        """
        known = values if isinstance(values, Mapping) else {}
        kept = {name: known[name] for name in ("path", "point", "kind") if type(known.get(name)) is str}
        if known.get("rope") in {"pre", "post"}:
            kept["rope"] = known["rope"]
        for name, least in (("heads", 1), ("layer", 0)):
            if type(known.get(name)) is int and known[name] >= least:
                kept[name] = known[name]
        return cls(**kept)


def solve_sites(
    statistics: MutableMapping[str, Statistic], facts: Mapping[str, Facts], n_components: float | None
) -> Reports:
    """Decompose every site in both views, one after the other.

    Args:
        statistics: what was counted, by site; each is taken out when it is done.
        facts: about the sites of heads.
        n_components: directions kept of each.

    Raises:
        ValueError: a site saw too few tokens.
    """
    reports = Reports()
    for name in list(statistics):
        try:
            reports[name] = _solve(statistics.pop(name), facts.get(name, Facts()), n_components)
        except ValueError as error:
            raise ValueError(f"site {name!r}: {error}") from error
    return reports


def _solve(statistic: Statistic, facts: Facts, n_components: float | None) -> Report:
    if isinstance(statistic, TokenViews):
        everything, typical, extreme = statistic.result()
    else:  # kept without views
        everything = typical = statistic
        none = {"count": 0, "threshold": math.inf, "positions": {}, "trace_share": 0.0}
        extreme = ExtremeRows(n_samples=statistic.n_samples, heavy_tailed=False, exact=True, **none)
    if isinstance(everything, HeadMoments) and isinstance(typical, HeadMoments):
        told = {"kind": facts.kind, "rope": facts.rope, "layer": facts.layer}
        return heads_report(everything, typical, extreme, n_components, **told)
    all_tokens = decompose(everything, n_components, WHOLE)
    if typical is everything:
        return SiteReport(all_tokens, all_tokens, extreme)
    return SiteReport(all_tokens, decompose(typical, n_components, WHOLE), extreme)
