"""`capture`: hooks on a model while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from pca_torch.hooks.cache_tap import CacheTap, cache_argument
from pca_torch.hooks.compiled import has_graphs, is_compiled
from pca_torch.hooks.masks import FindMask
from pca_torch.hooks.run import Run, StopForward, When
from pca_torch.hooks.targets import Sinks, Target, find_targets
from pca_torch.sites.names import roots, stacks

__all__ = ["Captured", "capture"]


class Captured:
    """What a capture tells while it runs and afterwards."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def shared(self) -> dict[str, str]:
        """Of each site that saw what another saw, whose sink holds its rows too; its own is empty."""
        return {} if self._run.sharing is None else dict(self._run.sharing.leaders)

    @property
    def rootless(self) -> bool:
        """Whether a site fired while the model was not running, whose mask was therefore not seen."""
        return self._run.rootless

    def run(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model once; under `stop_early` only as far as its last site.

        Args:
            call: the model, or what calls it once. It is stopped once every site has fired as often as in
                the first forward that ran to its end and reached them all.
            args: for the call.
            kwargs: for the call.

        Returns:
            What `call` returns, None where it was stopped.

        Raises:
            ValueError: a sink refused its rows, or an output or the mask did not fit.
        """
        self._run.stopping = True
        try:
            return call(*args, **kwargs)
        except StopForward:
            self._run.raise_held()
            return None
        finally:
            self._run.stopping = False


@contextmanager
def capture(
    model: nn.Module,
    sinks: Sinks,
    *,
    mask: str | FindMask | None = "attention_mask",
    share: bool | Mapping[str, str] = False,
    stop_early: bool = False,
    when: When | None = None,
    must_fire: bool = True,
) -> Generator[Captured]:
    """Feed the activations of each site, detached, to its sink while the block runs.

    Inputs are read before a module runs, as hooks set before the block left them; outputs after it, before
    hooks set inside the block. Sinks run without autograd and autocast; what they raise is held until the
    forward has returned. What activation checkpointing computes again in the backward pass is not fed again.
    Copies of the model made inside the block are not captured. If `model` holds compiled modules, or a site
    is in a cache, or modules of the classes that are hooked were called compiled before the block, compiled
    code runs eagerly inside it: a graph ignores hooks it was not traced with. A model whose classes are
    first called compiled inside the block keeps its graph whole.

    Args:
        model: the module that will be called, its wrappers included.
        sinks: per site, given as such or as what names one ("model.layers.3", "model.layers.3:input",
            "k@3"), an object with `update(x, mask=...)`, which gets the activations as they are and a boolean
            mask of their leading shape or None; or a callable, which gets the kept rows as a fresh (n, D)
            tensor. `Statistic` says what else an object may have.
        mask: the argument of the forward that marks the rows to keep, (B, T) of 0 and 1. Where it is
            longer than the input, as in a decoding step, its last columns count. Activations lead with
            (B, T): those that lead with (T, B) are refused unless T is B, where nothing tells. A callable
            `(module, args, kwargs)` makes such a mask itself, once per forward; None keeps every row. Encoder
            and decoder of a model of transformers that has both are told their own: "attention_mask" is
            each time that of the stack, and a callable is called for the model and for each of them. Which
            rows reached an expert that is a module of its own is not known, so no token may be left out.
        share: count once what several sites see as the very same tensor, so long as they do and their sinks,
            empty at first and of one class, have `copy_from`; `shared` of what the block gets says whose sink
            speaks for whom. Such a mapping, of an earlier capture with the same sinks, goes on with it.
        stop_early: end forwards that go through `run` of what the block gets after their last site.
        when: asked with the model before each forward, whether that counts; None counts all. In compiled code
            it is asked while a graph is traced, so it may look at `training` and at autograd alone.
        must_fire: refuse to end where a site never fired.

    Raises:
        ValueError: before the model is touched, a name is unknown or for several sites; after a forward, a
            sink refused its rows, or an output or the mask did not fit.
        TypeError: a sink or `mask` is of the wrong kind.
        RuntimeError: the block is over and a site never fired that must.
    """
    targets = find_targets(model, sinks)
    run = Run(targets, roots(model), stacks(model), mask, share, stop_early, when)
    with ExitStack() as stack:
        cached = any(target.site.side == "cache" for target in targets.values())
        if cached or is_compiled(model) or has_graphs(_hooked_and_above(model, run)):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for root in run.roots:  # before the sites: a root that is a site is entered before it is fed
            stack.callback(root.register_forward_pre_hook(_Hook(run.enter), with_kwargs=True).remove)
        for target in targets.values():
            _attach(target, run, stack)
        for root in run.roots:  # after the sites, likewise
            stack.callback(root.register_forward_hook(_Hook(run.leave), always_call=True).remove)
            stack.callback(root.register_forward_hook(_Hook(run.report)).remove)
        yield Captured(run)
    run.raise_held()
    if must_fire:
        run.check_all_fired()


def _attach(target: Target, run: Run, stack: ExitStack) -> None:
    """Hook one site, until `stack` closes."""
    module = target.module
    if target.site.side == "output":
        stack.callback(module.register_forward_hook(_Hook(run.feed, target), with_kwargs=True).remove)
    elif target.site.side == "input":
        before = _Hook(run.feed, target, after=(None,))
        stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    else:
        argument = cache_argument(module)
        assert argument is not None  # `find_targets` has seen to it
        tap = CacheTap(module, argument, lambda came: run.feed(target, module, came, {}, None))
        stack.callback(tap.close)
        stack.callback(module.register_forward_pre_hook(_Hook(tap.open), with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(_Hook(tap.closed), always_call=True).remove)


def _hooked_and_above(model: nn.Module, run: Run) -> list[nn.Module]:
    """The modules that are hooked, and all in the model that hold one of them."""
    hooked = {*run.roots, *(target.module for target in run.targets.values())}
    return [*run.roots, *(m for m in model.modules() if not hooked.isdisjoint(m.modules()))]


class _Hook:
    """A hook that copies of its model, and files with them, leave behind."""

    def __init__(self, call: Callable[..., Any], *before: Any, after: tuple[Any, ...] = ()) -> None:
        self.call = call
        self.before = before
        self.after = after

    def __call__(self, *args: Any) -> Any:
        return self.call(*self.before, *args, *self.after)

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*args: object) -> None:
    """Leave a call as it is."""
