"""Every worked example that concerns PCA, through the public API, to 1e-12 relative in float64."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import solvers
from pca_torch.solvers import krylov
from tests.support import GOLDEN

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SOLVERS = tuple(solvers.SOLVERS)
DESCRIBING = {"source", "recipe", "note", "this_machine"}  # words, and what one machine once printed
BY_ANGLE = {"at_0_deg", "at_45_deg", "outlier_variance_45deg", "outlier_variance_135deg"}  # read in loops


@pytest.fixture(autouse=True)
def krylov_iterates(monkeypatch):
    """The examples are small: without this `krylov` would hand all of them to a dense solver."""
    monkeypatch.setattr(krylov, "DENSE_UP_TO", 0)
    monkeypatch.setattr(krylov, "FEW", 1)
    monkeypatch.setattr(krylov, "BLOCK", 1)
    monkeypatch.setattr(krylov, "_narrow", lambda *_: None)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def same(have, want):
    torch.testing.assert_close(torch.as_tensor(have, dtype=torch.float64), tensor(want), **CLOSE)


def samples_of(covariance, n=8):
    """Rows whose covariance with ddof=0 is exactly the one wanted."""
    covariance = tensor(covariance)
    g = torch.Generator().manual_seed(0)
    white = torch.randn(n, len(covariance), generator=g, dtype=torch.float64)
    white = torch.linalg.qr(white - white.mean(0)).Q * math.sqrt(n)
    values, vectors = torch.linalg.eigh(covariance)
    return white * values.sqrt() @ vectors.mT


def direction(degrees):
    return tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


def angle(component):
    """Degrees of an axis, in [0, 180)."""
    return math.degrees(math.atan2(component[1], component[0])) % 180


def test_two_cell_images():
    e = GOLDEN["two_cell_images"]
    x = tensor(e["X"])
    pca = pt.PCA(1).fit(x)
    full = pt.PCA().fit(x)
    same(full.mean_, e["mean"])
    same(full.singular_values_, e["singular_values"])
    same(full.explained_variance_, e["explained_variance_ddof1"])
    same(full.explained_variance_ratio_, e["ratio"])
    same(full.result_.total_variance * 3, e["total_square"])
    same(pca.components_.abs(), np.abs(e["components_up_to_sign"][:1]))
    same(full.components_.abs(), np.abs(e["components_up_to_sign"]))
    assert full.components_[1].prod() < 0
    same(pca.inverse_transform(pca.transform(x)), e["k1_reconstruction"])
    assert pca.result_.reconstruction_error(x) == pytest.approx(e["k1_sq_error"], rel=1e-12)
    same(pt.Moments(2).update(x).covariance(), e["covariance_ddof1"])
    same(pca.transform(x).flatten().abs(), e["scores_k1_abs"])
    left = pt.subspace.captured(x, tensor([1.0, 0.0])) * 3  # keep the left cell: the right one is lost
    same(e["total_square"] - left, e["left_only_sq_error"])


def test_two_cell_images_new_records_are_centred_by_the_fit():
    e = GOLDEN["two_cell_images"]
    pca = pt.PCA(1).fit(tensor(e["X"]))
    new = tensor([e["new_record"]])
    assert abs(pca.transform(new).item()) == pytest.approx(e["new_score_abs"], rel=1e-12)
    same(pca.inverse_transform(pca.transform(new))[0], e["new_reconstruction"])
    batch = tensor(e["new_batch"])
    same(pca.transform(batch).abs(), [[e["new_batch_scores_abs"]]] * 2)
    recentred = (batch - batch.mean(0)) @ pca.components_.mT
    same(recentred.abs(), [[e["new_batch_scores_if_recentred"]]] * 2)  # what a wrong transform would give
    storage = pca.result_.storage(4)
    assert (storage["scores"] + storage["directions"] + storage["mean"], storage["original"]) == (
        e["storage_numbers_k1"],
        e["storage_original"],
    )


def test_squared_spectrum():
    e = GOLDEN["squared_spectrum_64_25_9_2"]
    same(pt.spectrum.cumulative(e["squared_singular_values"]), e["cumulative"])
    for share, rank in e["rank_for"].items():
        assert pt.spectrum.rank(e["squared_singular_values"], float(share)) == rank


def test_two_values():
    e = GOLDEN["two_values_6_2"]
    for n, ddof, key in ((5, 1, "n5_explained_variance_ddof1"), (10, 0, "n10_explained_variance_ddof0")):
        x = samples_of(np.diag(np.square(e["singular_values"])) / n, n)
        pca = pt.PCA(ddof=ddof).fit(x)
        same(pca.singular_values_, e["singular_values"])
        same(pca.explained_variance_, e[key])
        same(pca.explained_variance_ratio_, e["ratio"])
        assert pt.PCA(1).fit(x).result_.reconstruction_error(x) == pytest.approx(e["k1_sq_error"], rel=1e-12)


def test_storage():
    e = GOLDEN["storage_1000x20_k3"]
    x = torch.randn(50, e["d"], generator=torch.Generator().manual_seed(0))
    storage = pt.PCA(e["k"]).fit(x).result_.storage(e["n"])
    assert storage == {key: e[key] for key in ("scores", "directions", "mean", "total", "original")}


def test_uncentred_offset():
    e = GOLDEN["uncentred_offset"]
    x = tensor(e["X"])
    moments = pt.Moments(2).update(x)
    same(moments.mean, e["mean"])
    same(pt.decompose(moments).explained_variance_ratio, e["centred_ratio"])
    assert e["identity"] == "R'R = X'X + n mu mu'"
    outer = torch.outer(moments.mean, moments.mean)
    torch.testing.assert_close(moments.second_moment(), moments.covariance(0) + outer, **CLOSE)
    torch.testing.assert_close(moments.second_moment() * 4, x.mT @ x, **CLOSE)


def test_isotropic_square_with_offset():
    e = GOLDEN["isotropic_square_with_offset"]
    x = tensor(e["X"])
    same(pt.Moments(2).update(x).mean, e["mean"])
    same(pt.Moments(2).update(x).covariance(0), e["centred_covariance_ddof0"])
    one = pt.PCA(1, ddof=0).fit(x)
    same(pt.PCA(ddof=0).fit(x).explained_variance_ratio_, e["centred_ratio"])
    assert one.certificate_.unique is e["unique_axis"]
    same(pt.Moments(2).update(x).second_moment(), e["uncentred_second_moment"])
    for solver in SOLVERS:
        raw = pt.PCA(center=False, ddof=0, svd_solver=solver).fit(x)
        same(raw.explained_variance_, e["uncentred_eigenvalues"])
        same(raw.explained_variance_ratio_[0], e["uncentred_ratio_first"])
        ray = tensor(e["uncentred_first_direction_prop"])
        same(raw.components_[0], (ray / ray.norm()).tolist())
        same(raw.mean_, [0, 0])


def test_duplicated_columns():
    e = GOLDEN["duplicated_columns"]
    x = tensor(e["X"])
    same(pt.Moments(2).update(x).covariance(0), e["covariance_ddof0"])
    for solver in SOLVERS:
        pca = pt.PCA(ddof=0, svd_solver=solver).fit(x)
        same(pca.explained_variance_, e["eigenvalues"])
        assert pt.spectrum.rank(pca.result_, 1.0) == e["rank"]
        one = pt.PCA(1, svd_solver=solver).fit(x).result_
        assert one.reconstruction_error(x) == pytest.approx(e["k1_sq_error"], abs=1e-12)


def test_four_points():
    e = GOLDEN["four_points_4p5"]
    x = tensor(e["X"])
    full, one = pt.PCA(ddof=0).fit(x), pt.PCA(1, ddof=0).fit(x)
    same(full.explained_variance_, e["explained_variance_ddof0"])
    same(full.explained_variance_ratio_, e["ratio"])
    same(full.singular_values_, e["singular_values"])
    assert abs(one.transform(x)[0].item()) == pytest.approx(e["score_of_1_2_abs"], rel=1e-12)
    same(x[0] - one.inverse_transform(one.transform(x))[0], e["residual_of_1_2"])
    assert one.result_.reconstruction_error(x) == pytest.approx(e["k1_sq_error"], rel=1e-12)
    relative = math.sqrt(one.result_.reconstruction_error(x) / x.square().sum().item())
    assert relative == pytest.approx(e["relative_frobenius_error"], rel=1e-12)


def test_exercise():
    e = GOLDEN["exercise_3_1"]
    x = tensor(e["X"])
    full, one = pt.PCA(ddof=0).fit(x), pt.PCA(1).fit(x)
    same(pt.Moments(2).update(x).covariance(0), e["covariance_ddof0"])
    same(full.explained_variance_, e["explained_variance_ddof0"])
    same(full.explained_variance_ratio_, e["ratio"])
    point = tensor([[3, 1]])
    assert abs(one.transform(point).item()) == pytest.approx(e["k1_score_of_3_1_abs"], rel=1e-12)
    same(one.inverse_transform(one.transform(point))[0], e["k1_reconstruction_of_3_1"])
    assert one.result_.reconstruction_error(x) == pytest.approx(e["k1_sq_error"], rel=1e-12)


def test_four_samples():
    e = GOLDEN["four_samples_14_1"]
    x = tensor(e["X"])
    full, one = pt.PCA().fit(x), pt.PCA(1).fit(x)
    same(full.mean_, e["mean"])
    same(pt.Moments(2).update(x).covariance(1) * 3, e["gram"])
    same(full.singular_values_.square(), e["squared_singular_values"])
    same(full.components_.abs(), np.abs(e["components_up_to_sign"]))
    same(one.transform(x).flatten().abs(), e["k1_scores_abs"])
    rebuilt = one.inverse_transform(one.transform(x))
    same(rebuilt, e["k1_reconstruction"])
    for per, key in (
        ("table", "k1_sq_error"),
        ("sample", "k1_mean_sq_error_per_sample"),
        ("scalar", "k1_mse_per_scalar"),
    ):
        assert one.result_.reconstruction_error(x, per) == pytest.approx(e[key], rel=1e-12)
    same(full.explained_variance_ratio_, e["ratio"])
    same(pt.PCA(ddof=0).fit(x).total_variance_, e["empirical_total_variance_ddof0"])
    assert torch.linalg.matrix_rank(rebuilt) == e["rank_of_affine_k1_reconstruction"]


def test_four_samples_new_sample_and_standardised():
    e = GOLDEN["four_samples_14_1"]
    x = tensor(e["X"])
    one, new = pt.PCA(1).fit(x), tensor([e["new_sample"]])
    assert abs(one.transform(new).item()) == pytest.approx(e["new_score_abs"], rel=1e-12)
    rebuilt = one.inverse_transform(one.transform(new))
    same(rebuilt[0], e["new_reconstruction"])
    same((new - rebuilt)[0], e["new_residual"])
    for solver in SOLVERS:
        for ddof in (0, 1):
            scaled = pt.PCA(standardize=True, ddof=ddof, svd_solver=solver).fit(x)
            same(scaled.components_[0].abs(), e["standardised_first_direction_up_to_sign"])
            v = scaled.components_
            correlation = v.mT * scaled.explained_variance_ @ v
            same(correlation, e["standardised_covariance_ddof0"])


def test_eight_points():
    e = GOLDEN["eight_points_133"]
    x = tensor(e["X"])
    pca = pt.PCA(ddof=0).fit(x)
    same(pt.Moments(2).update(x).covariance(0), e["covariance_ddof0"])
    same(pca.total_variance_, e["total"])
    same(pca.explained_variance_, e["eigenvalues"])
    for degrees in (0, 45):
        kept = pt.subspace.captured(x, direction(degrees), ddof=0).item()
        assert kept == pytest.approx(e[f"at_{degrees}_deg"]["kept"], rel=1e-12)
        assert e["total"] - kept == pytest.approx(e[f"at_{degrees}_deg"]["lost"], rel=1e-12)
    for factor, degrees in e["second_column_scaled_first_axis_deg"].items():
        scaled = pt.PCA(1).fit(x * tensor([1.0, float(factor)]))
        assert angle(scaled.components_[0]) == pytest.approx(degrees, rel=1e-12)


def test_eight_points_and_an_outlier():
    e = GOLDEN["eight_points_133"]
    x = tensor(e["X"])
    far = tensor([e["outlier"]])  # the ninth point, around the mean of the eight
    x = torch.cat([x - x.mean(0), far])
    moments = pt.Moments(2).update(x)
    same(moments.mean, e["outlier_mean"])
    for degrees in (135, 45):
        kept = pt.subspace.captured(moments, direction(degrees), ddof=0).item()
        assert kept == pytest.approx(e[f"outlier_variance_{degrees}deg"], rel=1e-12)
    assert angle(pt.PCA(1).fit(x).components_[0]) == pytest.approx(e["outlier_first_axis_deg"], rel=1e-12)


@pytest.mark.parametrize("name", ["labels_blind_132_1", "curve_blind_13_14p95"])
def test_first_ratio_of_a_covariance(name):
    e = GOLDEN[name]
    pca = pt.PCA(ddof=0).fit(samples_of(e["covariance"]))
    assert pca.explained_variance_ratio_[0].item() == pytest.approx(e["ratio_first"], rel=1e-12)


def test_dominant_spectrum():
    e = GOLDEN["spectrum_dominant"]
    assert pt.spectrum.top_share([e["first"]], total=e["total"]) == pytest.approx(e["ratio_first"], rel=1e-12)
    x = samples_of(np.diag([e["first"], e["lost_after_first"]]))
    one = pt.PCA(1, ddof=0).fit(x).result_
    assert one.explained_variance_ratio[0].item() == pytest.approx(e["ratio_first"], rel=1e-12)
    assert one.reconstruction_error(x, "sample") == pytest.approx(e["lost_after_first"], rel=1e-12)


def test_five_points():
    e = GOLDEN["five_points_3p8_0p2"]
    x = samples_of(e["covariance_ddof0"], e["n"])
    pca = pt.PCA(ddof=0).fit(x)
    same(pca.explained_variance_, e["eigenvalues"])
    same(pca.singular_values_, e["singular_values"])
    same(pca.explained_variance_ratio_, e["ratio"])


KEEPS_SMALL = {"full": 5, "tsqr": 5}  # how many of the five variances each may trust
SQUARES = {"covariance_eigh": 4, "krylov": 4, "randomized": 4}


@pytest.mark.parametrize("solver", SOLVERS)
def test_kappa_squared(solver):
    e = GOLDEN["kappa_squared"]
    x, want, close = tensor(e["X"]), e["exact_variances_ddof0"], e["tolerance_smallest_variance_relative"]
    pca = pt.PCA(len(want), svd_solver=solver, ddof=0).fit(x)
    certificate, have = pca.certificate_, pca.explained_variance_.tolist()
    assert certificate.trusted == (KEEPS_SMALL | SQUARES)[solver]
    for value, exact, error in zip(have, want, certificate.variance_error, strict=True):
        assert abs(value - exact) <= error
    if solver in SQUARES:  # the smallest is lost, and the certificate has said so
        assert abs(have[-1] - want[-1]) > close * want[-1]
        return
    assert have == pytest.approx(want, rel=close)
    assert pca.singular_values_.tolist() == pytest.approx(e["exact_singular_values_60_digits"], rel=close)
    condition = (pca.singular_values_[0] / pca.singular_values_[-1]).item()
    assert condition == pytest.approx(e["quoted"]["cond_X"], rel=1e-3)  # quoted to four digits


RULES = {
    "total variance 0: ratio undefined, report 'total variance is zero', never 0/0",
    "k=0 reconstructs the mean",
    "k>=rank: training error 0",
    "ddof=1 needs n>=2",
    "tied eigenvalues across the cut: k-subspace not unique",
    "constant column cannot be divided by its standard deviation",
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_degenerate_rules(solver):
    assert set(GOLDEN["degenerate"]["rules"]) == RULES  # a new rule wants a test below
    x = tensor([[1, 2, 0], [3, 4, 0], [5, 6, 0], [7, 9, 0]])
    with pytest.warns(UserWarning, match="total variance is zero"):
        nothing = pt.PCA(svd_solver=solver).fit(torch.full((4, 3), 0.1, dtype=torch.float64))
    same(nothing.explained_variance_ratio_, [0, 0, 0])
    assert pt.spectrum.rank(nothing.result_, 0.95) == 0
    none = pt.PCA(0, svd_solver=solver).fit(x)
    same(none.inverse_transform(none.transform(x)), x.mean(0).expand(4, 3).tolist())
    both = pt.PCA(2, svd_solver=solver).fit(x)
    assert both.result_.reconstruction_error(x) == pytest.approx(0, abs=1e-24)
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        pt.PCA(svd_solver=solver).fit(x[:1])
    tied = tensor([[1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, -1, 0], [0, 0, 3], [0, 0, -3]])
    assert pt.PCA(1, svd_solver=solver).fit(tied).certificate_.unique
    assert not pt.PCA(2, svd_solver=solver).fit(tied).certificate_.unique
    with pytest.warns(UserWarning, match="1 of 3 columns are constant"):
        scaled = pt.PCA(standardize=True, svd_solver=solver).fit(x)
    assert scaled.scale_[2] == 1
    assert bool(torch.isfinite(scaled.transform(x)).all())


def test_every_example_and_every_key_of_one_is_named_here():
    source = Path(__file__).read_text()
    keys = {key for entry in GOLDEN.values() for key in entry} - DESCRIBING - BY_ANGLE
    assert [name for name in (*GOLDEN, *keys) if f'"{name}"' not in source] == []
