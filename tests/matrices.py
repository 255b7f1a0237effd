"""Symmetric matrices of a chosen spectrum as operators, for the tests of the iterations."""

import torch
from torch import Tensor

from pca_torch.operators import Dense, Problem
from pca_torch.precision import unit_roundoff

U64 = unit_roundoff(torch.float64)


def turned(values, seed: int = 0) -> Tensor:
    """(D, D) with these eigenvalues, in a random frame."""
    values = torch.as_tensor(values, dtype=torch.float64)
    q = frame(len(values), len(values), seed)
    matrix = q.mT * values @ q
    return (matrix + matrix.mT) / 2


def frame(rows: int, d: int, seed: int = 0) -> Tensor:
    """(rows, D) random orthonormal rows."""
    return torch.linalg.qr(noise(d, rows, seed=seed)).Q.mT


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def power(d: int, exponent: float = 1.4) -> Tensor:
    """(D,) variances i^-exponent."""
    return torch.arange(1, d + 1, dtype=torch.float64) ** -exponent


def eigenvalues(matrix: Tensor) -> Tensor:
    """(D,) descending."""
    return torch.linalg.eigvalsh(matrix).flip(0)


def operator(matrix: Tensor) -> Dense:
    """A covariance that nothing else is known of."""
    d = len(matrix)
    return Dense(
        Problem(
            mean=torch.zeros(d, dtype=torch.float64),
            scale=None,
            variance=matrix.diagonal().clone(),
            second_moment=matrix.diagonal().clone(),
            n_samples=10 * d,
            divisor=10 * d - 1,
            dtype=torch.float64,
            centred=True,
            constant=False,
            error=0.0,
            products="float64",
        ),
        matrix,
    )


class Unformed:
    """The same without its entries: only products can be asked for, and are counted."""

    matrix: Tensor | None = None

    def __init__(self, matrix: Tensor) -> None:
        self._formed = operator(matrix)
        self.problem = self._formed.problem
        self.noise = self._formed.noise
        self.products = 0

    def apply(self, v: Tensor) -> Tensor:
        self.products += len(v)
        return self._formed.apply(v)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
