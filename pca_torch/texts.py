"""From text, or token ids on disk, to batches of equal length for a language model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import check_number

__all__ = [
    "Piece",
    "Tokens",
    "batches",
    "check_ids",
    "default_text",
    "read_texts",
    "read_tokens",
    "token_windows",
]

READ_CHARACTERS = 2**20  # of a plain file at a time, so its size does not matter
TOKENISE_CHARACTERS = 2**16  # at a time: the most that is tokenised and then not needed


class Piece(NamedTuple):
    """Part of a document too long to hold in memory at once."""

    text: str
    ends_document: bool


@dataclass(frozen=True, eq=False)
class Tokens:
    """Sequences of token ids, all of one length."""

    ids: Tensor  # (N, T) int64, negative where there is padding
    dropped_tail: int = 0  # tokens at the end that did not fill a sequence

    @property
    def n_sequences(self) -> int:
        """N."""
        return self.ids.shape[0]

    @property
    def seq_len(self) -> int:
        """T."""
        return self.ids.shape[1]

    @property
    def padding(self) -> int:
        """Positions without a token."""
        return int((self.ids < 0).sum())

    @property
    def seen(self) -> int:
        """Positions with a token."""
        return self.ids.numel() - self.padding

    def counts(self) -> dict[str, int]:
        """For a report, as JSON types."""
        names = ("seen", "padding", "dropped_tail", "n_sequences", "seq_len")
        return {name: getattr(self, name) for name in names}


def default_text() -> str:
    """The English of Python's own language reference, as the standard library carries it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[key] for key in sorted(topics))


def read_texts(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Piece]:
    """The documents of text files, in memory that does not grow with the files.

    Args:
        paths: UTF-8 files. `.jsonl`: one JSON object a line, its string `text` is a document, blank
            lines are skipped. Anything else is one document, in pieces cut at line ends.

    Raises:
        FileNotFoundError: one of the files is missing; checked for all before the first is read.
        ValueError: no path, a folder, an empty file; while reading: not UTF-8, or a bad JSON line.
    """
    if not paths:
        raise ValueError("`paths` is empty; give at least one text file.")
    files = [Path(path) for path in paths]
    for file in files:
        _check_file(file)
    return chain.from_iterable(_pieces(file) for file in files)


def token_windows(texts: Iterable[str | Piece], tokenizer: Any, seq_len: int, max_tokens: int) -> Tokens:
    """Documents joined by the tokenizer's end-of-text token, cut into full windows.

    No token is added at the start of a document or a window. Nothing is tokenised, or taken from
    `texts`, beyond the last window. A larger `max_tokens` leaves the windows before as they were.

    Args:
        texts: whole documents, or pieces of them.
        tokenizer: a transformers tokenizer; without an end-of-text token documents follow directly.
        seq_len: tokens in a window.
        max_tokens: at most this many tokens in all; a last window that does not fit is left out.

    Raises:
        ValueError: `seq_len` is below 1, `max_tokens` is below `seq_len`, or the texts give less than
            one window.
    """
    _check_length(seq_len, max_tokens)
    wanted = max_tokens // seq_len * seq_len
    ids: list[int] = []
    for part in _token_parts(texts, tokenizer):
        ids += part
        if len(ids) >= wanted:
            break
    return _windows(torch.tensor(ids[:wanted], dtype=torch.int64, device="cpu"), seq_len, "the texts")


def read_tokens(path: str | os.PathLike[str], seq_len: int, max_tokens: int | None = None) -> Tokens:
    """Token ids from a `.npy` file, never unpickled.

    Args:
        path: integers; (N, T) holds one sequence a row, negative where there is padding; (N,) is a
            stream that is cut into windows.
        seq_len: length of those windows; rows stay as they are.
        max_tokens: read at most this many positions; None reads all.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not an integer array of one or two dimensions, `max_tokens` below one sequence, or
            nothing but padding.
    """
    path = Path(path)
    array = _open_ids(path)
    if array.ndim == 1:
        _check_length(seq_len, max_tokens)
        wanted = None if max_tokens is None else max_tokens // seq_len * seq_len
        tokens = _windows(_to_int64(array[:wanted], path), seq_len, str(path))
    else:
        width = array.shape[1]
        allowed = f"at least {width}, the row length of {path}"
        check_number(max_tokens, "max_tokens", allowed, max_tokens is None or max_tokens >= width)
        rows = None if max_tokens is None else max_tokens // width
        tokens = Tokens(_to_int64(array[:rows], path))
    if not tokens.seen:
        raise ValueError(f"{path}: nothing but padding; token ids are not negative.")
    return tokens


