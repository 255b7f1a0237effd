"""`full`: the SVD of the samples, its error bound, and the cases at the edge."""

import math

import pytest
import torch

from pca_torch.precision import unit_roundoff
from pca_torch.solvers import full
from tests.support import samples, truth

U64 = unit_roundoff(torch.float64)


def own(variance, shape):
    """What the float64 truth may be off by: a backward error of a few √D + √N roundings on each σ."""
    s = U64 * (4 * math.sqrt(min(shape)) + math.sqrt(max(shape)))
    return 2 * s * (variance * variance[0]).sqrt() + s**2 * variance[0]


def test_known_variances_and_directions():
    a, b = 3.0, 0.5
    x = torch.tensor([[a, 0], [-a, 0], [0, b], [0, -b]], dtype=torch.float64) + 7
    result = full.solve(x)
    assert result.spectrum.tolist() == pytest.approx([2 * a * a / 3, 2 * b * b / 3], rel=1e-14)
    assert result.components.abs().tolist() == [pytest.approx([1, 0]), pytest.approx([0, 1])]
    assert result.mean.tolist() == [7, 7]
    assert (result.certificate.solver, result.certificate.bound_kind) == ("full", "deterministic")


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(20_000, 1), (100_000, 2), (50_000, 8), (8, 2000), (300, 9)])
def test_float32_is_within_its_bound_on_long_sums(shape):
    """Columns are cut in fewer pieces on one thread: there a bound of min(N, D) alone can be exceeded."""
    g = torch.Generator().manual_seed(0)
    x = samples(*shape, decay=1.0, dtype=torch.float32) if shape[1] < 100 else torch.randn(shape, generator=g)
    result = full.solve(x, precision="float32")
    _, want, _ = truth(x)
    off = (result.spectrum - want).abs()
    assert bool((off <= torch.tensor(result.certificate.variance_error) + own(want, shape)).all())
    assert off.max() > own(want, shape).max()  # control: float64's bound would be false here
    assert result.certificate.precision.startswith("float32")


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_many_small_problems(precision, standardize):
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        d = int(torch.randint(1, 10, (), generator=g))
        n = int(torch.randint(d + 2, 60, (), generator=g))
        x = torch.randn(n, d, generator=g, dtype=torch.float64)
        x = x * 10.0 ** torch.randint(-3, 4, (d,), generator=g) + 10.0 ** int(seed % 4)
        result = full.solve(x, precision=precision, standardize=standardize)
        _, want, _ = truth(x / x.std(0) if standardize else x)
        allowed = torch.tensor(result.certificate.variance_error) + own(want, x.shape)
        if standardize:  # dividing before centring rounds the mean too
            allowed = allowed + 8 * U64 * (x.mean(0) / x.std(0)).abs().max() * want[0]
        assert bool(((result.spectrum - want).abs() <= allowed).all()), seed


SCALES = [1e-25, 1e25, 1e-38]
FAR = [*SCALES, 1e-60, 1e100]  # beyond float32 in the data themselves


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, s) for s in SCALES] + [(torch.float64, s) for s in FAR]
)
@pytest.mark.parametrize("shape", [(60, 7), (7, 60)])
def test_float32_takes_data_of_any_size(shape, dtype, scale):
    x = samples(*shape, decay=0.8, offset=2.0) * scale
    x = x.to(dtype)
    result = full.solve(x, precision="float32")
    _, want, _ = truth(x)
    allowed = torch.tensor(result.certificate.variance_error, dtype=torch.float64) + own(want, shape)
    assert bool(((result.spectrum - want).abs() <= allowed).all())
    assert bool((result.components.isfinite()).all())
    assert result.certificate.trusted == full.solve(x / scale, precision="float32").certificate.trusted > 3
    if scale in FAR[3:]:  # control: the data alone leave float32
        assert not bool(((x != 0) == (x.float() != 0)).all() & x.float().isfinite().all())


@pytest.mark.parametrize("power", [-300, -100, 7, 300])
def test_a_power_of_two_changes_no_digit_in_float32(power):
    x = samples(60, 7, offset=2.0)
    have, want = full.solve(x * 2.0**power, precision="float32"), full.solve(x, precision="float32")
    assert torch.equal(have.spectrum, want.spectrum * 4.0**power)
    assert torch.equal(have.components, want.components)


