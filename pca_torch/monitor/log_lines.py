"""Lines of a log: what they hold, and what is believed of them."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

from pca_torch._safetensors import decode, naming
from pca_torch._state import LARGEST_COUNT
from pca_torch.monitor.record import VIEWS, Alert, SpectrumRecord

__all__ = ["Resumption", "entry_line", "header_line", "read_entries", "read_header", "resumption_line"]

FORMAT = "pca_torch.monitor"
VERSION = 1
BEGINNING = f'{{"format": "{FORMAT}"'.encode()
RESERVED = {"format", "version", "kind"}
MOST_BYTES = 50_000_000  # of a line


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """A run went on with other settings."""

    step: int  # optimizer steps done
    changed: Mapping[str, Any]  # settings that differ, with their new values; None where one is gone


Entry = SpectrumRecord | Alert | Resumption
Fits = Callable[[Any], bool]
Schema = Mapping[str, tuple[str, Fits]]  # by field, what it must be
T = TypeVar("T", SpectrumRecord, Alert, Resumption)


def entry_line(entry: SpectrumRecord | Alert) -> bytes:
    """What was logged as a line.

    Args:
        entry: of one step.

    Raises:
        ValueError: it holds NaN or inf, or what JSON has not.
    """
    kind = "spectrum" if isinstance(entry, SpectrumRecord) else "alarm"
    what = f"what is logged of {entry.site} at step {entry.step}"
    return _line({"kind": kind, **entry.to_dict()}, what)


def resumption_line(step: int, changed: Mapping[str, Any]) -> bytes:
    """That a run went on with other settings, as a line.

    Args:
        step: optimizer steps done.
        changed: settings that differ, with their new values.
    """
    return _line({"kind": "resumed", "step": step, "changed": changed}, "`run`")


def header_line(run: Mapping[str, Any]) -> bytes:
    """The first line of a log.

    Args:
        run: settings of the run.

    Raises:
        ValueError: a setting has a name that the header needs, or a value that JSON has not.
    """
    if clash := RESERVED & run.keys():
        raise ValueError(f"`run` has {sorted(clash)}, which the header uses itself; rename them.")
    return _line({"format": FORMAT, "version": VERSION, "kind": "run", **run}, "`run`")


def _line(found: Mapping[str, Any], what: str) -> bytes:
    """One object as a line.

    Raises:
        ValueError: it holds what JSON has not.
    """
    try:
        return json.dumps(found, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} must hold finite numbers and JSON types alone: {error}.") from error


def read_header(file: BinaryIO, path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Settings in the first line of an open log; None where that line is not whole yet.

    Args:
        file: at its beginning.
        path: how errors call it.

    Raises:
        ValueError: it is another kind of file.
    """
    line = file.readline(MOST_BYTES)
    if not line.endswith(b"\n"):
        if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
            raise ValueError(f"{path}: is no log of a monitor; give another path.")
        return None
    try:
        found = _object(line)
    except ValueError:
        found = {}
    if found.pop("format", None) != FORMAT or found.pop("kind", None) != "run":
        raise ValueError(f"{path}: is no log of a monitor; give another path.")
    version = found.pop("version", None)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path}: has format version {version!r:.40}, only {VERSION} can be read; a newer pca_torch may."
        )
    return found


