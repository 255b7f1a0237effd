"""`covariance_eigh`: what it adds to the statistic it solves."""

import numpy as np
import pytest
import torch

from pca_torch.moments import Moments
from pca_torch.precision import Precision, unit_roundoff
from pca_torch.solvers import covariance
from tests.support import samples

U64 = unit_roundoff(torch.float64)
EXTENDED = np.finfo(np.longdouble).eps < 2.0**-60


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def streamed(x, precision: Precision = "auto", size=5):
    moments = Moments(x.shape[1], precision=precision)
    for part in x.split(size):
        moments.update(part)
        moments.flush()  # every part a chunk of its own: the most merges, the most rounding
    return moments


def extended(x):
    """Scatter and mean in long double."""
    a = x.double().numpy().astype(np.longdouble)
    mean = a.mean(0)
    return (a - mean).T @ (a - mean), mean


def eigenvalues(matrix):
    return torch.linalg.eigvalsh(torch.from_numpy(np.asarray(matrix, np.float64))).flip(0)


def problem(seed):
    """Columns of very different spread and offset."""
    g = torch.Generator().manual_seed(seed)
    n, d = int(torch.randint(20, 200, (), generator=g)), int(torch.randint(2, 9, (), generator=g))
    spread = 10.0 ** torch.randint(-4, 5, (d,), generator=g).double()
    offset = 10.0 ** torch.randint(-4, 5, (d,), generator=g).double()
    return torch.randn(n, d, generator=g, dtype=torch.float64) * spread + offset


@pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["centred", "uncentred", "standardised"])
def test_variances_are_within_their_error(kind, precision):
    for seed in range(40):
        x = problem(seed)
        n, d = x.shape
        scatter, mean = extended(x)
        if kind == "uncentred":
            scatter = scatter + n * np.outer(mean, mean)
        scale = np.sqrt(np.diag(scatter) / (n - 1)) if kind == "standardised" else np.ones(d)
        want = eigenvalues(scatter / (n - 1) / np.outer(scale, scale))
        result = covariance.solve(
            streamed(x, precision), center=kind != "uncentred", standardize=kind == "standardised"
        )
        off = (result.spectrum - want).abs()
        own = (d + 8) * U64 * want[0]  # of the eigensolver behind `want`
        assert bool((off <= torch.tensor(result.certificate.variance_error) + own).all()), seed


def test_what_the_products_were_is_said():
    x = samples(600, 6, dtype=torch.float32)
    exact, coarse = (covariance.solve(streamed(x, p)) for p in ("float64", "float32"))
    mixed = covariance.solve(streamed(x, "float64").merge(streamed(x, "float32")))
    kinds = [r.certificate.bound_kind for r in (exact, coarse, mixed)]
    assert kinds == ["deterministic", "measured", "measured"]
    assert mixed.certificate.precision.startswith("float32 products")
    assert mixed.certificate.variance_error[0] > 100 * exact.certificate.variance_error[0]


def test_it_loses_what_squaring_loses_and_says_so():
    q = torch.linalg.qr(samples(100, 5) - samples(100, 5).mean(0)).Q
    x = q * 10.0 ** -torch.arange(0.0, 20, 4, dtype=torch.float64)  # σ from 1 to 1e-16
    certificate = covariance.solve(streamed(x, size=100)).certificate
    assert certificate.trusted == 2  # σ = 1e-8 stands on the floor √u


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_rows_give_as_many_variances(n):
    x = samples(n, 6)
    if n == 1:
        with pytest.warns(UserWarning, match="total variance is zero"):
            result = covariance.solve(streamed(x), ddof=0)
    else:
        result = covariance.solve(streamed(x), ddof=0)
    assert result.components.shape == (n, 6)
    assert bool((result.spectrum >= 0).all())
    assert int((result.spectrum > result.certificate.rounding_floor).sum()) == n - 1


def test_nothing_is_shared_with_the_statistic():
    moments = streamed(samples(30, 4))
    result = covariance.solve(moments)
    kept = [t.clone() for t in (result.mean, result.components, result.spectrum, result.total_variance)]
    moments.update(samples(3000, 4, offset=5.0))
    moments.flush()
    now = (result.mean, result.components, result.spectrum, result.total_variance)
    assert all(map(torch.equal, kept, now))


def test_no_rows_and_too_few():
    with pytest.raises(ValueError, match="no rows were counted"):
        covariance.solve(Moments(3))
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        covariance.solve(Moments(3).update(torch.ones(1, 3)))
