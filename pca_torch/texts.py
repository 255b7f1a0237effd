"""Text and token files → sequences of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pca_torch._checks import check_number

__all__ = ["Piece", "Tokens", "default_text", "read_texts", "read_tokens", "token_windows"]

BLOCK = 1 << 20  # characters read at a time: a file never sits in memory as a whole


class Piece(NamedTuple):
    """A stretch of text."""

    text: str
    ends_document: bool  # an end-of-text token follows


@dataclass(frozen=True)
class Tokens:
    """Sequences of one length, ready for a model."""

    ids: Tensor  # (n, T) int64, negative = padding
    dropped_tail: int = 0  # tokens after the last full sequence

    @property
    def seq_len(self) -> int:
        """T."""
        return self.ids.shape[1]

    @property
    def padding(self) -> int:
        """Entries that are no tokens."""
        return int((self.ids < 0).sum())

    @property
    def seen(self) -> int:
        """Tokens, padding left out."""
        return self.ids.numel() - self.padding

    def counts(self) -> dict[str, int]:
        """The numbers that a report states."""
        return {
            "seen": self.seen,
            "padding": self.padding,
            "sequences": len(self.ids),
            "seq_len": self.seq_len,
            "dropped_tail": self.dropped_tail,
        }

    def batches(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Arguments for a model: padding becomes id 0 and is masked.

        Args:
            batch_size: sequences per batch.

        Yields:
            `input_ids` and `attention_mask`, (B, T) each.
        """
        for part in self.ids.split(batch_size):
            yield {"input_ids": part.clamp_min(0), "attention_mask": (part >= 0).long()}

    def check(self, vocab_size: int) -> None:
        """Refuse ids that the model does not know.

        Args:
            vocab_size: rows of its embedding.

        Raises:
            ValueError: the largest id is beyond them.
        """
        largest = int(self.ids.max())
        if largest >= vocab_size:
            raise ValueError(
                f"token ids must be below {vocab_size}, the vocabulary of the model, got {largest}; "
                "give ids of this model's own tokenizer."
            )


def read_texts(paths: Sequence[Path]) -> Iterator[Piece]:
    """The text of files, a piece at a time: `.jsonl` by its field `text`, anything else as plain text.

    Args:
        paths: the files; each plain file is one document, and so is each line of a `.jsonl`.

    Yields:
        Pieces in order.

    Raises:
        ValueError: a file is empty, not UTF-8, a folder, or a line of it is not an object with a text.
        FileNotFoundError: there is no such file.
    """
    for path in paths:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; give text files.")
        if not path.exists():
            raise FileNotFoundError(f"there is no file {path}; give plain text or jsonl.")
        empty = True
        try:
            for piece in _lines(path) if path.suffix == ".jsonl" else _blocks(path):
                empty = False
                yield piece
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}); convert it first.") from error
        if empty:
            raise ValueError(f"{path} holds no text; give a file that does.")


def default_text() -> Iterator[Piece]:
    """The language reference of the standard library, English prose that every CPython carries.

    Yields:
        One document, by topic.
    """
    from pydoc_data.topics import topics

    last = max(topics)
    for name in sorted(topics):
        yield Piece(topics[name] + "\n\n", ends_document=name == last)


def token_windows(pieces: Iterable[Piece], tokenizer: Any, seq_len: int, max_tokens: int) -> Tokens:
    """Tokenise until there are enough tokens, and cut them into full sequences.

    Documents are joined by the tokenizer's end-of-text token; a sequence may hold several.

    Args:
        pieces: the text; no more of it is read than is needed.
        tokenizer: of the model.
        seq_len: tokens per sequence, T.
        max_tokens: at most this many tokens.

    Raises:
        ValueError: there are fewer tokens than one sequence.
    """
    _check_lengths(seq_len, max_tokens)
    wanted = max_tokens // seq_len * seq_len
    ids: list[int] = []
    for piece in pieces:
        ids += tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"]
        if piece.ends_document and tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
        if len(ids) >= wanted:
            return Tokens(torch.tensor(ids[:wanted]).reshape(-1, seq_len))
    return _windows(np.asarray(ids, dtype=np.int64), seq_len, "the text")


def read_tokens(path: Path, seq_len: int, max_tokens: int) -> Tokens:
    """Token ids from a `.npy` file.

    Args:
        path: 1-D, a stream that is cut into sequences; or 2-D (n, T), one sequence per row, negative
            ids being padding.
        seq_len: tokens per sequence of a stream.
        max_tokens: at most this many tokens, padding included.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such array, or has fewer tokens than one sequence.
    """
    _check_lengths(seq_len, max_tokens)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; give token ids as .npy.") from None
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise ValueError(
            f"{path} is not a .npy array of numbers; save token ids with `numpy.save`."
        ) from error
    if (
        not isinstance(array, np.ndarray)
        or array.dtype.kind not in "iu"
        or array.ndim not in {1, 2}
        or not array.size
    ):
        shape = getattr(array, "shape", None)
        raise ValueError(
            f"{path} must hold integer token ids, 1-D or (sequences, T), got shape {shape} of "
            f"{getattr(array, 'dtype', type(array).__name__)}."
        )
    if array.ndim == 1:
        stream = np.asarray(array[: max_tokens // seq_len * seq_len], dtype=np.int64)
        if (stream < 0).any():
            raise ValueError(
                f"{path} is a stream with negative ids; padding needs rows, shape (sequences, T)."
            )
        return _windows(stream, seq_len, str(path))
    rows = torch.from_numpy(np.array(array[: max(1, max_tokens // array.shape[1])], dtype=np.int64))
    if not bool((rows >= 0).any()):
        raise ValueError(f"{path} holds padding alone; ids of tokens are ≥ 0.")
    return Tokens(rows)


def _check_lengths(seq_len: int, max_tokens: int) -> None:
    check_number(seq_len, "seq_len", "at least 1", seq_len >= 1)
    check_number(max_tokens, "max_tokens", f"at least one sequence of {seq_len}", max_tokens >= seq_len)


def _windows(ids: np.ndarray, seq_len: int, what: str) -> Tokens:
    """Full sequences of a stream.

    Raises:
        ValueError: there is not one.
    """
    full = len(ids) // seq_len * seq_len
    if not full:
        raise ValueError(
            f"{what} has {len(ids)} tokens, fewer than one sequence of {seq_len}; "
            "give more, or a smaller seq_len (--seq-len)."
        )
    return Tokens(torch.from_numpy(ids[:full].reshape(-1, seq_len)), dropped_tail=len(ids) - full)


def _blocks(path: Path) -> Iterator[Piece]:
    """A plain file in blocks that end with a line."""
    with path.open(encoding="utf-8") as file:
        block = file.read(BLOCK) + file.readline(BLOCK)
        while block:
            following = file.read(BLOCK)
            following += file.readline(BLOCK) if following else ""
            yield Piece(block, ends_document=not following)
            block = following


def _lines(path: Path) -> Iterator[Piece]:
    """The documents of a jsonl file.

    Raises:
        ValueError: a line is no object with a text.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError):
                text = None
            if not isinstance(text, str):
                raise ValueError(f'{path}, line {number}: must be a JSON object with a string field "text".')
            yield Piece(text, ends_document=True)
