"""A `.npy` file by blocks: nothing in its header is believed before the file's size confirms it."""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pca_torch.sources.blocks import StoredRows, check_shape, fingerprint, quote, regular, rows_per

__all__ = ["NpySource"]

LARGEST_SIZE = 2**63  # longer numbers would only be trouble to print
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
        self.path = regular(path, ".npy")
        with self.path.open("rb") as file:
            stat = fingerprint(file.fileno())
            head = io.BytesIO(file.read(HEADER_BYTES))
        self.shape, fortran, stored = _header(self.path, head)
        start = head.tell()
        _check_layout(self.path, self.shape, fortran, stored, stat[0] - start)
        self.n_features = self.shape[-1]
        self.n_rows = math.prod(self.shape[:-1])
        self.dtype: torch.dtype = torch.from_numpy(np.empty(0, stored.newbyteorder("="))).dtype
        self.block_rows = rows_per(block_rows, self.n_features * stored.itemsize, self.n_rows)
        self._rows = StoredRows(
            self.path,
            stat,
            start,
            self.n_rows,
            self.n_features,
            self.dtype,
            self.block_rows,
            not stored.isnative,
        )

    def __iter__(self) -> Iterator[Tensor]:
        """Blocks in file order, (rows, D) in `dtype`, each a view of the reused buffer.

        Raises:
            ValueError: the file is no longer the one that was opened.
        """
        return iter(self._rows)


def _check_layout(path: Path, shape: tuple[int, ...], fortran: bool, dtype: np.dtype, size: int) -> None:
    """Refuse what cannot be read as rows of D real numbers from `size` bytes of data.

    Raises:
        ValueError: the dtype, the shape, the order or the size of the file.
    """
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None:
        raise ValueError(
            f"{path}: two-byte void, as numpy stores bfloat16; save `x.float().numpy()` instead."
        )
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise ValueError(
            f"{path}: must hold real numbers of at most 64 bits, got {quote(dtype)}; convert it."
        )
    if not all(type(length) is int and 0 <= length < LARGEST_SIZE for length in shape):
        raise ValueError(f"{path}: the sizes in its header are not numbers of rows and columns.")
    check_shape(path, shape)
    if size != math.prod(shape) * dtype.itemsize:  # Python integers: no header overflows them
        raise ValueError(
            f"{path}: {size} bytes of data are not {quote(shape)} of {dtype}; "
            "the file is truncated or damaged."
        )
    if fortran and sum(length > 1 for length in shape) > 1:  # with one long axis both orders are the same
        raise ValueError(
            f"{path}: stored in Fortran order, whose rows are scattered; save `np.ascontiguousarray(x)`."
        )


def _header(path: Path, head: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran flag and stored dtype; leaves `head` where the data begin.

    Raises:
        ValueError: not the header of a `.npy` file.
    """
    if head.getvalue()[:4] == b"PK\x03\x04":
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
        raise ValueError(f"{path}: the `.npy` header is damaged ({quote(error)}).") from error
    raise ValueError(f"{path}: `.npy` version {version}; 1.0, 2.0 and 3.0 can be read.")
