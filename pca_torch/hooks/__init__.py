"""Hooks: feed the output of named submodules to statistics while a model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pca_torch.sites.names import (
    canonical_name,
    find_hits,
    listing,
    match_sites,
    modules_by_name,
    nearest,
    roots,
)

__all__ = ["canonical_name", "capture", "match_sites"]


@runtime_checkable
class Statistic(Protocol):
    """What `capture` hands whole outputs to."""

    def update(self, x: Tensor, /, *, mask: Tensor | None = None) -> object:
        """Absorb `x` (..., D), of which `mask` (...) keeps some rows, None all."""
        ...


Sink = Statistic | Callable[[Tensor], object]
FindMask = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Tensor | None]


@contextmanager
def capture(
    model: nn.Module, sinks: Mapping[str, Sink], *, mask: str | FindMask | None = "attention_mask"
) -> Generator[None, None, None]:
    """Feed the output of each named submodule, detached, to its sink while the block runs.

    Of a tuple, list or mapping the first floating tensor counts. Sinks run without autograd and
    autocast; what they raise is held until the forward has returned. What activation checkpointing
    computes again in the backward pass is not fed again. If `model` holds compiled modules, compiled
    code runs eagerly inside the block: a graph ignores hooks it was not traced with.

    Args:
        model: the module that will be called, its wrappers included.
        sinks: per site, by canonical or full name, an object with `update(x, mask=...)`, which gets the
            output as it is and a boolean mask of its leading shape or None; or a callable, which gets
            the kept rows as a fresh (n, D) tensor.
        mask: the argument of the forward that marks the rows to keep, (B, T) of 0 and 1. Where it is
            longer than the input, as in a decoding step, its last columns count. A callable
            `(module, args, kwargs)` makes such a mask itself; None keeps every row.

    Raises:
        ValueError: before the model is touched, a name is unknown or a pattern for several sites; after
            a forward, a sink refused its rows, or an output or the mask did not fit.
        TypeError: a sink or `mask` is of the wrong kind.
        RuntimeError: the block is over and a site never fired.
    """
    targets = _targets(model, sinks)
    run = _Run(mask)
    with ExitStack() as stack:
        if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for key, module in targets.items():
            stack.callback(module.register_forward_hook(partial(run.feed, key, sinks[key])).remove)
        for root in roots(model):  # after the sites: a root that is a site is fed before it is left
            stack.callback(root.register_forward_pre_hook(run.enter, with_kwargs=True).remove)
            stack.callback(root.register_forward_hook(run.leave, always_call=True).remove)
            stack.callback(root.register_forward_hook(run.report).remove)
        yield
    run.raise_held()
    run.check_all_fired(sinks)


class _Run:
    """One `capture`: the masks of the forwards under way, the sites that fired, the errors held."""

    def __init__(self, mask: str | FindMask | None) -> None:
        if not (mask is None or isinstance(mask, str) or callable(mask)):
            raise TypeError(
                f"`mask` must be an argument's name, a callable or None, got {type(mask).__name__}."
            )
        self.source = mask
        self.under_way: list[tuple[nn.Module, Tensor | None]] = []  # roots and their masks, outermost first
        self.fired: set[str] = set()
        self.held: dict[str, Exception] = {}

    @property
    def mask(self) -> Tensor | None:
        """The (B, T) mask of the forward under way."""
        return self.under_way[-1][1] if self.under_way else None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a root runs: its mask is that of the outermost root that was given one."""
        mask = self.mask
        if mask is None and self.source is not None:
            mask = _read_mask(self.source, module, args, kwargs)
        self.under_way.append((module, mask))

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """After a root ran, also when it raised: forget its mask."""
        if any(root is module for root, _ in self.under_way):  # not so if `enter` itself raised
            while self.under_way.pop()[0] is not module:
                pass

    def report(self, module: nn.Module, args: object, output: object) -> None:
        """After the outermost root returned: raise what its sites held back."""
        if not self.under_way:
            self.raise_held()

    def feed(self, key: str, sink: Sink, module: nn.Module, args: object, output: object) -> None:
        """After a site ran: hand its output to the sink."""
        if torch._C._current_graph_task_id() != -1:  # inside backward: a recomputation
            return
        self.fired.add(key)
        try:
            x = _floating(output)
            mask = None if self.mask is None else _fit(self.mask, x)
            _hand_over(sink, x, mask)
        except Exception as error:  # raised by `report`, when the forward is through
            self.held.setdefault(key, error)

    def raise_held(self) -> None:
        """Raise the held errors as one, and forget them.

        Raises:
            ValueError: there are some.
        """
        if self.held:
            held, self.held = self.held, {}
            first = next(iter(held.values()))
            raise ValueError(f"sites {listing(held)}: {first}") from first

    def check_all_fired(self, keys: Collection[str]) -> None:
        """Refuse to end as if all were well when a site saw nothing.

        Raises:
            RuntimeError: one of `keys` never fired.
        """
        silent = [key for key in keys if key not in self.fired]
        if silent:
            raise RuntimeError(
                f"sites {listing(silent)} never fired. Call the model inside the block; a compiled one must "
                "be handed to `capture` as compiled, or captured before its first call; a module whose "
                "parent only reads its weights (`out_proj` of nn.MultiheadAttention) never fires: capture "
                "the parent."
            )


