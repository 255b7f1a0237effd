"""What a statistic is saved as: tensors and facts by name, believed only once they are checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pca_torch._dtypes import FLOATING

__all__ = ["LARGEST_COUNT", "Saved", "State", "dtype_name", "prefixed"]

Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors by name, and facts in JSON types

LARGEST_COUNT = 2**53  # float64 holds every integer up to here


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one part of a statistic, under names that tell the part.

    Args:
        name: of the part.
        tensors: by name inside the part.
    """
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


class State:
    """Tensors and facts of one statistic, handed out checked; `done` refuses what nobody asked for.

    Args:
        tensors: by name.
        facts: by name, as JSON gives them.

    Raises:
        ValueError: here and in every method: something is missing, or not what a statistic can hold.
    """

    def __init__(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        if not isinstance(facts, dict):
            raise ValueError(f"facts must be an object, got {facts!r:.80}.")
        self._tensors = dict(tensors)
        self._facts = dict(facts)

    def has(self, name: str) -> bool:
        """Whether there is a tensor or a fact of this name.

        Args:
            name: of the one or the other.
        """
        return name in self._tensors or name in self._facts

    def tensor(
        self,
        name: str,
        shape: Sequence[int | None],
        dtypes: Sequence[torch.dtype] = (torch.float64,),
        least: float = -math.inf,
    ) -> Tensor:
        """A copy of a tensor whose values are finite; an own one, placed as torch places any new tensor.

        Args:
            name: of the tensor.
            shape: sizes; None is any.
            dtypes: those allowed.
            least: what no value lies below.

        Raises:
            ValueError: it is missing, or not that.
        """
        found = self._tensors.pop(name, None)
        if found is None:
            raise ValueError(f"lacks the tensor `{name}`.")
        fits = len(shape) == found.ndim and all(
            want in {None, got} for want, got in zip(shape, found.shape, strict=True)
        )
        if not fits or found.dtype not in dtypes:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            allowed = " or ".join(str(dtype) for dtype in dtypes)
            got = f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(f"`{name}` must be {allowed} ({sizes}), got {got}.")
        if not bool(torch.isfinite(found).all()):
            raise ValueError(f"`{name}` holds NaN or inf.")
        if found.numel() and found.min().item() < least:
            raise ValueError(f"`{name}` must be at least {least:g}, got {found.min().item()!r}.")
        with torch.inference_mode(False), torch.no_grad():
            return found.clone(memory_format=torch.contiguous_format)

    def fact(self, name: str, allowed: str, fits: Callable[[Any], bool]) -> Any:
        """A fact that fits.

        Args:
            name: of the fact.
            allowed: what it must be, for the error.
            fits: whether a value is that.

        Raises:
            ValueError: it is missing, or not that.
        """
        if name not in self._facts:
            raise ValueError(f"lacks the fact `{name}`.")
        value = self._facts.pop(name)
        if not fits(value):
            raise ValueError(f"`{name}` must be {allowed}, got {value!r:.80}.")
        return value

    def count(self, name: str, least: int = 0) -> int:
        """A fact that counts.

        Args:
            name: of the fact.
            least: what it may be at least.
        """
        allowed = f"an integer in {least}..2**53"
        return self.fact(name, allowed, lambda n: type(n) is int and least <= n <= LARGEST_COUNT)

    def number(self, name: str, least: float = 0.0, most: float = math.inf) -> float:
        """A fact that measures: a number from `least` to `most`, both included.

        Args:
            name: of the fact.
            least: its lower end.
            most: its upper end.
        """

        def fits(x: Any) -> bool:  # JSON writes 1.0 as 1, and integers of any length
            exact = type(x) is float or (type(x) is int and abs(x) <= LARGEST_COUNT)
            return exact and least <= x <= most

        return float(self.fact(name, f"a number from {least:g} to {most:g}", fits))

    def choice(self, name: str, choices: Sequence[Any]) -> Any:
        """A fact that is one of some words, or None where that is among them.

        Args:
            name: of the fact.
            choices: the words.
        """
        allowed = "one of " + ", ".join(map(repr, choices))
        return self.fact(name, allowed, lambda x: (x is None or type(x) is str) and x in choices)

    def dtype(self, name: str) -> torch.dtype | None:
        """A fact that names a floating dtype, or None.

        Args:
            name: of the fact.
        """
        found = self.choice(name, [*FLOATING, None])
        return None if found is None else FLOATING[found]

    def product_dtype(self, name: str) -> torch.dtype:
        """A fact that names the arithmetic of products.

        Args:
            name: of the fact.
        """
        return FLOATING[self.choice(name, ["float32", "float64"])]

    def part(self, name: str) -> tuple[dict[str, Tensor], Any]:
        """Tensors and facts of a part, for its own `from_state`; what it lacks, that will tell.

        Args:
            name: of the part.
        """
        return self.tensors(name), self.fact(name, "an object", lambda value: isinstance(value, dict))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a part alone.

        Args:
            name: of the part.
        """
        start = f"{name}."
        mine = [key for key in self._tensors if key.startswith(start)]
        return {key.removeprefix(start): self._tensors.pop(key) for key in mine}

    def done(self) -> None:
        """Refuse what is left over.

        Raises:
            ValueError: something is.
        """
        if left := [*self._tensors, *self._facts]:
            raise ValueError(f"holds {left[0]!r:.80}, which this statistic does not have.")


def dtype_name(dtype: torch.dtype | None) -> str | None:
    """What `State.dtype` reads.

    Args:
        dtype: a floating dtype, or None.
    """
    return None if dtype is None else str(dtype).removeprefix("torch.")
