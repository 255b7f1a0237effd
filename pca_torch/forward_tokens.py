"""The tokens of one forward, read from its arguments: ids, padding, and places in their sequences."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._arguments import cached, padding_of
from pca_torch.sites.names import roots

__all__ = ["ForwardTokens", "as_booleans", "find_tokens", "is_any", "parameters", "places_of"]

BESIDE = ("labels", "position_ids", "token_type_ids", "cache_position")  # (B, T) integers, but no ids


@dataclass(frozen=True, eq=False)
class ForwardTokens:
    """The tokens of one forward."""

    ids: Tensor | None  # (B, T), None where the forward got embeddings
    shape: tuple[int, ...]  # B, T
    device: torch.device

    def ids_for(self, setting: str) -> Tensor:
        """The ids (B, T).

        Args:
            setting: what needs them, for the message.

        Raises:
            ValueError: the forward was called with embeddings.
        """
        if self.ids is None:
            raise ValueError(
                f"`{setting}` needs token ids, but the forward got embeddings; pass `input_ids`, or leave "
                "tokens out by a mask in the batch."
            )
        return self.ids

    def told(self, beside: Mapping[str, Any], key: str) -> Tensor | None:
        """What a batch says of each token (B, T) under `key`, where it does.

        Args:
            beside: the batch.
            key: such as "labels".

        Raises:
            ValueError: it is not (B, T).
        """
        value = beside.get(key)
        if value is None:
            return None
        if not isinstance(value, Tensor) or tuple(value.shape) != self.shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"`{key}` must have one value per token, {self.shape}, to select them, got {got}."
            )
        return value.to(self.device)

    def real(self, arguments: Mapping[str, Any], padding: str | None) -> tuple[Tensor, Tensor | int]:
        """What is no padding, (B, T) booleans, and how many tokens came before, in each sequence or in all.

        Args:
            arguments: of the forward.
            padding: the one with 0 at padding, None if there is none.

        Raises:
            ValueError: the mask is not (B, T), or (B, S) with the past; or has other values than 0 and 1.
        """
        before = cached(arguments)
        mask = None if padding is None else padding_of(arguments.get(padding), arguments)
        if mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device), before
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"`{padding}` must be a 2-D tensor (B, T) to tell padding, got {got}; pass such a one, or "
                "padding=None if there is no padding."
            )
        past = mask.shape[1] - self.shape[1]
        if past < 0 or mask.shape[0] != self.shape[0]:
            raise ValueError(
                f"`{padding}` must have the shape {self.shape} of the tokens, or more columns in front of "
                f"them for the past, got {tuple(mask.shape)}; make it of the same batch."
            )
        real = as_booleans(mask, str(padding)).to(self.device)
        return real[:, past:], real[:, :past].sum(1, keepdim=True) if past else before


def find_tokens(
    arguments: Mapping[str, Any], padding: str | None, aside: Iterable[str], needed: bool
) -> ForwardTokens | None:
    """The ids or embeddings among arguments; where the padding alone speaks of tokens, its shape.

    Args:
        arguments: of the forward, by name.
        padding: the one with 0 at padding, None if there is none.
        aside: names of others that say something of each token.
        needed: whether any (B, T, D) is a sequence, as where tokens are to be told apart.
    """
    mask = arguments.get(padding) if padding else None
    side = "decoder_" if padding and padding.startswith("decoder_") else ""
    named = (arguments.get(f"{side}input_ids"), arguments.get(f"{side}inputs_embeds"))
    no_ids = {padding, *aside, *BESIDE}
    others = (value for key, value in arguments.items() if key not in no_ids)
    x = next((value for value in (*named, *others) if isinstance(value, Tensor)), None)
    if x is not None and x.ndim == 2 and not x.is_floating_point():
        return ForwardTokens(x, tuple(x.shape), x.device)
    is_sequence = x is named[1] or mask is not None or needed
    if x is not None and x.ndim == 3 and x.is_floating_point() and is_sequence:
        return ForwardTokens(None, tuple(x.shape[:2]), x.device)
    if mask is None:
        return None
    device = getattr(mask, "device", torch.device("cpu"))  # what is no mask is refused later on
    return ForwardTokens(None, tuple(getattr(mask, "shape", ())), device)


def places_of(real: Tensor, before: Tensor | int, position_ids: Any) -> Tensor:
    """The place of each token in its own sequence (B, T), -1 in padding.

    Args:
        real: what is no padding (B, T).
        before: tokens that came before, in each sequence (B, 1) or in all.
        position_ids: where they are 2-D and restart, a sequence begins.
    """
    starts = torch.zeros_like(real)
    if isinstance(position_ids, Tensor) and position_ids.ndim == 2 and position_ids.shape[1] == real.shape[1]:
        starts[:, 1:] = position_ids[:, 1:] <= position_ids[:, :-1]
        starts &= real
    seen = real.cumsum(1)
    others = ((seen - real.long()) * starts).cummax(1).values  # tokens of the row before this sequence
    goes_on = starts.cumsum(1) == 0
    return torch.where(real, seen - 1 - others + before * goes_on, -1)


def as_booleans(mask: Tensor, name: str) -> Tensor:
    """A mask of 0 and 1 as booleans.

    Args:
        mask: in any dtype.
        name: of the argument, for the message.

    Raises:
        ValueError: it has other values.
    """
    keep = mask.bool()
    if mask.dtype != torch.bool and not bool((mask == keep).all()):  # waits for the device, once a forward
        raise ValueError(
            f"`{name}` must hold 0 and 1 only, got other values; where packed sequences are numbered there, "
            "let `position_ids` restart instead."
        )
    return keep


def is_any(values: Tensor, wanted: Iterable[int]) -> Tensor:
    """Whether each of `values` is one of `wanted`, booleans.

    Args:
        values: integers.
        wanted: integers.
    """
    return torch.isin(values, torch.tensor(list(wanted), device=values.device))


def parameters(model: nn.Module) -> set[str]:
    """Names that the forward of `model` has parameters for; of a wrapper, those of what it wraps.

    Args:
        model: the module that is called.
    """
    for module in roots(model):
        found = inspect.signature(module.forward).parameters
        if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in found.values()):
            return set(found)
    return set()
