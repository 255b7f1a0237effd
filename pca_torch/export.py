"""One safetensors file for many sites: written whole or not at all, checked before it is used.

Tensors are named `{site}/{kind}`, the kinds are those of `layout.py`. The header holds `format`, `version`
and `json`, one text `{"metadata": ..., "sites": {site: [facts of each group]}, "sign_rule", "libraries"}`.
JSON has no inf and no NaN: they stand as `{"$float": "inf"}` and come back as floats.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from pca_torch._files import replacing
from pca_torch.layout import KINDS, check_site, pack_site, unpack_site
from pca_torch.result import PCAResult

__all__ = ["BasisFile", "load", "load_metadata", "save"]

FORMAT, VERSION = "pca_torch", "1"
SIGN_RULE = "largest entry of each component positive; within 1e-3 of the largest, the first decides"
STORED = ("F64", "F32", "BF16", "F16", "I64")  # the dtypes we write, as safetensors calls them
NONFINITE = "$float"
MOST_NESTED = 64  # far above real metadata, far below the recursion limit of whoever reads it
MOST_TEXT = 50_000_000  # safetensors reads no header above 100 MB, and its escapes can double the text


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
        with _naming(f"`results[{site!r}]`"):
            parts, sites[site] = pack_site(groups)
            check_site(parts, sites[site])  # what is written can be read
        tensors |= {f"{site}/{kind}": tensor for kind, tensor in parts.items()}
    libraries = {name: _version(name) for name in ("torch", "numpy", "safetensors", "pca-torch")}
    body = {"metadata": dict(metadata or {}), "sites": sites, "sign_rule": SIGN_RULE, "libraries": libraries}
    text = json.dumps({key: _encode(value, key) for key, value in body.items()}, allow_nan=False)
    if len(text) > MOST_TEXT:
        raise ValueError(f"`metadata` must stay below {MOST_TEXT} characters of JSON, got {len(text)}.")
    _write(path, tensors, {"format": FORMAT, "version": VERSION, "json": text})


def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> BasisFile:
    """Read a file of `save`: tensors come back bit for bit, and nothing in the file is executed.

    Args:
        path: the file.
        device: where the tensors go.

    Raises:
        ValueError: it is no basis file, of another version, or anything in it is wrong.
    """
    with open(path, "rb") as file, _naming(os.fspath(path)):
        body = _read_header(file)
        file.seek(0)
        tensors = _by_site(safetensors.torch.load(file.read()))
        if unmatched := sorted(tensors.keys() ^ body["sites"].keys()):
            raise ValueError(f"site {unmatched[0]!r} has tensors without facts, or facts without tensors.")
        if not tensors:
            raise ValueError("holds no site.")
        sites: dict[str, PCAResult | tuple[PCAResult, ...]] = {}
        for site, facts in body["sites"].items():
            with _naming(f"site {site!r}"):
                check_site(tensors[site], facts)
            groups = tuple(result.to(device) for result in unpack_site(tensors.pop(site), facts))
            sites[site] = groups[0] if len(groups) == 1 else groups
    return BasisFile(Path(path), body["metadata"], sites)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `save` was given as `metadata`, from the header alone, which is checked as in `load`.

    Args:
        path: the file.
    """
    with open(path, "rb") as file, _naming(os.fspath(path)):
        return _read_header(file)["metadata"]


@contextmanager
def _naming(culprit: str) -> Generator[None, None, None]:
    """Put the name of the culprit before what is wrong with it.

    Raises:
        ValueError: whatever was wrong.
    """
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{culprit}: {error}") from error


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # a source tree that was never installed
        return None


def _as_groups(site: str, value: PCAResult | Sequence[PCAResult]) -> list[PCAResult]:
    groups = [value] if isinstance(value, PCAResult) else value
    if not isinstance(groups, Sequence) or not all(isinstance(group, PCAResult) for group in groups):
        raise TypeError(f"`results[{site!r}]` must be a PCAResult or a sequence of them, got {value!r:.80}.")
    if not groups:
        raise ValueError(f"`results[{site!r}]` is empty; give at least one result.")
    return list(groups)


def _write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write the file with the permissions of any new file there; safetensors itself leaves 0600.

    Raises:
        OSError: the disk is full, or the folder may not be written to.
    """
    try:
        with replacing(path) as draft:
            draft.touch()
            mode = stat.S_IMODE(draft.stat().st_mode)
            safetensors.torch.save_file(tensors, draft, metadata=header)
            draft.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{os.fspath(path)} could not be written: {error}") from error


def _encode(value: Any, where: str, depth: int = 0) -> Any:
    """`value` in strict JSON types.

    Raises:
        TypeError: a type, or a key, that JSON does not have.
        ValueError: nested too deeply, or a key of ours.
    """
    if depth > MOST_NESTED:
        raise ValueError(
            f"`{where:.40}...` must be nested at most {MOST_NESTED} deep; does it contain itself?"
        )
    if isinstance(value, float) and not math.isfinite(value):
        return {NONFINITE: str(float(value))}
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, list):
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TypeError(f"`{where}` must be dict, list, str, number, bool or None, got {kind}; convert it.")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"`{where}` must have strings as keys, got {key!r}.")
        if key == NONFINITE:
            raise ValueError(f"`{where}` has the key {NONFINITE!r}, which marks inf and NaN; rename it.")
    return {key: _encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}


def _decode(text: str) -> Any:
    """Inverse of `_encode`, refusing what `json.loads` would pass over.

    Raises:
        ValueError: not JSON, a key twice, or nested beyond what Python can follow.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON.")

    try:
        return json.loads(text, object_pairs_hook=_as_object, parse_constant=refuse)
    except RecursionError:
        raise ValueError("JSON is nested too deeply.") from None


def _as_object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object has the same key twice.")
    if NONFINITE not in found:
        return found
    if len(found) > 1 or found[NONFINITE] not in ("inf", "-inf", "nan"):
        raise ValueError(f"{NONFINITE!r} must mark inf, -inf or nan, got {found!r:.80}.")
    return float(found[NONFINITE])


def _read_header(file: BinaryIO) -> dict[str, Any]:
    """The JSON body of an open basis file; nothing is allocated that the file does not have.

    Raises:
        ValueError: anything in the header is wrong.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(
            f"is not a whole safetensors file: {size} bytes do not hold the header it announces."
        )
    with _naming("is not a safetensors file"):
        header = _decode(file.read(length).decode())
    about = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError("is not a pca_torch basis.")
    if about.get("version") != VERSION:
        got = about.get("version")
        raise ValueError(f"has format version {got!r}, only {VERSION!r} can be read; a newer pca_torch may.")
    for name, entry in header.items():
        if not _is_entry(entry, size):
            raise ValueError(f"describes tensor {name!r} as {entry!r:.80}, which no basis file holds.")
    with _naming("`json` in the header"):
        body = _decode(about["json"] if isinstance(about.get("json"), str) else "")
    if not (isinstance(body, dict) and all(isinstance(body.get(key), dict) for key in ("metadata", "sites"))):
        raise ValueError("`json` in the header must hold `metadata` and `sites`.")
    return body


def _is_entry(entry: Any, size: int) -> bool:
    """Whether a tensor has a dtype and a shape we write, with no dimension larger than the file."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return (
        isinstance(shape, list)
        and len(shape) <= 3
        and all(type(n) is int and 0 <= n <= size for n in shape)
        and entry.get("dtype") in STORED
    )


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
