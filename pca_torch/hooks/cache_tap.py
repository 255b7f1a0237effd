"""Keys and values where attention puts them into a cache: after rotary embedding, whatever the layout.

Tapped is what an attention module is given. Where that is a cache, its `update` tells us for as long as the
module runs. Where it is none, the module gets a stand-in that stores nothing and returns what came: masks and
positions of the model were made without a cache, so packed sequences, `use_cache=False` and activation
checkpointing stay as they are, and nothing is kept that the model would not have kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from pca_torch.hooks.tensors import recomputing

__all__ = ["CacheTap", "cache_argument"]

ARGUMENTS = ("cache", "past_key_values", "past_key_value", "layer_past")  # newest name first
PARTS = ("self_attention_cache", "cross_attention_cache")  # of the cache of an encoder-decoder

Tell = Callable[[tuple[Any, ...]], object]  # is told (keys (B, H, T, E), values, index of the layer)


def cache_argument(module: nn.Module) -> str | None:
    """The argument of an attention module that takes a cache; None if there is none.

    Args:
        module: the attention module.
    """
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in ARGUMENTS if name in parameters), None)


class StandIn:
    """A cache that stores nothing."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Tell what came, and return it."""
        came = _came(args, kwargs)
        self.tell(came)
        return came[0], came[1]

    def update_indexer(self, keys: Tensor, *args: object) -> Tensor:
        """Keys of an index for sparse attention, as they came."""
        return keys

    def get_seq_length(self, *args: object) -> int:
        """Tokens stored."""
        return 0


class _Update:
    """Takes the place of the `update` of one cache, and tells listeners what comes."""

    def __init__(self, cache: Any) -> None:
        self.original = cache.update
        self.listeners: list[Tell] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for tell in self.listeners:
            tell(_came(args, kwargs))
        return self.original(*args, **kwargs)


def _came(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Keys, values and index of the layer in a call of `update`."""
    named = dict(zip(("key_states", "value_states", "layer_idx"), args, strict=False)) | kwargs
    return named["key_states"], named["value_states"], named.get("layer_idx")


class CacheTap:
    """Listens while one attention module runs.

    Args:
        module: the attention module.
        argument: its argument that takes the cache.
        tell: is told what the module puts into it.
    """

    def __init__(self, module: nn.Module, argument: str, tell: Tell) -> None:
        self.argument = argument
        self.place = list(inspect.signature(module.forward).parameters).index(argument)
        self.tell = tell
        self.tapped: list[Any] = []

    def open(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the module runs: listen to its cache, or give it a stand-in.

        Args:
            module: the attention module.
            args: of the call.
            kwargs: of the call.

        Returns:
            other arguments, or None where they stay.
        """
        self.close()
        if recomputing():
            return None
        by_place = len(args) > self.place
        cache = args[self.place] if by_place else kwargs.get(self.argument)
        if cache is None:
            stand_in = StandIn(self.tell)
            if by_place:
                return (*args[: self.place], stand_in, *args[self.place + 1 :]), kwargs
            return args, kwargs | {self.argument: stand_in}
        parts = [getattr(cache, part) for part in PARTS if hasattr(cache, part)]
        for part in parts or [cache]:
            if not isinstance(part.__dict__.get("update"), _Update):
                part.update = _Update(part)
            part.update.listeners.append(self.tell)
            self.tapped.append(part)
        return None

    def closed(self, module: nn.Module, args: object, output: object) -> None:
        """After the module ran, also when it raised.

        Args:
            module: the attention module.
            args: of the call.
            output: of the call.
        """
        self.close()

    def close(self) -> None:
        """Give the cache its own `update` back."""
        while self.tapped:
            part = self.tapped.pop()
            update = part.__dict__["update"]
            update.listeners.remove(self.tell)
            if not update.listeners:
                del part.update
