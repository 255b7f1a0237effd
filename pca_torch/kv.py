"""Principal directions of what a key-value cache holds, head by head, whatever the container."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_mask, as_tensor, check_choice, check_whole
from pca_torch.covariances import batch_covariance
from pca_torch.solvers import BatchedResult, decompose_batch

__all__ = ["cache_spectra", "cached", "head_spectra"]

Which = Literal["keys", "values"]
SIDES = ("keys", "values")


def cached(cache: Any, which: Which = "keys") -> dict[int, Tensor]:
    """The keys or values (B, H, T, E) of each layer that has some, by the index of the layer.

    Read are a sequence of pairs (keys, values); an object with lists `key_cache` and `value_cache`; one with
    `layers` that have `keys` and `values`. Layers without them, such as those that share the keys of
    another, that nothing was written to, or of linear attention, are left out. What a static layer has
    allocated but not filled is cut off.

    Args:
        cache: of a model.
        which: "keys" or "values".

    Raises:
        TypeError: none of these containers.
        ValueError: a quantised layer, which keeps only its newest tokens as numbers, or another shape.
    """
    check_choice(which, "which", SIDES)
    found = {}
    for layer, tensor in _entries(cache, which):
        if tensor is None:
            continue
        tensor = as_tensor(tensor, f"{which} of layer {layer}")
        if tensor.ndim == 4 and tensor.numel():
            found[layer] = tensor
        elif tensor.numel():
            raise ValueError(
                f"`cache` must hold {which} (B, H, T, E), got {tuple(tensor.shape)} in layer {layer}."
            )
    return found


def head_spectra(
    states: Any,
    n_components: int | None = None,
    *,
    num_key_value_heads: int | None = None,
    mask: Any = None,
    center: bool = True,
    ddof: float = 1,
) -> BatchedResult:
    """Principal directions of each head of one layer, over all sequences and positions.

    Args:
        states: keys, values or queries (B, H, T, E); heads come before positions, as in a cache.
        n_components: K in 0..E, or None for all.
        num_key_value_heads: how many heads were computed, where each was repeated for the queries that share
            it (grouped-query attention): repeats are left out, and have to be repeats.
        mask: (B, T), 0 or 1: which positions count; None is all of them.
        center: subtract the mean of each head; False gives second moments.
        ddof: delta degrees of freedom.

    Returns:
        Leading dimension H, or `num_key_value_heads`.

    Raises:
        ValueError: another shape, NaN or inf, too few positions, or heads that are no repeats.
    """
    x = as_tensor(states, "states").detach()
    if x.ndim != 4 or not x.shape[1] or not x.shape[3]:
        raise ValueError(f"`states` must be (batch, heads, positions, width), got shape {tuple(x.shape)}.")
    if num_key_value_heads is not None:
        x = _without_repeats(x, num_key_value_heads)
    keep = as_mask(mask, (x.shape[0], x.shape[2]), x.device)
    rows = x.movedim(1, 0).flatten(1, 2)  # (H, B·T, E): a plain reshape would mix the heads
    covariance = batch_covariance(rows if keep is None else rows[:, keep], center=center, ddof=ddof)
    return decompose_batch(covariance, n_components)


def cache_spectra(
    cache: Any,
    n_components: int | None = None,
    *,
    which: Which = "keys",
    num_key_value_heads: int | None = None,
    mask: Any = None,
    center: bool = True,
    ddof: float = 1,
) -> dict[int, BatchedResult]:
    """Principal directions of each head of each layer of a cache.

    Keys of a cache are rotated (post-RoPE) in models that rotate them: their basis is for keys on that side.

    Args:
        cache: see `cached`.
        n_components: K in 0..E, or None for all.
        which: "keys", or "values" for those instead.
        num_key_value_heads: see `head_spectra`.
        mask: (B, T), 0 or 1: which positions count. A layer that holds fewer positions, such as one with a
            sliding window, has the last ones.
        center: subtract the mean of each head; False gives second moments.
        ddof: delta degrees of freedom.

    Returns:
        By the index of the layer; without the layers that hold nothing.

    Raises:
        ValueError: no layer holds anything, or what `head_spectra` refuses, with the layer.
    """
    layers = cached(cache, which)
    if not layers:
        raise ValueError(f"`cache` holds no {which}; run the model with it first.")
    marks = None if mask is None else as_tensor(mask, "mask")
    results = {}
    for layer, states in layers.items():
        try:
            results[layer] = head_spectra(
                states,
                n_components,
                num_key_value_heads=num_key_value_heads,
                mask=marks if marks is None else marks[..., -states.shape[2] :],
                center=center,
                ddof=ddof,
            )
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error
    return results


def _entries(cache: Any, which: Which) -> Iterator[tuple[int, Any]]:
    """What each layer holds, None where nothing.

    Raises:
        TypeError: no cache of a known kind.
    """
    old = getattr(cache, "key_cache" if which == "keys" else "value_cache", None)
    layers = getattr(cache, "layers", None)
    if layers is not None:
        yield from ((i, _of_layer(layer, which, i)) for i, layer in enumerate(layers))
    elif old is not None:
        yield from enumerate(old)
    elif isinstance(cache, tuple | list):
        yield from ((i, None if pair is None else pair[SIDES.index(which)]) for i, pair in enumerate(cache))
    else:
        inside = " pass its `self_attention_cache`" if hasattr(cache, "self_attention_cache") else ""
        raise TypeError(
            f"`cache` must be a sequence of (keys, values), or have `layers` or `key_cache`, got "
            f"{type(cache).__name__};{inside or ' pass what the model returned as its cache'}."
        )


def _of_layer(layer: Any, which: Which, index: int) -> Any:
    """The keys or values of one layer object.

    Raises:
        ValueError: they are quantised.
    """
    if getattr(layer, f"_quantized_{which}", None) is not None:
        raise ValueError(
            f"`cache` is quantised in layer {index}; capture the site of the {which} with hooks instead."
        )
    tensor = getattr(layer, which, None)
    if tensor is None or not hasattr(layer, "max_cache_len"):
        return tensor
    return tensor[..., : int(layer.get_seq_length()), :]  # allocated at full length, zeros beyond


def _without_repeats(x: Tensor, n: int) -> Tensor:
    """One of each group of equal heads.

    Raises:
        ValueError: they are not equal, or do not divide into `n` groups.
    """
    check_whole(n, "num_key_value_heads", 1)
    heads = x.shape[1]
    if heads % n:
        raise ValueError(f"`num_key_value_heads` must divide the {heads} heads of `states`, got {n}.")
    groups = x.unflatten(1, (n, heads // n))
    first = groups[:, :, :1]
    if not torch.equal(groups, first.expand_as(groups)):
        raise ValueError(
            f"`states` must repeat each of {n} heads {heads // n} times in a row, but they differ; leave "
            "`num_key_value_heads` out, as for queries."
        )
    return first[:, :, 0]
