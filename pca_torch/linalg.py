"""Small matrix algebra shared by the statistics and the solvers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch._checks import check_seed

__all__ = ["add_gram", "fix_signs", "gaussian", "generator_from", "mirror", "panels", "rademacher", "two_sum"]

PANELS = 8  # block rows of a symmetric product: 36 of 64 blocks are computed
PLAIN_BELOW = 192  # columns under which one product beats eight
COMMON = 2.0**-30, 2.0**30  # largest values whose squares, to 1e-14 of the largest, are normal in float32
SIGN_TIE = 1e-3  # entries this close to the largest count as tied


def fix_signs(components: Tensor) -> Tensor:
    """Components (..., K, D) with the entry of largest modulus of each row positive.

    Among entries within 1e-3 relative of the largest the first decides, so that rounding cannot
    pick another one on another device or by another route.
    """
    if not components.numel():
        return components
    size = components.abs()
    first = (size >= (1 - SIGN_TIE) * size.amax(-1, keepdim=True)).int().argmax(-1, keepdim=True)
    return torch.where(components.gather(-1, first) < 0, -components, components)


def panels(d: int) -> list[tuple[int, int]]:
    """Column ranges of the block rows of a symmetric D×D product."""
    step = d if d < PLAIN_BELOW else -(-d // PANELS)
    return [(start, min(start + step, d)) for start in range(0, d, step)]


def add_gram(target: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> None:
    """Add xᵀx to the upper block triangle of `target` (D, D) in place; `mirror` fills the rest.

    Memory for a narrower product is taken before anything is added; the first block is the largest.

    Args:
        target: (D, D) sums, in the dtype of `x`.
        x: rows (n, D).
        dtype: a narrower one to form the products in; they are added in that of `target`.
    """
    narrow = dtype is not None and dtype != target.dtype
    unit = 1.0
    if narrow and x.numel():
        unit = _unit(x)
        x = (x if unit == 1 else x / unit).to(dtype)
    for start, stop in panels(x.shape[1]):
        block = target[start:stop, start:]
        if narrow:
            block += (x[:, start:stop].mT @ x[:, start:]).to(target.dtype).mul_(unit**2)
        else:
            block.addmm_(x[:, start:stop].mT, x[:, start:])


def _unit(x: Tensor) -> float:
    """A power of two to divide `x` by, which rounds nothing, so that its squares stay in float32."""
    low, high = x.aminmax()
    size = torch.maximum(-low, high).item()
    if size == 0 or COMMON[0] <= size <= COMMON[1]:
        return 1.0
    return math.ldexp(1.0, math.frexp(size)[1] - 1)


def mirror(upper: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle is that of `upper`, a copy."""
    full = upper.clone()
    for start, stop in panels(len(upper)):  # by blocks: whole triangles would be two more D×D copies
        block = upper[start:stop, start:stop]
        full[start:stop, start:stop] = block.triu() + block.triu(1).mT
        full[stop:, start:stop] = upper[start:stop, stop:].mT
    return full


def rademacher(d: int, columns: int, device: torch.device) -> Tensor:
    """Fixed random signs (d, columns) in float64, the same in every process; the global RNG is left alone."""
    generator = torch.Generator("cpu").manual_seed(20121)
    signs = torch.randint(0, 2, (d, columns), generator=generator, dtype=torch.int8, device="cpu")
    return (2 * signs - 1).double().to(device)


def gaussian(rows: int, d: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Normal numbers (rows, d) in float64 on `device`, drawn where the generator is.

    Args:
        rows: how many.
        d: of how many features.
        generator: their source.
        device: where they are wanted.
    """
    return torch.randn(rows, d, generator=generator, dtype=torch.float64, device=generator.device).to(device)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum, and what rounding took from it, exactly (Knuth, TAOCP 2, §4.2.2).

    Args:
        a: a number or many.
        b: as many.
    """
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def generator_from(random_state: int | torch.Generator | None) -> torch.Generator:
    """The generator of a randomised solver; the global one is never touched.

    Args:
        random_state: a seed, a generator, which moves on, or None for seed 0.

    Raises:
        ValueError: anything else.
    """
    check_seed(random_state)
    if isinstance(random_state, torch.Generator):
        return random_state
    return torch.Generator("cpu").manual_seed(0 if random_state is None else int(random_state))
