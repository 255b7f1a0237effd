"""What is decomposed: a covariance that can be multiplied, and everything else that is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pca_torch.precision import unit_roundoff

__all__ = ["Operator", "Problem", "product_noise"]


@dataclass(frozen=True)
class Problem:
    """All facts of a covariance but its entries; the data may be samples, a statistic, or on disk."""

    mean: Tensor  # (D,)   float64, what is subtracted: zeros for an uncentred decomposition
    scale: Tensor | None  # (D,)   float64, what columns are divided by, when standardised
    variance: Tensor  # (D,)   float64 diagonal of the covariance, after scaling
    second_moment: Tensor  # (D,)   float64 E[x²] per column, uncentred, after scaling
    n_samples: int  # N
    divisor: float  # N - ddof, or its weighted form
    dtype: torch.dtype  # of the data
    centred: bool
    constant: bool  # no column varies by more than the rounding of its mean
    error: float  # ‖Ĉ - C‖₂ at most: what sums, centring and scaling are off by
    products: str  # their arithmetic, for the certificate
    measured: bool = False  # `error` was measured with a safety factor, not bounded

    @property
    def total_variance(self) -> float:
        """Tr C, of all D directions."""
        return self.variance.sum().item()


class Operator(Protocol):
    """A positive semi-definite C that rows are multiplied by."""

    @property
    def problem(self) -> Problem:
        """What else is known of C."""
        ...

    @property
    def matrix(self) -> Tensor | None:
        """(D, D) C itself, where it was formed."""
        ...

    @property
    def noise(self) -> float:
        """‖fl(vC) - vC‖ ≤ noise · max(λ₁, what centring cancels) for unit v: rounding of one product."""
        ...

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) float64 → v C (b, D) float64.

        Args:
            v: rows to multiply.
        """
        ...


def product_noise(d: int, dtype: torch.dtype = torch.float64) -> float:
    """Rounding of one product with a D×D matrix over its norm: 8u√D.

    The root is that of the probabilistic rounding model (Higham & Mary, SIAM J. Sci. Comput. 41(5),
    2019); the factor leaves room for what follows the product.

    Args:
        d: D.
        dtype: arithmetic of the product.
    """
    return 8 * unit_roundoff(dtype) * d**0.5
