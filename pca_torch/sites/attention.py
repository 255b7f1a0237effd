"""Queries, keys and values of an attention module, whatever its layout: separate, fused, or a latent."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pca_torch.sites.blocks import layer_of
from pca_torch.sites.reading import argument, per_head, result
from pca_torch.sites.site import Arguments, Read, Site
from pca_torch.sites.tree import Tree, bare, is_linear, parent, width_in, width_out

__all__ = [
    "ATTENTION_POINTS",
    "attention_site",
    "attentions",
    "out_projection",
    "reads_across",
    "why_missing",
]

ATTENTION_POINTS = ("q", "q_rope", "k", "k_rope", "v", "kv_latent", "heads")
Part = Literal["q", "k", "v"]

PROJECTIONS: dict[str, tuple[str, ...]] = {  # a latent query has its last projection here
    "q": ("q_proj", "q_b_proj", "query", "q_lin", "q", "wq", "query_proj", "to_q"),
    "k": ("k_proj", "key", "k_lin", "k", "wk", "key_proj", "to_k"),
    "v": ("v_proj", "value", "v_lin", "v", "wv", "value_proj", "to_v"),
}
NORMS: dict[str, tuple[str, ...]] = {  # applied after the projection and before the rotation
    "q": ("q_norm", "q_layernorm", "query_layernorm", "q_layer_norm"),
    "k": ("k_norm", "k_layernorm", "key_layernorm", "k_layer_norm"),
    "v": ("v_norm",),
}
NORM_AFTER_ROTATION = ("HunYuan", "NanoChat")  # there the projection is what comes before it
FUSED = {  # how q, k and v lie in the features: one after the other, or by groups of heads
    "c_attn": "parts",
    "qkv_proj": "parts",
    "qkv": "parts",
    "Wqkv": "parts",
    "W_pack": "parts",
    "query_key_value": "groups",
}
UNREADABLE = ("CodeGen", "MiniMaxLightning")  # layouts of their own under a name of the table above
LATENT_NORM = ("kv_a_layernorm",)
OUT = ("o_proj", "out_proj", "dense", "c_proj", "wo", "Wo", "o", "out_lin", "proj", "to_out.0", "to_out")
HEAD_WIDTH = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
CROSS = re.compile(r"cross|enc_?dec|encoder_att", re.IGNORECASE)
ROTARY = re.compile(r"rotary|(^|_)rope", re.IGNORECASE)
CACHES = {"cache", "past_key_values", "past_key_value", "layer_past"}
KINDS = {"q_rope": "q", "k_rope": "k", "heads": "attn"}
WORDS = {"q": "queries", "k": "keys", "v": "values"}


def attentions(tree: Tree, path: str, *, cross: bool = False) -> list[str]:
    """Paths of the attention modules inside `path`: those that own projections of queries.

    Args:
        tree: the model.
        path: where to look; this module itself counts.
        cross: also those that attend to another sequence.
    """
    found = [p for p in tree.below(path) if _is_attention(tree, p)]
    return [p for p in found if cross or p == path or not CROSS.search(p.removeprefix(path))]


def attention_site(tree: Tree, path: str, point: str) -> Site | None:
    """One of `ATTENTION_POINTS` of the attention module at `path`; None where it has no such place.

    Raises:
        ValueError: the widths of a fused projection contradict the numbers of heads.
    """
    match point:
        case "q" | "k" | "v":
            return _part(tree, path, point)
        case "k_rope":
            return _cached_key(tree, path)
        case "kv_latent":
            norm = tree.child(path, *LATENT_NORM)
            words = "latent of keys and values, after its norm"
            return _site(tree, path, point, norm, result, words) if norm else None
        case "heads":
            out = out_projection(tree, path)
            return _heads(tree, path, out) if out else None
    return None


def out_projection(tree: Tree, path: str) -> str | None:
    """The projection of the heads back to the residual stream, in the attention module or beside it."""
    if isinstance(bare(tree.modules[path]), nn.MultiheadAttention):
        return None  # it has one, which never runs: only its weight is used
    found = tree.child(path, *OUT) or tree.child(parent(path), "output.dense")
    return found if found and is_linear(tree.modules[found]) else None


def reads_across(path: str) -> bool:
    """Whether a module works on what cross-attention attends to: it makes the keys or the values there."""
    holder, _, last = path.rpartition(".")
    names = (*PROJECTIONS["k"], *PROJECTIONS["v"], *NORMS["k"], *NORMS["v"])
    return last in names and CROSS.search(holder) is not None


def why_missing(tree: Tree, path: str, point: str) -> str:
    """Why an attention module lacks a point, and what to take instead, as a clause."""
    if isinstance(bare(tree.modules[path]), nn.MultiheadAttention):
        return "nn.MultiheadAttention computes them inside: take 'attn', its output, or its ':input'"
    if tree.child(path, *LATENT_NORM):
        return "its cache holds a latent of keys and values: take 'kv_latent' and 'k_rope'"
    if point == "kv_latent":
        return "its cache holds keys and values: take 'k' and 'v'"
    if any(name in tree.class_name(path) for name in UNREADABLE):
        return f"the layout of {tree.class_name(path)} is not known here: take its projection by path"
    if point == "k_rope" and _rotates(tree, path):
        return "it keeps no cache, where rotated keys are read: take 'k', before the rotation"
    if point == "k_rope":
        return "nothing rotates its keys: take 'k'"
    return "its projections are not among those known here: take them by path"


def _is_attention(tree: Tree, path: str) -> bool:
    if isinstance(bare(tree.modules[path]), nn.MultiheadAttention):
        return True
    if tree.child(path, *LATENT_NORM) or _fused(tree, path):
        return True
    q, k, o = (_linear(tree, path, names) for names in (PROJECTIONS["q"], PROJECTIONS["k"], OUT))
    return q is not None and (k is not None or o is not None)  # some layers use the keys of others


def _linear(tree: Tree, path: str, names: tuple[str, ...]) -> str | None:
    found = (tree.child(path, name) for name in names)
    return next((p for p in found if p and is_linear(tree.modules[p])), None)


def _fused(tree: Tree, path: str) -> str | None:
    return _linear(tree, path, tuple(FUSED))


def _site(tree: Tree, path: str, point: str, hooked: str, read: Read, words: str, **facts: Any) -> Site:
    width = width_out(tree.modules[hooked])
    basic = Site(
        f"{path}:{point}", hooked, "output", KINDS.get(point, point), words, read, layer=layer_of(path)
    )
    return replace(basic, **({"width": width, "across": reads_across(hooked)} | facts))


def _part(tree: Tree, path: str, part: Part) -> Site | None:
    """Queries, keys or values before any rotation, after a norm of their own."""
    if any(name in tree.class_name(path) for name in UNREADABLE):
        return None
    latent = tree.child(path, *LATENT_NORM) is not None
    if latent and part != "q":
        return None
    rope = "pre" if part != "v" and _rotates(tree, path) else None
    words = f"{WORDS[part]} of each head" + (" before the rotation" if rope else "")
    projection = _linear(tree, path, PROJECTIONS[part])
    if projection is None:
        fused = _fused(tree, path)
        return _fused_part(tree, path, part, fused, rope, words) if fused else None
    total = width_out(tree.modules[projection]) or 0
    width = tree.number(path, "qk_head_dim") if latent else _head_width(tree, path)
    heads = total // width if width and total % width == 0 else 1
    read = _clipped(tree, path, per_head(result, heads, total // heads))
    norm = None if _norm_is_late(tree, path) else tree.child(path, *NORMS[part])
    return _site(tree, path, part, norm or projection, read, words, rope=rope, heads=heads, width=total)


def _fused_part(tree: Tree, path: str, part: Part, fused: str, rope: str | None, words: str) -> Site:
    """The share of queries, keys or values in the output of one projection.

    Raises:
        ValueError: its width is not that of the heads.
    """
    total, width = width_out(tree.modules[fused]) or 0, _head_width(tree, path) or 0
    heads = tree.number(path, *HEADS) or 0
    pairs, rest = divmod(total - heads * width, 2 * width) if width and heads else (0, 1)
    if rest or pairs < 1:
        raise ValueError(
            f"`sites`: {fused!r} has {total} features, which {heads} heads of width {width} do not divide "
            f"into queries, keys and values; capture {fused + ':output'!r}."
        )
    layout = FUSED[fused.rpartition(".")[2]]
    if layout == "parts" and getattr(tree.modules[path], "multi_query", None) is False:
        layout = "groups"  # GPT-BigCode with as many keys as queries
    count = heads if part == "q" else pairs
    take = _clipped(tree, path, _from_parts(part, heads, pairs, width))
    if layout == "groups":
        take = _clipped(tree, path, _from_groups(part, heads, pairs, width))
    norm = None if _norm_is_late(tree, path) else tree.child(path, *NORMS[part])
    read = per_head(result, count, width) if norm else take
    facts: dict[str, Any] = {"rope": rope, "heads": count, "width": count * width}
    return _site(tree, path, part, norm or fused, read, words, **facts)


def _from_parts(part: Part, heads: int, pairs: int, width: int) -> Read:
    """Of features q | k | v, the one part."""
    sizes = [heads * width, pairs * width, pairs * width]

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        return result(module, args, kwargs, output).split(sizes, -1)["qkv".index(part)]

    return read


def _from_groups(part: Part, heads: int, pairs: int, width: int) -> Read:
    """Of features that hold, for each head of keys in turn, its queries, its key and its value."""
    queries = heads // pairs
    chosen = {"q": slice(0, queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, queries + 2)}

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        x = result(module, args, kwargs, output).unflatten(-1, (pairs, queries + 2, width))
        return x[..., chosen[part], :].flatten(-3)

    return read


def _clipped(tree: Tree, path: str, read: Read) -> Read:
    """What `read` gives, limited as the attention module itself limits it."""
    limit = tree.setting(path, "clip_qkv")
    if limit is None:
        return read
    return lambda *firing: torch.clamp(read(*firing), -limit, limit)


def _cached_key(tree: Tree, path: str) -> Site | None:
    """Rotated keys as the cache gets them; of a latent attention the one rotated key that heads share."""
    if not _rotates(tree, path) or not _has_cache(tree, path):
        return None
    facts: dict[str, Any] = {"side": "cache", "rope": "post"}
    if tree.child(path, *LATENT_NORM):
        width, latent = (tree.number(path, name) for name in ("qk_rope_head_dim", "kv_lora_rank"))
        words = "rotary part of the keys, shared by the heads, after the rotation"
        read = _shared_key(width or 0, latent or 0)
        return _site(tree, path, "k_rope", path, read, words, **facts, kind="k_rope", width=width)
    key = _part(tree, path, "k")
    if key is None:
        return None
    words = "keys of each head after the rotation, as the cache gets them"
    facts |= {"heads": key.heads, "width": key.width}
    return _site(tree, path, "k_rope", path, _cached(key.heads), words, **facts)


def _cached(heads: int) -> Read:
    """Keys (B, H, T, E) handed to a cache, heads side by side (B, T, H·E)."""

    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        keys = args[0]
        times = keys.shape[1] // heads  # Falcon repeats each head for its queries before it caches
        return keys[:, ::times].transpose(1, 2).flatten(-2)

    return read


def _shared_key(width: int, latent: int) -> Read:
    def read(module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any) -> Tensor:
        first, second = args[:2]  # (B, 1, T, latent) and (B, 1, T, width)
        if first.shape[1] == 1 and first.shape[-1] == latent and second.shape[-1] == width:
            return second[:, 0]
        return first[:, 0, :, -width:]  # transformers that cache the expanded keys: it ends each of them

    return read


def _heads(tree: Tree, path: str, out: str) -> Site:
    """What attention gathered per head, before its output projection."""
    total = width_in(tree.modules[out]) or 0
    width = tree.number(path, "v_head_dim") if tree.child(path, *LATENT_NORM) else _head_width(tree, path)
    heads = total // width if width and total % width == 0 else 1
    words = "output of each attention head, before the output projection"
    return _site(tree, path, "heads", out, argument, words, side="input", heads=heads, width=total)


def _head_width(tree: Tree, path: str) -> int | None:
    """E: from the attention module, else from the nearest configuration, else hidden size over heads."""
    module = tree.modules[path]
    own = [value for name in HEAD_WIDTH if isinstance(value := getattr(module, name, None), int)]
    if own:
        return own[0]
    told, heads, hidden = (tree.number(path, *names) for names in (HEAD_WIDTH, HEADS, ("hidden_size",)))
    return told or (hidden // heads if hidden and heads else None)


def _norm_is_late(tree: Tree, path: str) -> bool:
    return any(name in tree.class_name(path) for name in NORM_AFTER_ROTATION)


def _rotates(tree: Tree, path: str) -> bool:
    """Whether queries and keys are rotated: the attention or something above it holds the angles."""
    module = tree.modules[path]
    if not getattr(module, "use_rope", True) or tree.setting(path, "alibi") is True:
        return False  # a layer without positions, or a model with biases for them
    if isinstance(getattr(module, "rotary_dim", None), int):
        return True
    near = [child for above in (path, *tree.ancestors(path)) for child in tree.children[above]]
    return any(ROTARY.search(child.rpartition(".")[2]) for child in near)


def _has_cache(tree: Tree, path: str) -> bool:
    """Whether the module hands keys to a cache: it takes one and knows its own index there."""
    module = bare(tree.modules[path])
    takes = CACHES & set(inspect.signature(type(module).forward).parameters)
    return bool(takes) and isinstance(getattr(module, "layer_idx", None), int)
