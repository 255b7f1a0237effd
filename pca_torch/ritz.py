"""Ritz pairs of a covariance, and what they prove about its true eigenvalues.

Θ are p Ritz values with vectors V, E = CV - VΘ the residual, G = EᵀE, and μ at least the largest
eigenvalue of C on the complement of V. For every δ > 0, 2xᵀEᵀy ≤ ‖Ex‖²/δ + δ‖y‖², hence

    C ≼ diag(Θ + G/δ, (μ + δ) I),

and by Weyl's monotonicity each λ_i is at most the i-th largest eigenvalue of the right side. λ_i ≥ θ_i by
Cauchy's interlacing. Quadratic in the residual; p > K buys the distance from θ_K to μ even where
λ_K and λ_{K+1} are close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pca_torch.bounds import Rest, Solved
from pca_torch.eigen import small_eigh, small_eigvalsh
from pca_torch.precision import unit_roundoff
from pca_torch.problem import Operator

__all__ = ["Ritz", "finish", "rayleigh_ritz", "reach", "room", "upper_values"]

U64 = unit_roundoff(torch.float64)
PART = 4096  # features at a time: what is left of a Ritz pair need not be kept
STEPS = 20  # δ tried per bound, geometrically spaced


@dataclass(frozen=True, eq=False)
class Ritz:
    """p Ritz pairs of C, with the images that tell how good they are."""

    values: Tensor  # (p,) descending
    vectors: Tensor  # (p, D) orthonormal rows
    images: Tensor  # (p, D) VC

    @cached_property
    def gram(self) -> Tensor:
        """(p, p) G = EEᵀ of the residual E = VC - ΘV, summed over a part of the features at a time."""
        total = self.values.new_zeros(len(self.values), len(self.values))
        for images, vectors in zip(self.images.split(PART, 1), self.vectors.split(PART, 1), strict=True):
            residual = images - self.values[:, None] * vectors
            total.addmm_(residual, residual.mT)
        return total

    def first(self, p: int) -> Ritz:
        """The p leading pairs.

        Args:
            p: how many.
        """
        leading = Ritz(self.values[:p], self.vectors[:p], self.images[:p])
        if "gram" in self.__dict__:
            leading.__dict__["gram"] = self.gram[:p, :p]
        return leading


def rayleigh_ritz(
    rows: Tensor, images: Tensor, projected: Tensor | None = None, keep: int | None = None
) -> Ritz:
    """The Ritz pairs of C in the span of orthonormal rows.

    Args:
        rows: (m, D) orthonormal.
        images: (m, D) rows · C.
        projected: (m, m) rows · C · rowsᵀ; None works it out.
        keep: how many leading pairs are wanted; None is m.
    """
    if projected is None:
        projected = rows @ images.mT
        projected = (projected + projected.mT) / 2
    values, turn = small_eigh(projected)
    turn = turn.mT.flip(0)[:keep]
    return Ritz(values.flip(0)[:keep], turn @ rows, turn @ images)


def upper_values(ritz: Ritz, below: float, count: int) -> Tensor:
    """(count,) upper bounds of λ_1 … λ_count, descending.

    Args:
        ritz: p pairs.
        below: proved bound on the complement of their vectors; it does not count when p = D.
        count: how many.
    """
    p, d = ritz.vectors.shape
    if p == d:
        return torch.cat([ritz.values, ritz.values.new_zeros(max(0, count - p))])[:count]
    norms = ritz.gram.diagonal().clamp_min(0).sqrt()
    top = max(ritz.values[0].item() if p else 0.0, below, 0.0)
    if top == 0:
        return ritz.values.new_zeros(count)
    # the best δ for λ_i lies between its residual and θ_i - μ: the last one wanted has the least room
    largest = max(top - below, norms.max().item() if p else 0.0, U64 * top)
    last = ritz.values[min(count, p) - 1].item() - below if p and count else 0.0
    smallest = min(largest, max(last / 8, norms[: max(count, 1)].min().item() if p else 0.0, U64 * top))
    ends = math.log10(smallest), math.log10(largest)
    spaced = torch.logspace(*ends, STEPS, dtype=torch.float64, device="cpu")
    bounds = [_majorant(ritz, below, delta, count) for delta in spaced.tolist()]
    return torch.stack(bounds).amin(0).to(ritz.values.device)


def _majorant(ritz: Ritz, below: float, delta: float, count: int) -> Tensor:
    """(count,) leading eigenvalues of diag(Θ + G/δ, (μ + δ) I), and what eigvalsh may be off by."""
    head = _head(ritz, delta)
    tail = head.new_full((min(count, ritz.vectors.shape[1] - len(head)),), below + delta)
    values = torch.cat([head, tail]).sort(descending=True).values[:count]
    return torch.cat([values, values.new_zeros(count - len(values))])


def _head(ritz: Ritz, delta: float) -> Tensor:
    """Eigenvalues of Θ + G/δ (p,), descending, rounded up."""
    matrix = (ritz.values.diag() + ritz.gram / delta).cpu()  # where small problems are solved in a moment
    rounding = 4 * U64 * math.sqrt(len(matrix)) * torch.linalg.matrix_norm(matrix)
    return small_eigvalsh(matrix).flip(0) + rounding


def outside(ritz: Ritz, k: int, below: float) -> float:
    """Bound on C over the complement of the K leading vectors alone, the others being a part of it.

    Args:
        ritz: p ≥ K pairs.
        k: K.
        below: proved bound on the complement of all p.
    """
    p, d = ritz.vectors.shape
    if k == p:
        return below if p < d else 0.0
    others = Ritz(ritz.values[k:], ritz.vectors[k:], ritz.images[k:])
    return upper_values(others, below, 1)[0].item()


def reach(ritz: Ritz, p: int, k: int, beta: float) -> float | None:
    """How clearly the first p of m > p pairs would prove "at most β missed"; None if they would not.

    The (p+1)-th pair stands for the complement: the proof needs a bound above θ_{p+1} + ‖r_{p+1}‖.

    Args:
        ritz: m pairs.
        p: how many of them enter the proof.
        k: K ≤ p.
        beta: variance that may be missed.
    """
    if p < k or p >= len(ritz.values):
        return None
    off = ritz.gram[p, p].clamp_min(0).sqrt().item()
    c = ritz.values[k - 1].item() + beta / (2 * k)
    delta = c - ritz.values[p].item() - off
    if delta <= 0:
        return None
    if ritz.gram.diagonal()[:k].sum().item() > beta * delta:  # by Ky Fan that much is added at least
        return None
    missed = _head(ritz.first(p), delta)[:k].clamp_min(c).sum().item() - ritz.values[:k].sum().item()
    return delta / max(off, U64 * c) if missed <= beta else None


def room(ritz: Ritz, k: int, beta: float) -> float | None:
    """The largest bound on the complement that would prove "at most β missed"; None if there is none.

    Half of β pays for ties beyond the p-th value: c = θ_K + β/2K, and s = c - δ for the smallest δ with
    Σ_{i≤K} max(λ_i(Θ + G/δ), c) - Σ_{i≤K} θ_i ≤ β.

    Args:
        ritz: p ≥ K pairs.
        k: K.
        beta: variance that may be missed.
    """
    captured = ritz.values[:k].sum().item()
    c = ritz.values[k - 1].item() + beta / (2 * k)

    def proves(delta: float) -> bool:
        return _head(ritz, delta)[:k].clamp_min(c).sum().item() - captured <= beta

    high = min(c, 2 * ritz.gram.trace().item() / beta)  # the trace alone proves it there
    if high <= 0:
        return c
    if not proves(high):
        return None
    low = high * 1e-4
    for _ in range(10):
        middle = math.sqrt(low * high)
        if proves(middle):
            high = middle
        else:
            low = middle
    return c - high


def finish(
    op: Operator,
    ritz: Ritz,
    k: int,
    upper: Tensor,
    below: float | None,
    *,
    solver: str,
    precision: str,
    bound_kind: str = "deterministic",
    fallbacks: tuple[str, ...] = (),
) -> Solved:
    """The K leading pairs as what `assemble` takes, each variance with its error.

    λ_i lies between θ_i and its upper bound, both off by what C and one product with it are off by.

    Args:
        op: C.
        ritz: K or more pairs.
        k: K.
        upper: (K + 1,) bounds of λ_1 … λ_{K+1}.
        below: proved bound on the complement of all p vectors; None if there is none.
        solver: name for the certificate.
        precision: arithmetic for the certificate.
        bound_kind: how sure `upper` is.
        fallbacks: what was tried before.
    """
    problem = op.problem
    leading = ritz.first(k)
    top = max(upper[0].item(), 0.0) if len(upper) else 0.0
    off = problem.error + op.noise * top
    residual = math.sqrt(max(0.0, small_eigvalsh(leading.gram)[-1].item())) if k else 0.0
    if problem.measured and bound_kind == "deterministic":
        bound_kind = "measured"
    return Solved(
        mean=problem.mean,
        scale=problem.scale,
        spectrum=leading.values,
        directions=leading.vectors,
        total_variance=problem.variance.sum(),
        second_moment=problem.second_moment,
        error=(upper[:k] - leading.values).clamp_min(0) + off,
        floor=off,
        perturbation=off,
        apply=op.apply,
        n_samples=problem.n_samples,
        divisor=problem.divisor,
        dtype=problem.dtype,
        constant=problem.constant,
        solver=solver,
        precision=precision,
        rest=Rest(
            below=upper[k].item() + off if len(upper) > k else off,
            outside=math.inf if below is None else outside(ritz, k, below) + off,
            residual=residual + off,
        ),
        applied_error=off,
        bound_kind=bound_kind,
        fallbacks=fallbacks,
    )
