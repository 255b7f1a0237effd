"""One safetensors file for many sites: written whole or not at all, checked before it is used.

Tensors are named `{site}/{kind}`, the kinds are those of `layout.py`. The header holds `format`, `version`
and `json`, one text `{"metadata": ..., "sites": {site: [facts of each group]}, "sign_rule", "libraries"}`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from pca_torch._safetensors import Format, describe, libraries, naming, read_header, write_tensors
from pca_torch.layout import KINDS, check_site, pack_site, unpack_site
from pca_torch.result import PCAResult

__all__ = ["BasisFile", "load", "load_metadata", "save"]

BASIS = Format("pca_torch", "1", "basis")
SIGN_RULE = "largest entry of each component positive; within 1e-3 of the largest, the first decides"


@dataclass(frozen=True, eq=False)
class BasisFile(Mapping[str, PCAResult | tuple[PCAResult, ...]]):
    """The results of one file by site: a `PCAResult`, or a tuple of them where a site has several groups."""

    path: Path
    metadata: dict[str, Any]  # as it was given to `save`
    _sites: dict[str, PCAResult | tuple[PCAResult, ...]] = field(repr=False)

    def __getitem__(self, site: str) -> PCAResult | tuple[PCAResult, ...]:
        return self._sites[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


def save(
    path: str | os.PathLike[str],
    results: Mapping[str, PCAResult | Sequence[PCAResult]],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write `results` to one safetensors file; an old one is replaced only once the new one is complete.

    Args:
        path: the file. Its folder must exist, or it is a FileNotFoundError.
        results: site name → its result, or one result per head or group of the site.
        metadata: what else to keep about the run, in JSON types (a tuple is not one).

    Raises:
        TypeError: `results` holds something else, or a value in `metadata` is of no JSON type.
        ValueError: no results, no name, groups that do not fit together, or anything `load` would refuse.
    """
    if not isinstance(results, Mapping):
        raise TypeError(f"`results` must map site names to results, got {type(results).__name__}.")
    if not results:
        raise ValueError("`results` is empty; give at least one site.")
    tensors: dict[str, Tensor] = {}
    sites: dict[str, list[dict[str, Any]]] = {}
    for site, value in results.items():
        if not isinstance(site, str) or not site:
            raise ValueError(f"`results` must have non-empty strings as site names, got {site!r}.")
        groups = _as_groups(site, value)
        with naming(f"`results[{site!r}]`"):
            parts, sites[site] = pack_site(groups)
            check_site(parts, sites[site])  # what is written can be read
        tensors |= {f"{site}/{kind}": tensor for kind, tensor in parts.items()}
    body = {"metadata": dict(metadata or {}), "sites": sites, "sign_rule": SIGN_RULE}
    body["libraries"] = libraries()
    write_tensors(path, describe(BASIS, body), tensors)


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> BasisFile:
    """Read a file of `save`: tensors come back bit for bit, and nothing in the file is executed.

    Args:
        path: the file.
        device: where the tensors go.

    Raises:
        ValueError: it is no basis file, of another version, or anything in it is wrong.
    """
    with open(path, "rb") as file, naming(os.fspath(path)):
        _, body = read_header(file, BASIS)
        file.seek(0)
        tensors = _by_site(safetensors.torch.load(file.read()))
        if unmatched := sorted(tensors.keys() ^ body["sites"].keys()):
            raise ValueError(f"site {unmatched[0]!r} has tensors without facts, or facts without tensors.")
        if not tensors:
            raise ValueError("holds no site.")
        sites: dict[str, PCAResult | tuple[PCAResult, ...]] = {}
        for site, facts in body["sites"].items():
            with naming(f"site {site!r}"):
                check_site(tensors[site], facts)
            groups = tuple(result.to(device) for result in unpack_site(tensors.pop(site), facts))
            sites[site] = groups[0] if len(groups) == 1 else groups
    return BasisFile(Path(path), body["metadata"], sites)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` was given as `metadata`, from the header alone, which is checked as in `load`.

    Args:
        path: the file.
    """
    with open(path, "rb") as file, naming(os.fspath(path)):
        return read_header(file, BASIS)[1]["metadata"]


def _as_groups(site: str, value: PCAResult | Sequence[PCAResult]) -> list[PCAResult]:
    groups = [value] if isinstance(value, PCAResult) else value
    if not isinstance(groups, Sequence) or not all(isinstance(group, PCAResult) for group in groups):
        raise TypeError(f"`results[{site!r}]` must be a PCAResult or a sequence of them, got {value!r:.80}.")
    if not groups:
        raise ValueError(f"`results[{site!r}]` is empty; give at least one result.")
    return list(groups)


def _by_site(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by site and kind; a site's name may hold slashes, a kind has none.

    Raises:
        ValueError: a name that `save` does not write.
    """
    sites: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        site, _, kind = name.rpartition("/")
        if not site or kind not in KINDS:
            raise ValueError(f"holds an unknown tensor {name!r}.")
        sites.setdefault(site, {})[kind] = tensor
    return sites
