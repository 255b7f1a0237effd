"""Small matrices of samples that were not squared yet: the covariance by products, or the Gram matrix."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pca_torch.basis import orthonormalise
from pca_torch.linalg import gaussian
from pca_torch.operators import Dense, Operator, Rows, Sparse
from pca_torch.problem import product_noise
from pca_torch.ritz import Ritz, rayleigh_ritz

__all__ = ["covariance_of", "gram_of", "lifted"]

BLOCK = 512  # rows multiplied at a time


def covariance_of(op: Operator) -> Dense:
    """C itself, by multiplying the identity.

    Args:
        op: C, not formed; D² must fit in memory.
    """
    problem = op.problem
    eye = torch.eye(len(problem.mean), dtype=torch.float64, device=problem.mean.device)
    matrix = torch.cat([op.apply(part) for part in eye.split(BLOCK)])
    matrix = (matrix + matrix.mT) / 2
    # each row is off by noise·λ₁, so the rows together by √D of that; λ₁ ≤ ‖C‖_F
    off = op.noise * math.sqrt(len(matrix)) * torch.linalg.matrix_norm(matrix).item()
    return Dense(replace(problem, error=problem.error + off), matrix)


def gram_of(op: Rows | Sparse) -> Dense:
    """XXᵀ over the divisor (N, N), whose non-zero eigenvalues are those of the covariance.

    Args:
        op: the samples; N² must fit in memory.
    """
    problem = op.problem
    if isinstance(op, Rows):
        gram = op.gram()
    else:
        eye = torch.eye(op.n_rows, dtype=torch.float64, device=problem.mean.device)
        parts = [op.scores(op.gather(part.mT)).mT for part in eye.split(BLOCK)]
        gram = torch.cat(parts).div_(problem.divisor)
        gram = (gram + gram.mT) / 2
    off = product_noise(len(problem.mean)) * problem.total_variance  # |X||X|ᵀ has the trace of C
    facts = replace(
        problem, mean=gram.new_zeros(len(gram)), variance=gram.diagonal().clone(), error=problem.error + off
    )
    return Dense(facts, gram)


def lifted(op: Rows | Sparse, left: Tensor, generator: torch.Generator) -> Ritz:
    """Ritz pairs of the covariance from eigenvectors of the Gram matrix: v = Xᵀu, made orthonormal.

    Args:
        op: the samples.
        left: (K, N) eigenvectors as rows.
        generator: for rows beyond the rank, where Xᵀu is zero and any other direction does as well.
    """
    k, d = len(left), len(op.problem.mean)
    vectors, _ = orthonormalise(op.gather(left.mT), left.new_empty(0, d))
    if len(vectors) < k:
        start = gaussian(k - len(vectors), d, generator, left.device)
        vectors = torch.cat([vectors, orthonormalise(start, vectors)[0]])
    return rayleigh_ritz(vectors, op.apply(vectors))
