"""Safetensors files of this package: one JSON text says what the tensors mean, and nothing is believed.

The header of a file holds `format`, `version` and `json`, a text in strict JSON. JSON has no inf and no NaN:
they stand as `{"$float": "inf"}` and come back as floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from torch import Tensor

from pca_torch._dtypes import STORED
from pca_torch._files import replacing

__all__ = [
    "Entry",
    "Format",
    "as_bytes",
    "as_text",
    "decode",
    "describe",
    "encode",
    "format_of",
    "is_safetensors",
    "libraries",
    "naming",
    "places",
    "read_header",
    "read_tensor",
    "write",
    "write_tensors",
]

NONFINITE = "$float"
MOST_NESTED = 64  # far above real metadata, far below the recursion limit of whoever reads it
MOST_DIMS = 3
MOST_TEXT = 50_000_000  # safetensors reads no header above 100 MB, and its escapes can double the text
ALIGNED = 8  # bytes; where the data begin


@dataclass(frozen=True)
class Format:
    """What a kind of file says of itself."""

    name: str  # `format` in the header
    version: str
    noun: str  # in errors


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


@contextmanager
def naming(culprit: str) -> Generator[None, None, None]:
    """Put the name of the culprit before what is wrong with it.

    Args:
        culprit: a file, or a part of one.

    Raises:
        ValueError: whatever was wrong.
    """
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{culprit}: {error}") from error


def libraries() -> dict[str, str | None]:
    """Versions of what made a file; None is a source tree that was never installed."""
    found: dict[str, str | None] = {}
    for name in ("torch", "numpy", "safetensors", "pca-torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """`value` in strict JSON types.

    Args:
        value: what to write.
        where: how errors call it.
        depth: how deep it is nested.

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
        return [encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TypeError(f"`{where}` must be dict, list, str, number, bool or None, got {kind}; convert it.")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"`{where}` must have strings as keys, got {key!r}.")
        if key == NONFINITE:
            raise ValueError(f"`{where}` has the key {NONFINITE!r}, which marks inf and NaN; rename it.")
    return {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}


def decode(text: str) -> Any:
    """Inverse of `encode`, refusing what `json.loads` would pass over.

    Args:
        text: strict JSON.

    Raises:
        ValueError: not JSON, a key twice, or nested beyond what Python can follow.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON.")

    try:
        return json.loads(text, object_pairs_hook=_as_object, parse_constant=refuse)
    except RecursionError:
        raise ValueError("JSON is nested too deeply.") from None


def as_text(body: Mapping[str, Any]) -> str:
    """A JSON text for a header, short enough for any reader.

    Args:
        body: by name, which is how errors call it.

    Raises:
        TypeError: something is of no JSON type.
        ValueError: it is too long.
    """
    text = json.dumps({key: encode(value, key) for key, value in body.items()}, allow_nan=False)
    if len(text) > MOST_TEXT:
        raise ValueError(f"`metadata` must stay below {MOST_TEXT} characters of JSON, got {len(text)}.")
    return text


def describe(kind: Format, body: Mapping[str, Any]) -> dict[str, str]:
    """What the header of a file of ours says, as `read_header` reads it.

    Args:
        kind: of the file.
        body: at least `metadata` and `sites`.
    """
    return {"format": kind.name, "version": kind.version, "json": as_text(body)}


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Whether something is a file that begins like one: eight bytes for a length, then a JSON object.

    Args:
        path: of anything.
    """
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(9)[8:] == b"{"


def format_of(path: str | os.PathLike[str]) -> str | None:
    """What the header of a safetensors file calls its format; None if it has none that can be read.

    Args:
        path: any file.
    """
    with open(path, "rb") as file:
        try:
            header = _whole_header(file)
        except ValueError:
            return None
    about = header.get("__metadata__") if isinstance(header, dict) else None
    return about.get("format") if isinstance(about, dict) else None


