"""Covariances that rows can be multiplied by, formed or not."""

from pca_torch.operators.dense import Dense, from_moments
from pca_torch.operators.disk import OnDisk
from pca_torch.operators.rows import Rows
from pca_torch.operators.sparse import Sparse, is_sparse
from pca_torch.problem import Operator, Problem

__all__ = ["Dense", "OnDisk", "Operator", "Problem", "Rows", "Sparse", "from_moments", "is_sparse"]
