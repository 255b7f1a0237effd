"""One capture: the forwards under way, what their sites saw, and what goes wrong meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._arguments import passes_on
from pca_torch.hooks.compiled import arguments_from, register, send, tensors_of
from pca_torch.hooks.masks import FindMask, Rows, Tokens, read_tokens
from pca_torch.hooks.sharing import Sharing
from pca_torch.hooks.sinks import hand_over
from pca_torch.hooks.targets import Target
from pca_torch.hooks.tensors import recomputing, whole
from pca_torch.sites.names import listing
from pca_torch.sites.site import Site

__all__ = ["Run", "StopForward", "When"]

When = Callable[[nn.Module], bool]

PADDING = ("attention_mask", "decoder_attention_mask")  # both are `attention_mask` of the stack itself


class StopForward(Exception):
    """Ends a forward whose sites have all fired."""


class Run:
    """The state that the hooks of one capture share.

    Args:
        targets: the sites by label.
        roots: the modules that callers call.
        stacks: encoder and decoder of a model that has both.
        source: the argument that marks the rows to keep, a callable that makes the mask, or None.
        share: whether sites that see the same tensor share a statistic, or leaders to begin with.
        stop_early: whether `stopping` forwards end after the last site.
        when: whether the forward counts that is about to run; None is always.

    Raises:
        TypeError: `source` is neither.
        ValueError: `share` names strange sites.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        roots: list[nn.Module],
        stacks: list[nn.Module],
        source: str | FindMask | None,
        share: bool | Mapping[str, str],
        stop_early: bool,
        when: When | None,
    ) -> None:
        if not (source is None or isinstance(source, str) or callable(source)):
            raise TypeError(
                f"`mask` must be an argument's name, a callable or None, got {type(source).__name__}; a "
                "`TokenSelection` is one that leaves out more than padding."
            )
        self.targets = targets
        self.roots = [*roots, *stacks]
        self.innermost = roots[-1]
        self.stacks = stacks
        self.source = source
        self.stop_early = stop_early
        self.when = when
        self.counting = True  # what `when` said of the forward under way
        self.rootless = False  # a site fired while no root was running
        self.stopping = False  # a caller is there who expects `StopForward`
        self.places = list(targets)  # labels by the number that compiled code uses
        self.number = register(self)
        self.sharing: Sharing | None = None
        if share is not False:
            leaders = {} if share is True else share
            self.sharing = Sharing(targets, self._count, self._copy, leaders)
        self.under_way: list[tuple[nn.Module, Tokens]] = []  # roots and their tokens, outermost first
        self.crosses = any(target.site.across for target in targets.values())
        self.encoded: Tokens | None = None  # the tokens that cross-attention attends to
        self.asked = False  # a callable has made the mask of the forward under way
        self.fired: Counter[str] = Counter()
        self.in_forward: Counter[str] = Counter()  # of the forward under way
        self.in_first: Counter[str] = Counter()  # of the first that ran to its end
        self.held: dict[str, Exception] = {}
        self.unreported = False  # the last forward was entered and has not returned

    # --- roots -------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a root runs: its tokens are those of the outermost root that was told them.

        Around encoder and decoder, what runs has the tokens of the one of them that ran last.

        Args:
            module: the root.
            args: of the call.
            kwargs: of the call.
        """
        if torch.compiler.is_compiling():
            if self._counts_in_graph():
                send(*tensors_of(args, kwargs), self.number, self.roots.index(module))
            return
        if not self.under_way or self.under_way[0][0] is module:  # else the outermost root was asked
            self.counting = self.when is None or self.when(module)
        self._enter(module, args, kwargs)

    def _counts_in_graph(self) -> bool:
        """What `when` says while a graph is traced: training and autograd are fixed in a graph."""
        return self.when is None or self.when(self.roots[0])

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(root is module for root, _ in self.under_way):  # an interrupt left it behind
            self.under_way.clear()
        if not self.under_way:
            if self.unreported:  # a forward that raised took its own error along
                self.held.clear()
            self.unreported = True
            self.asked = False
            self.in_forward.clear()
        self.under_way.append((module, self._tokens_of(module, args, kwargs)))

    def _tokens_of(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        """The tokens of a root that is entered; an encoder and a decoder have their own."""
        tokens = self.under_way[-1][1] if self.under_way else Tokens(None)
        if self.source is None or not self.counting:
            return tokens
        if module in self.stacks:
            is_padding = self.source in PADDING
            found = read_tokens(PADDING[0] if is_padding else self.source, module, args, kwargs)
            return found or (Tokens(None) if is_padding or callable(self.source) else tokens)
        if self.crosses and (isinstance(self.source, str) or not self.stacks):  # else the encoder was asked
            name = PADDING[0] if self.stacks else "encoder_attention_mask"
            self.encoded = read_tokens(name, module, args, kwargs, of_input=False) or Tokens(None)
        if tokens.shape is None and self._may_ask(module):
            tokens = read_tokens(self.source, module, args, kwargs) or tokens
        return tokens

    def _may_ask(self, module: nn.Module) -> bool:
        """Whether the mask can be read of this call; a callable, which may count, is asked only once."""
        if isinstance(self.source, str):
            return True
        if self.asked or (passes_on(module) and module is not self.innermost):
            return False
        self.asked = True
        return True

    def leave(self, module: nn.Module, args: object, output: object) -> None:
        """After a root ran, also when it raised: forget its tokens.

        Args:
            module: the root.
            args: of the call.
            output: of the call, None when it raised.
        """
        if torch.compiler.is_compiling():
            if self._counts_in_graph():
                send([], "", self.number, -1 - self.roots.index(module))
            return
        if any(root is module for root, _ in self.under_way):  # not so if `enter` itself raised
            while (left := self.under_way.pop())[0] is not module:
                pass
            if module in self.stacks:
                self.under_way = [(root, left[1]) for root, _ in self.under_way]
                self.encoded = left[1] if module is self.stacks[0] else self.encoded
        if not self.under_way and self.sharing is not None:
            self.sharing.settle()

    def report(self, module: nn.Module, args: object, output: object) -> None:
        """After the outermost root returned: raise what its sites held back.

        Args:
            module: the root.
            args: of the call.
            output: of the call.
        """
        if torch.compiler.is_compiling() or self.under_way:
            return
        if not self._knows_the_last_site():
            self.in_first = Counter(self.in_forward)
        self.unreported = False
        self.raise_held()

    # --- sites -------------------------------------------------------------------------------------

    def feed(self, target: Target, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Where a site is reached: read its activation, and have its rows counted.

        Args:
            target: the site.
            module: its module.
            args: of the call.
            kwargs: of the call.
            output: of the call, None before it.

        Raises:
            StopForward: it was the last site, and a caller expects it.
        """
        site = target.site
        if torch.compiler.is_compiling():
            if not self._counts_in_graph():
                return
            values = [site.read(module, args, kwargs, output).detach()]
            if site.only is not None:
                values.append(site.only(module, args, kwargs, output))
            send(values, "", self.number, len(self.roots) + self.places.index(target.label))
            return
        if recomputing() or not self._counts(module):
            return
        try:
            x = site.read(module, args, kwargs, output)
            only = None if site.only is None else site.only(module, args, kwargs, output)
        except Exception as error:  # raised by `report`, when the forward is through
            self.held.setdefault(target.label, error)
        else:
            self._arrive(target, x, only)
        self._fire(target.label)

    def _counts(self, module: nn.Module) -> bool:
        """Whether what a site reads counts; where no root is running, its own module is asked."""
        if self.under_way:
            return self.counting
        return self.when is None or self.when(module)

    def _arrive(self, target: Target, x: Tensor, only: Tensor | None) -> None:
        try:
            x = whole(x)
            rows = self._rows(target.site, x)
            if only is not None:
                rows = rows.narrowed(only)
            if self.sharing is None:
                self._count(target, x, rows)
            else:
                self.sharing.arrive(target, x, rows, inside=bool(self.under_way))
        except Exception as error:
            self.held.setdefault(target.label, error)

    def _rows(self, site: Site, x: Tensor) -> Rows:
        self.rootless |= not self.under_way
        tokens = self.under_way[-1][1] if self.under_way else Tokens(None)
        if site.across and self.encoded is not None:
            tokens = self.encoded
        return tokens.routed_rows(x, site.path) if site.is_routed else tokens.rows(x)

    def _count(self, target: Target, x: Tensor, rows: Rows, version: int | None = None) -> None:
        """Hand rows to a sink; `version` is what that of `x` must still be."""
        try:
            if version is not None:
                _check_version(x, version)
            hand_over(target.sink, x, rows)
        except Exception as error:
            self.held.setdefault(target.label, error)

    def _copy(self, target: Target, source: Target) -> None:
        """Give the sink of `target` what that of `source` holds."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                sink: Any = target.sink
                sink.copy_from(source.sink)
        except Exception as error:
            self.held.setdefault(target.label, error)

    def _fire(self, label: str) -> None:
        self.fired[label] += 1
        self.in_forward[label] += 1
        if not (self.stop_early and self.stopping and self._knows_the_last_site()):
            return
        if all(self.in_forward[name] >= self.in_first[name] for name in self.targets):
            raise StopForward

    def _knows_the_last_site(self) -> bool:
        """Whether a forward ran to its end in which every site fired: where others stand is not known."""
        return all(self.in_first[name] for name in self.targets)

    def receive(self, tensors: list[Tensor], names: str, place: int) -> None:
        """Take what compiled code sends: a root that is entered or left, or the activation of a site.

        Args:
            tensors: arguments of the root, or the activation and what narrows its rows.
            names: of the arguments.
            place: a root by its number, left ones as -1 minus it; sites are numbered behind the roots.
        """
        if place < 0:
            root = self.roots[-1 - place]
            self.leave(root, (), None)
            self.report(root, (), None)
        elif place < len(self.roots):
            self.counting = True  # else nothing would have been sent
            self._enter(self.roots[place], *arguments_from(tensors, names))
        else:
            label = self.places[place - len(self.roots)]
            self._arrive(self.targets[label], tensors[0], tensors[1] if len(tensors) > 1 else None)
            self.fired[label] += 1

    # --- the end -----------------------------------------------------------------------------------

    def raise_held(self) -> None:
        """Raise the held errors as one, and forget them.

        Raises:
            ValueError: there are some.
        """
        if self.held:
            held, self.held = self.held, {}
            first = next(iter(held.values()))
            raise ValueError(f"sites {listing(held)}: {first}") from first

    def check_all_fired(self) -> None:
        """Refuse to end as if all were well when a site saw nothing.

        Raises:
            RuntimeError: one never fired that should have.
        """
        silent = [
            label for label, t in self.targets.items() if not self.fired[label] and not t.site.may_be_empty
        ]
        if silent:
            raise RuntimeError(
                f"sites {listing(silent)} never fired. Call the model inside the block; a compiled one must "
                "be handed to `capture` as compiled, or captured before its first call; a module whose "
                "parent only reads its weights (`out_proj` of nn.MultiheadAttention) never fires: capture "
                "the parent."
            )


def _check_version(x: Tensor, version: int) -> None:
    """Refuse activations that are no longer what a site saw.

    Raises:
        ValueError: they were changed in place.
    """
    if x._version != version:
        raise ValueError(
            "the activations were changed in place before all sites that share them had fired; take these "
            "sites one at a time, or `capture` them with `share=False`."
        )
