"""Chebyshev-filtered subspace iteration, stopped by a proof: matrix products of one shape and little else.

Source: Zhou & Saad, SIAM J. Matrix Anal. Appl. 29(3), 2007, with the smallest Ritz value of the block as the
edge of the filter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch.basis import orthonormalise
from pca_torch.linalg import gaussian
from pca_torch.precision import unit_roundoff
from pca_torch.problem import Operator
from pca_torch.prover import Found, Prover
from pca_torch.ritz import Ritz, rayleigh_ritz

__all__ = ["chebyshev"]

AMPLIFY = math.acosh(1e8)  # the first unlocked direction against what lies below the edge, per filter
DEGREE = 64
LOCK = 1e-3  # residual over θ_K/√K of a pair that is left alone: relative to its own θ it would poison others
SHARPER = 0.1  # and over √(βθ_K/K), for what it misses grows as its square
ROUNDS = 30
U64 = unit_roundoff(torch.float64)


def chebyshev(op: Operator, k: int, prover: Prover, *, generator: torch.Generator) -> Found | None:
    """Filter a block of 1.5 K rows until its Ritz pairs prove what was asked for.

    Args:
        op: C.
        k: K.
        prover: the stopping rule.
        generator: where the start is drawn.

    Returns:
        What was found, or None where the effort was spent.
    """
    like = op.problem.mean
    d, none = len(like), like.new_empty(0, len(like))
    p = min(d, k + max(k // 2, 32))

    def fresh(rows: int, others: Tensor) -> Tensor:
        return orthonormalise(gaussian(rows, d, generator, like.device), others)[0]

    block = orthonormalise(op.apply(fresh(p, none)), none)[0]
    for _ in range(ROUNDS):
        if len(block) < p:  # rank below p, or a block that filtering made dependent
            block = torch.cat([block, fresh(p - len(block), block)])
        ritz = rayleigh_ritz(block, op.apply(block))
        found = prover(ritz, k, max(8, k // 8))
        if found is not None:
            return found
        allowed = prover.allowed(ritz, k)
        locked = min(_converged(ritz, k, allowed), p - 1)
        if prover.refused or ritz.values[-1].item() <= 0:  # a copy of a tie is missing: only new rows find it
            half = max(1, (p - locked) // 2)
            kept = ritz.vectors[: p - half]
            block = torch.cat([kept, fresh(half, kept)])
            ritz = rayleigh_ritz(block, op.apply(block))
            locked = min(_converged(ritz, k, allowed), p - 1)
        fixed, (top, edge) = ritz.vectors[:locked], ritz.values[[locked, -1]].tolist()
        filtered = _filter(op, ritz.vectors[locked:], fixed, top, edge)
        block = torch.cat([fixed, orthonormalise(filtered, fixed)[0]])
    return None


def _converged(ritz: Ritz, k: int, allowed: float) -> int:
    """How many leading pairs need no more filtering where `allowed` may be missed."""
    off = ritz.gram.diagonal().clamp_min(0).sqrt()
    last = max(ritz.values[k - 1].item(), 0.0)
    enough = min(LOCK * last, SHARPER * math.sqrt(allowed * last)) / math.sqrt(k) + 50 * U64 * ritz.values[0]
    open_ = (off > enough).nonzero()
    return int(open_[0]) if len(open_) else len(off)


def _filter(op: Operator, x: Tensor, fixed: Tensor, top: float, edge: float) -> Tensor:
    """Rows times the scaled Chebyshev polynomial of C that is small on [0, edge] and 1 at `top`."""
    edge = max(edge, 1e-12 * top)
    if top <= edge * (1 + 1e-12):
        return x
    degree = min(DEGREE, max(2, math.ceil(AMPLIFY / math.acosh(2 * top / edge - 1))))
    centre = half = edge / 2
    sigma = first = half / (top - centre)

    def shifted(y: Tensor) -> Tensor:
        y = op.apply(y) - centre * y
        return y - (y @ fixed.mT) @ fixed

    y = shifted(x) * (sigma / half)
    for _ in range(degree - 1):
        following = 1 / (2 / first - sigma)
        x, y = y, shifted(y) * (2 * following / half) - x * (sigma * following)
        sigma = following
    return y
