"""Proofs that nothing large was overlooked: bounds on a covariance over the complement of Ritz vectors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pca_torch.basis import Basis, orthonormalise
from pca_torch.eigen import small_eigvalsh
from pca_torch.linalg import gaussian
from pca_torch.precision import unit_roundoff
from pca_torch.problem import Operator
from pca_torch.ritz import Ritz

__all__ = ["Bound", "cholesky_proves", "probe", "trace_bound"]

U64 = unit_roundoff(torch.float64)
PROBE_COLUMNS = 16
PROBE_PRODUCTS = 24  # blocks after which a bound within 2 % is as good as it gets
FAILURE = 1e-11  # probability of one probe to be wrong; ten of them stay below what is stated
STATED = "probability 1-1e-10"


@dataclass(frozen=True)
class Bound:
    """What is proved of C on the complement of Ritz vectors."""

    below: float  # its largest eigenvalue is at most this
    kind: str = "deterministic"  # or the probability with which that holds


def cholesky_proves(matrix: Tensor, ritz: Ritz, s: float, noise: float) -> float | None:
    """A proved bound on C over the complement of Ritz vectors, a little above `s`; None if `s` is too small.

    S = sI - C + V(Θ + gI)Vᵀ has a Cholesky factor only if it is positive definite, and xᵀSx = s - xᵀCx on the
    complement. g = 10⁴ s makes room for the residual, which couples the two: without it S is indefinite.

    Args:
        matrix: (D, D) C.
        ritz: p pairs.
        s: what to prove, > 0.
        noise: relative rounding of products with C, which S inherits.
    """
    g = 1e4 * s
    lifted = ritz.vectors * (ritz.values + g)[:, None]
    shifted = torch.addmm(matrix, lifted.mT, ritz.vectors, beta=-1)
    shifted.diagonal().add_(s)
    _, failed = torch.linalg.cholesky_ex(shifted, check_errors=False)
    if int(failed):
        return None
    # the factor's own error is u·tr S at most, of which p·g is in the directions that were lifted
    return s + noise * (ritz.values[0].item() + g) + U64 * len(ritz.values) * g


def trace_bound(ritz: Ritz, total: float, noise: float) -> Bound:
    """What the trace alone proves: no eigenvalue of the complement exceeds tr C - ΣΘ.

    Args:
        ritz: p pairs.
        total: tr C.
        noise: relative rounding of one product with C.
    """
    top = ritz.values[0].item() if len(ritz.values) else 0.0
    left = max(0.0, total - ritz.values.sum().item())
    return Bound(left + noise * (len(ritz.values) * top + total))


def probe(
    op: Operator,
    ritz: Ritz,
    generator: torch.Generator | None = None,
    enough: float = 0.0,
    products: int = PROBE_PRODUCTS,
) -> Bound:
    """A bound on C over the complement of Ritz vectors from block Lanczos with fresh Gaussian rows.

    A start x is uniform on the sphere of the complement, of n = D - p dimensions. If the largest Ritz value
    ξ of its Krylov space of dimension q is below (1 - ε)μ, then the polynomial T_{2q-1}(s)/s with
    s² = 1 - t/(1 - ε) shows that the component of x along the top eigenvector is below
    1 / cosh((2q - 1) artanh √ε), which has probability √(2n/π) times that. Independent starts multiply.
    Solved for ε: μ ≤ ξ cosh²(arcosh(√(2n/π) η^(-1/b)) / (2q - 1)) with probability 1 - η.
    Source: the bound of Kuczyński & Woźniakowski, SIAM J. Matrix Anal. Appl. 13(4), 1992.

    Args:
        op: C.
        ritz: p pairs.
        generator: where the rows are drawn; None takes a seed of its own.
        enough: stop as soon as this much is proved.
        products: blocks multiplied by C at most.
    """
    p, d = ritz.vectors.shape
    n, v = d - p, ritz.vectors
    by_trace = trace_bound(ritz, op.problem.total_variance, op.noise)
    if n <= 0 or by_trace.below <= enough:
        return by_trace
    generator = generator or torch.Generator("cpu").manual_seed(n)
    columns = min(PROBE_COLUMNS, n)
    start = gaussian(columns, d, generator, v.device)

    def apply(x: Tensor) -> Tensor:
        y = op.apply(x)
        return y - (y @ v.mT) @ v

    basis = Basis(apply, like=v, room=columns * products, keep_images=False)
    block, _ = orthonormalise(start, v)
    reach = math.acosh(max(1.0, math.sqrt(2 * n / math.pi) * FAILURE ** (-1 / columns)))
    best = by_trace
    top = ritz.values[0].item() if p else 0.0
    for q in range(1, products + 1):
        if not len(block):
            break
        block = basis.append(block, op.noise)
        xi = small_eigvalsh(basis.projected)[-1].item()
        below = max(0.0, xi) * math.cosh(reach / (2 * q - 1)) ** 2 + op.noise * top
        if below < best.below:
            best = Bound(below, STATED)
        if best.below <= enough or xi > enough > 0:
            break
        block, _ = orthonormalise(block, v)
    return best
