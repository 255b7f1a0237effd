"""Statistics as a file: what a run has summed, to be merged, reported or gone on with later.

Tensors are named `{site}/{part of the statistic}`. The header holds `format`, `version` and `json`, one text
`{"metadata": ..., "sites": {site: {"n_samples", "device", "state"}}, "runs", "libraries"}`, where `state` are
the facts that the statistic's own `to_state` gave, and `runs` names what was counted, so that merging counts
no row twice. What is read goes on bit for bit as what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pca_torch._safetensors import (
    Entry,
    Format,
    as_bytes,
    describe,
    encode,
    libraries,
    naming,
    places,
    read_header,
    read_tensor,
    write,
)
from pca_torch._state import Saved
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.statistic_kinds import Statistic, rebuilt
from pca_torch.tokens import TokenViews

__all__ = ["STATISTICS", "Statistic", "StatisticFile", "load_statistics", "save_statistics", "write_file"]

STATISTICS = Format("pca_torch_statistics", "1", "statistic")


class StatisticFile(Mapping[str, Statistic]):
    """The statistics of one file by site.

    The header is read and checked at once. A site is read and checked when it is asked for, anew each
    time: memory holds one site, and what is given out belongs to the caller.

    Args:
        path: the file.
        kind: what it must be.
        device: where the statistics go; None is where each of them was.

    Raises:
        ValueError: it is no such file, of another version, or anything in its header is wrong; of a site,
            when it is asked for: anything in it is wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: Format = STATISTICS,
        device: torch.device | str | None = "cpu",
    ) -> None:
        self.path = Path(path)
        self._device = device
        with open(path, "rb") as file, naming(os.fspath(path)):
            self._stat = _identity(file.fileno())
            header, body = read_header(file, kind)
            tensors = _by_site(places(file, header))
            self.metadata: dict[str, Any] = body["metadata"]  # as it was given when it was saved
            self.runs = _checked_runs(body.get("runs", []))  # a digest of each, if they are told
            self._sites = {site: _checked_facts(site, facts) for site, facts in body["sites"].items()}
            if stray := tensors.keys() - self._sites.keys():
                raise ValueError(f"site {min(stray)!r} has tensors without facts.")
            self._tensors = {site: tensors.get(site, {}) for site in self._sites}

    def __getitem__(self, site: str) -> Statistic:
        facts = self._sites[site]
        device = facts["device"] if self._device is None else self._device
        with open(self.path, "rb") as file, naming(os.fspath(self.path)):
            if _identity(file.fileno()) != self._stat:
                raise ValueError("was changed after it was opened; open it again.")
            tensors = {name: read_tensor(file, entry) for name, entry in self._tensors[site].items()}
            with naming(f"site {site!r}"):
                placed = {name: tensor.to(_available(device)) for name, tensor in tensors.items()}
                statistic = rebuilt(placed, facts["state"])
                n, told = statistic.n_samples, facts["n_samples"]
                if n != told:
                    raise ValueError(f"`n_samples` must be {n}, the rows counted, got {told}.")
        return statistic

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def n_samples(self, site: str) -> int:
        """Rows that a site has counted, from the header.

        Args:
            site: its name.
        """
        return self._sites[site]["n_samples"]

    def kind(self, site: str) -> tuple[str, ...]:
        """What the statistic of a site is, from the header: a word for each layer of it.

        Args:
            site: its name.
        """
        state = self._sites[site]["state"]
        inner = state.get("typical")
        return (str(state.get("kind")), str(inner.get("kind")) if isinstance(inner, dict) else "")


