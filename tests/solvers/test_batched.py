"""Many small covariances at once: known spectra, the error bound, drivers that fail, what is refused."""

import math
import re

import numpy as np
import pytest
import torch

from pca_torch.linalg import fix_signs
from pca_torch.precision import unit_roundoff
from pca_torch.solvers import batched
from pca_torch.solvers.batched import decompose_batch
from pca_torch.svd import LinAlgError
from tests.test_jacobi import SPECTRA, known_spectrum

U = unit_roundoff(torch.float64)
NAMES = ["eigh", "svd", "jacobi"]


@pytest.fixture(autouse=True)
def one_thread():
    """Small operations wait for each other on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def covariances(shape, e, *, rows=None, seed=0, dtype=torch.float64):
    """Covariances (*shape, e, e) of Gaussian samples with falling scales."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, rows or 2 * e, e, generator=g, dtype=torch.float64)
    x = x * 0.9 ** torch.arange(e, dtype=torch.float64)
    return (x.mT @ x / x.shape[-2]).to(dtype)


def check(c, result):
    """What the result claims, measured here in another way."""
    e = c.shape[-1]
    c = c.double()
    v = result.components
    eye = torch.eye(v.shape[-2], dtype=torch.float64)
    off = (v @ v.mT - eye).abs().amax((-2, -1))
    assert bool((off <= result.orthonormality + 2 * e * U).all())  # K of the E directions; e·U: this product
    assert bool((result.orthonormality <= (10 * math.sqrt(e) + 40) * U).all())
    size = torch.linalg.matrix_norm(c)
    lost = torch.linalg.vector_norm(
        c @ v.mT - v.mT * result.explained_variance[..., None, :], dim=-2, keepdim=True
    ).amax((-2, -1))
    assert bool((lost <= result.residual + result.variance_error + 2 * e * U * size).all())
    assert torch.equal(v, fix_signs(v))
    torch.testing.assert_close(result.total_variance, c.diagonal(dim1=-2, dim2=-1).sum(-1))
    assert bool((result.spectrum >= 0).all())
    assert bool((result.spectrum.diff() <= 0).all())
    assert torch.equal(result.explained_variance, result.spectrum[..., : v.shape[-2]])


@pytest.mark.parametrize("driver", NAMES)
@pytest.mark.parametrize("e", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("kind", SPECTRA)
def test_known_spectra_are_within_the_bound(kind, e, driver):
    c, want = known_spectrum(kind, e, batch=4)
    result = decompose_batch(c, driver=driver)
    check(c, result)
    assert bool(((result.spectrum - want).abs() <= result.variance_error[:, None]).all())
    size = torch.linalg.matrix_norm(c)
    assert bool((result.variance_error <= 400 * e * U * size).all())  # a bound that says something
    assert result.driver == driver


@pytest.mark.parametrize("driver", NAMES)
def test_sixty_heads_of_width_64(driver):
    c = covariances((5, 12), 64)
    before = c.clone()
    result = decompose_batch(c, 8, driver=driver)
    assert torch.equal(c, before)
    assert result.components.shape == (5, 12, 8, 64)
    assert result.explained_variance.shape == (5, 12, 8)
    assert result.spectrum.shape == (5, 12, 64)
    check(c, result)
    single = c.float()  # control: the same in float32 arithmetic is outside
    for i in range(5):
        for j in range(12):
            want, vectors = torch.linalg.eigh(c[i, j])
            want, vectors = want.flip(0), vectors.mT.flip(0)
            own = 10 * 64 * U * want[0]  # LAPACK, backward stable
            allowed = result.variance_error[i, j] + own
            assert (result.spectrum[i, j] - want).abs().max() <= allowed
            overlap = (result.components[i, j] * vectors[:8]).sum(1).abs()
            turned = 2 * allowed / -want[:9].diff().max()  # sin θ ≤ ‖E‖ / gap, Davis & Kahan
            assert (1 - overlap).max() <= turned**2 + 64 * U
            assert (torch.linalg.eigvalsh(single[i, j]).flip(0) - want).abs().max() > allowed


@pytest.mark.parametrize("driver", NAMES)
def test_wide_samples_have_zero_variances_not_negative_ones(driver):
    c = covariances((6,), 12, rows=5)
    result = decompose_batch(c, driver=driver)
    check(c, result)
    assert bool((result.spectrum[:, 5:] <= result.variance_error[:, None]).all())
    assert bool((result.spectrum[:, :5] > result.variance_error[:, None]).all())


def test_auto_is_eigh_on_the_cpu():
    assert decompose_batch(covariances((2,), 40)).driver == "eigh"


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0), (2, 1, 3)])
@pytest.mark.parametrize("driver", NAMES)
def test_any_leading_shape(shape, driver):
    c = covariances(shape, 3)
    result = decompose_batch(c, 2, driver=driver)
    assert result.components.shape == (*shape, 2, 3)
    assert result.spectrum.shape == (*shape, 3)
    for name in ("total_variance", "variance_error", "orthonormality", "residual"):
        assert getattr(result, name).shape == shape
    alone = [decompose_batch(one, 2, driver="eigh").spectrum for one in c.reshape(-1, 3, 3)]
    for one, have in zip(alone, result.spectrum.reshape(-1, 3), strict=True):
        assert (one - have).abs().max() <= 100 * U * one.sum()


