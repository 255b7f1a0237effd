"""Rows that lie one after another in a file, read by blocks; and checks that all kinds of files share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import check_number

__all__ = [
    "Fingerprint",
    "Source",
    "StoredRows",
    "check_shape",
    "fingerprint",
    "quote",
    "regular",
    "rows_per",
]

Fingerprint = tuple[int, int, int]

BLOCK_BYTES = 16 * 2**20  # one read: large enough for full disk speed, small beside any D × D statistic
MOST_QUOTED = 80


@runtime_checkable
class Source(Protocol):
    """Rows of one data set on disk, which can be read any number of times.

    Iterating gives blocks of (rows, D) tensors in `dtype`. A block is a view of a buffer that the next one
    overwrites: copy what must outlive the turn of the loop.
    """

    path: Path  # errors name it
    n_rows: int  # N
    n_features: int  # D
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Tensor]: ...


@dataclass(frozen=True)
class StoredRows:
    """(rows, D) in C order from byte `start` of a file on, which was seen to hold them all."""

    path: Path
    stat: Fingerprint
    start: int
    n_rows: int
    n_features: int
    dtype: torch.dtype
    block_rows: int
    swapped: bool = False  # stored in the byte order that is not this machine's

    def __iter__(self) -> Iterator[Tensor]:
        """Blocks in the order of the file.

        Yields:
            (rows, D) tensor in `dtype`, a view of the reused buffer.

        Raises:
            ValueError: the file is no longer the one that was opened.
        """
        if not self.n_rows:
            return
        row_bytes = self.n_features * self.dtype.itemsize
        buffer = np.empty(self.block_rows * row_bytes, np.uint8)
        with self.path.open("rb") as file:
            file.seek(self.start)
            for first in range(0, self.n_rows, self.block_rows):
                block = buffer[: (self.n_rows - first) * row_bytes]
                got = file.readinto(block.data)
                if got != block.nbytes or fingerprint(file.fileno()) != self.stat:
                    raise ValueError(changed(self.path))
                yield self._as_numbers(block).view(-1, self.n_features)

    def _as_numbers(self, block: np.ndarray) -> Tensor:
        """The bytes in place as numbers (rows · D)."""
        if self.dtype == torch.bool:  # a byte other than 0 and 1 is no boolean, and acts as either
            np.not_equal(block, 0, out=block.view(np.bool_))
        elif self.swapped:
            block.view(f"u{self.dtype.itemsize}").byteswap(inplace=True)
        return torch.from_numpy(block).view(self.dtype)


def regular(path: str | os.PathLike[str], kind: str) -> Path:
    """`path`, if it is a file: opening a pipe would wait for a writer.

    Args:
        path: where it should be.
        kind: suffix of such files, for the error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, a pipe or a device, or it is empty.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file.")
    if not path.is_file():
        raise ValueError(f"{path}: not a file; give the `{kind}` files themselves.")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty.")
    return path


def fingerprint(file: int | Path) -> Fingerprint:
    """Size, time of change and identity of a file.

    Args:
        file: a descriptor, or a path.
    """
    stat = os.stat(file)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def changed(path: Path) -> str:
    """What to say of a file that is no longer the one that was opened.

    Args:
        path: the file.
    """
    return f"{path}: the file changed after it was opened; open it again."


def check_shape(where: str | Path, shape: Sequence[int]) -> None:
    """Refuse a shape that is not (..., D) with D ≥ 1.

    Args:
        where: the file, and the tensor in it, for the error.
        shape: of the tensor.

    Raises:
        ValueError: fewer than two dimensions, or no columns.
    """
    if len(shape) < 2:
        raise ValueError(
            f"{where}: must have shape (..., D) with at least two dimensions, got {quote(tuple(shape))}; "
            "save `x[:, None]` if these are samples of one feature, `x[None]` if one sample."
        )
    if shape[-1] == 0:
        raise ValueError(f"{where}: must have at least one column, got {quote(tuple(shape))}.")


def rows_per(block_rows: int | None, row_bytes: int, n_rows: int) -> int:
    """Rows of a block: as asked, else as many as fill `BLOCK_BYTES`; no more than there are.

    Args:
        block_rows: what the caller asked for.
        row_bytes: of one row.
        n_rows: that the file was seen to hold, so that no block is larger than the file.

    Raises:
        ValueError: `block_rows` is below 1.
    """
    allowed = type(block_rows) is int and block_rows >= 1
    check_number(block_rows, "block_rows", "an integer of at least 1", block_rows is None or allowed)
    return min(block_rows or max(1, BLOCK_BYTES // row_bytes), n_rows)


def quote(value: object, longest: int = MOST_QUOTED) -> str:
    """`value` for a one-line message: what a damaged header claims can be of any length.

    Args:
        value: anything that was read.
        longest: characters that are left at most.
    """
    text = "".join(c if c.isprintable() else "�" for c in " ".join(str(value).split()))
    return text if len(text) <= longest else text[: longest - 3] + "..."
