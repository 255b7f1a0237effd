"""`decompose`: what it refuses, and when it looks again."""

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch.solvers import choice
from tests.support import samples, truth

SHARP = samples(60, 12, decay=0.05)  # variances fall by 400 each: the last are below √u·σ₁


@pytest.mark.parametrize("whiten", [False, True])
def test_auto_looks_again_below_the_floor_of_the_covariance(monkeypatch, whiten):
    monkeypatch.setattr(choice, "SMALL", 0)
    assert pt.choose_solver(60, 12, 12) == "covariance_eigh"
    alone = pt.decompose(SHARP, svd_solver="covariance_eigh")
    assert alone.certificate.trusted < 12
    found = pt.decompose(SHARP, 12, whiten=whiten)
    assert found.certificate.solver == "tsqr"
    assert (
        found.n_components >= (11 if whiten else 12) > alone.certificate.trusted
    )  # the last is null to float64
    assert "below its floor" in found.certificate.fallbacks[0]
    k = found.n_components
    error = (found.spectrum - truth(SHARP)[1])[:k].abs()
    assert bool((error <= 2 * torch.tensor(found.certificate.variance_error)).all())
    few = pt.decompose(SHARP, 2, whiten=whiten)
    assert (few.certificate.solver, few.certificate.fallbacks) == ("covariance_eigh", ())


def test_rows_are_chosen_where_the_statistic_is_made():
    moments = pt.Moments(3).update(samples(20, 3))
    for option in ("mask", "weights"):
        with pytest.raises(ValueError, match=r"give them to `Moments\.update`"):
            pt.decompose(moments, **{option: torch.ones(20)})
    with pytest.raises(ValueError, match="'full' needs the samples"):
        pt.decompose(moments, svd_solver="full")


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_squares_beyond_float64_are_refused(solver):
    with pytest.raises(ValueError, match=r"beyond 1e\+70, whose squares leave float64"):
        pt.decompose(1e200 * samples(20, 3), svd_solver=solver)


@pytest.mark.parametrize("solver", ["arpack", "gesvda", "Full", ""])
def test_solvers_that_do_not_exist_name_those_that_do(solver):
    with pytest.raises(ValueError, match="must be one of 'auto', 'full', 'covariance_eigh', 'tsqr'"):
        pt.decompose(samples(9, 2), svd_solver=solver)


@pytest.mark.parametrize("ddof", [-1, "1", None, True])
def test_ddof_is_a_number(ddof):
    with pytest.raises(ValueError, match="`ddof` must be a number ≥ 0"):
        pt.decompose(samples(9, 2), ddof=ddof)
    with pytest.raises(ValueError, match="`ddof` must be a number ≥ 0"):
        pt.PCA(ddof=ddof)


def test_a_bad_file_is_named(tmp_path):
    np.save(tmp_path / "bad.npy", np.full((4, 2), np.inf))
    with pytest.raises(ValueError, match=r"bad\.npy: `x` has 4 of 4 samples"):
        pt.decompose(pt.NpySource(tmp_path / "bad.npy"))


@pytest.mark.parametrize("seed", range(5))
def test_a_share_is_found_where_float32_products_lift_the_sum_above_the_trace(seed):
    x = samples(400, 300, decay=0.9, dtype=torch.float32, seed=seed)
    x[:, 0] += 1e4 * torch.randn(400, generator=torch.Generator().manual_seed(seed))
    moments = pt.Moments(300, precision="float32").update(x)
    result = pt.decompose(moments, 0.95)
    assert result.n_components == pt.spectrum.rank(result, 0.95) == 1


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_a_loud_constant_column_does_not_hide_the_others(solver):
    x = samples(500, 2) * torch.tensor([0.0, 1e-6]) + torch.tensor([1e9, 0.0])
    found = pt.decompose(x, 1, solver)
    assert found.total_variance.item() == pytest.approx(x[:, 1].var().item(), rel=1e-6)
    times = 1.7e18 + 1e15 * samples(500, 3)
    assert pt.decompose(times, svd_solver=solver, standardize=True).total_variance.item() == pytest.approx(3)


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_whitening_drops_what_the_stored_components_cannot_hold(solver):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 3, generator=g) @ torch.randn(3, 20, generator=g)
    result = pt.decompose(x, whiten=True, svd_solver=solver)
    assert result.n_components == 3
    torch.testing.assert_close(result.transform(x).std(0), torch.ones(3), rtol=1e-4, atol=0)


def test_float32_arithmetic_has_float32_components_and_saves(tmp_path):
    for solver in ("full", "covariance_eigh"):
        result = pt.decompose(samples(50, 8), svd_solver=solver, precision="float32")
        pt.save(tmp_path / "b.safetensors", {"a": result})
        assert torch.equal(pt.load(tmp_path / "b.safetensors")["a"].components, result.components)


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1e30, 1e60])
def test_float32_products_have_the_range_of_float64(size):
    x = samples(50, 8, offset=2.0)
    want, found = (
        pt.decompose(scale * x, svd_solver="covariance_eigh", precision="float32") for scale in (1, size)
    )
    torch.testing.assert_close(
        found.explained_variance_ratio, want.explained_variance_ratio, rtol=1e-4, atol=1e-7
    )
    error = (found.spectrum - truth(size * x)[1]).abs()
    assert bool((error <= torch.tensor(found.certificate.variance_error, dtype=torch.float64)).all())
