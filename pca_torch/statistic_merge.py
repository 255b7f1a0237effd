"""Statistic files of runs over different tokens, as if one run had seen them all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pca_torch._safetensors import naming
from pca_torch.statistic_file import Statistic, StatisticFile, load_statistics

__all__ = ["MergedStatistics", "merge_statistics"]

ADDED = "tokens"  # what was counted
FREE = frozenset({  # what two runs may differ in and still measure the same; the first file tells
    *("model.transformers", "model.device"),
    *("settings.batch_size", "settings.device", "settings.files", "settings.max_tokens", "settings.memory"),
    *("settings.n_components", "settings.seq_len", "settings.text", "settings.view"),
    "settings.sites",  # what they stand for is compared, site by site
})
NOT_ADDED = frozenset({"seq_len"})  # numbers among the counts that count nothing
JOINED = frozenset({"settings.files", "settings.text"})  # what the rows came from
WORDS = frozenset({"kind", "layer", "point"})  # of a site, which depend on how it was asked for
NAMED = 3  # files that stand for the model


class MergedStatistics(Mapping[str, Statistic]):
    """The statistics of several files by site, each merged when it is asked for.

    Memory holds one site, and one more while it is merged, however large the files are.

    Args:
        files: at least one, of the same sites.
        metadata: of all of them.
    """

    def __init__(self, files: Sequence[StatisticFile], metadata: dict[str, Any]) -> None:
        self.files = tuple(files)
        self.metadata = metadata
        self.runs = tuple(run for file in files for run in file.runs)  # what they counted, each once
        self._sites = list(dict.fromkeys(site for file in files for site in file))

    def __getitem__(self, site: str) -> Statistic:
        if site not in self._sites:
            raise KeyError(site)
        (first, name), *others = [(file, name) for file in self.files if (name := _held_as(site, file))]
        total: Any = first[name]
        for file, name in others:
            other: Any = file[name]
            with naming(f"{file.path}: site {site!r}"):
                total.merge(other)
            del other  # before the next one is read
        return total

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def n_samples(self, site: str) -> int:
        """Rows that a site has counted in all files.

        Args:
            site: its name.
        """
        return sum(file.n_samples(name) for file in self.files if (name := _held_as(site, file)))


def merge_statistics(
    paths: Sequence[str | os.PathLike[str]], device: torch.device | str | None = "cpu"
) -> MergedStatistics:
    """Open statistic files and merge them site by site: the result is that of one run over all their rows.

    The files must be of the same model, sites and settings, as far as these decide what is measured. What
    was counted adds up. A site may be missing where the metadata list it under `empty`: no token reached it.

    Args:
        paths: files of `save_statistics`.
        device: where the statistics go; None is where each of them was.

    Returns:
        A mapping to pass to `save_statistics`, with its `metadata`, or to read site by site.

    Raises:
        ValueError: no file, a file given twice, a damaged one, two that hold the same run, or files that do
            not belong together.
    """
    if not paths:
        raise ValueError("`paths` is empty; give at least one statistic file.")
    if len({Path(path).resolve() for path in paths}) < len(paths):
        raise ValueError("`paths` names a file twice; its rows would count twice.")
    files = [load_statistics(path, device) for path in paths]
    _check_runs(files)
    first = files[0]
    metadata = dict(first.metadata)
    for file in files[1:]:
        with naming(f"{file.path} and {first.path} cannot be merged"):
            _check_sites(first, file)
            metadata = _together(metadata, file.metadata)
    merged = [name for file in files for name in file.metadata.get("merged", [file.path.name])]
    if len(files) > 1:
        metadata["merged"] = merged
    return MergedStatistics(files, metadata)


def _check_runs(files: Sequence[StatisticFile]) -> None:
    """Refuse files of which one holds what another counted: a copy, or a file that it was merged into.

    Raises:
        ValueError: there are two.
    """
    holders: dict[str, StatisticFile] = {}
    for file in files:
        for run in file.runs:
            if run in holders:
                raise ValueError(
                    f"{file.path} and {holders[run].path} hold the same run, whose rows would count twice; "
                    "leave one out."
                )
            holders[run] = file


def _held_as(site: str, file: StatisticFile) -> str | None:
    """The name under which a file has a site: its own, or that of the one whose very tensors it saw."""
    leader = _shared(file.metadata).get(site)
    return site if site in file else leader if leader in file else None


def _shared(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Leader by follower."""
    found = metadata.get("shared")
    pairs = found.items() if isinstance(found, dict) else ()
    return {follower: leader for follower, leader in pairs if isinstance(leader, str)}


