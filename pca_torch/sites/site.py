"""One place in a model whose activations are of interest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

__all__ = ["Site"]

Arguments = tuple[Any, ...]
Read = Callable[[nn.Module, Arguments, Mapping[str, Any], Any], Tensor]


@dataclass(frozen=True, eq=False)
class Site:
    """A point of a module, what is read there, and how a file calls it.

    Hooked is the module at `path`. `read(module, args, kwargs, output)` gives the activations (..., D) with
    tokens leading; of H heads they are side by side, D = H·E. `only` narrows the rows: of what one firing
    read, booleans in the leading shape, such as the tokens that were routed to one expert.
    """

    name: str  # in files and reports: the path and the point, "model.layers.3.self_attn:k"
    path: str  # canonical path of the module that is hooked, "model.layers.3.self_attn.k_proj"
    side: Literal["input", "output", "cache"]  # its arguments, its result, what it puts in a cache
    kind: str  # "resid", "attn", "mlp", "q", "k", "v", "kv_latent", "k_rope", "expert", "norm" or "module"
    point: str  # in words: "keys of self_attn before RoPE"
    read: Read
    only: Read | None = None
    rope: Literal["pre", "post"] | None = None  # for queries and keys that are rotated
    heads: int = 1  # H
    width: int | None = None  # D where the model tells without running, all heads together
    layer: int | None = None  # index of the block, where the path has one
    may_be_empty: bool = False  # an expert that no token reached is no mistake
    across: bool = False  # keys and values of cross-attention: their rows are the tokens of the encoder

    @property
    def is_routed(self) -> bool:
        """Whether the rows are those that a router sent to an expert, in an order known to it alone."""
        return self.kind == "expert" and self.only is None

    @property
    def per_head(self) -> bool:
        """Whether each head is decomposed apart: also the one that all queries of some models share."""
        return self.heads > 1 or self.kind in {"q", "k", "v"}
