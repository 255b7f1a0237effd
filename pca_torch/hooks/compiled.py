"""Hooks inside compiled code: one operator with an effect carries activations out of the graph."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Listener", "arguments_from", "has_graphs", "is_compiled", "register", "send", "tensors_of"]


OWN = "pca_torch.hooks"  # in the guards of a graph that was traced with hooks of ours


class Listener(Protocol):
    """Who gets what compiled code sends."""

    def receive(self, tensors: list[Tensor], names: str, place: int) -> None:
        """Take the tensors of one message."""
        ...


# Without the operator a graph breaks in two, and messages are handed over in between, by what is put here
# then: `torch.compiler.disable` imports the compiler.
_OUTSIDE: dict[str, Any] = {}
_LISTENERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(listener: Listener) -> int:
    """A number by which compiled code finds `listener`, for as long as it lives.

    It is the lowest that is free: a graph that was traced with hooks like these then serves again.

    Args:
        listener: takes the messages.
    """
    number = next(n for n in itertools.count() if n not in _LISTENERS)
    _LISTENERS[number] = listener
    return number


def _has_operator() -> bool:
    """Whether there is an operator that carries tensors out of a graph."""
    return _define_operator()


# While a graph is traced, it runs as it is, not as a part of that: `torch.compiler.assume_constant_result`
# says the same and imports the compiler to do so, which costs an import of this package a second.
_has_operator._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@cache
def _define_operator() -> bool:
    """Define `torch.ops.pca_torch.tap`, once per process and not before a model is compiled.

    A graph holds no Python objects, and would trace, reorder or drop what they do. So tensors leave it
    through an operator that is declared to have an effect: it runs once per call, in the order of the code.

    Returns:
        whether this PyTorch can; PyTorch has no public name for that declaration.
    """
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

        effect = _EffectType.ORDERED
    except (ImportError, AttributeError):
        _OUTSIDE["receive"] = torch.compiler.disable(_receive)
        return False
    operator = torch.library.custom_op(
        "pca_torch::tap",
        _receive,
        mutates_args=(),
        schema="(Tensor[] tensors, str names, int listener, int place) -> ()",
        tags=(torch.Tag.cudagraph_unsafe,),
    )
    operator.register_fake(lambda tensors, names, listener, place: None)
    _register_effectful_op(torch.ops.pca_torch.tap.default, effect)
    return True


def _receive(tensors: list[Tensor], names: str, listener: int, place: int) -> None:
    """Hand a message to its listener.

    Raises:
        RuntimeError: the listener is gone.
    """
    target = _LISTENERS.get(listener)
    if target is None:
        raise RuntimeError(
            "this graph was compiled inside a `capture` that is over; compile the model again after "
            "`torch.compiler.reset()`."
        )
    target.receive(tensors, names, place)


def send(tensors: list[Tensor], names: str, listener: int, place: int) -> None:
    """Send tensors out of a graph while it is traced; where PyTorch has no operators with effects, break it.

    Args:
        tensors: what to send; an operator needs one at least, so none becomes one that is empty.
        names: what they are, joined by commas.
        listener: its number.
        place: what the message is about, a number that the listener knows.
    """
    if _has_operator():
        torch.ops.pca_torch.tap(tensors or [torch.empty(0, device="cpu")], names, listener, place)
    else:
        _OUTSIDE["receive"](tensors, names, listener, place)


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], str]:
    """The tensors among arguments, and their names: numbers for those by position.

    Args:
        args: by position.
        kwargs: by keyword.
    """
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    found = [(name, value) for name, value in named if isinstance(value, Tensor)]
    return [value for _, value in found], ",".join([name for name, _ in found])


def arguments_from(tensors: list[Tensor], names: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `tensors_of` took apart; arguments by position that were no tensors are None.

    Args:
        tensors: the tensors.
        names: their names.
    """
    named = dict(zip(names.split(","), tensors, strict=False)) if names else {}
    places = [int(name) for name in named if name.isdigit()]
    args = tuple(named.get(str(i)) for i in range(max(places, default=-1) + 1))
    return args, {name: value for name, value in named.items() if not name.isdigit()}


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` holds modules that were compiled, whose graphs may ignore hooks set from now on.

    Args:
        model: the model.
    """
    return any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in model.modules())


def has_graphs(modules: Collection[nn.Module]) -> bool:
    """Whether a call of one of `modules` may be served by a graph that was traced without hooks of ours.

    A graph asks for the classes of the modules it was traced from, not for the hooks they lacked, and it
    serves other instances as well. So what counts is a class among `modules` that some graph asks for.

    Args:
        modules: what is hooked, and what holds it.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    classes = [str(id(type(module))) for module in modules]
    try:
        return any(
            OWN not in guards and any(kind in guards for kind in classes) for guards in _guards_of_graphs()
        )
    except (ImportError, AttributeError):  # PyTorch has no public names for this: then any graph may serve
        return True


def _guards_of_graphs() -> Iterator[str]:
    """What each graph of this process asks for before it serves, as text.

    Yields:
        the text of one graph; classes are in it by their `id`.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    for reference in list(input_codes.seen):
        code = reference()
        for entry in [] if code is None else _debug_get_cache_entry_list(code):
            yield str(entry.guard_manager)
