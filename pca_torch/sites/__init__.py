"""What can be captured: names of modules, points of them, and shortcuts over model families."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from pca_torch.sites.blocks import decoder_layers
from pca_torch.sites.names import canonical_name, find_hits, match_sites, nearest
from pca_torch.sites.shortcuts import EXPERT, POINTS, SHORTCUTS, point_sites, shortcut_sites
from pca_torch.sites.site import Site
from pca_torch.sites.tree import Tree

__all__ = ["SHORTCUTS", "Site", "canonical_name", "decoder_layers", "find_sites", "match_sites"]

ORDER = ("input", "input_rows", "input_map", *POINTS)  # of the points of one module
LAYERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*$")


def find_sites(model: nn.Module, sites: str | Site | Sequence[str | Site] | None = None) -> list[Site]:
    """The places in a model that `sites` names, in the order of the model, each once.

    A name is one of
      - a shortcut over all blocks, see `SHORTCUTS`: "resid", "k"; of some layers: "resid@0-5,10";
      - the path of a submodule or a pattern over paths: "model.layers.*", its output;
      - a path or pattern with a point: "model.layers.3.mlp:input". Points of any module are `output` and
        `input`; where a tensor of four axes could be read in two ways, `rows` (features last) and `map`
        (B, C, ...), with `input_rows` and `input_map`. Of an attention module, or what holds one, `q`,
        `k`, `k_rope`, `v`, `kv_latent`, `heads`; of an MLP `hidden`; of experts `experts`, `expert_3`.

    Args:
        model: the module that will be called, its wrappers included.
        sites: names, or sites found before; None is the residual stream after every block. A word that is
            the path of a submodule means that.

    Returns:
        The sites; `Site.name` is a name that finds the same one again.

    Raises:
        ValueError: a name finds nothing, or a shortcut is of something that the model has not.
        TypeError: a name is no text.
    """
    tree = Tree(model)
    given = ["resid"] if sites is None else [sites] if isinstance(sites, str | Site) else sites
    if isinstance(given, nn.Module) or not isinstance(given, Iterable):
        raise TypeError(
            f"`sites` must be names or sites, got {type(given).__name__}; name a module by its path."
        )
    found: dict[tuple[nn.Module, str], Site] = {}
    for one in given:
        for site in [one] if isinstance(one, Site) else _parse(tree, one):
            point = site.name.rpartition(":")[2]
            found.setdefault((tree.modules.get(site.path, model), point), site)
    return sorted(found.values(), key=lambda site: _place(tree, site))


def _place(tree: Tree, site: Site) -> tuple[int, int]:
    """Where a site is in the order of the model: its module, then the points of that."""
    path, _, point = site.name.rpartition(":")
    kind = point.split("_")[0] if point not in ORDER else point
    order = ORDER.index(kind) if kind in ORDER else len(ORDER)
    return tree.order.get(path, len(tree.order)), order


def _parse(tree: Tree, name: str) -> list[Site]:
    """The sites of one name.

    Raises:
        ValueError: it finds nothing.
        TypeError: it is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"`sites` must hold names or Site objects, got {type(name).__name__}.")
    word, at, layers = name.partition("@")
    if word in SHORTCUTS and name not in tree.modules:
        return shortcut_sites(tree, word, _layers(name, layers) if at else None)
    pattern, colon, point = name.partition(":")
    if colon and point not in POINTS and not EXPERT.match(point):
        raise ValueError(f"`sites` has {name!r}; the point after ':' must be one of {', '.join(POINTS)}.")
    paths = find_hits(pattern, tree.modules) or find_hits(canonical_name(tree.model, pattern), tree.modules)
    if not paths:
        close = nearest(pattern, [*tree.modules, *SHORTCUTS])
        raise ValueError(
            f"`sites` has {name!r}, which is no submodule of the model and no shortcut; {close}."
        )
    return _of_paths(tree, paths, point or "output")


def _of_paths(tree: Tree, paths: list[str], point: str) -> list[Site]:
    """The sites of `point` in those of `paths` that have it.

    Raises:
        ValueError: none has.
    """
    found, errors = [], []
    for path in paths:
        try:
            found += point_sites(tree, path, point)
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def _layers(name: str, text: str) -> set[int]:
    """The indices in "0-5,10".

    Raises:
        ValueError: it is not of this form, or a span descends.
    """
    if not LAYERS.match(text):
        raise ValueError(f"`sites` has {name!r}; write layers after '@' as 'resid@0-5,10'.")
    chosen: set[int] = set()
    for span in text.split(","):
        first, _, last = span.partition("-")
        if last and int(last) < int(first):
            raise ValueError(f"`sites` has {name!r}; write the span {span!r} upwards, '{last}-{first}'.")
        chosen.update(range(int(first), int(last or first) + 1))
    return chosen
