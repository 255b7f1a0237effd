"""What does the certificate cost on top of the bare decomposition?

A solver from its statistic, or from the samples, against nothing but the eigenvalues and vectors of the
same covariance, or the singular values and vectors of the same centred rows.
"""

import pytest
import torch
from spectra import samples
from torch import Tensor
from truth import centred, covariance, eigenvalues

import pca_torch as pt
from pca_torch.eigen import eigenpairs
from pca_torch.solvers import SOLVERS

CASES = {
    "covariance_eigh, all": "bare eigh",
    "covariance_eigh, top": "bare eigh",
    "tsqr, all": "bare SVD of R",
    "full, all": "bare QR, SVD",
}


@pytest.mark.parametrize("case", CASES)
def test_certified_against_bare(versus, sized, device, case):
    """The same matrix, with and without a certificate."""
    n, d, k = sized(full=(4096, 1024, 64), tiny=(300, 40, 4))
    solver, _, some = case.partition(", ")
    k = k if some == "top" else min(n, d)
    x = samples("power", n, d, d).to(device)
    z = centred(x)
    if solver == "covariance_eigh":
        data = pt.Moments(d).update(x)
        matrix = data.covariance()
        truth = torch.linalg.svdvals(z).square() / (n - 1)  # another route: nothing is squared

        def bare() -> Tensor:
            return eigenpairs(matrix, (lambda _: k) if some == "top" else None)[0][:k]

    else:
        data = pt.RFactor(d).update(x) if solver == "tsqr" else x
        truth = eigenvalues(covariance(x))

        def bare() -> Tensor:
            r = data.r if solver == "tsqr" else torch.linalg.qr(z, mode="r").R
            return torch.linalg.svd(r).S.square() / (n - 1)

    versus(
        f"{solver}, {k if some == 'top' else 'all'} of {n}×{d}",
        lambda: SOLVERS[solver](data, k).explained_variance,
        bare,
        against=CASES[case],
        what="of a variance, over the largest",
        judge=lambda found: ((found - truth[:k]).abs().max() / truth[0]).item(),
    )
