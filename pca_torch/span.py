"""What the span of stored components captures, and how nearly a covariance leaves it alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pca_torch.eigen import small_eigvalsh

__all__ = ["Span"]


@dataclass(frozen=True)
class Span:
    """The span of K rows W, made orthonormal, with what C does to it."""

    captured: float  # tr WCWᵀ
    least: float  # the smallest eigenvalue of WCWᵀ
    residual: float  # ‖WC - (WCWᵀ)W‖_F

    @classmethod
    def of(cls, v: Tensor, applied: Tensor) -> Span:
        """The span of components as they are stored.

        Their rounding bends each by u, which moves a single vᵀCv by u√(λλ₁), but the span's by u² only.

        Args:
            v: (K, D) rows, orthonormal but for their rounding.
            applied: (K, D) vC.
        """
        if not len(v):
            return cls(0.0, 0.0, 0.0)
        factor = torch.linalg.cholesky(v @ v.mT)
        w = torch.linalg.solve_triangular(factor, v, upper=False)
        image = torch.linalg.solve_triangular(factor, applied, upper=False)
        inner = image @ w.mT
        inner = (inner + inner.mT) / 2
        least = small_eigvalsh(inner)[0].item()
        residual = torch.linalg.vector_norm(image - inner @ w).item()
        return cls(inner.trace().item(), least, residual)
