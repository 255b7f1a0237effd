"""The κ² lesson: squaring the samples squares their condition number, κ(XᵀX) = κ(X)².

`study` computes the smallest variances of samples by every route beside the true ones, before any clamp at
zero; `table` and `plot` show them.
"""

from pca_torch.kappa.picture import plot
from pca_torch.kappa.routes import MOST_FEATURES, STEPS, Route, Study, example, read, study
from pca_torch.kappa.shifts import Shift
from pca_torch.kappa.text import table

__all__ = [
    "MOST_FEATURES",
    "STEPS",
    "Route",
    "Shift",
    "Study",
    "example",
    "plot",
    "read",
    "study",
    "table",
]