def test_zero_data_in_float32():
    with pytest.warns(UserWarning, match="total variance is zero"):
        result = full.solve(torch.zeros(5, 3), precision="float32")
    assert result.spectrum.tolist() == [0, 0, 0]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_driver_that_fails_is_recorded_and_the_next_one_answers(monkeypatch, precision):
    pytest.importorskip("scipy")
    x = samples(40, 6, offset=1.0)
    want = full.solve(x, precision=precision)
    assert want.certificate.fallbacks == ()
    true_svd, calls = torch.linalg.svd, []

    def fails_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("linalg.svd: failed to converge\nsecond line")
        return true_svd(*args, **options)

    monkeypatch.setattr(torch.linalg, "svd", fails_once)
    result = full.solve(x, precision=precision)
    assert result.certificate.fallbacks == ("full: gesdd: linalg.svd: failed to converge",)
    assert result.components.dtype == want.components.dtype
    both = torch.tensor(result.certificate.variance_error) + torch.tensor(want.certificate.variance_error)
    assert bool(((result.spectrum - want.spectrum).abs() <= both).all())


def test_small_singular_values_survive_in_float64():
    """κ = 10⁸: the squared matrix has nothing of them left, the samples have."""
    q = torch.linalg.qr(samples(100, 5) - samples(100, 5).mean(0)).Q
    x = q * 10.0 ** -torch.arange(0.0, 10, 2, dtype=torch.float64)
    result = full.solve(x)
    _, want, _ = truth(x)
    assert result.certificate.trusted == 5
    assert result.spectrum[-1].item() == pytest.approx(want[-1].item(), rel=1e-5)


@pytest.mark.parametrize("shape", [(5, 5000), (2, 7), (5000, 3)])
def test_wide_and_tall_shapes_have_min_n_d_variances(shape):
    result = full.solve(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert result.components.shape == (min(shape), shape[1])
    gram = (result.components @ result.components.mT).double()
    assert (gram - torch.eye(min(shape))).abs().max() < 10 * 2**-24 * math.sqrt(shape[1])


def test_one_row_has_one_direction_and_no_variance():
    with pytest.warns(UserWarning, match="total variance is zero"):
        result = full.solve(torch.ones(1, 7), ddof=0)
    assert result.components.shape == (1, 7)
    assert bool(result.components.isfinite().all())
    assert result.spectrum.tolist() == [0]


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_rows(n):
    message = "no rows that count" if n == 0 else "`ddof` = 1 needs more than 1 samples, got 1"
    with pytest.raises(ValueError, match=message):
        full.solve(torch.ones(n, 3))


def test_weights_are_repeated_rows():
    x = samples(30, 4, offset=2.0)
    times = torch.randint(1, 4, (30,), generator=torch.Generator().manual_seed(0))
    weighted = full.solve(x, weights=times.double(), ddof=0)
    _, want, _ = truth(x.repeat_interleave(times, 0), ddof=0)
    assert bool(((weighted.spectrum - want).abs() <= 2 * own(want, x.shape)).all())
    w = times.double()
    divisor = (w.sum() - w.square().sum() / w.sum()).item()
    assert full.solve(x, weights=w).divisor == pytest.approx(divisor, rel=1e-14)


def test_uncentred_is_the_second_moment():
    x = samples(50, 4, offset=2.0)
    result = full.solve(x, center=False, ddof=0)
    want = torch.linalg.eigvalsh(x.mT @ x / 50).flip(0)
    torch.testing.assert_close(result.spectrum, want, rtol=1e-12, atol=0)
    assert not result.mean.any()
    assert not result.centred


def test_the_samples_are_not_changed_and_not_shared():
    x = samples(20, 4)
    before = x.clone()
    result = full.solve(x, 2)
    kept = result.components.clone(), result.mean.clone()
    assert torch.equal(x, before)
    x.zero_()
    assert torch.equal(result.components, kept[0])
    assert torch.equal(result.mean, kept[1])
