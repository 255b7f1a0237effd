"""Which solver "auto" takes, when it looks again, and what `decompose` refuses."""

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import row_stream, solvers
from pca_torch.solvers import choice
from tests.support import samples, truth

F32, F64 = torch.float32, torch.float64


@pytest.mark.parametrize(
    ("n", "d", "k", "dtype", "facts", "want"),
    [
        (200_000, 50_000, 20, F32, {"sparse": True}, "krylov"),
        (100, 10, None, F32, {"sparse": True}, "krylov"),
        (0, 4096, 128, F32, {"again": False}, "krylov"),  # a stream: N is not known
        (0, 4096, 0.95, F32, {"again": False}, "krylov"),
        (0, 4096, 410, F32, {"again": False}, "covariance_eigh"),  # more than a tenth
        (0, 4096, None, F64, {"again": False}, "covariance_eigh"),
        (0, 512, 1, F32, {"again": False}, "covariance_eigh"),  # too small for an iteration
        (100, 100, 0.95, F32, {}, "full"),
        (3000, 300, None, F32, {}, "full"),  # 2.7e8
        (10_000, 173, None, F32, {}, "full"),  # 2.99e8
        (10_000, 174, None, F32, {}, "covariance_eigh"),  # 3.03e8
        (10_000, 174, 10, F32, {}, "covariance_eigh"),
        (8192, 4096, 128, F32, {}, "krylov"),
        (8192, 4096, 0.95, F32, {}, "krylov"),
        (8192, 4096, 1.0, F32, {}, "covariance_eigh"),
        (8192, 4096, None, F32, {}, "covariance_eigh"),
        (8192, 4096, None, F64, {}, "tsqr"),
        (8192, 4096, 1.0, F64, {}, "tsqr"),
        (8192, 4096, 1000, F64, {}, "covariance_eigh"),
        (10**8, 2, None, torch.bfloat16, {}, "covariance_eigh"),
        (4, 200_000, 3, F32, {}, "full"),  # 3.2e6: D×D is never formed
        (2000, 200_000, 10, F32, {}, "krylov"),
        (2000, 200_000, 1000, F32, {}, "full"),
        (20_000, 30_000, None, F64, {}, "full"),
    ],
)
def test_the_table_of_choices(n, d, k, dtype, facts, want):
    assert pt.choose_solver(n, d, k, dtype, "cpu", **facts) == want


def test_what_is_chosen_is_what_runs(monkeypatch):
    x = samples(1400, 600, decay=0.98, dtype=F32)
    moments = pt.Moments(600).update(x)
    for k in (3, 0.9, 100, None):
        assert pt.decompose(x, k).certificate.solver == pt.choose_solver(1400, 600, k)
        chosen = pt.choose_solver(1400, 600, k, again=False)
        assert pt.decompose(moments, k).certificate.solver == chosen
    assert pt.decompose(x.double()).certificate.solver == pt.choose_solver(1400, 600, None, F64) == "tsqr"
    assert pt.decompose(x[:60, :4]).certificate.solver == pt.choose_solver(60, 4) == "full"
    assert pt.decompose(x.to_sparse(), 3).certificate.solver == "krylov"
    assert pt.decompose(pt.RFactor(4).update(x[:, :4])).certificate.solver == "tsqr"
    monkeypatch.setattr(choice, "SMALL", 0)
    assert pt.decompose(x[:3]).certificate.solver == pt.choose_solver(3, 600) == "full"


def graded(dtype=F64):
    """σ from 1 to 1e-12: the last three stand below the floor of a covariance."""
    q = torch.linalg.qr(samples(100, 5) - samples(100, 5).mean(0)).Q
    return (q * 10.0 ** -torch.arange(0.0, 15, 3, dtype=torch.float64)).to(dtype).contiguous()