def _hand_over(sink: Sink, x: Tensor, mask: Tensor | None) -> None:
    """Give `x` to a statistic with its mask, or its kept rows to a callable."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        x = x.detach()
        if isinstance(sink, Statistic):
            sink.update(x, mask=mask)
        else:
            rows = x.flatten(0, -2)
            sink(rows.clone() if mask is None else rows[mask.flatten()])


def _floating(output: object) -> Tensor:
    """The tensor of samples in what a module returned.

    Raises:
        ValueError: there is none.
    """
    x = next((t for t in _tensors(output, depth=2) if t.is_floating_point()), None)
    got = type(output).__name__
    if x is None:
        got = f"a tensor of {output.dtype}" if isinstance(output, Tensor) else got
        raise ValueError(f"the output must be or hold a floating tensor, got {got}; capture another module.")
    if x.ndim < 2:
        raise ValueError(
            f"the output must have shape (..., D), two or more, got {got} with {tuple(x.shape)}."
        )
    return x


def _tensors(output: object, depth: int) -> Iterator[Tensor]:
    """Tensors in `output`, at most `depth` containers deep.

    Yields:
        the tensors in the order of the output.
    """
    if isinstance(output, Tensor):
        yield output
    elif depth and isinstance(output, (tuple, list, Mapping)):
        for item in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(item, depth - 1)


def _fit(mask: Tensor, x: Tensor) -> Tensor:
    """`mask` (B, T) in the leading shape of `x`: (B, T), (B, T, ...) or (B·T,).

    Raises:
        ValueError: `x` has none of these.
    """
    lead = x.shape[:-1]
    mask = mask.to(x.device)
    if lead[:2] == mask.shape:
        return mask.reshape(*mask.shape, *[1] * (len(lead) - 2)).expand(lead)
    if lead == (mask.numel(),):
        return mask.flatten()
    raise ValueError(
        f"the output of shape {tuple(x.shape)} does not fit the mask {tuple(mask.shape)}; pass `mask` as a "
        "callable that returns one that fits, or None to keep every row."
    )


def _read_mask(
    source: str | FindMask, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The mask of one forward as booleans, cut to the columns of the input.

    Raises:
        ValueError: it is not a (B, T) tensor of 0 and 1.
    """
    name = source if isinstance(source, str) else "mask"
    arguments = _arguments(module, args, kwargs)
    mask = arguments.get(source) if isinstance(source, str) else source(module, args, kwargs)
    if mask is None:
        return None
    remedy = "pass such a one, or make it with a callable as `mask`"
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"`{name}` must be a 2-D tensor (B, T) to select rows, got {got}; {remedy}.")
    keep = mask.bool()
    if not bool((mask == keep).all()):  # once per forward: sites get booleans and need not look
        raise ValueError(f"`{name}` must hold 0 and 1 only to select rows, got other values; {remedy}.")
    # The input says how long this step is; an output with fewer columns may be pooled, not decoded.
    inputs = (arguments.get("inputs_embeds"), arguments.get("input_ids"), *args, *arguments.values())
    first = next((value for value in inputs if isinstance(value, Tensor)), None)
    return keep if first is None or first.ndim < 2 else keep[:, -first.shape[1] :]


def _arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward by name, in the order of its signature."""
    signature = inspect.signature(module.forward)
    try:
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # not what the forward takes, as it will say itself
        return kwargs
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(parameter.name, {}))
    return arguments


def _targets(model: nn.Module, sinks: Mapping[str, Sink]) -> dict[str, nn.Module]:
    """The module to hook for each key of `sinks`.

    Raises:
        ValueError: keys that name no module, or a pattern that names several.
        TypeError: a sink that can take nothing.
    """
    sites = modules_by_name(model)
    targets, unknown = {}, []
    for key, sink in sinks.items():
        if isinstance(sink, nn.Module) and not hasattr(sink, "update"):
            raise TypeError(
                f"`sinks[{key!r}]` is a module, calling it keeps nothing; pass its `partial_fit`."
            )
        if not callable(sink) and not callable(getattr(sink, "update", None)):
            raise TypeError(
                f"`sinks[{key!r}]` must be callable or have an `update` method, got {type(sink).__name__}."
            )
        hits = find_hits(key, sites) or find_hits(canonical_name(model, key), sites)
        if len(hits) > 1:
            raise ValueError(f"`sinks` has {key!r} for {listing(hits)}; expand it with `match_sites`.")
        if hits:
            targets[key] = sites[hits[0]]
        else:
            unknown.append(key)
    if unknown:
        close = "; ".join(nearest(key, sites) for key in unknown[:3])
        raise ValueError(f"`sinks` names {listing(unknown)}, no submodule of the model; {close}.")
    return targets
