"""Submodules by name: without the segments of wrappers, by patterns, and the roots that callers call."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from torch import nn

__all__ = [
    "canonical_name",
    "find_hits",
    "listing",
    "match_sites",
    "modules_by_name",
    "nearest",
    "roots",
    "stacks",
    "unwrapped",
]

# Segments that torch.compile, activation checkpointing and FSDP put into the path of what they wrap.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
STACKS = (("encoder", "text_encoder"), ("decoder", "text_decoder"))  # of a model that has both
NAMES_WRITTEN = 10  # an error about every layer of a large model stays readable


def canonical_name(model: nn.Module, name: str) -> str:
    """`name` without the segments of wrappers: what the same site is called in the bare model.

    Stripped are `_orig_mod`, `_checkpoint_wrapped_module` and `_fsdp_wrapped_module` anywhere, and at
    the root `module` (DistributedDataParallel and its kin) and `base_model.model` (PEFT adapters).

    Args:
        model: the model in whose paths `name` was found.
        name: dotted path of a submodule, or a pattern over such paths.
    """
    segments, path = name.split("."), _wrapper_path(model)
    while segments and path and segments[0] == path[0]:
        segments, path = segments[1:], path[1:]
    return ".".join(s for s in segments if s not in WRAPPERS)


def match_sites(model: nn.Module, patterns: str | Sequence[str]) -> list[str]:
    """Canonical names of the submodules that match any of `patterns`, in model order, each module once.

    Args:
        model: the model to look in.
        patterns: dotted paths, canonical or as `named_modules` gives them. `*`, `?` and `[...]` match
            within one segment, `**` any number of segments: "model.layers.*" is the layers alone.

    Raises:
        ValueError: a pattern matches nothing.
    """
    sites = modules_by_name(model)
    found: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matched = find_hits(pattern, sites) or find_hits(canonical_name(model, pattern), sites)
        if not matched:
            raise ValueError(
                f"`patterns` has {pattern!r}, which is no submodule of the model; {nearest(pattern, sites)}."
            )
        found.update(matched)
    first: dict[nn.Module, str] = {}
    for name in sites:
        if name in found:
            first.setdefault(sites[name], name)
    return list(first.values())


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical name in model order; of a wrapper and what it wraps, the wrapper."""
    sites: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        sites.setdefault(canonical_name(model, name), module)
    return sites


def _wrapper_path(model: nn.Module) -> list[str]:
    """Segments from `model` down to the first module that wraps no other."""
    path: list[str] = []
    while True:
        names = [name for name, _ in model.named_children()]
        if names == ["base_model"] and [n for n, _ in model.get_submodule("base_model").named_children()] == [
            "model"
        ]:
            names.append("model")
        elif len(names) != 1 or names[0] not in WRAPPERS | {"module"}:
            return path
        path += names
        model = model.get_submodule(".".join(names))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside all that wraps it at the root."""
    return model.get_submodule(".".join(_wrapper_path(model)))


def roots(model: nn.Module) -> list[nn.Module]:
    """Modules that callers call: `model`, what it wraps, and the `base_model` of that (transformers)."""
    path = _wrapper_path(model)
    found = [model.get_submodule(".".join(path[:i])) for i in range(len(path) + 1)]
    base = getattr(found[-1], "base_model", None)
    return list(dict.fromkeys([*found, base] if isinstance(base, nn.Module) else found))


def stacks(model: nn.Module) -> list[nn.Module]:
    """Encoder and decoder, in this order, of a model of transformers that has both; of any other none.

    Each reads tokens of its own, and is called with ids and a mask that have the same names in both.

    Args:
        model: the model, its wrappers included.
    """
    inside = unwrapped(model)
    if not getattr(getattr(inside, "config", None), "is_encoder_decoder", False):
        return []
    for holder in inside.modules():
        named = dict(holder.named_children())
        found = [next((named[name] for name in names if name in named), None) for names in STACKS]
        both = [stack for stack in found if stack is not None]
        if len(both) == len(STACKS):
            return both
    return []


def find_hits(pattern: str, sites: Collection[str]) -> list[str]:
    """Names that `pattern` matches; the root only if it is named, by the empty name."""
    if pattern in sites:
        return [pattern]
    return [name for name in sites if name and _matches(name.split("."), pattern.split("."))]


def _matches(name: list[str], pattern: list[str]) -> bool:
    """Whether the segments of `name` match those of `pattern`."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_matches(name[i:], pattern[1:]) for i in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def nearest(name: str, sites: Collection[str]) -> str:
    """The existing names most like `name`, as a clause."""
    close = difflib.get_close_matches(name, [site for site in sites if site], n=3, cutoff=0)
    return f"nearest to {name!r}: {', '.join(map(repr, close)) or 'none, it has no submodules'}"


def listing(names: Collection[str]) -> str:
    """The first names quoted, and how many more there are."""
    written = ", ".join(repr(name) for name in list(names)[:NAMES_WRITTEN])
    more = len(names) - NAMES_WRITTEN
    return f"{written} and {more} more" if more > 0 else written
