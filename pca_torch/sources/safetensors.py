"""A tensor of a `.safetensors` file by blocks; the library that defines the format checks the header."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pca_torch._dtypes import READABLE
from pca_torch.sources.blocks import StoredRows, check_shape, fingerprint, quote, regular, rows_per

__all__ = ["SafetensorsSource", "find_in_index", "pick"]

MOST_NAMES = 400  # characters of names in an error
MOST_INDEX = 50_000_000  # bytes; the index of the largest public models is near 10 MB


class SafetensorsSource:
    """The rows of one tensor of a `.safetensors` file, as blocks of (rows, D) tensors.

    Every block is a view of one buffer that the next block overwrites: copy what must outlive the
    turn of the loop. Each `for` opens the file anew, so a source can be read any number of times.

    Args:
        path: the file.
        tensor: name of the tensor (..., D), real numbers or booleans; the leading axes are flattened to
            rows. None is the only tensor of two or more dimensions.
        block_rows: rows per block; None fills about 16 MiB.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, it has no such tensor, several that None could mean, or one that
            is no table of real numbers; or `block_rows` is below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensor: str | None = None, block_rows: int | None = None
    ) -> None:
        self.path = regular(path, ".safetensors")
        with self.path.open("rb") as file:
            stat = fingerprint(file.fileno())
            length, entries = _header(self.path, file)
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        self.tensor = pick(self.path, tensor, shapes)
        self.shape = shapes[self.tensor]
        where = f"{self.path}: tensor {quote(self.tensor)!r}"
        check_shape(where, self.shape)
        entry = entries[self.tensor]
        if entry["dtype"] not in READABLE:
            raise ValueError(
                f"{where}: must hold real numbers of 8 to 64 bits, got {quote(entry['dtype'])}; convert it."
            )
        self.dtype: torch.dtype = READABLE[entry["dtype"]]
        self.n_features = self.shape[-1]
        self.n_rows = math.prod(self.shape[:-1])
        first, last = entry["data_offsets"]
        row_bytes = self.n_features * self.dtype.itemsize
        if last - first != self.n_rows * row_bytes or 8 + length + last > stat[0]:
            raise ValueError(f"{where}: not where the header says; the file is damaged.")
        self.block_rows = rows_per(block_rows, row_bytes, self.n_rows)
        self._rows = StoredRows(
            self.path, stat, 8 + length + first, self.n_rows, self.n_features, self.dtype, self.block_rows
        )

    def __iter__(self) -> Iterator[Tensor]:
        """Blocks in file order, (rows, D) in `dtype`, each a view of the reused buffer.

        Raises:
            ValueError: the file is no longer the one that was opened.
        """
        return iter(self._rows)


def pick(path: Path, tensor: str | None, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The name that is meant: the one given, else that of the only table, else that of the only tensor.

    Args:
        path: the file, for the error.
        tensor: what the caller asked for.
        shapes: the shape of each tensor there is.

    Raises:
        ValueError: there is no such tensor, or None could mean several.
    """
    names = quote(", ".join(sorted(map(str, shapes))), MOST_NAMES)
    if not shapes:
        raise ValueError(f"{path}: holds no tensor.")
    if tensor is not None:
        if tensor not in shapes:
            raise ValueError(f"{path}: no tensor {quote(tensor)!r}; there is {names}.")
        return tensor
    candidates = [name for name, shape in shapes.items() if len(shape) >= 2] or list(shapes)
    if len(candidates) > 1:
        raise ValueError(f"{path}: holds several tensors; say which with `tensor`, one of {names}.")
    return candidates[0]


def find_in_index(path: Path, tensor: str | None) -> tuple[Path, str]:
    """The file that holds a tensor, and its name, by an index such as `model.safetensors.index.json`.

    Args:
        path: the index, `{"weight_map": {tensor: file}}`.
        tensor: the name; None is the only one.

    Raises:
        ValueError: it is no such index, or it has no such tensor.
    """
    regular(path, ".index.json")
    if path.stat().st_size > MOST_INDEX:
        raise ValueError(f"{path}: larger than any index of safetensors files.")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON ({quote(error)}).") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{path}: is no index of safetensors files, whose `weight_map` names them.")
    name = pick(path, tensor, dict.fromkeys(files, (1, 1)))
    if Path(files[name]).name != files[name] or not files[name].endswith(".safetensors"):
        raise ValueError(f"{path}: {quote(files[name])!r} is not the name of a file beside the index.")
    return path.parent / files[name], name


def _header(path: Path, file: Any) -> tuple[int, dict[str, Any]]:
    """Bytes of the header, and what it says of each tensor.

    Raises:
        ValueError: the file is none of safetensors, truncated, or its header is damaged.
    """
    start = file.read(8)
    if start[:4] == b"PK\x03\x04":
        raise ValueError(f"{path}: a zip archive (.npz, .pt), not `.safetensors`; rename it to what it is.")
    try:
        with safe_open(path, "pt"):  # refuses offsets that overlap, leave holes or pass the end
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({quote(error)}).") from error
    length = int.from_bytes(start, "little")
    entries = json.loads(file.read(length))
    entries.pop("__metadata__", None)
    return length, entries
