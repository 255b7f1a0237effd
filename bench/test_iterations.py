"""Lanczos or Chebyshev instead of a dense eigensolver: how much faster on a formed covariance?

Each with its certificate, from the same `Moments`, against `covariance_eigh` of as many components.
"""

import pytest
from spectra import samples
from truth import covariance, eigenvalues, missed

import pca_torch as pt
from pca_torch.operators import from_moments
from pca_torch.solvers import krylov


@pytest.mark.parametrize("method", ["lanczos", "chebyshev"])
@pytest.mark.parametrize("spectrum", ["power", "flat"])
@pytest.mark.parametrize("which", [0, 1], ids=["few", "many"])
def test_iteration_against_dense(versus, sized, device, method, spectrum, which):
    """Few components and as many as an iteration is taken for."""
    n, d = sized(full=(8192, 2048), tiny=(900, 560))
    k = sized(full=(32, 200), tiny=(4, 16))[which]
    x = samples(spectrum, n, d, k).to(device)
    moments = pt.Moments(d).update(x)
    c = covariance(x)
    variance = eigenvalues(c)
    versus(
        f"{method}, {spectrum}, {k} of {n}×{d}",
        lambda: krylov.solve(from_moments(moments), k, method=method).components,
        lambda: pt.decompose(moments, k, "covariance_eigh").components,
        against="covariance_eigh",
        what="share of the variance that is missed",
        judge=lambda components: missed(c, variance, components),
    )
