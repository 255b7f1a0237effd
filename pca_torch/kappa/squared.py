"""The two routes that square the samples: every variance of a covariance before any clamp, and certified."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pca_torch.basis import Basis, orthonormalise
from pca_torch.bounds import Solved, assemble
from pca_torch.linalg import gaussian, generator_from
from pca_torch.operators import Dense
from pca_torch.precision import exact_products
from pca_torch.result import Certificate
from pca_torch.ritz import finish, rayleigh_ritz, upper_values
from pca_torch.solvers import covariance

__all__ = ["SQUARING"]

BLOCK = 32  # rows per product of the iteration, where there are eight times as many features


def _eigh(op: Dense, k: int) -> tuple[Tensor, Certificate]:
    """(K,) raw eigenvalues, descending, and their certificate."""
    with exact_products(op.matrix.device):
        return _certified(covariance.whole(op), k)


def _lanczos(op: Dense, k: int) -> tuple[Tensor, Certificate]:
    """(K,) raw Ritz values of block Lanczos, carried on until its space is the whole one.

    The solver hands so many components over to a dense one; the lesson is what the iteration makes of
    them. Nothing is left out of its space, so its bounds are those of rounding alone.
    """
    like, generator = op.problem.mean, generator_from(None)
    d = len(like)
    block = max(1, min(BLOCK, d // 8))
    with exact_products(like.device):
        basis, following = Basis(op.apply, like, room=d), like.new_empty(0, d)
        while basis.size < d:
            if not len(following):  # at the start, and where rounding hides what the images add
                following = orthonormalise(gaussian(block, d, generator, like.device), basis.rows)[0]
            following = basis.append(following[: d - basis.size], op.noise)
        ritz = rayleigh_ritz(basis.rows, basis.images, basis.projected)
        precision = f"{op.problem.products} products, float64 iteration"
        upper = upper_values(ritz, 0.0, k + 1)
        return _certified(finish(op, ritz, k, upper, 0.0, solver="krylov", precision=precision), k)


def _certified(solved: Solved, k: int) -> tuple[Tensor, Certificate]:
    """What was found as it came, and the certificate of the same run."""
    result = assemble(solved, k, dtype=torch.float64, centred=True, whiten=False)
    return solved.spectrum[:k], result.certificate


SQUARING: dict[str, Callable[[Dense, int], tuple[Tensor, Certificate]]] = {
    "covariance": _eigh,
    "krylov": _lanczos,
}
