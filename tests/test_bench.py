"""The instruments of the benchmarks: samples of a known spectrum, their truth, and pairs in turn."""

import math

import pytest
import torch

from tests.support import bench_module
from tests.support import truth as svd_truth

N, D, K = 200, 64, 8
SPECTRA = ("power", "flat", "massive", "offset")
U32, U64 = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64))


spectra, truth = bench_module("spectra"), bench_module("truth")


def share_bound(n=N, d=D):
    """Largest error of a share of the variance in float64.

    A covariance of N products and a spectrum of D values are each off by at most (N + D)·u of the trace
    in a norm, and K ≤ D of them are summed.
    """
    return 2 * d * (n + d) * U64


def true_share(x, k):
    _, variance, _ = svd_truth(x)
    return (variance[:k].sum() / variance.sum()).item()


# --- the instruments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_samples_have_the_variances_they_claim(spectrum):
    n = 4000
    x = spectra.samples(spectrum, n, D, K).double()
    signs = 2.0 * torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(0)) - 1
    directions = spectra.rotate(torch.eye(D, dtype=torch.float64), signs)  # rows: where each axis goes
    assert torch.allclose(directions @ directions.mT, torch.eye(D, dtype=torch.float64), atol=D * U64)
    expected = spectra.variances(spectrum, D, K)
    seen = ((x - spectra.mean(spectrum, D)) @ directions.mT).square().mean(0)
    # a mean of n squares of Gaussians is off by √(2/n) of itself, six such are never seen; float32 storage
    # adds noise of u32 times the size of a row, which the widest directions set
    storage = U32**2 * D * expected.sum() + 2 * U32 * (expected.sum() * expected).sqrt()
    assert ((seen - expected).abs() <= 6 * math.sqrt(2 / n) * expected + storage).all()
    wrong = spectra.variances(spectrum, D, K) * 1.2  # control: a fifth too much is seen
    assert ((seen - wrong).abs() > 6 * math.sqrt(2 / n) * wrong + storage).any()


@pytest.mark.parametrize(("d", "k"), [(D, K), (4096, 128)])
def test_a_massive_spectrum_has_its_ratio(d, k):
    values = spectra.variances("massive", d, k)
    assert (values[0] / values[k - 1]).item() == pytest.approx(1e7, rel=1e-12)
    assert (values.diff() <= 0).all()
    assert (values > 1e3 * values[k - 1]).sum() == min(9, k // 2)


def test_an_offset_spoils_the_formula_that_subtracts_the_mean():
    """XᵀX - n·mean·meanᵀ in float32 is off by more than centred sums may be, and those are not."""
    x = spectra.samples("offset", 1000, D, K)
    want = truth.covariance(x)
    bound = 2 * (len(x) + D) * U32 * want.trace().item()  # N products and a mean, each of them rounded
    z = x - x.mean(0)
    assert torch.linalg.matrix_norm((z.mT @ z).double() / (len(x) - 1) - want, 2).item() <= bound
    uncentred = x.mT @ x - len(x) * torch.outer(x.mean(0), x.mean(0))
    assert torch.linalg.matrix_norm(uncentred.double() / (len(x) - 1) - want, 2).item() > bound


def test_samples_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first = spectra.samples("power", 1100, D, K, seed=3)  # more than one block
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, spectra.samples("power", 1100, D, K, seed=3))
    assert not torch.equal(first, spectra.samples("power", 1100, D, K, seed=4))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_truth_is_that_of_an_svd(spectrum):
    x = spectra.samples(spectrum, N, D, K) + 3  # an offset, which centring has to take
    _, variance, components = svd_truth(x)
    c = truth.covariance(x)
    values = truth.eigenvalues(c)
    assert (values - variance).abs().max() <= (N + D) * U64 * variance.sum()
    best = variance[:K].sum() / variance.sum()
    assert truth.captured(c, components[:K]) == pytest.approx(best.item(), abs=share_bound())


def test_the_share_that_wrong_components_miss_is_seen():
    x = spectra.samples("power", N, D, K)
    _, variance, components = svd_truth(x)
    c = truth.covariance(x)
    for first in (1, 5):  # the second to the ninth direction, the sixth to the thirteenth
        expected = variance[first : first + K].sum() / variance.sum()
        seen = truth.captured(c, components[first : first + K])
        assert seen == pytest.approx(expected.item(), abs=share_bound())
        assert true_share(x, K) - seen > 1e9 * share_bound()
        lost = truth.missed(c, truth.eigenvalues(c), components[first : first + K])
        assert lost == pytest.approx(true_share(x, K) - expected.item(), abs=2 * share_bound())


def test_captured_counts_the_span_and_not_the_rows():
    x = spectra.samples("power", N, D, K)
    _, _, components = svd_truth(x)
    c = truth.covariance(x)
    skewed = (
        torch.randn(K, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ components[:K]
    )
    bound = share_bound() * torch.linalg.cond(skewed).item()  # what a QR loses to skew rows
    assert truth.captured(c, skewed) == pytest.approx(true_share(x, K), abs=bound)


@pytest.mark.parametrize(("share", "rank"), [(0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_rank_is_the_first_that_reaches_the_share(share, rank):
    assert truth.rank(torch.tensor([5.0, 3.0, 2.0]), share) == rank
