"""Two files of bases or statistics, site by site: do the layers still use the same directions?"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from pca_torch import export, spectrum
from pca_torch._checks import check_choice, check_whole
from pca_torch._safetensors import format_of
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.result import PCAResult
from pca_torch.solvers import decompose
from pca_torch.statistic_file import STATISTICS, load_statistics
from pca_torch.subspace import RandomOverlap, orthonormal_rows, random_overlap
from pca_torch.subspace.energy import CapturedShare, share_within
from pca_torch.subspace.spans import angles_between
from pca_torch.tokens import TokenViews

__all__ = ["Comparison", "GroupComparison", "Side", "SiteComparison", "compare", "open_side"]

VERSION = 1
SHARE = 0.95  # of the variance: the ranks that are compared, and the default k
# settings that change nothing of what is measured, or that are compared site by site
HARMLESS = {"n_components", "batch_size", "sites", "files", "points", "memory"}
VIEWS = ("typical", "all")

View = Literal["typical", "all"]
Group = tuple[PCAResult, Moments | PCAResult]  # a result, and what knows most about its variance
Progress = Callable[[int], object]  # is told how many sites were just done


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two files: its sites, and how the groups of a site are read."""

    path: Path
    metadata: Mapping[str, Any]
    view: str | None  # which rows its results are of
    names: tuple[str, ...]
    read: Callable[[str], list[Group]]


@dataclass(frozen=True)
class GroupComparison:
    """One head, or one site without heads, in A and in B, at one k."""

    k: int  # leading directions of both that are compared
    overlap: float  # mean squared cosine of the principal angles
    chance: RandomOverlap  # of two random subspaces of these dimensions
    largest_angle: float | None  # radians; None where a span has no dimension
    mean_angle: float | None
    a_in_b: CapturedShare  # of the variance of A within the k directions of B
    a_in_a: float  # within its own, the most that k directions can hold
    b_in_a: CapturedShare
    b_in_b: float
    rank_a: int | None  # directions for 95 % of the variance; None if more than were computed
    rank_b: int | None


