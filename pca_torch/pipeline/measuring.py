"""One pass of a model over batches: what its sites saw, reduced inside the hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch.hooks import capture
from pca_torch.selection import TokenSelection
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site, canonical_name

__all__ = ["Batch", "Progress", "count_tokens", "measure"]

Batch = Mapping[str, Any] | Tensor
Progress = Callable[[int], object]  # is told how many tokens or rows were just done


def measure(
    model: nn.Module,
    batches: Iterable[Batch],
    sinks: Mapping[Site, SiteStatistic],
    selection: TokenSelection,
    *,
    shared: Mapping[str, str] | None = None,
    stop_early: bool | None = None,
    progress: Progress | None = None,
    counted: Callable[[Mapping[str, str]], object] | None = None,
) -> dict[str, str]:
    """Feed every site's activations to its statistic; the model is put in eval mode while this runs.

    Activations are reduced inside the hook, nothing of them is kept. The head of a language model is not run
    unless a site needs it.

    Args:
        model: any module.
        batches: arguments for it, by keyword or as one tensor.
        sinks: what takes the activations of each site.
        selection: which tokens count.
        stop_early: end a forward when every site has fired as often as in the first; right if no module runs
            more often in one forward than in another. None is so for models of transformers.
        shared: what an earlier call with the same sinks returned, to go on with it.
        progress: told the tokens of each batch after it.
        counted: called after each batch, when all sites have it, with what is returned at the end.

    Returns:
        Sites that saw the very tensors of another, each with the name of that one.

    Raises:
        ValueError: no batch, or a site refused its rows.
        TypeError: a batch is neither.
    """
    body, seen = _body(model, sinks), 0
    extras = {"use_cache": False} if "use_cache" in inspect.signature(body.forward).parameters else {}
    stop = _is_transformer(model) if stop_early is None else stop_early
    hooked = capture(model, sinks, mask=selection, share=shared or True, stop_early=stop)
    with _evaluating(model), torch.no_grad(), hooked as captured:
        for batch in batches:
            if not isinstance(batch, (Mapping, Tensor)):
                raise TypeError(
                    f"`batches` must hold mappings of arguments or tensors, got {type(batch).__name__}; "
                    "take what the model reads out of it."
                )
            if isinstance(batch, Mapping):
                captured.run(body, **{**extras, **selection.split(batch, body)})
            else:
                captured.run(body, batch, **extras)
            seen += 1
            if counted is not None:
                counted(captured.shared)
            if progress is not None:
                progress(count_tokens(batch))
        if not seen:
            raise ValueError("`batches` must hold at least one batch, got none.")
    return captured.shared


def count_tokens(batch: Batch) -> int:
    """Tokens of a batch, padding included.

    Args:
        batch: arguments by keyword, or a tensor of ids or embeddings.
    """
    values = batch.values() if isinstance(batch, Mapping) else [batch]
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        return 0
    return first.shape[:-1].numel() if first.is_floating_point() else first.numel()


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Eval mode inside; each part gets its own mode back: what was frozen in training stays frozen."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _is_transformer(model: nn.Module) -> bool:
    """Whether this is a model of transformers, not one with a `base_model` of its own, as PEFT's have."""
    return isinstance(getattr(type(model), "base_model_prefix", None), str)


def _body(model: nn.Module, sites: Iterable[Site]) -> nn.Module:
    """What to call: a language model without its head, if no site needs that."""
    body = getattr(model, "base_model", model) if _is_transformer(model) else model
    if not isinstance(body, nn.Module):
        return model
    inside = {
        canonical_name(model, name) for name, part in model.named_modules() if part in set(body.modules())
    }
    return body if all(site.path in inside for site in sites) else model
