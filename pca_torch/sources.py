"""Arrays on disk, read by blocks: nothing in a header is believed before the file's size confirms it."""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import check_number

__all__ = ["NpySource", "open_sources"]

LARGEST_SIZE = 2**63  # longer numbers would only be trouble to print
BLOCK_BYTES = 16 * 2**20  # one read: large enough for full disk speed, small beside any D × D statistic
HEADER_BYTES = 2**14  # numpy refuses headers above 10,000 bytes; a longer claim is never allocated


class NpySource:
    """The rows of one `.npy` file, as blocks of (rows, D) tensors.

    Every block is a view of one buffer that the next block overwrites: copy what must outlive the
    turn of the loop. Each `for` opens the file anew, so a source can be read any number of times.

    Args:
        path: a `.npy` file in C order with at least two dimensions, real numbers or booleans, either
            byte order. The last axis is D; the leading ones are flattened to rows.
        block_rows: rows per block; None fills about 16 MiB.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not such an array, its size is not what its header says, or
            `block_rows` is below 1.
    """

    def __init__(self, path: str | os.PathLike[str], block_rows: int | None = None) -> None:
        self.path = Path(path)
        if block_rows is not None:
            check_number(
                block_rows,
                "block_rows",
                "an integer of at least 1",
                type(block_rows) is int and block_rows >= 1,
            )
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path}: no such file.")
        if not self.path.is_file():  # before opening: a pipe would wait for a writer
            raise ValueError(f"{self.path}: not a file; give the `.npy` files themselves.")
        with self.path.open("rb") as file:
            self._stat = _fingerprint(file.fileno())
            head = io.BytesIO(file.read(HEADER_BYTES))
        self.shape, fortran, self._stored = _header(self.path, head)
        self._start = head.tell()
        self._check_layout(fortran)
        self.n_features = self.shape[-1]
        self.n_rows = math.prod(self.shape[:-1])
        self._native = self._stored.newbyteorder("=")
        self.dtype: torch.dtype = torch.from_numpy(np.empty(0, self._native)).dtype
        self._row_bytes = self.n_features * self._stored.itemsize
        # the file was seen to hold n_rows rows, so no block is larger than the file
        self.block_rows = min(block_rows or max(1, BLOCK_BYTES // self._row_bytes), self.n_rows)

    def __iter__(self) -> Iterator[Tensor]:
        """Blocks in file order.

        Yields:
            (rows, D) tensor in `dtype`, a view of the reused buffer.

        Raises:
            ValueError: the file is no longer the one that was opened.
        """
        if not self.n_rows:
            return
        buffer = np.empty(self.block_rows * self._row_bytes, np.uint8)
        with self.path.open("rb") as file:
            file.seek(self._start)
            for first in range(0, self.n_rows, self.block_rows):
                block = buffer[: (self.n_rows - first) * self._row_bytes]
                got = file.readinto(block.data)
                if got != block.nbytes or _fingerprint(file.fileno()) != self._stat:
                    raise ValueError(f"{self.path}: the file changed after it was opened; open it again.")
                yield torch.from_numpy(self._to_native(block).reshape(-1, self.n_features))

    def _to_native(self, block: np.ndarray) -> np.ndarray:
        """The bytes as numbers, in place."""
        if self._stored.kind == "b":  # a byte other than 0 and 1 is no boolean, and acts as either
            return np.not_equal(block, 0, out=block.view(np.bool_))
        numbers = block.view(self._native)
        return numbers if self._stored.isnative else numbers.byteswap(inplace=True)

    def _check_layout(self, fortran: bool) -> None:
        """Refuse what cannot be read as rows of D real numbers.

        Raises:
            ValueError: the dtype, the shape, the order or the size of the file.
        """
        where, shape, dtype = self.path, self.shape, self._stored
        if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None:
            raise ValueError(
                f"{where}: two-byte void, as numpy stores bfloat16; save `x.float().numpy()` instead."
            )
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise ValueError(
                f"{where}: must hold real numbers of at most 64 bits, got {_short(dtype)}; convert it."
            )
        if not all(type(size) is int and 0 <= size < LARGEST_SIZE for size in shape):
            raise ValueError(f"{where}: the sizes in its header are not numbers of rows and columns.")
        if len(shape) < 2:
            raise ValueError(
                f"{where}: must have shape (..., D) with at least two dimensions, got {_short(shape)}."
            )
        if shape[-1] == 0:
            raise ValueError(f"{where}: must have at least one column, got {_short(shape)}.")
        stored = self._stat[0] - self._start
        if stored != math.prod(shape) * dtype.itemsize:  # Python integers: no header overflows them
            raise ValueError(
                f"{where}: {stored} bytes of data are not {_short(shape)} of {dtype}; "
                "the file is truncated or damaged."
            )
        if fortran and sum(size > 1 for size in shape) > 1:  # with one long axis both orders are the same
            raise ValueError(
                f"{where}: stored in Fortran order, whose rows are scattered; save `np.ascontiguousarray(x)`."
            )


def open_sources(paths: Iterable[str | os.PathLike[str]]) -> list[NpySource]:
    """The shards of one data set in natural order: `shard_2` stands before `shard_10`.

    Args:
        paths: `.npy` files, in any order.

    Raises:
        ValueError: no path, a file given twice, or files with different D.
    """
    ordered = sorted(map(Path, paths), key=_natural)
    if not ordered:
        raise ValueError("`paths` is empty; give at least one `.npy` file.")
    if len({path.resolve() for path in ordered}) < len(ordered):
        raise ValueError("`paths` names a file twice; its rows would count twice.")
    sources = [NpySource(path) for path in ordered]
    first = sources[0]
    for source in sources:
        if source.n_features != first.n_features:
            raise ValueError(
                f"{source.path}: {source.n_features} columns, but {first.path} has {first.n_features}; "
                "all files must have the same D."
            )
    return sources


def _header(path: Path, head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran flag and stored dtype; leaves `head` where the data begin.

    Raises:
        ValueError: not the header of a `.npy` file.
    """
    start = head.getvalue()[:4]
    if not start:
        raise ValueError(f"{path}: the file is empty.")
    if start == b"PK\x03\x04":
        raise ValueError(f"{path}: a zip archive (.npz, .pt), not `.npy`; save each array with `numpy.save`.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged header is parsed as source and warns like it
            version = np.lib.format.read_magic(head)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(head)
            if version in {(2, 0), (3, 0)}:  # 3.0 is 2.0 in UTF-8: other field names, refused anyway
                return np.lib.format.read_array_header_2_0(head)
    except Exception as error:  # any bytes reach the parser, and it fails in any way
        raise ValueError(f"{path}: the `.npy` header is damaged ({_short(error)}).") from error
    raise ValueError(f"{path}: `.npy` version {version}; 1.0, 2.0 and 3.0 can be read.")


def _fingerprint(descriptor: int) -> tuple[int, int, int]:
    """Size, time of change and identity of an open file."""
    stat = os.fstat(descriptor)
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def _natural(path: Path) -> tuple[list[str | int], str]:
    """Sort key: runs of digits count as numbers; spellings of one number fall back to the text."""
    name = path.as_posix()
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)], name


def _short(value: object) -> str:
    """`value` for a one-line message: what a damaged header claims can be of any length."""
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else text[:77] + "..."