def read_header(file: BinaryIO, kind: Format) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an open file says of each tensor, and its JSON body; nothing is allocated that the file lacks.

    Args:
        file: at its beginning.
        kind: what it must be.

    Raises:
        ValueError: anything in the header is wrong.
    """
    size = os.fstat(file.fileno()).st_size
    header = _whole_header(file)
    about = header.pop("__metadata__", None) if isinstance(header, dict) else None
    if not isinstance(about, dict) or about.get("format") != kind.name:
        raise ValueError(f"is not a pca_torch {kind.noun}.")
    if about.get("version") != kind.version:
        got = about.get("version")
        raise ValueError(
            f"has format version {got!r}, only {kind.version!r} can be read; a newer pca_torch may."
        )
    for name, entry in header.items():
        if not _is_entry(entry, size):
            raise ValueError(f"describes tensor {name!r} as {entry!r:.80}, which no {kind.noun} file holds.")
    with naming("`json` in the header"):
        body = decode(about["json"] if isinstance(about.get("json"), str) else "")
    if not (isinstance(body, dict) and all(isinstance(body.get(key), dict) for key in ("metadata", "sites"))):
        raise ValueError("`json` in the header must hold `metadata` and `sites`.")
    return header, body


def places(file: BinaryIO, header: Mapping[str, Any]) -> dict[str, Entry]:
    """Where each tensor lies; together they must fill the file without gap and overlap.

    Args:
        file: just behind its header.
        header: what `read_header` found there.

    Raises:
        ValueError: they do not.
    """
    start, size = file.tell(), os.fstat(file.fileno()).st_size
    entries, end = {}, start
    for name, entry in sorted(header.items(), key=lambda item: _offset(item[1])):
        dtype, shape = STORED[entry["dtype"]], tuple(entry["shape"])
        entries[name] = Entry(dtype, shape, end)
        after = end + math.prod(shape) * dtype.itemsize
        if entry.get("data_offsets") != [end - start, after - start]:
            raise ValueError(f"tensor {name!r} does not lie where the one before it ends.")
        end = after
    if end != size:
        raise ValueError(f"is not a whole safetensors file: {size} bytes, {end} are described.")
    return entries


def read_tensor(file: BinaryIO, entry: Entry) -> Tensor:
    """One tensor of an open file, on the CPU; the others stay on the disk.

    Args:
        file: the file.
        entry: where the tensor lies.

    Raises:
        ValueError: the file ends before it does.
    """
    with torch.inference_mode(False):
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    file.seek(entry.start)
    if file.readinto(as_bytes(tensor)) != tensor.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError("became shorter while it was read.")
    return tensor


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; of a contiguous one on the CPU its own, which can be written to.

    Args:
        tensor: of any dtype, shape and device.
    """
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def write(
    path: str | os.PathLike[str],
    about: Mapping[str, str],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a safetensors file tensor by tensor; the library takes all at once, a second copy of them.

    An old file is replaced only once the new one is complete.

    Args:
        path: the file, in a folder that exists.
        about: what the header says.
        shapes: dtype and shape of each tensor, in any order.
        tensors: them, one after the other, on any device.

    Raises:
        OSError: the disk is full, or the folder may not be written to.
        RuntimeError: the tensors are not those that were announced.
    """
    try:
        with replacing(path) as draft, draft.open("wb") as file:
            _fill(file, about, shapes, tensors)
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        told = f"{os.fspath(path)} could not be written: {error.strerror}"
        raise OSError(error.errno, told) from error  # a full disk has no name


def write_tensors(
    path: str | os.PathLike[str], about: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """`write` for tensors that are all there.

    Args:
        path: the file.
        about: what the header says.
        tensors: by name.
    """
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write(path, about, shapes, tensors.items())


def _fill(
    file: BinaryIO,
    about: Mapping[str, str],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Header and tensors into an empty file.

    Raises:
        RuntimeError: the tensors are not those that were announced.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)}
    starts, end = {}, 0
    names = {dtype: name for name, dtype in STORED.items()}
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: -item[1][0].itemsize):  # all aligned
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNED)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, tensor in tensors:
        if name not in starts or shapes[name] != (tensor.dtype, tuple(tensor.shape)):
            raise RuntimeError(f"`{name}` changed while it was written; save between two updates.")
        file.seek(8 + len(text) + starts.pop(name))
        file.write(as_bytes(tensor))
    if starts:
        raise RuntimeError(f"`{next(iter(starts))}` was not written; save between two updates.")


def _whole_header(file: BinaryIO) -> Any:
    """The JSON at the beginning of an open file.

    Raises:
        ValueError: there is none, or not all of it.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError(
            f"is not a whole safetensors file: {size} bytes do not hold the header it announces."
        )
    with naming("is not a safetensors file"):
        return decode(file.read(length).decode())


def _as_object(pairs: list[tuple[str, Any]]) -> Any:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object has the same key twice.")
    if NONFINITE not in found:
        return found
    if len(found) > 1 or found[NONFINITE] not in ("inf", "-inf", "nan"):
        raise ValueError(f"{NONFINITE!r} must mark inf, -inf or nan, got {found!r:.80}.")
    return float(found[NONFINITE])


def _is_entry(entry: Any, size: int) -> bool:
    """Whether a tensor has a dtype and a shape we write, with no dimension larger than the file."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return (
        isinstance(shape, list)
        and len(shape) <= MOST_DIMS
        and all(type(n) is int and 0 <= n <= size for n in shape)
        and isinstance(entry.get("dtype"), str)
        and entry["dtype"] in STORED
    )


def _offset(entry: Any) -> tuple[int, int]:
    """Where a tensor claims to lie, to sort by; what is no place at all comes first and is refused there."""
    offsets = entry.get("data_offsets")
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets):
        return offsets[0], offsets[1]
    return -1, -1