def _object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line.

    Raises:
        ValueError: it holds something else, or text that cannot be written down.
    """
    try:
        found = decode(line.decode())
        if b"\\u" in line:  # half of a pair of surrogates is no character, and no terminal takes it
            json.dumps(found, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON at column {error.colno}: {error.msg}.") from None
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ValueError(f"is not text in UTF-8: {error.reason}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"must be a JSON object, got {found!r:.80}.")
    return found


def read_entries(file: BinaryIO, path: str | os.PathLike[str]) -> Iterator[tuple[int, Entry]]:
    """Where each whole line behind the header ends, in bytes, and what it holds.

    Args:
        file: just behind its header.
        path: how errors call it.

    Yields:
        Them, in the order of their steps.

    Raises:
        ValueError: a line is damaged.
    """
    done = 0
    for number in itertools.count(2):
        line = file.readline(MOST_BYTES)
        if len(line) == MOST_BYTES:
            raise ValueError(f"{path}: line {number} is longer than {MOST_BYTES} bytes.")
        if not line.endswith(b"\n"):
            return
        with naming(f"{path}: line {number}"):
            entry = _entry(_object(line))
            if entry.step < done:
                raise ValueError(f"`step` is {entry.step}, after step {done} in the line before.")
        done = entry.step
        yield file.tell(), entry


def _entry(found: dict[str, Any]) -> Entry:
    """What one line behind the header says.

    Raises:
        ValueError: a kind that is not known, or a field that is missing or not what it must be.
    """
    match found.pop("kind", None):
        case "spectrum":
            return _read(SpectrumRecord, found, RECORD)
        case "alarm":
            return _read(Alert, found, ALERT)
        case "resumed":
            return _read(Resumption, found, RESUMPTION)
        case kind:
            raise ValueError(f"`kind` must be 'spectrum', 'alarm' or 'resumed', got {kind!r:.80}.")


def _read(kind: type[T], found: dict[str, Any], schema: Schema) -> T:
    """The fields of one line, checked.

    Raises:
        ValueError: one is missing, unknown or not what it must be.
    """
    for name, (allowed, fits) in schema.items():
        if name not in found:
            raise ValueError(f"lacks `{name}`.")
        if not fits(found[name]):
            raise ValueError(f"`{name}` must be {allowed}, got {found[name]!r:.80}.")
    if unknown := found.keys() - schema.keys():
        raise ValueError(f"has {min(unknown)!r:.80}, which is no field of this kind of line.")
    if kind is SpectrumRecord and len(found["index"]) != len(found["variance"]):
        counts = f"{len(found['index'])} and {len(found['variance'])}"
        raise ValueError(f"`index` and `variance` must be equally long, got {counts} entries.")
    return kind(**found)


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (
        type(value) is int and abs(value) <= LARGEST_COUNT
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def _is_index(value: Any) -> bool:
    """Whether these are places in a spectrum, counted from 1."""
    if type(value) is not list or not all(map(_is_count, value)):
        return False
    return all(a < b for a, b in itertools.pairwise([0, *value]))


def _is_text(value: Any) -> bool:
    return type(value) is str


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _is_list(fits: Fits) -> Fits:
    return lambda value: type(value) is list and all(map(fits, value))


def _is_object(fits: Fits) -> Fits:
    return lambda value: type(value) is dict and all(map(fits, value.values()))


COUNT = "a count", _is_count
NUMBER = "a finite number", _is_number
TEXT = "text", _is_text
PLACE: Schema = {
    "step": COUNT,
    "site": TEXT,
    "view": (" or ".join(map(repr, VIEWS)), lambda value: type(value) is str and value in VIEWS),
    "head": ("a count or null", _or_null(_is_count)),
}
RECORD: Schema = {
    **PLACE,
    "n_samples": COUNT,
    "n_effective": NUMBER,
    "n_features": COUNT,
    "metrics": ("an object of finite numbers and nulls", _is_object(_or_null(_is_number))),
    "index": ("an ascending list of counts from 1", _is_index),
    "variance": ("a list of finite numbers", _is_list(_is_number)),
    "rounding_floor": NUMBER,
    "trusted": COUNT,
    "extreme": COUNT,
    "extreme_share": NUMBER,
    "heavy_tailed": ("true or false", lambda value: type(value) is bool),
    "nonfinite": COUNT,
    "tokens": ("an object of counts", _is_object(_is_count)),
}
ALERT: Schema = {
    **PLACE,
    "rule": TEXT,
    "metric": TEXT,
    "value": NUMBER,
    "before": ("a finite number or null", _or_null(_is_number)),
    "before_step": ("a count or null", _or_null(_is_count)),
}
RESUMPTION: Schema = {"step": COUNT, "changed": ("an object", _is_object(lambda value: True))}
