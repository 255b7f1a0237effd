"""Samples on disk: files of several kinds, read by blocks and never whole, as the shards of one data set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pca_torch.sources.blocks import Source
from pca_torch.sources.npy import NpySource
from pca_torch.sources.pt import TorchSource
from pca_torch.sources.safetensors import SafetensorsSource, find_in_index

__all__ = [
    "SUFFIXES",
    "NpySource",
    "SafetensorsSource",
    "Source",
    "TorchSource",
    "check_same_width",
    "open_sources",
]

SUFFIXES = (".npy", ".safetensors", ".pt", ".pth")
KINDS = "`.npy`, `.safetensors`, `.pt` or `.pth`"


def open_sources(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], tensor: str | None = None
) -> list[Source]:
    """The shards of one data set in natural order: `shard_2` stands before `shard_10`.

    Args:
        paths: `.npy`, `.safetensors`, `.pt` and `.pth` files, mixed as they come and in any order; a folder
            is all such files in it, an `.index.json` the file it names for `tensor`. Shards may differ in
            dtype.
        tensor: which tensor of files that hold several.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no path, another kind of file, a file given twice, one that cannot be read as rows, or
            files with different D.
    """
    single = isinstance(paths, (str, os.PathLike))
    found = [file for path in ([paths] if single else paths) for file in _files(Path(path), tensor)]
    if not found:
        raise ValueError(f"`paths` is empty; give at least one file, {KINDS}.")
    if len({path.resolve() for path, _ in found}) < len(found):
        raise ValueError("`paths` names a file twice; its rows would count twice.")
    sources = [_open(path, name) for path, name in sorted(found, key=lambda item: _natural(item[0]))]
    check_same_width(sources)
    return sources


def check_same_width(sources: Sequence[Source]) -> None:
    """Refuse sources that are no parts of one data set.

    Args:
        sources: at least one.

    Raises:
        ValueError: one has another D than the first.
    """
    first = sources[0]
    for source in sources:
        if source.n_features != first.n_features:
            raise ValueError(
                f"{source.path}: {source.n_features} columns, but {first.path} has {first.n_features}; "
                "all files must have the same D."
            )


def _files(path: Path, tensor: str | None) -> Iterator[tuple[Path, str | None]]:
    """The files that one path stands for, each with the name of the tensor in it.

    Yields:
        the path itself, or what is in the folder or the index.

    Raises:
        ValueError: a folder without a file that can be read.
    """
    if path.is_dir():
        inside = sorted(file for file in path.iterdir() if not file.name.startswith("."))
        shards = [file for file in inside if file.suffix.lower() in SUFFIXES]
        if not shards:
            folders = ", ".join(file.name for file in inside if file.is_dir())
            hint = f"; give one of its folders: {folders[:200]}" if folders else ""
            raise ValueError(f"{path}: the folder holds no {KINDS} file{hint}.")
        yield from ((shard, tensor) for shard in shards)
    elif path.name.endswith(".index.json"):
        yield find_in_index(path, tensor)
    else:
        yield path, tensor


def _open(path: Path, tensor: str | None) -> Source:
    """The source for a file, by its suffix.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another suffix, or a file that cannot be read as rows.
    """
    match path.suffix.lower():
        case ".npy":
            return NpySource(path)
        case ".safetensors":
            return SafetensorsSource(path, tensor)
        case ".pt" | ".pth":
            return TorchSource(path, tensor)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file.")
    raise ValueError(f"{path}: must be a {KINDS} file; convert it.")


def _natural(path: Path) -> tuple[list[str | int], str]:
    """Sort key: runs of digits count as numbers; spellings of one number fall back to the text."""
    name = path.as_posix()
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name
