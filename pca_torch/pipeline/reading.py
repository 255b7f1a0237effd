"""What a language model is to read: text or token ids, and the role of each token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pca_torch import texts
from pca_torch._checks import check_number
from pca_torch.models import LanguageModel

__all__ = ["Data", "Reading"]


@dataclass(frozen=True)
class Data:
    """Sequences of tokens for one model."""

    tokens: texts.Tokens
    roles: Tensor | None  # (N, T), of each token
    source: str | list[str]

    def batches(self, batch_size: int, device: Any) -> Iterator[dict[str, Tensor]]:
        """Arguments for the model, and the roles beside them.

        Args:
            batch_size: sequences in each.
            device: where the model is.
        """
        roles = None if self.roles is None else self.roles.split(batch_size)
        for i, batch in enumerate(texts.batches(self.tokens.ids, batch_size)):
            beside = {} if roles is None else {"roles": roles[i]}
            yield {key: value.to(device) for key, value in (batch | beside).items()}

    def digest(self) -> str:
        """SHA-256 of all ids and roles: what a resumed run must read again."""
        parts = [part for part in (self.tokens.ids, self.roles) if part is not None]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()


class Reading:
    """Checked before a model is loaded, read for the model after that.

    Args:
        text: plain text or jsonl files; none is the embedded text.
        tokens: a `.npy` file of token ids, instead of text.
        roles: a `.npy` file of one integer for each of those ids.
        keep_roles: the roles that count.
        seq_len: tokens per sequence.
        max_tokens: tokens at most.

    Raises:
        ValueError: an argument or a file is at fault.
    """

    def __init__(
        self,
        text: Sequence[str | Path] = (),
        tokens: str | Path | None = None,
        roles: str | Path | None = None,
        keep_roles: Sequence[int] = (),
        *,
        seq_len: int = 512,
        max_tokens: int = 8192,
    ) -> None:
        self.pieces: Iterable[Any] = texts.read_texts(text) if text else [texts.default_text()]
        self.ids = _read_ids(text, tokens, seq_len, max_tokens)
        self.roles = _read_roles(roles, keep_roles, self.ids, max_tokens)
        self.keep_roles = tuple(keep_roles)
        self.source = [str(file) for file in text] or ("pydoc_data.topics" if tokens is None else str(tokens))
        self.seq_len = seq_len if self.ids is None else self.ids.seq_len
        self.max_tokens = max_tokens

    def check_drop(self, drop_first: int) -> None:
        """Refuse to leave out whole sequences.

        Args:
            drop_first: tokens left out at the start of each.
        """
        allowed = f"in 0..{self.seq_len - 1}, less than a sequence"
        check_number(drop_first, "drop_first", allowed, 0 <= drop_first < self.seq_len)

    def data(self, loaded: LanguageModel) -> Data:
        """The tokens, all of them known to the model.

        Args:
            loaded: the model, with its tokenizer where there is text.
        """
        ids = self.ids
        if ids is None:
            ids = texts.token_windows(self.pieces, loaded.tokenizer, self.seq_len, self.max_tokens)
        embedding: Any = loaded.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        texts.check_ids(ids.ids, embedding.num_embeddings)
        return Data(ids, self.roles, self.source)


def _read_ids(
    text: Sequence[str | Path], tokens: str | Path | None, seq_len: int, max_tokens: int
) -> texts.Tokens | None:
    """The ids of a file, None if there is text to tokenise.

    Raises:
        ValueError: there is both.
    """
    if text and tokens is not None:
        raise ValueError("`text` and `tokens` exclude each other; give one of them.")
    return None if tokens is None else texts.read_tokens(Path(tokens), seq_len, max_tokens)


def _read_roles(
    roles: str | Path | None, keep_roles: Sequence[int], ids: texts.Tokens | None, max_tokens: int
) -> Tensor | None:
    """The role of each token of a file.

    Raises:
        ValueError: there is no such file of ids, no role that counts, or another number of roles.
    """
    if roles is None and not keep_roles:
        return None
    if roles is None or not keep_roles or ids is None:
        raise ValueError(
            "`roles` needs `tokens`, whose ids it is of, and `keep_roles`, those that count; give all three."
        )
    found = texts.read_tokens(Path(roles), ids.seq_len, max_tokens).ids
    if found.shape != ids.ids.shape:
        raise ValueError(
            f"`roles` must have the shape of `tokens`, {tuple(ids.ids.shape)}, got {tuple(found.shape)}."
        )
    return found
