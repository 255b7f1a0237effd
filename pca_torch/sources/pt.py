"""Tensors of a `.pt` file by blocks; no code in the file is ever run."""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from pca_torch._dtypes import READABLE
from pca_torch.sources.blocks import changed, check_shape, fingerprint, quote, regular, rows_per
from pca_torch.sources.safetensors import pick

__all__ = ["TorchSource"]

MAGIC = b"PK\x03\x04"
DESCRIPTOR_BYTES = 24  # that may stand behind a record: its sum and its sizes


class TorchSource:
    """The rows of a tensor that `torch.save` wrote, as blocks of (rows, D) tensors.

    The file is mapped into memory, not loaded, and only tensors and plain containers are accepted
    (`weights_only`). Every block is a view of one buffer that the next block overwrites: copy what must
    outlive the turn of the loop. Each `for` opens the file anew.

    Args:
        path: a `.pt` or `.pth` file of a tensor (..., D), of a list of them, whose rows follow each other,
            or of a dict that holds such. Views and transposed tensors are read as they are.
        tensor: key of the dict, a number as its digits; None is the only table. A file without a dict has
            no names and takes any.
        block_rows: rows per block; None fills about 16 MiB.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, compressed, of the format before torch 1.6, or holds code; it has no
            such tensor, several that None could mean, or one that is no table of real numbers; or
            `block_rows` is below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensor: str | None = None, block_rows: int | None = None
    ) -> None:
        self.path = regular(path, ".pt")
        self._stat = fingerprint(self.path)
        sizes = _record_sizes(self.path)
        self.tensor, parts = _select(self.path, tensor, _load(self.path))
        where = str(self.path) if self.tensor is None else f"{self.path}: tensor {quote(self.tensor)!r}"
        for part in parts:
            _check_part(where, part, parts[0], sizes)
        self.n_features = parts[0].shape[-1]
        self.n_rows = sum(math.prod(part.shape[:-1]) for part in parts)
        self.dtype: torch.dtype = parts[0].dtype
        self.block_rows = rows_per(block_rows, self.n_features * self.dtype.itemsize, self.n_rows)

    def __iter__(self) -> Iterator[Tensor]:
        """Blocks in the order of the tensors; none holds rows of two.

        Yields:
            (rows, D) tensor in `dtype`, a view of the reused buffer.

        Raises:
            ValueError: the file is no longer the one that was opened.
        """
        if not self.n_rows:
            return
        buffer = torch.empty(self.block_rows, self.n_features, dtype=self.dtype, device="cpu")
        with self.path.open("rb") as file:  # held open: a new file of this name is not this one
            if fingerprint(file.fileno()) != self._stat:
                raise ValueError(changed(self.path))
            parts = _select(self.path, self.tensor, _load(self.path))[1]
            for rows in itertools.chain.from_iterable(map(_tables, parts)):
                for piece in rows.split(self.block_rows):
                    if fingerprint(file.fileno()) != self._stat:  # before the pages of a cut file are touched
                        raise ValueError(changed(self.path))
                    block = buffer[: len(piece)]
                    if self.dtype == torch.bool:  # a byte other than 0 and 1 acts as either
                        torch.ne(piece.view(torch.uint8), 0, out=block)
                    else:
                        block.copy_(piece)
                    yield block


def _load(path: Path) -> Any:
    """What the file holds, mapped.

    Raises:
        ValueError: it cannot be read, or holds more than tensors and plain containers.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript and odd pickles warn before they are refused
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # any bytes reach the parser, and it fails in any way
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path}: holds {quote(code[1])}, and no code in a file is ever run; save the tensors alone."
            ) from error
        raise ValueError(
            f"{path}: cannot be read as plain tensors ({quote(error)}); save the tensors alone."
        ) from error


