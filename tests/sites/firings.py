"""What sites read in a forward, through plain hooks and a cache that is watched: no code of the package."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pca_torch.sites import Site
from pca_torch.sites.names import modules_by_name


def read_sites(model: nn.Module, inputs: dict[str, Any], sites: list[Site]) -> dict[str, Tensor]:
    """By name, what each site read in one forward; where it names rows (`only`), those rows alone."""
    modules = modules_by_name(model)
    read: dict[str, Tensor] = {}
    hooked = defaultdict(list)
    for site in sites:
        hooked[site.path, site.side == "cache"].append(site)

    def note(site, module, args, kwargs, output):
        x = site.read(module, args, kwargs, output).detach().clone()
        read[site.name] = x if site.only is None else x[site.only(module, args, kwargs, output)]

    def listen(path):
        def hook(module, args, kwargs, output):
            for site in hooked[path, False]:
                note(site, module, args, kwargs, output)

        return hook

    handles = [
        modules[path].register_forward_hook(listen(path), with_kwargs=True)
        for path, cached in hooked
        if not cached
    ]
    cached = {modules[path].layer_idx: path for path, is_cached in hooked if is_cached}
    extra = {}
    if cached:
        cache = DynamicCache(config=model.config)
        update = cache.update

        def watched(keys, values, layer, *args, **kwargs):
            for site in hooked[cached.get(layer, ""), True]:
                note(site, modules[site.path], (keys, values, layer), {}, None)
            return update(keys, values, layer, *args, **kwargs)

        cache.update = watched
        extra = {"cache": cache, "use_cache": True}
    try:
        with torch.no_grad():
            model(**inputs, **extra)
    finally:
        for handle in handles:
            handle.remove()
    return read


def arguments_of(model: nn.Module, inputs: dict[str, Any], path: str) -> tuple[tuple, dict[str, Any], Any]:
    """Arguments and result of one module in one forward, before anything changes them in place."""
    got = []
    handle = modules_by_name(model)[path].register_forward_hook(
        lambda module, args, kwargs, output: got.append(deepcopy((args, kwargs, output))), with_kwargs=True
    )
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        handle.remove()
    return got[-1]
