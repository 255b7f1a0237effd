"""`randomized`: the sketch of `torch.svd_lowrank`, on any samples, with a certificate that holds."""

import math
from functools import partial

import pytest
import torch

from pca_torch.operators import Rows, Sparse, rows
from pca_torch.precision import unit_roundoff
from pca_torch.solvers import full, randomized
from tests.support import reported_case, samples, truth

U64 = unit_roundoff(torch.float64)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def global_rng_is_left_alone():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


def chunked(x, monkeypatch, **options):
    monkeypatch.setattr(rows, "free_memory", lambda device: 0)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 16 * x.shape[1])
    return Rows(x, **options)


def sparse(x, *args, **options):
    return Sparse(x.to_sparse(), *args, **options)


def lowrank(x, q, n_iter, seed):
    """Right vectors (q, D) and singular values of torch's routine on the centred samples."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        _, s, v = torch.svd_lowrank(x - x.mean(0), q=q, niter=n_iter)
    return v.mT, s


@pytest.mark.parametrize("way", ["kept", "chunked", "sparse"])
@pytest.mark.parametrize("n_iter", [0, 1, 4])
@pytest.mark.parametrize(("n", "d"), [(80, 30), (30, 80), (40, 40)])
def test_the_range_is_that_of_svd_lowrank(n, d, n_iter, way, monkeypatch):
    """Each QR rounds its columns to a few u√max(N, D), products at the size of the rows, σ_q is the least."""
    x = samples(n, d, decay=0.97, offset=3.0)
    ways = {"kept": Rows, "chunked": partial(chunked, monkeypatch=monkeypatch), "sparse": sparse}
    want, s = lowrank(x, 12, n_iter, seed=5)
    generator = torch.Generator().manual_seed(5)
    omega = torch.randn(min(n, d), 12, generator=generator, dtype=torch.float64)
    op = ways[way](x)
    found = randomized.range_finder(op, omega, n_iter)
    bound = 8 * (2 * n_iter + 2) * U64 * math.sqrt(max(n, d)) * (x.norm() / s[-1]).item()
    assert (found @ found.mT - torch.eye(12)).abs().max() <= 8 * U64 * math.sqrt(d)
    assert torch.linalg.matrix_norm(found.mT @ found - want.mT @ want, 2) <= bound
    other = randomized.range_finder(op, omega.flip(0), n_iter)
    assert torch.linalg.matrix_norm(other.mT @ other - want.mT @ want, 2) > 1e6 * bound


def test_flat_spectrum():
    found = reported_case("randomized_flat_spectrum")
    x, expect = torch.from_numpy(found["x"]["X"]), found["expect"]
    want = torch.from_numpy(expect["explained_variance_"])
    for seed in range(10):
        got = randomized.solve(Rows(x), 20, random_state=seed).explained_variance
        assert bool((got <= torch.from_numpy(expect["explained_variance_at_most"])).all())
        assert got.sum().item() >= expect["explained_variance_sum_at_least"]
        torch.testing.assert_close(got, want, rtol=found["tol"][0], atol=0)
    wrong = torch.from_numpy(found["wrong"]["explained_variance_"])
    assert wrong.sum().item() < expect["explained_variance_sum_at_least"]


def test_the_same_seed_gives_the_same_bits():
    x = torch.from_numpy(reported_case("randomized_rng")["x"]["X"])
    first, second, other = (randomized.solve(Rows(x), 5, random_state=seed) for seed in (0, 0, 1))
    assert torch.equal(first.components, second.components)
    assert torch.equal(first.spectrum, second.spectrum)
    assert first.certificate == second.certificate
    assert not torch.equal(first.spectrum, other.spectrum)


def test_a_generator_moves_on_and_none_is_a_fixed_seed():
    op = Rows(torch.randn(200, 50, generator=torch.Generator().manual_seed(0)))
    generator = torch.Generator().manual_seed(7)
    first = randomized.solve(op, 5, n_iter=0, random_state=generator)
    again = randomized.solve(op, 5, n_iter=0, random_state=generator)
    assert not torch.equal(first.spectrum, again.spectrum)
    same = randomized.solve(op, 5, n_iter=0, random_state=torch.Generator().manual_seed(7))
    assert torch.equal(first.spectrum, same.spectrum)
    fixed = [randomized.solve(op, 5, n_iter=0).spectrum for _ in range(2)]
    assert torch.equal(*fixed)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99, 1.0], ids=lambda decay: f"decay{decay}")
@pytest.mark.parametrize(("n", "d"), [(300, 60), (40, 200)])
def test_the_certificate_holds(n, d, decay, offset):
    for seed in range(3):
        x = samples(n, d, decay=decay, offset=offset, seed=seed)
        _, want, _ = truth(x)
        result = randomized.solve(Rows(x), 8, n_iter=1, random_state=seed)
        got, c = result.explained_variance, result.certificate
        assert bool(((got - want[:8]).abs() <= torch.tensor(c.variance_error)).all())
        basis = result.components
        captured = ((x - x.mean(0)) @ basis.mT).square().sum() / (n - 1)
        missed = (want[:8].sum() - captured).item() / want.sum().item()
        assert missed <= c.missed_ratio_bound
        assert c.captured_ratio == pytest.approx(captured.item() / want.sum().item(), rel=1e-9)
        assert (c.solver, c.precision) == ("randomized", "float64 products, float64 sketch")
        if decay > 0.99:  # control: that a bound of rounding alone would be false
            assert missed > 1e-6
            assert c.bound_kind.startswith("probability")


@pytest.mark.parametrize("options", [{}, {"standardize": True}, {"center": False}, {"ddof": 0}], ids=str)
@pytest.mark.parametrize(("n", "d"), [(60, 12), (12, 60)])
@pytest.mark.parametrize("kind", [Rows, sparse])
def test_all_components_are_those_of_full(n, d, options, kind):
    x = samples(n, d, offset=2.0)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    result, want = (
        randomized.solve(kind(x, weights, **options), random_state=0),
        full.solve(x, weights=weights, **options),
    )
    assert result.n_components == min(n, d)
    errors = torch.tensor(result.certificate.variance_error) + torch.tensor(want.certificate.variance_error)
    assert bool(((result.spectrum - want.spectrum).abs() <= errors).all())
    torch.testing.assert_close(result.total_variance, want.total_variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.mean, want.mean, rtol=1e-12, atol=1e-14)
    k = 3  # well apart from the next
    torch.testing.assert_close(result.components[:k], want.components[:k], rtol=0, atol=1e-9)


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize(
    ("n", "d", "decay"), [(400, 120, 0.95), (60, 300, 0.99), (300, 90, 1.0), (200, 80, 0.3)]
)
def test_a_share_is_of_the_total_variance(n, d, decay, share):
    """K can only come out too large, and by what a sketch of a slow spectrum misses."""
    x = samples(n, d, decay=decay, offset=5.0)
    _, variance, _ = truth(x)
    result = randomized.solve(Rows(x), share, random_state=0)
    reached = (variance.cumsum(0) / variance.sum())[: result.n_components]
    if share < 1:
        assert result.explained_variance_ratio.sum().item() >= share - 1e-12
        least = int((variance.cumsum(0) / variance.sum() < share).sum()) + 1
        assert least <= result.n_components <= 1.2 * least + 1
    else:
        assert result.n_components == int(
            (variance[: min(n - 1, d)] > result.certificate.rounding_floor).sum()
        )
        assert reached[-1].item() == pytest.approx(1, abs=1e-9)


def test_a_share_needs_more_than_the_kept_variance():
    """The wrong ratio, over what was sketched, would reach half at once."""
    x = samples(500, 300, decay=1.0)
    result = randomized.solve(Rows(x), 0.5, random_state=0)
    first = randomized.solve(Rows(x), randomized.FIRST_SKETCH, random_state=0).spectrum
    wrong = int((first.cumsum(0) / first.sum() < 0.5).sum()) + 1
    assert result.n_components > 3 * wrong


@pytest.mark.parametrize("k", [0, 1, 2, 12])
@pytest.mark.parametrize("n_oversamples", [0, 10, 1000])
def test_any_count(k, n_oversamples):
    x = samples(40, 12)
    result = randomized.solve(Rows(x), k, n_oversamples=n_oversamples, random_state=0)
    assert result.components.shape == (k, 12)
    assert len(result.spectrum) == k
    assert result.certificate.missed_ratio_bound >= 0


def test_tol_doubles_the_sketch():
    x = samples(600, 150, decay=0.99)
    loose = randomized.solve(Rows(x), 10, n_iter=0, random_state=0).certificate
    tight = randomized.solve(Rows(x), 10, n_iter=0, random_state=0, tol=1e-3).certificate
    assert loose.missed_ratio_bound > 1e-3
    assert tight.missed_ratio_bound <= 1e-3 * (1 + 1e-6)


def test_power_iterations_sharpen_a_slow_spectrum():
    x = samples(600, 150, decay=0.99)
    captured = [
        randomized.solve(Rows(x), 10, n_iter=n_iter, random_state=0).certificate.captured_ratio
        for n_iter in range(4)
    ]
    assert captured == sorted(captured)
    assert captured[-1] > 1.05 * captured[0]


def test_dtypes_of_the_components():
    for dtype, want in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int32, torch.float64),
    ):
        result = randomized.solve(Rows((10 * samples(40, 12)).to(dtype)), 2, random_state=0)
        assert result.components.dtype == want
        assert result.spectrum.dtype == torch.float64


@pytest.mark.parametrize("value", [0.0, 1e4 / 3])
@pytest.mark.parametrize("n_components", [None, 3, 0.9])
def test_constant_data(value, n_components):
    with pytest.warns(UserWarning, match="total variance is zero"):
        result = randomized.solve(Rows(torch.full((50, 6), value)), n_components, random_state=0)
    assert result.n_components == {None: 6, 3: 3, 0.9: 0}[n_components]
    assert not result.explained_variance_ratio.any()
    gram = result.components @ result.components.mT
    torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-6)


def test_whitening_drops_null_directions():
    x = samples(50, 4) @ torch.randn(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = randomized.solve(Rows(x), 8, random_state=0, whiten=True)
    assert (result.n_components, result.whiten) == (4, True)
    assert result.transform(x).std(0).tolist() == pytest.approx([1] * 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_components": 7},
            r"`n_components` must be in 0\.\.6, the smaller of 40 samples and 6 features, got 7",
        ),
        ({"n_oversamples": -1}, "`n_oversamples` must be an integer ≥ 0, got -1"),
        ({"n_oversamples": 1.5}, "`n_oversamples` must be an integer ≥ 0, got 1.5"),
        ({"n_iter": True}, "`n_iter` must be an integer ≥ 0, got True"),
        ({"tol": 0}, "`tol` must be a number > 0 or None, got 0"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        randomized.solve(Rows(samples(40, 6)), **options)


def test_a_sketch_that_does_not_fit(monkeypatch):
    op = Rows(samples(40, 6))
    monkeypatch.setattr(randomized, "free_memory", lambda device: 1000)
    with pytest.raises(
        ValueError, match=r"`n_components` takes a sketch of 6 directions, which needs .* GiB"
    ):
        randomized.solve(op, random_state=0)
