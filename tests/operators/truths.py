"""Covariances in extended precision, and what a product with one may be off by."""

import numpy as np
import torch
from torch import Tensor

from tests.support import samples

OPTIONS = {
    "plain": {},
    "standardised": {"standardize": True},
    "uncentred": {"center": False},
    "uncentred scaled": {"center": False, "standardize": True},
    "divisor N": {"ddof": 0},
}
INPUTS = [  # dtype, spread, mean over spread
    (torch.float64, 1.0, 0.0),
    (torch.float64, 1.0, 1e2),
    (torch.float64, 1.0, 1e4),
    (torch.float32, 1.0, 1e2),
    (torch.bfloat16, 1.0, 1e1),
    (torch.int64, 1e3, 1e4),
]


def rows_of(
    dtype: torch.dtype, spread: float, ratio: float, n: int = 90, d: int = 14, seed: int = 0
) -> Tensor:
    """(n, d) rows of a dtype whose columns have means of `ratio` times their spread, of either sign."""
    signs = (-1.0) ** torch.arange(d)
    return (spread * (samples(n, d, decay=0.95, seed=seed) + ratio * signs)).to(dtype)


def standard(
    x: Tensor, w: Tensor | None = None, *, center: bool = True, standardize: bool = False
) -> np.ndarray:
    """(N, D) centred, scaled and weighted rows in 80-bit numbers."""
    z = x.double().numpy().astype(np.longdouble)
    w = np.ones(len(z), np.longdouble) if w is None else w.numpy().astype(np.longdouble)
    if center:
        z = z - (w @ z) / w.sum()
    if standardize:  # the divisor cancels but for its root
        z = z / np.sqrt(w @ z**2)
    return z * np.sqrt(w)[:, None]


def divisor(n: int, w: Tensor | None, ddof: float) -> float:
    if w is None:
        return n - ddof
    return (w.sum() - ddof * w.square().sum() / w.sum()).item()


def covariance(x: Tensor, w: Tensor | None = None, *, ddof: float = 1, **options) -> np.ndarray:
    """(D, D) in 80-bit numbers."""
    z = standard(x, w, **options)
    return z.T @ z / (1 if options.get("standardize") else divisor(len(z), w, ddof))


def units(d: int) -> Tensor:
    """Unit rows: the axes, and a few random ones."""
    more = torch.randn(5, d, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return torch.cat([torch.eye(d, dtype=torch.float64), more / more.norm(dim=1, keepdim=True)])


def largest_error(op, want: np.ndarray) -> float:
    """The largest ‖fl(vC) - vC‖ over unit rows."""
    v = units(len(want))
    off = op.apply(v).numpy() - v.numpy().astype(np.longdouble) @ want
    return float(np.sqrt((off**2).sum(1)).max())


def allowed(op, want: np.ndarray) -> float:
    """What an operator says such a product is off by."""
    return op.problem.error + op.noise * float(np.linalg.norm(want.astype(float), 2))


def check_facts(op, x: Tensor, w: Tensor | None = None, *, ddof: float = 1, **options) -> None:
    """Everything that a problem says of C but its error."""
    want, problem = covariance(x, w, ddof=ddof, **options), op.problem
    close = {"rtol": 1e-12, "atol": 1e-14 * float(want.max())}
    np.testing.assert_allclose(problem.variance.numpy(), want.diagonal().astype(float), **close)
    plain, share = (
        x.double().numpy().astype(np.longdouble),
        1 / len(x) if w is None else w.numpy() / w.sum().item(),
    )
    mean, second = (share * plain.T).sum(1), (share * plain.T**2).sum(1)
    scale = 1.0 if problem.scale is None else problem.scale.numpy()
    np.testing.assert_allclose(problem.second_moment.numpy() * scale**2, second.astype(float), rtol=1e-12)
    center = options.get("center", True)
    np.testing.assert_allclose(problem.mean.numpy(), mean.astype(float) * center, rtol=1e-13, atol=1e-14)
    assert problem.divisor == divisor(len(x), w, ddof)
    assert (problem.n_samples, problem.centred, problem.constant) == (len(x), center, False)
    assert problem.dtype == (x.dtype if x.is_floating_point() else torch.float64)