@pytest.mark.parametrize("k", [0, 1, 4, None])
def test_the_number_of_components(k):
    result = decompose_batch(covariances((2,), 4), k)
    assert result.components.shape == (2, 4 if k is None else k, 4)
    result.explained_variance.zero_()
    assert bool((result.spectrum > 0).all())  # nothing is shared


def test_ratios_are_of_the_total_and_zero_where_it_is():
    c = torch.stack([torch.diag(torch.tensor([6.0, 3, 1])), torch.zeros(3, 3)])
    ratio = decompose_batch(c, 2).explained_variance_ratio
    torch.testing.assert_close(
        ratio, torch.tensor([[0.6, 0.3], [0, 0]], dtype=torch.float64), rtol=8 * U, atol=0
    )


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint16, torch.bool],
)
def test_any_real_dtype_is_taken_exactly(dtype):
    c = torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 0, 1]]])
    result = decompose_batch(c.to(dtype))
    assert result.components.dtype == result.spectrum.dtype == torch.float64
    assert bool(((result.spectrum - torch.tensor([2.0, 1, 0])).abs() <= result.variance_error[:, None]).all())


def test_arrays_and_lists_are_taken():
    want = decompose_batch(torch.tensor([[2.0, 1], [1, 2]], dtype=torch.float64))
    for form in ([[2, 1], [1, 2]], np.array([[2.0, 1], [1, 2]])):
        assert torch.equal(decompose_batch(form).components, want.components)


@pytest.mark.parametrize("power", [-1000, -400, 60, 400, 1000])
@pytest.mark.parametrize("driver", NAMES)
def test_a_power_of_two_changes_no_digit(power, driver):
    c = covariances((3,), 6)
    factor = 2.0 ** (power / 2)
    have, want = decompose_batch(c * factor * factor, driver=driver), decompose_batch(c, driver=driver)
    assert torch.equal(have.components, want.components)
    for name in ("spectrum", "total_variance", "variance_error", "residual"):
        assert torch.equal(getattr(have, name), getattr(want, name) * factor * factor)


def test_matrices_of_different_size_do_not_disturb_each_other():
    c = covariances((3,), 6) * torch.tensor([1e-200, 1.0, 1e200], dtype=torch.float64)[:, None, None]
    result = decompose_batch(c, driver="jacobi")
    check(c[1:2], decompose_batch(c[1:2], driver="jacobi"))
    for one, spectrum, error in zip(c, result.spectrum, result.variance_error, strict=True):
        want = decompose_batch(one, driver="eigh")
        assert (spectrum - want.spectrum).abs().max() <= error + want.variance_error


# ---------------------------------------------------------------- drivers that fail
def stretched(c):
    values, rows = batched._eigh(c)
    rows = rows.clone()
    rows[1] *= 1 + 1e-12
    return values, rows


def not_eigenvectors(c):
    values, rows = batched._eigh(c)
    rows = rows.clone()
    rows[1] = torch.eye(c.shape[-1])
    return values, rows


def other_values(c):
    values, rows = batched._eigh(c)
    values = values.clone()
    values[1] *= 1 + 1e-12
    return values, rows


def not_a_number(c):
    values, rows = batched._eigh(c)
    rows = rows.clone()
    rows[1, 0, 0] = torch.nan
    return values, rows


def gives_up(c):
    raise LinAlgError("(Batch element 1): did not converge")


