"""Arrays on disk, read by blocks into one buffer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import check_number

__all__ = ["NpySource", "open_sources"]

BLOCK_BYTES = 16 << 20
LONGEST_HEADER = 1 << 16
READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # differs in the encoding of field names, which we refuse
}


class NpySource:
    """A `.npy` file of samples (..., D): the leading axes are flattened to rows.

    Iterating yields tensors (rows, D) that are views of one reused buffer: copy what is to be kept.
    Nothing is unpickled, and nothing is allocated before the header agrees with the size of the file.

    Args:
        path: the file.
        block_rows: rows per block; None makes blocks of about 16 MiB.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not an array of real numbers with two or more dimensions, or it is damaged.
    """

    def __init__(self, path: str | Path, block_rows: int | None = None) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"there is no file {self.path}; give .npy arrays.")
        if self.path.is_dir():
            raise ValueError(f"{self.path} is a folder; give its .npy files.")
        self.shape, self._stored, self._offset = self._read_header()
        self.n_features = self.shape[-1]
        self.n_rows = math.prod(self.shape[:-1])
        self._native = self._stored.newbyteorder("=")
        self.dtype: torch.dtype = torch.from_numpy(np.empty(0, self._native)).dtype
        row_bytes = self.n_features * self._stored.itemsize
        self.block_rows = min(self.n_rows, block_rows or max(1, BLOCK_BYTES // row_bytes))
        check_number(block_rows, "block_rows", "an integer ≥ 1", block_rows is None or block_rows >= 1)

    def __iter__(self) -> Iterator[Tensor]:
        buffer = np.empty((self.block_rows, self.n_features), self._stored)
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for start in range(0, self.n_rows, self.block_rows):
                block = buffer[: min(self.block_rows, self.n_rows - start)]
                raw: Any = block.reshape(-1).view(np.uint8)
                if file.readinto(raw) != block.nbytes:
                    raise ValueError(f"{self.path} shrank while it was read; write it again.")
                yield torch.from_numpy(block if self._stored == self._native else block.astype(self._native))

    def _read_header(self) -> tuple[tuple[int, ...], np.dtype[Any], int]:
        """Shape, dtype and where the data start, checked against the size of the file.

        Raises:
            ValueError: anything is wrong.
        """
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            try:
                shape, fortran, dtype = _parse(file, size)
            except Exception as error:  # numpy evaluates the header text and lets any parser error through
                raise ValueError(f"{self.path} is not a .npy array; write it with `numpy.save`.") from error
            offset = file.tell()
        self._check_dtype(dtype)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(
                f"{self.path} must hold samples (..., D), two or more dimensions, none empty, got {shape}."
            )
        if size - offset != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{self.path} is damaged: {shape} of {dtype} takes {math.prod(shape) * dtype.itemsize} "
                f"bytes, the file has {size - offset}; write it again."
            )
        if fortran and sum(n > 1 for n in shape) > 1:
            raise ValueError(f"{self.path} is in Fortran order; save `numpy.ascontiguousarray` of it.")
        return shape, dtype, offset

    def _check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Refuse what is no real number, or none that torch has.

        Raises:
            ValueError: it is not.
        """
        if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
            raise ValueError(f"{self.path} holds raw 2-byte values, perhaps bfloat16; save it as float32.")
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise ValueError(
                f"{self.path} must hold real numbers of up to 64 bits, got {dtype}; convert it first."
            )


def open_sources(paths: Sequence[str | Path]) -> list[NpySource]:
    """Sources of one data set in natural order: `shard_2` before `shard_10`.

    Args:
        paths: `.npy` files.

    Raises:
        ValueError: there are none, or they differ in D.
    """
    if not paths:
        raise ValueError("`paths` must name at least one .npy file, got none.")
    sources = [NpySource(path) for path in sorted(map(Path, paths), key=_natural)]
    first = sources[0]
    for other in sources:
        if other.n_features != first.n_features:
            raise ValueError(
                f"{other.path} has {other.n_features} features, {first.path} has {first.n_features}; "
                "give files of one data set."
            )
    return sources


def _natural(path: Path) -> list[tuple[int, int | str]]:
    return [
        (0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"([0-9]+)", str(path)) if part
    ]


def _parse(file: BinaryIO, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The three fields of a header whose length was compared with the file first.

    Raises:
        ValueError: the version, the length or a field is none that the format allows.
    """
    version = np.lib.format.read_magic(file)
    width = 2 if version == (1, 0) else 4
    start = file.tell()
    length = int.from_bytes(file.read(width), "little")
    if length > min(size, LONGEST_HEADER):
        raise ValueError("the header is longer than the file")
    file.seek(start)
    shape, fortran, dtype = READERS[version](file, max_header_size=LONGEST_HEADER)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("the shape is not made of integers")
    return shape, fortran, dtype
