"""The formulas of the certificate, against matrices whose truth is known."""

import math

import pytest
import torch

import pca_torch as pt
from pca_torch.bounds import constant_columns, factor_errors, sine_bound, standard_deviations
from tests.support import samples

U64 = torch.finfo(torch.float64).eps / 2


@pytest.mark.parametrize("seed", range(20))
def test_the_sine_bound_covers_a_known_perturbation(seed):
    g = torch.Generator().manual_seed(seed)
    d, k = 8, 1 + seed % 7
    values = torch.rand(d, generator=g, dtype=torch.float64).sort(descending=True).values
    values[:k] += 0.2
    q = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    noise = torch.randn(d, d, generator=g, dtype=torch.float64)
    noise = 10.0 ** -(seed % 4 + 1) * (noise + noise.mT) / torch.linalg.matrix_norm(noise + noise.mT, 2)
    found, vectors = torch.linalg.eigh(q * values @ q.mT + noise)
    found, basis = found.flip(0), vectors.flip(1)[:, :k]
    sine = torch.linalg.matrix_norm(basis - q[:, :k] @ (q[:, :k].mT @ basis), 2).item()
    size = torch.linalg.matrix_norm(noise, 2).item()
    bound = sine_bound(size, (found[k - 1] - found[k]).item())
    assert math.asin(min(1.0, sine)) <= bound + 8 * d * U64


def test_the_sine_bound_is_sharp_in_the_plane_and_gives_up_without_a_gap():
    assert sine_bound(0.0, 1.0) == 0
    assert sine_bound(1.0, 1.0) == sine_bound(1.0, 0.0) == sine_bound(0.0, 0.0) == math.pi / 2
    e = 1e-3  # [[1, e], [e, 0]] turns by atan(2e) / 2
    assert math.atan(2 * e) / 2 <= sine_bound(e, math.sqrt(1 + 4 * e * e)) < 1.01 * e


def test_errors_of_squared_singular_values_cover_a_shift_of_each():
    sigma = torch.tensor([3.0, 1.0, 1e-3, 1e-9, 0.0], dtype=torch.float64)
    relative = 1e-7
    error, floor = factor_errors(sigma.square(), relative)
    for shift in (relative * 3, -relative * 3):
        moved = (sigma + shift).square()
        assert bool(((moved - sigma.square()).abs() <= error * (1 + 1e-9)).all())
    at_floor, _ = factor_errors(torch.tensor([9.0, floor], dtype=torch.float64), relative)
    assert at_floor[1].item() == pytest.approx(floor, rel=1e-12)  # where a variance equals its error


def test_a_column_is_constant_up_to_the_rounding_of_its_mean():
    mean = torch.tensor([1e4, 1e4, 0.0, 0.0], dtype=torch.float64)
    spread = torch.tensor([16 * U64 * 1e4, 1e-10, 0.0, 1e-30], dtype=torch.float64)
    assert constant_columns(spread.square(), mean).tolist() == [True, False, True, False]
    with pytest.warns(UserWarning, match="2 of 4 columns are constant; their scale stays 1"):
        scale = standard_deviations(spread.square(), mean)
    assert scale.tolist() == pytest.approx([1, 1e-10, 1, 1e-30])


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_what_is_called_zero_is_off_by_what_it_was(solver):
    """Steps of the last digit on a mean of 10⁴: called constant, though the stored numbers differ."""
    x = torch.full((10, 3), 1e4, dtype=torch.float64)
    step = torch.tensor(1e4, dtype=torch.float64).nextafter(torch.tensor(2e4).double()).item() - 1e4
    x[:, 0] += step * torch.arange(10)
    want = step**2 * sum((i - 4.5) ** 2 for i in range(10)) / 9
    with pytest.warns(UserWarning, match="total variance is zero"):
        result = pt.decompose(x, svd_solver=solver)
    assert result.spectrum.tolist() == [0, 0, 0]
    assert result.certificate.trusted == 0
    assert want <= result.certificate.variance_error[0] * (1 + 1e-9)


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_is_measured_on_the_components_as_they_are_stored(solver, dtype):
    x = samples(300, 10, decay=0.7, dtype=dtype)
    result = pt.decompose(x, 4, solver)
    covariance = torch.cov(x.double().mT)
    v = result.components.double()
    span = torch.linalg.qr(v.mT).Q.mT  # the rounding of each component is not that of their span
    want = ((span @ covariance * span).sum() / covariance.trace()).item()
    assert result.certificate.captured_ratio == pytest.approx(want, rel=1e-12)
    residual = torch.linalg.vector_norm(v @ covariance - result.explained_variance[:, None] * v, dim=1)
    slack = 300 * U64 * covariance.trace().item()
    assert result.certificate.residual_norms == pytest.approx(residual.tolist(), rel=1e-6, abs=slack)
    assert result.certificate.gap == pytest.approx((result.spectrum[3] - result.spectrum[4]).item())


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_no_component_and_every_component(solver):
    x = samples(50, 4)
    none, every = pt.decompose(x, 0, solver), pt.decompose(x, 4, solver)
    assert none.certificate.variance_error == ()
    assert (none.certificate.captured_ratio, none.certificate.missed_ratio_bound) == (0, 0)
    assert every.certificate.captured_ratio == pytest.approx(1, abs=1e-14)
    assert every.certificate.missed_ratio_bound == 0
    assert every.certificate.unique


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 2.8e-6), (torch.float16, 4.3e-8)])
@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_the_quantisation_floor_is_near_the_noise_of_rounding(solver, dtype, share):
    """Rounding Gaussian data of a known spectrum adds this variance along a direction outside it."""
    g = torch.Generator().manual_seed(0)
    d = 32
    line = torch.nn.functional.normalize(torch.randn(1, d, generator=g, dtype=torch.float64))
    x = torch.randn(4000, 1, generator=g, dtype=torch.float64) * line * d**0.5
    x = x.to(dtype)
    floor = pt.decompose(x, 5, solver).certificate.quantisation_floor
    assert floor is not None
    second = x.double().square().mean(0)
    v = pt.decompose(x, 5, solver).components.double()
    assert floor == pytest.approx((share * (v.square() @ second)).tolist(), rel=1e-5)
    noise = torch.linalg.eigvalsh(torch.cov(x.double().mT)).flip(0)[1:5].mean().item()
    assert noise / 4 < sum(floor[1:]) / 4 < 4 * noise  # the line is rank 1: the rest is rounding
    assert pt.decompose(x.float(), 5, solver).certificate.quantisation_floor is None


@pytest.mark.parametrize("k", [-1, 5])
def test_a_count_out_of_range_names_both_numbers(k):
    x = samples(50, 4)
    with pytest.raises(ValueError, match="`n_components` must be"):
        pt.decompose(x, k)
    with pytest.raises(ValueError, match=r"0\.\.3, the smaller of 3 samples and 4 features, got 4"):
        pt.decompose(x[:3], 4)


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_whitening_drops_null_directions(solver):
    x = samples(60, 3) @ samples(3, 6, seed=1)
    result = pt.decompose(x, svd_solver=solver, whiten=True)
    assert result.n_components == 3
    torch.testing.assert_close(
        torch.cov(result.transform(x).mT), torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-9
    )