FAULTS = {f.__name__: f for f in (stretched, not_eigenvectors, other_values, not_a_number)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_is_noticed_and_solved_again(monkeypatch, fault):
    c = covariances((4,), 6)
    monkeypatch.setitem(batched.DRIVERS, "eigh", FAULTS[fault])
    result = decompose_batch(c, driver="eigh")
    assert result.driver == "eigh, svd for 1 of 4"
    check(c, result)


def test_a_driver_that_gives_up_is_replaced_for_all(monkeypatch):
    c = covariances((4,), 6)
    monkeypatch.setitem(batched.DRIVERS, "eigh", gives_up)
    monkeypatch.setitem(batched.DRIVERS, "svd", not_a_number)
    result = decompose_batch(c, driver="eigh")
    assert result.driver == "eigh, svd for 3 of 4, jacobi for 1 of 4"
    check(c, result)


def test_a_matrix_that_no_driver_solves_is_named(monkeypatch):
    c = covariances((2, 3), 6)
    for name in NAMES:
        monkeypatch.setitem(batched.DRIVERS, name, lambda c: (c[..., 0], c * torch.nan))
    message = "`covariance`: no driver gives matrix [0, 0] orthonormal directions; check its entries"
    with pytest.raises(LinAlgError, match=re.escape(message)):
        decompose_batch(c)


# ---------------------------------------------------------------- what is refused
def spoiled(index, value):
    c = covariances((2, 3), 4)
    c[index] = value
    return c


@pytest.mark.parametrize(
    ("c", "message"),
    [
        (torch.zeros(3), "`covariance` must have shape (..., E, E) with E ≥ 1, got (3,); for samples use"),
        (torch.zeros(2, 3, 4), "`covariance` must have shape (..., E, E) with E ≥ 1, got (2, 3, 4)"),
        (torch.zeros(2, 0, 0), "`covariance` must have shape (..., E, E) with E ≥ 1, got (2, 0, 0)"),
        (spoiled((1, 2, 0, 0), torch.nan), "`covariance` must be finite, matrix [1, 2] has NaN or inf"),
        (spoiled((0, 1, 0, 0), torch.inf), "`covariance` must be finite, matrix [0, 1] has NaN or inf"),
        (
            spoiled((1, 0, 0, 3), 0.5),
            "`covariance` must be symmetric to 1e-06 of its largest entry, matrix [1, 0] is not; "
            "pass `(c + c.mT) / 2`.",
        ),
        (
            spoiled((1, 1), -torch.eye(4, dtype=torch.float64)),
            "`covariance` must be positive semi-definite, matrix [1, 1] has a negative variance",
        ),
        (torch.tensor([[1.0, 2], [0, 1]]), "of its largest entry, the matrix is not"),
    ],
    ids=["vector", "oblong", "empty", "nan", "inf", "skew", "negative", "single"],
)
def test_other_matrices_are_refused(c, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        decompose_batch(c)


def test_complex_matrices_are_refused():
    with pytest.raises(TypeError, match="`covariance` must be real"):
        decompose_batch(torch.eye(2, dtype=torch.complex64))


@pytest.mark.parametrize("k", [5, 0.5, 1.0])
def test_other_numbers_of_components_are_refused(k):
    message = rf"`n_components` must be an integer in 0\.\.4 or None, got {k}; a share would keep"
    with pytest.raises(ValueError, match=message):
        decompose_batch(covariances((2,), 4), k)


def test_other_drivers_are_refused():
    with pytest.raises(ValueError, match="`driver` must be one of 'auto', 'eigh', 'svd', 'jacobi', got 'qr'"):
        decompose_batch(torch.eye(2), driver="qr")


def test_rounding_of_the_entries_is_no_asymmetry_and_no_negative_variance():
    """A product in float32 need not be symmetric, nor its null directions exactly null."""
    c = covariances((4,), 20, rows=6, dtype=torch.float32)
    c[:, 0, 1] *= 1 + 1e-7
    result = decompose_batch(c)
    symmetric = (c.double() + c.double().mT) / 2
    raw = torch.linalg.eigvalsh(symmetric).flip(-1)
    assert bool((raw[:, -1] < 0).all())
    assert bool(((result.spectrum - raw).abs() <= 2 * result.variance_error[:, None]).all())
    assert bool((result.variance_error >= -raw[:, -1]).all())  # the clamp is an error too


@pytest.mark.gpu
@pytest.mark.parametrize("driver", [*NAMES, "auto"])
def test_on_a_gpu(driver):
    c = covariances((3, 4), 40)
    result = decompose_batch(c.cuda(), driver=driver)
    want = decompose_batch(c)
    assert result.driver == ("jacobi" if driver == "auto" else driver)
    off = (result.spectrum.cpu() - want.spectrum).abs()
    assert bool((off <= (result.variance_error.cpu() + want.variance_error)[..., None]).all())