def _record_sizes(path: Path) -> set[int]:
    """The sizes of the storages, in bytes, by the archive's own directory, which is seen to tell the truth.

    Raises:
        ValueError: it is no archive of `torch.save`, or a damaged or compressed one: mapped into memory,
            compressed bytes would be taken for numbers.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(
                f"{path}: not an archive of `torch.save`, or one of torch before 1.6; "
                "load it where it is trusted and save it again."
            )
        try:
            with zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                plain = all(record.compress_type == zipfile.ZIP_STORED for record in records)
                if plain:
                    _check_records(file, archive)
        except Exception as error:  # likewise
            raise ValueError(f"{path}: not a whole archive of `torch.save` ({quote(error)}).") from error
    if not plain:
        raise ValueError(f"{path}: a compressed archive; save it with `torch.save`, which does not compress.")
    return {record.file_size for record in records}


def _check_records(file: BinaryIO, archive: zipfile.ZipFile) -> None:
    """Refuse an archive whose records do not fill it one after another, as far as torch trusts it blindly.

    Raises:
        ValueError: a record is not where it should be, its sum is wrong, or bytes are in the other order.
    """
    records = sorted(archive.infolist(), key=lambda record: record.header_offset)
    ends = [record.header_offset for record in records[1:]] + [archive.start_dir]
    for record, end in zip(records, ends, strict=True):
        file.seek(record.header_offset)
        magic, name, padding = struct.unpack("<4s22xHH", file.read(30))
        start = record.header_offset + 30 + name + padding
        if magic != MAGIC or not 0 <= end - start - record.file_size <= DESCRIPTOR_BYTES:
            raise ValueError(f"{record.filename} is damaged")
        if record.filename.endswith(("/data.pkl", "/byteorder")):
            content = archive.read(record)  # checks its sum, as torch does not
            if record.filename.endswith("/byteorder") and content != b"little":
                raise ValueError("its bytes are in big-endian order")


def _select(path: Path, tensor: str | None, content: Any) -> tuple[str | None, list[Tensor]]:
    """The key that is meant, None without a dict, and its tensors.

    Raises:
        ValueError: no tensor, no such key, or several that None could mean.
    """
    if parts := _as_parts(content):
        return None, parts
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{path}: holds {_kind(content)}; save a tensor (..., D), a list of such, or a dict of either."
        )
    found = {str(name): parts for name, value in content.items() if (parts := _as_parts(value))}
    name = pick(path, tensor, {name: tuple(parts[0].shape) for name, parts in found.items()})
    return name, found[name]


def _as_parts(content: Any) -> list[Tensor]:
    """One tensor, or a list of tensors, as a list; empty for anything else."""
    if isinstance(content, Tensor):
        return [content.detach()]
    if isinstance(content, (list, tuple)) and all(isinstance(part, Tensor) for part in content):
        return [part.detach() for part in content]
    return []


def _kind(content: Any) -> str:
    """What stands in a file in place of tensors, in a few words."""
    if isinstance(content, (list, tuple)):
        odd = next((type(part).__name__ for part in content if not isinstance(part, Tensor)), None)
        return f"an empty {type(content).__name__}" if odd is None else f"a {type(content).__name__} of {odd}"
    return f"an object of type {type(content).__name__}"


def _check_part(where: str, part: Tensor, first: Tensor, sizes: set[int]) -> None:
    """Refuse what cannot be read as rows like those of `first`.

    Raises:
        ValueError: the layout, the dtype, the shape, or a storage that the archive does not have.
    """
    if part.layout != torch.strided or part.dtype not in READABLE.values():
        kind = part.dtype if part.layout == torch.strided else part.layout
        raise ValueError(f"{where}: must hold dense real numbers of 8 to 64 bits, got {kind}; convert it.")
    check_shape(where, part.shape)
    if (part.dtype, part.shape[-1]) != (first.dtype, first.shape[-1]):
        raise ValueError(
            f"{where}: holds tensors of {first.shape[-1]} columns of {first.dtype} and of {part.shape[-1]} "
            f"of {part.dtype}; all must have the same D and dtype."
        )
    if part.untyped_storage().nbytes() not in sizes:
        raise ValueError(f"{where}: larger or smaller than its record; the file is damaged.")


def _tables(x: Tensor) -> Iterator[Tensor]:
    """`x` (..., D) as views (rows, D), one if its leading axes lie evenly, else one per leading index.

    Yields:
        (rows, D), not copied.
    """
    try:
        yield x.view(-1, x.shape[-1])
    except RuntimeError:  # its strides would need a copy
        for part in x:
            yield from [part] if part.ndim == 2 else _tables(part)
