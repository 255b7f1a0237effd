"""The modules of a model as a tree of canonical names: children, descendants, and the numbers they tell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from pca_torch.sites.names import WRAPPERS, modules_by_name, unwrapped

__all__ = ["Tree", "bare", "is_linear", "joined", "parent", "spatial_axes", "width_in", "width_out"]

MAP_LIKE = re.compile(r"(Conv|ConvTranspose|Norm|Pool|Dropout|Pad|Upsample)([123])d$")


class Tree:
    """Modules by canonical name; wrappers of compilation, checkpointing and sharding do not show."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.root = unwrapped(model)
        self.modules = modules_by_name(model)
        self.blocks: list[str] | None = None  # once they were looked for
        self.order = {path: i for i, path in enumerate(self.modules)}
        self.children: dict[str, list[str]] = {path: [] for path in self.modules}
        for path in self.modules:
            if path:
                self.children.setdefault(parent(path), []).append(path)

    def child(self, path: str, *names: str) -> str | None:
        """The path of the first of `names`, dotted ones too, that is below `path`."""
        return next((found for name in names if (found := joined(path, name)) in self.modules), None)

    def below(self, path: str) -> Iterator[str]:
        """`path` and the paths of all that is inside it, in model order."""
        yield path
        for child in self.children[path]:
            yield from self.below(child)

    def ancestors(self, path: str) -> Iterator[str]:
        """The paths above `path` that are modules, nearest first, the root last."""
        while path:
            path = parent(path)
            if path in self.modules:
                yield path

    def number(self, path: str, *names: str) -> int | None:
        """The first of `names` that the module, its configuration, or one above it gives as a number."""
        module = self.modules[path]
        above = (self.modules[p] for p in self.ancestors(path))
        configs = [getattr(holder, "config", None) for holder in (module, *above, self.root)]
        for holder in (module, *configs):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def setting(self, path: str, name: str) -> Any:
        """What the module or its own configuration says under `name`; None where neither does."""
        module = self.modules[path]
        value = getattr(module, name, None)
        return getattr(getattr(module, "config", None), name, None) if value is None else value

    def class_name(self, path: str) -> str:
        """The name of the class below all wrappers."""
        return type(bare(self.modules[path])).__name__


def parent(path: str) -> str:
    """The path one segment up."""
    return path.rpartition(".")[0]


def joined(path: str, name: str) -> str:
    """`name` below `path`, which may be the root."""
    return f"{path}.{name}" if path else name


def bare(module: nn.Module) -> nn.Module:
    """The module that a wrapper of compilation or checkpointing holds."""
    while inside := [child for name, child in module.named_children() if name in WRAPPERS]:
        module = inside[0]
    return module


def is_linear(module: nn.Module) -> bool:
    """Whether it projects features as nn.Linear does: quantised, adapted and transposed kinds as well."""
    return _integer(module, "in_features", "nx") is not None and width_out(module) is not None


def spatial_axes(module: nn.Module) -> int | None:
    """How many spatial axes follow the channels by the class of a module, such as 2 of nn.Conv2d."""
    found = (MAP_LIKE.search(kind.__name__) for kind in type(bare(module)).__mro__)
    return next((int(match[2]) for match in found if match), None)


def width_out(module: nn.Module) -> int | None:
    """Features of what a module returns, where its attributes tell."""
    told = _integer(module, "out_features", "nf")
    return told if told is not None else _leaf_width(bare(module), "out_channels", "embedding_dim")


def width_in(module: nn.Module) -> int | None:
    """Features of what a module takes, where its attributes tell."""
    told = _integer(module, "in_features", "nx")
    return told if told is not None else _leaf_width(bare(module), "in_channels")


def _integer(module: nn.Module, *names: str) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)


def _leaf_width(module: nn.Module, *names: str) -> int | None:
    """Features of a module without parts, by `names`, or those that a norm scales."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    if next(module.children(), None) is not None:
        return None
    told = _integer(module, *names, "num_features", "num_channels")
    weight = getattr(module, "weight", None)
    if told is not None or not isinstance(weight, Tensor) or weight.ndim != 1:
        return told
    return len(weight) if "Norm" in type(module).__name__ else None