def save_statistics(
    path: str | os.PathLike[str],
    statistics: Mapping[str, Statistic],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write statistics to one safetensors file; an old one is replaced only once the new one is complete.

    Tensors are written one by one, so that no second copy of the statistics is made. The file says which
    runs it holds: those of `statistics` that were loaded or merged as a whole, else one by what it counted.

    Args:
        path: the file. Its folder must exist, or it is a FileNotFoundError.
        statistics: site name → statistic; they may go on afterwards.
        metadata: what else to keep about the run, in JSON types (a tuple is not one).

    Raises:
        TypeError: a value in `metadata` is of no JSON type, or a statistic is of no kind that can be saved.
        ValueError: no statistics, or no name.
        RuntimeError: an interrupt left rows of a statistic counted in part.
    """
    if not statistics:
        raise ValueError("`statistics` is empty; give at least one site.")
    runs = getattr(statistics, "runs", ()) or None
    write_file(path, STATISTICS, statistics, metadata or {}, runs)


def load_statistics(path: str | os.PathLike[str], device: torch.device | str | None = "cpu") -> StatisticFile:
    """Open a file of `save_statistics`: nothing in it is executed, and nothing is used before it is checked.

    Args:
        path: the file.
        device: where the statistics go; None is where each of them was.

    Raises:
        ValueError: it is no statistic file, of another version, or anything in it is wrong.
    """
    file = StatisticFile(path, STATISTICS, device)
    if not file:
        raise ValueError(f"{os.fspath(path)}: holds no site.")
    return file


def write_file(
    path: str | os.PathLike[str],
    kind: Format,
    statistics: Mapping[str, Statistic],
    metadata: Mapping[str, Any],
    runs: Sequence[str] | None = (),
) -> None:
    """`save_statistics` for any kind of file.

    Args:
        path: the file.
        kind: what its header says.
        statistics: site name → statistic; each is asked for twice, and kept no longer than it takes.
        metadata: in JSON types.
        runs: digests of those that were counted; None is a single one, of this very content.

    Raises:
        TypeError: something is of no type that can be saved.
        ValueError: no name, or too much metadata.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    sites: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for site in statistics:
        if not isinstance(site, str) or not site:
            raise ValueError(f"`statistics` must have non-empty strings as site names, got {site!r}.")
        tensors, sites[site] = _state(site, statistics[site])
        shapes |= {f"{site}/{name}": (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if runs is None and sites[site]["n_samples"]:
            digests[site] = _digest(tensors, sites[site]["state"])
        del tensors
    told = [_digest({}, digests)] if digests else list(runs or ())
    body = {"metadata": dict(metadata), "sites": sites, "runs": told, "libraries": libraries()}
    write(path, describe(kind, body), shapes, _parts(statistics))


def _parts(statistics: Mapping[str, Statistic]) -> Iterator[tuple[str, Tensor]]:
    """All tensors, one site after the other; none is kept here until the next."""
    for site in statistics:
        tensors, _ = _state(site, statistics[site])
        while tensors:
            name, tensor = tensors.popitem()
            yield f"{site}/{name}", tensor
            del tensor


def _state(site: str, statistic: Statistic) -> Saved:
    """Tensors of one site, and what the header says of it.

    Raises:
        TypeError: it is no statistic.
    """
    if not isinstance(statistic, (TokenViews, Moments, HeadMoments)):
        kind = type(statistic).__name__
        raise TypeError(
            f"`statistics[{site!r}]` must be TokenViews, Moments or HeadMoments, got {kind}; "
            "save results with `pca_torch.save`."
        )
    tensors, facts = statistic.to_state()
    devices = {str(tensor.device) for tensor in tensors.values()} - {"cpu"}
    device = min(devices, default="cpu")
    return tensors, {"n_samples": statistic.n_samples, "device": device, "state": facts}


def _digest(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """What no other rows have in common with these: of all bits, in no order."""
    found = hashlib.sha256(json.dumps(encode(facts, "state"), sort_keys=True).encode())
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(as_bytes(tensors[name]))
    return found.hexdigest()[:32]


def _by_site(entries: Mapping[str, Entry]) -> dict[str, dict[str, Entry]]:
    """Where tensors lie, by site and name; a site's name may hold slashes, that of a tensor has none."""
    sites: dict[str, dict[str, Entry]] = {}
    for full, entry in entries.items():
        site, _, name = full.rpartition("/")
        sites.setdefault(site, {})[name] = entry
    return sites


def _checked_facts(site: str, facts: Any) -> dict[str, Any]:
    """What the header says of a site.

    Raises:
        ValueError: it is not what `write_file` writes.
    """
    wanted = {"n_samples": int, "device": str, "state": dict}
    fits = isinstance(facts, dict) and facts.keys() == wanted.keys()
    if not fits or any(type(facts[name]) is not kind for name, kind in wanted.items()):
        raise ValueError(f"site {site!r} must have `n_samples`, `device` and `state`, got {facts!r:.80}.")
    return facts


def _checked_runs(runs: Any) -> tuple[str, ...]:
    """The digests of the runs in a file.

    Raises:
        ValueError: they are not what `write_file` writes.
    """
    fits = isinstance(runs, list) and all(isinstance(run, str) and run for run in runs)
    if not fits or len(set(runs)) < len(runs):
        raise ValueError(f"`runs` must be different digests, got {runs!r:.80}.")
    return tuple(runs)


def _available(name: torch.device | str) -> torch.device:
    """A device of this machine.

    Raises:
        ValueError: it has none of that name.
    """
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"was on {str(name)!r:.80}, which this machine lacks; pass `device`.") from error


def _identity(descriptor: int) -> tuple[int, int, int]:
    """Size, time of change and identity of an open file."""
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
