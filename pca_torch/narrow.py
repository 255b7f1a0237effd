"""Leading eigenpairs by a dense solver in float32, made right and proved in float64.

A dense eigenproblem in float32 takes half of the time. What it gets wrong, u·λ₁ of float32 in the residual, a
Rayleigh-Ritz step in float64 squares, and a product with C before it damps; then it is proved like what
an iteration finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pca_torch.basis import orthonormalise
from pca_torch.eigen import leading_rows, subset_solver, values_of
from pca_torch.operators.dense import Dense
from pca_torch.precision import unit_roundoff
from pca_torch.prover import Found, Prover
from pca_torch.ritz import rayleigh_ritz

__all__ = ["narrow"]

U32 = unit_roundoff(torch.float32)
SPARE = 8  # one pair in so many beyond K: their distance from the rest is what the proof lives on
FEWEST = 16  # of them
STEPS = 3
SEEN = 100 * U32  # variances below this part of λ₁ drown in float32


def narrow(
    op: Dense,
    k: int | None,
    reached: Callable[[Tensor], int | None],
    prover: Prover,
) -> Found | None:
    """The leading pairs of a covariance on a CPU; it takes SciPy's solver for some of them.

    Args:
        op: C.
        k: K, or None for a share.
        reached: K of the share, given leading variances; None where they do not reach it.
        prover: the stopping rule.

    Returns:
        What was found, or None: no such solver, more than half of all directions, or variances that
        float32 cannot see beside λ₁.

    Memory: two float32 D×D beside C.
    """
    matrix, none = op.matrix, op.problem.mean.new_empty(0, len(op.matrix))
    if not subset_solver(matrix) or k == 0:
        return None
    unit = 2.0 ** matrix.diagonal().max().log2().floor().item()  # no entry of a covariance is larger
    small = (matrix / unit).float()
    about = k
    if about is None:
        values = values_of(small).double() * unit
        about = reached(values)
        if about is None or values[about - 1] <= SEEN * values[0]:
            return None
    p = about + max(FEWEST, about // SPARE)
    if 2 * p > len(matrix):
        return None
    rows = leading_rows(small, p).double()
    for _ in range(STEPS):
        rows, _ = orthonormalise(rows, none)
        ritz = rayleigh_ritz(rows, op.apply(rows))
        wanted = k if k is not None else reached(ritz.values)
        if wanted is None or wanted > len(rows) or ritz.values[wanted - 1] <= SEEN * ritz.values[0]:
            return None
        found = prover(ritz, wanted, max(SPARE, wanted // SPARE))
        if found is not None:
            return replace(found, arithmetic="float32 eigenproblem refined in float64")
        if prover.refused:
            return None
        rows = ritz.images
    return None