def _check_sites(a: StatisticFile, b: StatisticFile) -> None:
    """Refuse files of different sites.

    Raises:
        ValueError: one has a site that the other lacks, or holds another kind of statistic there.
    """
    for one, other in ((a, b), (b, a)):
        empty = _names(other.metadata, "empty")
        if missing := [site for site in one if _held_as(site, other) is None and site not in empty]:
            raise ValueError(f"{other.path.name} lacks site {min(missing)!r}; capture the same sites.")
    for site in a:
        name = _held_as(site, b)
        if name is not None and a.kind(site) != b.kind(name):
            kinds = " and ".join("/".join(filter(None, kind)) for kind in (b.kind(name), a.kind(site)))
            raise ValueError(f"site {site!r} holds {kinds}; capture it alike.")


def _names(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = metadata.get(key)
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def _together(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of two files as those of one.

    Raises:
        ValueError: they differ in what decides what is measured.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys([*a, *b]):
        mine, theirs = a.get(key), b.get(key)
        if key == ADDED and isinstance(mine, dict) and isinstance(theirs, dict):
            merged[key] = _added(mine, theirs)
        elif key == "model" and _files(a) and _files(b):  # their names stand for the model
            files = [*_files(a), *_files(b)]
            merged[key] = {"name": ", ".join(files[:NAMED]) + (" …" if len(files) > NAMED else "")}
        elif key == "sites":
            _same(_without_words(mine), _without_words(theirs), key)
            merged[key] = mine
        elif key == "shared":
            merged[key] = dict(_shared(a).items() & _shared(b).items())  # others have sums of their own
        elif key == "empty":
            merged[key] = [name for name in _names(a, key) if name in _names(b, key)]
        elif key == "merged":
            continue
        else:
            merged[key] = _same(mine, theirs, key)
    return merged


def _files(metadata: Mapping[str, Any]) -> list[str]:
    """The files that rows came from; none where they came from a model."""
    settings = metadata.get("settings")
    return _names(settings, "files") if isinstance(settings, dict) else []


def _without_words(sites: Any) -> Any:
    """The facts of each site that say what was measured."""
    if not isinstance(sites, dict):
        return sites
    return {
        site: {key: facts[key] for key in facts.keys() - WORDS} if isinstance(facts, dict) else facts
        for site, facts in sites.items()
    }


def _same(a: Any, b: Any, name: str) -> Any:
    """What both have, or what the first has where it may differ.

    Raises:
        ValueError: they differ.
    """
    if name in JOINED and isinstance(a, list) and isinstance(b, list):
        once = name != "settings.files"  # two files of one name are two
        return [*a, *(item for item in b if not (once and item in a))]
    if name in FREE:
        return a
    if isinstance(a, dict) and isinstance(b, dict):
        return {key: _same(a.get(key), b.get(key), f"{name}.{key}") for key in dict.fromkeys([*a, *b])}
    if a == b:
        return a
    raise ValueError(f"{name} is {b!r:.60} and {a!r:.60}.")


def _added(a: Any, b: Any) -> Any:
    """Counts of both runs: numbers add up, what was read is listed, anything else stays where it agrees."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {
            key: (a.get(key) if a.get(key) == b.get(key) else None)
            if key in NOT_ADDED
            else _added(a.get(key), b.get(key))
            for key in dict.fromkeys([*a, *b])
        }
    if a is None or b is None:
        return b if a is None else a
    if all(type(value) in {int, float} for value in (a, b)):
        return a + b
    lists = [value if isinstance(value, list) else [value] for value in (a, b)]
    joined = lists[0] + [item for item in lists[1] if item not in lists[0]]
    return joined if len(joined) > 1 or isinstance(a, list) else a
