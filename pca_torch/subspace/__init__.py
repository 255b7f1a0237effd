"""Subspaces: the angles between two of them, what chance would give, and the variance that they hold."""

from __future__ import annotations

from pca_torch.subspace.chance import RandomOverlap, random_overlap
from pca_torch.subspace.energy import CapturedShare, captured, captured_between, captured_share
from pca_torch.subspace.spans import orthonormal_rows, overlap, principal_angles

__all__ = [
    "CapturedShare",
    "RandomOverlap",
    "captured",
    "captured_between",
    "captured_share",
    "orthonormal_rows",
    "overlap",
    "principal_angles",
    "random_overlap",
]
