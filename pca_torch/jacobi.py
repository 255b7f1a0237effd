"""Eigenvalues of many small symmetric matrices at once, by rotations of disjoint pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from pca_torch.precision import unit_roundoff
from pca_torch.svd import LinAlgError

__all__ = ["jacobi_eigh"]

SWEEPS = 60  # 64 × 64 takes 9, with half of its eigenvalues tied 18


def jacobi_eigh(a: Tensor, sweeps: int = SWEEPS) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a batch of real symmetric matrices, none of them in a loop.

    A sweep meets every pair (p, q) once, in E - 1 rounds of E/2 disjoint pairs (round robin); each round
    is a few operations on the whole batch. The smaller angle that makes a_pq zero is taken, so the
    off-diagonal part shrinks, quadratically in the end. Entries up to u times the largest diagonal one
    are left: inside a set of tied eigenvalues they are noise, and turning it by large angles would bring
    back what other rotations removed. Sweeps stop where only such entries are left.

    Args:
        a: (B, E, E) symmetric, float32 or float64; not changed.
        sweeps: at most so many.

    Returns:
        Eigenvalues (B, E), descending, and eigenvectors (B, E, E) as orthonormal rows.

    Raises:
        LinAlgError: not converged after `sweeps`.

    Memory: about eight copies of `a`. Accuracy: backward stable, λ is off by a few u·√E·‖a‖.
    Source: Golub & Van Loan, Matrix Computations, 4th ed., §8.5; the order is that of Brent & Luk,
        SIAM J. Sci. Stat. Comput. 6(1), 1985.
    """
    e = a.shape[-1]
    even = e + e % 2  # the partner of the odd one out is a row of zeros, which no rotation touches
    a = torch.nn.functional.pad(a, (0, even - e, 0, even - e))
    rows = torch.eye(even, dtype=a.dtype, device=a.device).expand(a.shape)
    order = torch.tensor(_next_round(even), device=a.device)
    for _ in range(sweeps):
        if _converged(a):
            break
        for _ in range(even - 1):
            a, rows = _rotate_pairs(a, rows)
            a, rows = a[:, order][:, :, order], rows[:, order]
        a = (a + a.mT) / 2  # what rounding made unsymmetric no rotation would remove
    if not _converged(a):
        raise LinAlgError(f"Jacobi rotations did not converge in {sweeps} sweeps; use another driver.")
    values, rank = a.diagonal(dim1=-2, dim2=-1)[:, :e].sort(-1, descending=True)  # all are back in place
    rows = rows[:, :e, :e].gather(1, rank[:, :, None].expand(-1, -1, e))
    return values, _orthonormalised(rows)


def _orthonormalised(rows: Tensor) -> Tensor:
    """The nearest orthonormal rows to nearly orthonormal ones: one Newton step, which squares the error.

    Each rotation stretches by a third of u, always the same way; hundreds of them add up.
    """
    gram = rows @ rows.mT
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return rows - gram @ rows / 2


def _next_round(even: int) -> list[int]:
    """Where each place of the next round comes from: place i meets place i + E/2, place 0 stays."""
    h = even // 2
    if h == 1:
        return [0, 1]
    return [0, h, *range(1, h - 1), *range(h + 1, even), h - 1]


def _converged(a: Tensor) -> bool:
    """Whether no entry beside the diagonal counts; NaN do not either, more sweeps would not help them."""
    off = a - torch.diag_embed(a.diagonal(dim1=-2, dim2=-1))
    return not bool((off.abs().amax(-1) > _negligible(a)).any())


def _negligible(a: Tensor) -> Tensor:
    """(B, 1) u times the largest diagonal entry, which is at least ‖a‖/E where `a` is a covariance."""
    return unit_roundoff(a.dtype) * a.diagonal(dim1=-2, dim2=-1).abs().amax(-1, keepdim=True)


def _rotate_pairs(a: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Make a_pq zero for every pair of this round where it counts, and turn the vectors along."""
    h = a.shape[-1] // 2
    p, q = a.diagonal(dim1=-2, dim2=-1).split(h, -1)  # (B, h) each
    pq = a[:, :h, h:].diagonal(dim1=-2, dim2=-1)
    left = pq.abs() <= _negligible(a)
    tau = (q - p) / (2 * pq)
    one = torch.ones_like(tau)
    tangent = torch.where(left, 0, one.copysign(tau) / (tau.abs() + torch.hypot(tau, one)))
    cosine = (1 + tangent.square()).sqrt().reciprocal()
    c, s = cosine[:, :, None], (tangent * cosine)[:, :, None]
    turned = _rotate(_rotate(a, c, s).mT, c, s)
    # known better than the products above say: a_pq is zero, and the diagonal moves by t·a_pq
    turned.diagonal(dim1=-2, dim2=-1).copy_(torch.cat([p - tangent * pq, q + tangent * pq], -1))
    for block in (turned[:, :h, h:], turned[:, h:, :h]):
        block.diagonal(dim1=-2, dim2=-1).mul_(left)
    return turned, _rotate(rows, c, s)


def _rotate(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """Row i of the upper half with row i of the lower one."""
    upper, lower = x.chunk(2, -2)
    return torch.cat([c * upper - s * lower, s * upper + c * lower], -2)
