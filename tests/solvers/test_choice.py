"""Which solver "auto" takes, when it looks again, and what `decompose` refuses."""

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import solvers
from tests.support import samples, truth


@pytest.mark.parametrize(
    ("n", "d", "want"),
    [
        (100, 100, "full"),  # N ≤ D: D×D is never formed
        (3, 100_000, "full"),
        (20_000, 30_000, "full"),
        (3000, 300, "full"),  # 2.7e8
        (10_000, 173, "full"),  # 2.99e8
        (10_000, 174, "covariance_eigh"),  # 3.03e8
        (8192, 4096, "covariance_eigh"),
        (10**8, 2, "covariance_eigh"),
    ],
)
def test_the_table_of_choices(n, d, want):
    assert pt.choose_solver(n, d) == want
    for k in (1, 0.95, None):
        for dtype in (torch.bfloat16, torch.float64):
            assert pt.choose_solver(n, d, k, dtype, "cpu") == want


def test_what_is_chosen_is_what_runs(monkeypatch):
    x = samples(60, 4)
    assert pt.decompose(x).certificate.solver == pt.choose_solver(60, 4) == "full"
    assert pt.decompose(pt.Moments(4).update(x)).certificate.solver == "covariance_eigh"
    monkeypatch.setattr(solvers, "SMALL", 0)
    assert pt.decompose(x).certificate.solver == pt.choose_solver(60, 4) == "covariance_eigh"
    assert pt.decompose(x[:4]).certificate.solver == "full"


def graded(dtype=torch.float64):
    """σ from 1 to 1e-12: the last three stand below the floor of a covariance."""
    q = torch.linalg.qr(samples(100, 5) - samples(100, 5).mean(0)).Q
    return (q * 10.0 ** -torch.arange(0.0, 15, 3, dtype=torch.float64)).to(dtype)


@pytest.fixture
def always_covariance(monkeypatch):
    monkeypatch.setattr(solvers, "SMALL", 0)


@pytest.mark.usefixtures("always_covariance")
def test_components_below_the_floor_are_looked_for_again():
    x = graded()
    result = pt.decompose(x)
    assert result.certificate.solver == "full"
    (tried,) = result.certificate.fallbacks
    assert tried.startswith("covariance_eigh: 5 components asked for, 3 stand above its floor")
    _, want, _ = truth(x)
    assert result.certificate.trusted == 5
    assert result.spectrum[-1].item() == pytest.approx(want[-1].item(), rel=1e-2)


@pytest.mark.usefixtures("always_covariance")
@pytest.mark.parametrize(
    ("x", "options"),
    [
        (graded(), {"n_components": 2}),  # all of them stand above the floor
        (graded(), {"svd_solver": "covariance_eigh"}),  # was asked for by name
        (graded(torch.float32), {}),  # the data are no better themselves
    ],
    ids=["few", "named", "float32"],
)
def test_otherwise_the_first_answer_stands(x, options):
    certificate = pt.decompose(x, **options).certificate
    assert (certificate.solver, certificate.fallbacks) == ("covariance_eigh", ())


@pytest.mark.usefixtures("always_covariance")
def test_whitening_asks_for_what_it_would_drop():
    result = pt.decompose(graded(), whiten=True)
    assert (result.n_components, result.certificate.solver) == (5, "full")


@pytest.mark.usefixtures("always_covariance")
def test_the_second_look_keeps_the_options():
    x, w = graded() + 1.0, torch.linspace(1, 2, 100, dtype=torch.float64)
    again = pt.decompose(x, weights=w, ddof=0)
    direct = pt.decompose(x, weights=w, ddof=0, svd_solver="full")
    assert again.certificate.fallbacks
    assert torch.equal(again.spectrum, direct.spectrum)
    assert torch.equal(again.components, direct.components)


X = samples(20, 3)


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (X, {"svd_solver": "arpack"}, ValueError, "`svd_solver` must be one of 'auto', 'full'"),
        (X, {"nonfinite": "zero"}, ValueError, "`nonfinite` must be one of 'raise', 'drop'"),
        (X, {"precision": "half"}, ValueError, "`precision` must be one of"),
        (X, {"ddof": -1}, ValueError, "`ddof` must be a number ≥ 0, got -1"),
        (X, {"ddof": True}, ValueError, "`ddof` must be a number ≥ 0, got True"),
        (X, {"n_components": 1.5}, ValueError, r"a share in \(0, 1\] as a float, or None, got 1.5"),
        (X, {"n_components": 4}, ValueError, "`n_components` must be in 0..3"),
        (X, {"mask": torch.ones(19)}, ValueError, "`mask` must have the leading shape"),
        (X, {"mask": torch.zeros(20)}, ValueError, "`x` has no rows that count"),
        (X, {"weights": torch.zeros(20)}, ValueError, "`x` has no rows that count"),
        (X, {"weights": -torch.ones(20)}, ValueError, "`weights` must be finite and not negative"),
        (X.to(torch.complex64), {}, TypeError, "`x` must be real, got torch.complex64"),
        (X[0], {}, ValueError, "at least two dimensions"),
        (X[:, :0], {}, ValueError, "at least one column"),
        (X[:0], {}, ValueError, "`x` has no rows that count"),
        (X[:1], {}, ValueError, "`ddof` = 1 needs more than 1 samples, got 1"),
        (X * np.nan, {}, ValueError, "20 of 20 samples with NaN or inf"),
        (X * np.nan, {"nonfinite": "drop"}, ValueError, "`x` has no rows that count"),
        (pt.Moments(3), {}, ValueError, "no rows were counted"),
        (pt.Moments(3).update(X), {"svd_solver": "full"}, ValueError, "needs the samples"),
        (np.array(["a"]), {}, TypeError, "numeric"),
    ],
)
def test_what_is_refused(data, options, error, message):
    with pytest.raises(error, match=message):
        pt.decompose(data, **options)


def test_any_leading_shape_mask_and_dropped_rows():
    x = X.clone().reshape(4, 5, 3)
    x[0, 0] = np.inf
    mask = torch.ones(4, 5)
    mask[3] = 0
    result = pt.decompose(x, mask=mask, nonfinite="drop")
    _, want, _ = truth(X[1:15])
    assert result.n_samples == 14
    torch.testing.assert_close(result.spectrum, want, rtol=1e-12, atol=0)


def test_the_caller_keeps_gradients_generator_and_data():
    x = X.clone().requires_grad_()
    state = torch.get_rng_state()
    for solver in ("full", "covariance_eigh"):
        result = pt.decompose(x, svd_solver=solver)
        assert not result.components.requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.detach(), X)