@pytest.fixture
def large(monkeypatch):
    """The sizes of a test count as large."""
    monkeypatch.setattr(choice, "SMALL", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("source", ["memory", "disk"])
def test_components_below_the_floor_are_looked_for_again(source, tmp_path):
    x = graded()
    np.save(tmp_path / "x.npy", x.numpy())
    data = x if source == "memory" else pt.NpySource(tmp_path / "x.npy", block_rows=40)
    result = pt.decompose(data, 5)
    assert result.certificate.solver == "tsqr"
    (tried,) = result.certificate.fallbacks
    assert tried.startswith("covariance_eigh: components below its floor")
    assert tried.endswith("were asked for, 3 stand above it")
    _, want, _ = truth(x)
    assert result.certificate.trusted == 5
    assert result.spectrum[-1].item() == pytest.approx(want[-1].item(), rel=1e-2)


@pytest.mark.usefixtures("large")
def test_float32_products_give_way_to_float64_and_those_to_the_samples(monkeypatch):
    monkeypatch.setattr(
        row_stream,
        "product_dtype",
        lambda dtype, device, precision="auto": F32 if precision != "float64" else F64,
    )
    result = pt.decompose(graded(), 5)
    assert result.certificate.solver == "tsqr"
    first, second = result.certificate.fallbacks
    assert first.startswith("covariance_eigh: components below its floor")
    assert second.startswith("covariance_eigh: components below its floor")
    assert float(first.split("floor ")[1].split()[0]) > 1e3 * float(second.split("floor ")[1].split()[0])


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"precision": "float32"}, "rerun with precision='float64'"),
        ({}, "rerun with svd_solver='tsqr'"),
    ],
)
def test_a_stream_cannot_be_read_again_and_says_what_to_rerun_with(options, hint):
    statistic = pt.Moments(5, **options).update(graded())
    (note,) = pt.decompose(statistic, 5).certificate.fallbacks
    assert note.startswith("covariance_eigh: ")
    assert note.endswith(hint)
    assert pt.decompose(statistic, 1).certificate.fallbacks == ()
    assert pt.decompose(pt.RFactor(5).update(graded()), 5).certificate.trusted == 5


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("x", "options", "notes"),
    [
        (graded(), {"n_components": 2}, 0),  # all of them stand above the floor
        (graded(), {"n_components": 5, "svd_solver": "covariance_eigh"}, 1),  # asked for by name: a hint
        (graded(torch.float32), {"n_components": 5}, 0),  # the data are no better themselves
    ],
    ids=["few", "named", "float32"],
)
def test_otherwise_the_first_answer_stands(x, options, notes):
    certificate = pt.decompose(x, **options).certificate
    assert (certificate.solver, len(certificate.fallbacks)) == ("covariance_eigh", notes)


@pytest.mark.usefixtures("large")
def test_whitening_asks_for_what_it_would_drop():
    result = pt.decompose(graded(), 5, whiten=True)
    assert (result.n_components, result.certificate.solver) == (5, "tsqr")


@pytest.mark.usefixtures("large")
def test_the_second_look_keeps_the_options():
    x, w = graded() + 1.0, torch.linspace(1, 2, 100, dtype=torch.float64)
    again = pt.decompose(x, 5, weights=w, ddof=0)
    direct = pt.decompose(x, 5, weights=w, ddof=0, svd_solver="tsqr")
    assert again.certificate.fallbacks
    assert torch.equal(again.spectrum, direct.spectrum)
    assert torch.equal(again.components, direct.components)


@pytest.mark.parametrize("solver", ["full", "randomized"])
def test_files_are_not_loaded_behind_the_callers_back(solver, tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 2)))
    with pytest.raises(ValueError, match=f"`svd_solver` = '{solver}' needs the samples in memory"):
        pt.decompose(pt.NpySource(tmp_path / "x.npy"), svd_solver=solver)


@pytest.mark.parametrize("solver", ["full", "covariance_eigh", "tsqr"])
def test_sparse_samples_stay_sparse(solver):
    with pytest.raises(ValueError, match=f"`svd_solver` = '{solver}' would make sparse samples dense"):
        pt.decompose(torch.eye(4).to_sparse(), svd_solver=solver)


def test_few_directions_of_long_files_are_found_without_a_square(tmp_path, monkeypatch):
    x = samples(700, 600, decay=0.95, dtype=F32)
    np.save(tmp_path / "x.npy", x.numpy())
    source = pt.NpySource(tmp_path / "x.npy", block_rows=100)
    formed = pt.decompose(source, 5)
    monkeypatch.setattr(choice, "SQUARE_BYTES", 0)
    monkeypatch.setattr(solvers, "Moments", None)  # what is not there cannot be formed
    passed = pt.decompose(source, 5)
    assert passed.certificate.bound_kind.startswith("probability")
    off = torch.tensor(passed.certificate.variance_error) + torch.tensor(formed.certificate.variance_error)
    assert bool(((passed.spectrum[:5] - formed.spectrum[:5]).abs() <= off).all())


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
    for solver in solvers.SOLVERS:
        result = pt.decompose(x, svd_solver=solver)
        assert not result.components.requires_grad
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.detach(), X)