def batches(ids: Tensor, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """What a model's forward takes, some sequences at a time.

    Args:
        ids: (N, T), negative where there is padding, on whichever side it stands.
        batch_size: sequences in a batch; the last may have fewer.

    Returns:
        Dicts of `input_ids` (B, T), padding as 0, and `attention_mask` (B, T), 1 at tokens.

    Raises:
        ValueError: `batch_size` is below 1.
    """
    check_number(batch_size, "batch_size", "at least 1", batch_size >= 1)
    return (
        {"input_ids": part.clamp_min(0), "attention_mask": (part >= 0).long()}
        for part in ids.split(batch_size)
    )


def check_ids(ids: Tensor, vocab_size: int) -> None:
    """Refuse ids that a model's embedding does not have, which on CUDA is an error without a cause.

    Args:
        ids: (N, T) token ids.
        vocab_size: rows of the embedding.

    Raises:
        ValueError: an id is `vocab_size` or more.
    """
    largest = int(ids.max())
    if largest >= vocab_size:
        raise ValueError(
            f"`ids` must be below {vocab_size}, the model's vocabulary, got {largest}; use its own tokenizer."
        )


def _check_file(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file.")
    if not path.is_file():  # before opening: a pipe would wait for a writer
        raise ValueError(f"{path}: not a file; give the files themselves.")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty.")


def _pieces(file: Path) -> Iterator[Piece]:
    try:
        with file.open(encoding="utf-8-sig") as lines:
            yield from _json_lines(lines, file) if file.suffix.lower() == ".jsonl" else _plain(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 ({error.reason}); convert it first.") from error


def _plain(lines: TextIO) -> Iterator[Piece]:
    while block := lines.read(READ_CHARACTERS):
        yield Piece(block + lines.readline(READ_CHARACTERS), ends_document=False)
    yield Piece("", ends_document=True)


def _json_lines(lines: TextIO, file: Path) -> Iterator[Piece]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Piece(_json_text(line, f"{file}, line {number}"), ends_document=True)


def _json_text(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        text.encode()  # JSON can spell half a surrogate pair, which no tokenizer takes
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f'{where}: must be one JSON object with a string "text", got {line[:40]!r}.'
        ) from error
    return text


def _token_parts(texts: Iterable[str | Piece], tokenizer: Any) -> Iterator[list[int]]:
    """Ids of one part after the other; the separator comes with the document that follows it."""
    eos: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    between: list[int] = []
    inside = False  # a document that has given tokens
    for piece in texts:
        text, ends_document = piece if isinstance(piece, Piece) else (piece, True)
        for part in _parts(text):
            # verbose would warn that the part is longer than the model's context, which it may well be
            if ids := tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]:
                yield between + ids
                between, inside = [], True
        if ends_document and inside:
            between, inside = eos, False


def _parts(text: str) -> Iterator[str]:
    """The text in bounded parts, cut after a line, else before a space, else anywhere."""
    start = 0
    while start < len(text):
        stop = start + TOKENISE_CHARACTERS
        if stop < len(text):
            line, space = text.rfind("\n", start, stop), text.rfind(" ", start + 1, stop)
            stop = line + 1 if line >= 0 else space if space >= 0 else stop
        yield text[start:stop]
        start = stop


def _windows(ids: Tensor, seq_len: int, source: str) -> Tokens:
    """A stream as full windows.

    Raises:
        ValueError: there is not one.
    """
    n = len(ids) // seq_len
    if n == 0:
        raise ValueError(
            f"`seq_len` is {seq_len}, but {source} gave {len(ids)} tokens; give more, or a shorter `seq_len`."
        )
    return Tokens(ids[: n * seq_len].reshape(n, seq_len), dropped_tail=len(ids) - n * seq_len)


def _open_ids(path: Path) -> np.ndarray:
    """The array, mapped: its size is checked against the file, and only what is used is read.

    Raises:
        ValueError: it is not an array of token ids.
    """
    _check_file(path)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # any bytes reach numpy's parser, and it fails in any way
        raise ValueError(
            f"{path}: not a readable `.npy` array ({' '.join(str(error).split())[:80]})."
        ) from error
    if array.dtype.kind not in "iu" or array.ndim not in {1, 2} or array.size == 0:
        raise ValueError(
            f"{path}: token ids must be integers of shape (N, T) or (N,), got {array.dtype} of {array.shape}."
        )
    return array


def _to_int64(ids: np.ndarray, path: Path) -> Tensor:
    if int(ids.max(initial=0)) > np.iinfo(np.int64).max:  # it would turn negative, which means padding
        raise ValueError(f"{path}: holds {ids.max()}, which is no token id.")
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _check_length(seq_len: int, max_tokens: int | None) -> None:
    check_number(seq_len, "seq_len", "at least 1", seq_len >= 1)
    if max_tokens is not None and max_tokens < seq_len:
        raise ValueError(f"`max_tokens` must be at least `seq_len`, {seq_len}, got {max_tokens}.")