@dataclass(frozen=True)
class SiteComparison:
    """One site of both files, with one group for each head."""

    name: str
    n_features: int  # D, or E of each head
    groups: tuple[GroupComparison, ...]

    @property
    def sigmas(self) -> float | None:
        """Standard deviations by which the mean overlap lies above chance, heads taken as independent."""
        mean, _ = self.over_groups(lambda group: group.overlap) or (0.0, 0.0)
        spread = math.sqrt(sum(group.chance.std**2 for group in self.groups)) / len(self.groups)
        return RandomOverlap(fmean(group.chance.mean for group in self.groups), spread).sigmas(mean)

    def over_groups(self, value: Callable[[GroupComparison], float | None]) -> tuple[float, float] | None:
        """Mean and spread of a number over the groups; None where one of them has none.

        Args:
            value: reads the number.
        """
        values = [value(group) for group in self.groups]
        known = [each for each in values if each is not None]
        return (fmean(known), pstdev(known)) if len(known) == len(values) else None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    a: Mapping[str, Any]  # path, model and view
    b: Mapping[str, Any]
    sites: tuple[SiteComparison, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    differences: tuple[str, ...]  # what else differs between the two, a sentence each

    def to_dict(self) -> dict[str, Any]:
        """All of it in JSON types."""
        sites = {
            site.name: {
                "n_features": site.n_features,
                "sigmas": site.sigmas,
                "groups": [asdict(group) for group in site.groups],
            }
            for site in self.sites
        }
        return {
            "version": VERSION,
            "a": dict(self.a),
            "b": dict(self.b),
            "sites": sites,
            "only_in_a": list(self.only_in_a),
            "only_in_b": list(self.only_in_b),
            "differences": list(self.differences),
        }


def open_side(path: str | os.PathLike[str], view: View = "typical") -> Side:
    """Open a basis file, a statistic file, or a folder that `pca-torch run` or `fit` wrote.

    Args:
        path: the file; of a folder, its `basis.safetensors`.
        view: which rows are looked at in a statistic file, which knows both views; a basis file has one.

    Raises:
        ValueError: neither kind of file, or damaged.
        OSError: it cannot be opened.
    """
    check_choice(view, "view", VIEWS)
    path = Path(path)
    path = path / "basis.safetensors" if path.is_dir() else path
    if format_of(path) == STATISTICS.name:
        return _statistics(path, view)
    file = export.load(path)

    def read(name: str) -> list[Group]:
        found = file[name]
        results = [found] if isinstance(found, PCAResult) else found
        return [(result, result) for result in results]

    return Side(path, file.metadata, file.metadata.get("view"), tuple(file), read)


def compare(a: Side, b: Side, k: int | None = None, progress: Progress | None = None) -> Comparison:
    """Angles, overlap and shared variance of the leading directions of every site that both files have.

    Args:
        a: the one.
        b: the other.
        k: directions compared; None is the smaller rank for 95 % of the variance, for each head its own.
        progress: called after each site.

    Raises:
        ValueError: no site in common, other features or heads, or fewer directions than `k`.
    """
    if k is not None:
        check_whole(k, "k", 1)
    common = [name for name in a.names if name in set(b.names)]
    if not common:
        raise ValueError(
            f"{a.path} and {b.path} have no site in common: {_some(a.names)} against {_some(b.names)}."
        )
    sites, differences = [], _differences(a, b)
    for name in common:
        groups_a, groups_b = a.read(name), b.read(name)
        _check_alike(name, a, b, groups_a, groups_b)
        if groups_a[0][0].centred != groups_b[0][0].centred:
            differences.append(f"site {name} is centred in {'A' if groups_a[0][0].centred else 'B'} alone")
        pairs = zip(groups_a, groups_b, strict=True)
        groups = tuple(_compare(one, other, k, name, (a, b)) for one, other in pairs)
        sites.append(SiteComparison(name, groups_a[0][0].n_features, groups))
        if progress is not None:
            progress(1)
    return Comparison(
        a=_about(a),
        b=_about(b),
        sites=tuple(sites),
        only_in_a=tuple(name for name in a.names if name not in set(b.names)),
        only_in_b=tuple(name for name in b.names if name not in set(a.names)),
        differences=tuple(differences),
    )


def _compare(one: Group, other: Group, k: int | None, name: str, sides: tuple[Side, Side]) -> GroupComparison:
    (a, data_a), (b, data_b) = one, other
    ranks = [_rank(result) for result in (a, b)]
    if k is None:
        k = min(*(rank for rank in ranks if rank is not None), a.n_components, b.n_components)
    for result, side in zip((a, b), sides, strict=True):
        if k > result.n_components:
            raise ValueError(
                f"`k` must be at most {result.n_components}, the components of site {name!r} in {side.path}, "
                f"got {k}; run again with more `--n-components`."
            )
    span_a, span_b = orthonormal_rows(a, k), orthonormal_rows(b, k)
    angles = angles_between(span_a, span_b)
    return GroupComparison(
        k=k,
        overlap=angles.cos().square().mean().item() if len(angles) else 0.0,
        chance=random_overlap(len(span_a), len(span_b), a.n_features),
        largest_angle=angles.max().item() if len(angles) else None,
        mean_angle=angles.mean().item() if len(angles) else None,
        a_in_b=share_within(data_a, span_b),
        a_in_a=_own(a, k),
        b_in_a=share_within(data_b, span_a),
        b_in_b=_own(b, k),
        rank_a=ranks[0],
        rank_b=ranks[1],
    )


def _rank(result: PCAResult) -> int | None:
    try:
        return spectrum.rank(result, SHARE)
    except ValueError:  # it needs more variances than were computed
        return None


def _own(result: PCAResult, k: int) -> float:
    """Share of the variance that the k leading directions hold."""
    return min(1.0, spectrum.ratio(result)[:k].sum().item())


def _check_alike(name: str, a: Side, b: Side, groups_a: Sequence[Group], groups_b: Sequence[Group]) -> None:
    """Refuse a site that is another one in the other file.

    Raises:
        ValueError: it has other features or heads, or is standardised in one file alone.
    """
    first, second = groups_a[0][0], groups_b[0][0]
    facts = (
        ("features", first.n_features, second.n_features),
        ("heads or groups", len(groups_a), len(groups_b)),
    )
    for what, in_a, in_b in facts:
        if in_a != in_b:
            raise ValueError(f"site {name!r} has {in_a} {what} in {a.path} and {in_b} in {b.path}.")
    if (first.scale is None) != (second.scale is None):
        raise ValueError(f"site {name!r} is standardised in one of {a.path} and {b.path} alone.")


def _differences(a: Side, b: Side) -> list[str]:
    """What the two files measured differently, beside the model and the text."""
    found = [("view", a.view, b.view)]
    settings_a, settings_b = (_as_mapping(side.metadata.get("settings")) for side in (a, b))
    for key in sorted((settings_a.keys() | settings_b.keys()) - HARMLESS):
        found.append((f"setting `{key}`", settings_a.get(key), settings_b.get(key)))
    points_a, points_b = (_as_mapping(settings.get("points")) for settings in (settings_a, settings_b))
    for name in sorted(points_a.keys() & points_b.keys()):
        found.append((f"the point of site {name}", points_a[name], points_b[name]))
    return [
        f"{what} is {json.dumps(one):.60} in A and {json.dumps(other):.60} in B"
        for what, one, other in found
        if one != other
    ]


def _about(side: Side) -> dict[str, Any]:
    model = _as_mapping(side.metadata.get("model"))
    return {"path": str(side.path), "model": model.get("name") or model.get("id"), "view": side.view}


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (", …" if len(names) > 2 else "")


def _statistics(path: Path, view: View) -> Side:
    """A statistic file: every direction, and the exact covariance.

    Sites that saw the tensor of another have its numbers; those with a single row are left out.
    """
    file = load_statistics(path)
    shared, told = (_as_mapping(file.metadata.get(key)) for key in ("shared", "sites"))
    leaders = {name: leader for name, leader in shared.items() if isinstance(leader, str) and leader in file}
    leaders |= {name: name for name in file}
    order = dict.fromkeys([*told, *leaders])  # that of the model, if it is known

    def read(name: str) -> list[Group]:
        statistic = file[leaders[name]]
        if isinstance(statistic, TokenViews):
            everything, typical, _ = statistic.result()
            statistic = typical if view == "typical" else everything
        many = isinstance(statistic, HeadMoments)
        heads = [statistic.head(i) for i in range(statistic.heads)] if many else [statistic]
        return [(decompose(head, svd_solver="covariance_eigh"), head) for head in heads]

    counted = (name for name in order if name in leaders and file.n_samples(leaders[name]) > 1)
    return Side(path, file.metadata, view, tuple(counted), read)
