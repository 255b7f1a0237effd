"""A list of what can be captured in a model, with shapes: by shortcut, layers together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch.sites import find_sites
from pca_torch.sites.names import modules_by_name, unwrapped
from pca_torch.sites.shortcuts import available
from pca_torch.sites.site import Site
from pca_torch.sites.tree import Tree

__all__ = ["SiteGroup", "describe_sites", "tiny_batch"]


@dataclass(frozen=True)
class SiteGroup:
    """Sites that differ in the index of their block alone, or in that of their expert."""

    shortcut: str | None  # the word that finds them; None where they were named otherwise
    name: str  # of one with "*" for what differs: "model.layers.*:output"
    layers: str  # the indices that differ: "0-29"; empty for one site
    shape: str  # of what is read: "(B, T, 576)", "(B, T, 3 heads × 64)", "(..., 64)" where rows are no tokens
    point: str  # in words
    sites: tuple[Site, ...]


def describe_sites(
    model: nn.Module,
    sites: str | Site | Sequence[str | Site] | None = None,
    *,
    batch: Mapping[str, Any] | None = None,
) -> list[SiteGroup]:
    """What can be captured in a model.

    Args:
        model: any module.
        sites: names as `find_sites` takes them; None is every shortcut that the model has.
        batch: arguments for one forward, by which widths are read that no attribute tells; None is a batch
            of one token or picture where the model is one of transformers, else those widths are left open.

    Returns:
        Groups in the order of the shortcuts, or that of the model where `sites` is given.

    Raises:
        ValueError: a name finds nothing.
    """
    if sites is None:
        words = available(Tree(model))
        named = [(word, find_sites(model, word)) for word in words if word != "k_rope" or "k" not in words]
    else:
        named = [(None, find_sites(model, sites))]
    unknown = [site for _, found in named for site in found if site.width is None]
    widths = _measured(model, unknown, tiny_batch(model) if batch is None else batch) if unknown else {}
    lead = "B, T" if getattr(unwrapped(model), "main_input_name", None) == "input_ids" else "..."
    return [group for word, found in named for group in _groups(word, found, widths, lead)]


def tiny_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Arguments for the cheapest forward of a model of transformers; None for any other."""
    root = unwrapped(model)
    main = getattr(root, "main_input_name", None)
    where = next(model.parameters(), torch.empty(0, device="cpu")).device
    config: Any = getattr(root, "config", None)
    if main == "input_ids":
        ids = torch.zeros(1, 1, dtype=torch.long, device=where)
        both = getattr(config, "is_encoder_decoder", False)
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if both else {})
    size = getattr(config, "image_size", None) or 32
    if main == "pixel_values" and isinstance(size, int):
        channels, dtype = getattr(config, "num_channels", 3), getattr(root, "dtype", torch.float32)
        return {"pixel_values": torch.zeros(1, channels, size, size, dtype=dtype, device=where)}
    return None


def _measured(model: nn.Module, sites: Sequence[Site], batch: Mapping[str, Any] | None) -> dict[str, int]:
    """Widths that one forward shows, by name; of what does not run or cannot be read none."""
    widths: dict[str, int] = {}
    if batch is None:
        return widths

    def note(site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        with suppress(ValueError):  # it holds no rows; capturing it will say why
            widths.setdefault(site.name, site.read(module, args, kwargs, out).shape[-1])

    modules = modules_by_name(model)
    hooks = [
        modules[site.path].register_forward_hook(partial(note, site), with_kwargs=True)
        for site in sites
        if site.side != "cache"
    ]
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        # A model that needs more than this batch leaves its widths unknown, for whatever reason it raises.
        with torch.no_grad(), warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return widths


def _groups(word: str | None, sites: Sequence[Site], widths: Mapping[str, int], lead: str) -> list[SiteGroup]:
    """Sites whose names differ in digits alone, together, in the order of the first of each."""
    together: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        together.setdefault((_pattern(site), _shape(site, widths, lead)), []).append(site)
    return [
        SiteGroup(
            shortcut=word,
            name=members[0].name if len(members) == 1 else pattern,
            layers=_spans({site.layer for site in members}) if len(members) > 1 else "",
            shape=shape,
            point=_in_common([site.point for site in members]),
            sites=tuple(members),
        )
        for (pattern, shape), members in together.items()
    ]


def _pattern(site: Site) -> str:
    """The name with "*" for the index of the block and that of the expert."""
    path, _, point = site.name.rpartition(":")
    segments = path.split(".")
    if site.layer is not None:
        segments[segments.index(str(site.layer))] = "*"
    return f"{'.'.join(segments)}:{'expert_*' if point.startswith('expert_') else point}"


def _shape(site: Site, widths: Mapping[str, int], lead: str) -> str:
    width = site.width or widths.get(site.name)
    features = "?" if width is None else str(width)
    if site.heads > 1 and width is not None:
        features = f"{site.heads} heads × {width // site.heads}"
    return f"({'tokens' if site.kind == 'expert' else lead}, {features})"


def _in_common(points: Sequence[str]) -> str:
    """What is said of all: the words without the numbers in which they differ."""
    first = points[0].split()
    same = [all(word in other.split() for other in points) for word in first]
    return " ".join(word if kept else "…" for word, kept in zip(first, same, strict=True))


def _spans(indices: set[int | None]) -> str:
    """The indices as "0-5,10"."""
    known = sorted(index for index in indices if index is not None)
    spans: list[list[int]] = []
    for index in known:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ",".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
