"""Words for the same place in every block, and points of one module: what each means in a given model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from pca_torch.sites import blocks as parts
from pca_torch.sites.attention import (
    ATTENTION_POINTS,
    attention_site,
    attentions,
    out_projection,
    reads_across,
    why_missing,
)
from pca_torch.sites.blocks import layer_of
from pca_torch.sites.reading import argument, as_map, as_rows, by_layout, result, tensors
from pca_torch.sites.site import Arguments, Read, Site
from pca_torch.sites.tree import Tree, bare, parent, width_in, width_out

__all__ = ["POINTS", "SHORTCUTS", "available", "module_site", "point_sites", "shortcut_sites"]

TENSORS: dict[str, tuple[Read, str]] = {  # of any module: how it is read, and in words
    "output": (by_layout(result), "output"),
    "input": (by_layout(argument), "input"),
    "rows": (as_rows(result), "output, features last"),
    "map": (as_map(result), "output, a map (B, C, ...)"),
    "input_rows": (as_rows(argument), "input, features last"),
    "input_map": (as_map(argument), "input, a map (B, C, ...)"),
}
POINTS = (*TENSORS, *ATTENTION_POINTS, "hidden", "experts")
EXPERT = re.compile(r"expert_(\d+|\*)$")


@dataclass(frozen=True)
class Shortcut:
    """A word for one place in every block."""

    words: str  # what it is
    find: Callable[[Tree, str], list[Site]]  # in one block


def module_site(tree: Tree, path: str, point: str = "output", kind: str = "module", words: str = "") -> Site:
    """The site of any module: one of its tensors, as `point` says."""
    read, said = TENSORS[point]
    inward = point.startswith("input")
    width = (width_in if inward else width_out)(tree.modules[path])
    if width is None and kind in {"resid", "norm"} and parent(path) in tree.modules:
        width = tree.number(parent(path), "hidden_size")
    side = "input" if inward else "output"
    text = words or f"{said} of {path or 'the model'}"
    routed = parts.is_in_expert(tree, path)
    facts: dict[str, Any] = {"width": width, "layer": layer_of(path), "may_be_empty": routed}
    kind = "expert" if routed else kind
    return Site(f"{path}:{point}", path, side, kind, text, read, **facts, across=reads_across(path))


def point_sites(tree: Tree, path: str, point: str) -> list[Site]:
    """The sites that `point` of the module at `path` means, one but for experts.

    Raises:
        ValueError: the module has no such point.
    """
    if point in TENSORS:
        return [module_site(tree, path, point, "resid" if parts.is_block(tree, path) else "module")]
    if point == "experts" or EXPERT.match(point):
        found = [site for site in _experts(tree, path) if _is_expert(site, point)]
    elif point == "hidden":
        found = _hidden(tree, path)
    else:
        found = _attention(point, tree, path)
    if not found:
        raise ValueError(f"`sites` has {f'{path}:{point}'!r}; {_why_not(tree, path, point)}.")
    return found


def shortcut_sites(tree: Tree, word: str, layers: set[int] | None) -> list[Site]:
    """The sites of a shortcut in the blocks of a model.

    Args:
        tree: the model.
        word: one of `SHORTCUTS`.
        layers: indices of the blocks; None is all.

    Raises:
        ValueError: the model has no such place, or no such layers.
    """
    every = parts.blocks(tree)
    there = {index for path in every if (index := layer_of(path)) is not None}
    if layers is not None and layers - there:
        raise ValueError(
            f"`sites` asks for layers {sorted(layers - there)} of {word!r}, the model has "
            f"{min(there, default=0)} to {max(there, default=0)}."
        )
    chosen = [path for path in every if layers is None or layer_of(path) in layers]
    found = [site for block in chosen for site in SHORTCUTS[word].find(tree, block)]
    if not found:
        others = ", ".join(available(tree)) or "none of the shortcuts: name modules by path"
        reason = next((_why_not(tree, block, word) for block in reversed(chosen)), "it has no blocks")
        name = type(tree.root).__name__
        raise ValueError(f"`sites` has {word!r}, which {name} has not: {reason}; it has {others}.")
    return found


def available(tree: Tree) -> list[str]:
    """The shortcuts that the model has."""
    try:
        every = parts.blocks(tree)
    except ValueError:
        return []
    return [word for word, shortcut in SHORTCUTS.items() if any(_has(shortcut, tree, b) for b in every)]


def _has(shortcut: Shortcut, tree: Tree, block: str) -> bool:
    try:
        return bool(shortcut.find(tree, block))
    except ValueError:
        return False


def _resid(point: str, words: str, tree: Tree, block: str) -> list[Site]:
    """The residual stream at one end of a block.

    Raises:
        ValueError: the block works on maps, whose layout the module does not tell.
    """
    if parts.is_convolutional(tree, block):
        end = "input_" if point == "input" else ""
        raise ValueError(
            f"`sites`: {block!r} works on maps; write '{parent(block)}.*:{end}map' where channels come "
            f"first (B, C, H, W), '{parent(block)}.*:{end}rows' where they are last."
        )
    return [module_site(tree, block, point, "resid", words)]


def _middle(tree: Tree, block: str) -> list[Site]:
    norm = parts.middle_norm(tree, block)
    words = "residual stream between attention and MLP"
    return [module_site(tree, norm, "input", "resid", words)] if norm else []


def _final(tree: Tree, block: str) -> list[Site]:
    """Before and after the final norm, found from the last block of a list."""
    following = tree.children.get(parent(block), [])
    norm = parts.final_norm(tree, block)
    if norm is None or block != following[-1] or parts.is_convolutional(tree, block):
        return []
    return [
        module_site(tree, norm, "input", "resid", "residual stream before the final norm"),
        module_site(tree, norm, "output", "norm", "residual stream after the final norm"),
    ]


def _attention(point: str, tree: Tree, path: str) -> list[Site]:
    """A point of the attention modules inside `path`: itself, or those that do not attend across."""
    found = (attention_site(tree, p, point) for p in attentions(tree, path))
    return [site for site in found if site]


def _keys(tree: Tree, block: str) -> list[Site]:
    """Keys before their rotation and after it, where there is one."""
    before = _attention("k", tree, block)
    return before + _attention("k_rope", tree, block) if before else []


def _attention_output(tree: Tree, block: str) -> list[Site]:
    words = "output of attention, after its output projection"
    paths = [out_projection(tree, p) or p for p in attentions(tree, block)]
    return [module_site(tree, p, "output", "attn", words) for p in paths]


def _hidden(tree: Tree, path: str) -> list[Site]:
    """Activations inside the MLP, where its last projection takes them."""
    sites = []
    for down in parts.down_projections(tree, path):
        site = module_site(tree, down, "input", "mlp", "hidden activations of the MLP")
        sites.append(replace(site, name=f"{parent(down)}:hidden"))
    return sites


def _mlp_output(tree: Tree, block: str) -> list[Site]:
    words = "output of the MLP"
    holder = parts.experts(tree, block)
    if holder is not None:  # routed and shared experts together
        site = module_site(tree, parent(holder), "output", "mlp", words)
        return [replace(site, width=tree.number(holder, "hidden_size"))]
    return [module_site(tree, p, "output", "mlp", words) for p in parts.down_projections(tree, block)]


def _experts(tree: Tree, path: str) -> list[Site]:
    """The tokens that reach each expert: a list of modules, or one module with all their weights."""
    holder = parts.experts(tree, path)
    if holder is None:
        return []
    module, index = tree.modules[holder], layer_of(holder)
    if isinstance(bare(module), nn.ModuleList):
        single = [module_site(tree, child, "input", "expert") for child in tree.children[holder]]
        return [
            replace(site, name=f"{holder}:expert_{e}", point=_of_expert(e)) for e, site in enumerate(single)
        ]
    count = max((p.shape[0] for p in module.parameters() if p.ndim == 3), default=0)
    if not count or not _is_routed(module):
        return []
    width = tree.number(holder, "hidden_size", "hidden_dim")
    facts: dict[str, Any] = {"width": width, "layer": index, "may_be_empty": True}
    return [
        Site(
            *(f"{holder}:expert_{e}", holder, "input", "expert", _of_expert(e), argument),
            **facts,
            only=partial(_reached, e),
        )
        for e in range(count)
    ]


def _is_expert(site: Site, point: str) -> bool:
    """Whether `point`, "expert_3" or a word for all, means the site."""
    return point in {"experts", "expert_*"} or site.name.endswith(f":{point}")


def _of_expert(index: int) -> str:
    return f"input of expert {index}: the tokens routed to it"


def _is_routed(module: nn.Module) -> bool:
    """Whether the module is told which tokens go to which expert."""
    names = inspect.signature(type(bare(module)).forward).parameters
    return any("index" in name or "indices" in name for name in names)


def _reached(
    expert: int, module: nn.Module, args: Arguments, kwargs: Mapping[str, Any], output: Any
) -> Tensor:
    """Which of the tokens are routed to `expert`, in their leading shape.

    Raises:
        ValueError: the module was not told the routes.
    """
    given = tensors((*args, *kwargs.values()))
    routes = next((t for t in given if not t.is_floating_point() and t.ndim >= 2), None)
    if routes is None:
        raise ValueError("the experts were called without the indices of the experts of each token.")
    x = argument(module, args, kwargs, output)
    return (routes == expert).any(-1).reshape(x.shape[:-1])


def _why_not(tree: Tree, path: str, word: str) -> str:
    """Why a model or module lacks a place, as a clause."""
    point = {"attn_heads": "heads", "attn": "heads", "mlp": "hidden"}.get(word, word)
    if point == "q_rope":
        return "rotated queries go to no cache: take 'q', before the rotation"
    if point in ATTENTION_POINTS:
        found = attentions(tree, path, cross=True)
        return why_missing(tree, found[0], point) if found else "no attention is found there"
    if point == "hidden" and parts.experts(tree, path):
        return "its MLPs are experts: take 'experts', their inputs, or 'mlp_out'"
    if point == "experts" or EXPERT.match(point):
        return "no experts are routed to there, or it is not told which"
    if word == "resid_mid":
        return "attention and MLP run side by side, or the norms come after them"
    if word == "final":
        return "no norm follows the blocks: take 'resid'"
    return "no MLP is found there"


SHORTCUTS: dict[str, Shortcut] = {
    "resid": Shortcut(
        "residual stream after each block", partial(_resid, "output", "residual stream after the block")
    ),
    "resid_pre": Shortcut(
        "residual stream before each block", partial(_resid, "input", "residual stream before the block")
    ),
    "resid_mid": Shortcut("residual stream between attention and MLP", _middle),
    "final": Shortcut("before and after the final norm", _final),
    "attn": Shortcut("output of attention, after its output projection", _attention_output),
    "attn_heads": Shortcut("output of each head, before that projection", partial(_attention, "heads")),
    "q": Shortcut("queries per head", partial(_attention, "q")),
    "k": Shortcut("keys per head, before and after rotation", _keys),
    "k_rope": Shortcut("rotated keys per head, as cached", partial(_attention, "k_rope")),
    "v": Shortcut("values per head", partial(_attention, "v")),
    "kv_latent": Shortcut("latent of keys and values, after its norm", partial(_attention, "kv_latent")),
    "mlp": Shortcut("hidden activations of the MLP", _hidden),
    "mlp_out": Shortcut("output of the MLP", _mlp_output),
    "experts": Shortcut("inputs of each expert", _experts),
}
