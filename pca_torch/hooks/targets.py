"""The keys of `sinks` as sites, modules and sinks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from pca_torch.hooks.cache_tap import cache_argument
from pca_torch.hooks.sinks import Sink, check_sink
from pca_torch.sites import SHORTCUTS, Site, find_sites
from pca_torch.sites.names import canonical_name, find_hits, listing, modules_by_name, nearest
from pca_torch.sites.tree import bare

__all__ = ["Sinks", "Target", "find_targets"]

Sinks = Mapping[str, Sink] | Mapping[Site, Sink] | Mapping[str | Site, Sink]


@dataclass(frozen=True, eq=False)
class Target:
    """One site, the module to hook for it, and what takes its activations."""

    label: str  # as the caller named it
    site: Site
    module: nn.Module
    sink: Sink


def find_targets(model: nn.Module, sinks: Sinks) -> dict[str, Target]:
    """Targets by label, in the order of `sinks`.

    Args:
        model: the model.
        sinks: sinks by site, or by what names exactly one.

    Raises:
        ValueError: keys that name no site, or several, or one of a cache where there is none.
        TypeError: a sink that can take nothing.
    """
    modules = modules_by_name(model)
    named = _sites_of(model, [key for key in sinks if isinstance(key, str)], modules)
    targets: dict[str, Target] = {}
    for key, sink in sinks.items():
        label = key if isinstance(key, str) else key.name
        check_sink(label, sink)
        if label in targets:
            raise ValueError(f"`sinks` has {label!r} twice, as a name and as a site; give it once.")
        site = key if isinstance(key, Site) else named[key]
        if site.path not in modules:
            close = nearest(site.path, modules)
            raise ValueError(f"`sinks` has {label!r}, a site that the model has not; {close}.")
        module = modules[site.path]
        if site.side == "cache":
            module = bare(module)  # a wrapper does not name the arguments
            if cache_argument(module) is None:
                raise ValueError(
                    f"`sinks` has {label!r}, but {type(module).__name__} takes no cache to see keys in; "
                    "capture them before rotary embedding."
                )
        targets[label] = Target(label, site, module, sink)
    return targets


def _sites_of(model: nn.Module, keys: list[str], modules: Mapping[str, nn.Module]) -> dict[str, Site]:
    """The one site that each key names.

    Raises:
        ValueError: plain paths lead nowhere, all said at once, or a key is for several sites.
    """
    plain = [key for key in keys if ":" not in key and key.partition("@")[0] not in SHORTCUTS]
    unknown = [
        key for key in plain if not any(find_hits(k, modules) for k in (key, canonical_name(model, key)))
    ]
    if unknown:
        close = "; ".join(nearest(key, modules) for key in unknown[:3])
        raise ValueError(f"`sinks` names {listing(unknown)}, no submodule of the model; {close}.")
    at_once = {site.name: site for site in find_sites(model, keys)} if keys else {}
    found: dict[str, Site] = {}
    for key in keys:
        site = at_once.get(f"{key}:output" if key in plain else key)
        sites = find_sites(model, key) if site is None else [site]
        if len(sites) != 1:
            names = listing([site.name for site in sites])
            raise ValueError(
                f"`sinks` has {key!r} for {names}; expand it with `find_sites`, a sink for each."
            )
        found[key] = sites[0]
    return found
