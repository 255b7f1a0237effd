"""`Scatter`: its error bound against sums in extended precision."""

import numpy as np
import pytest
import torch

from pca_torch import scatter as module
from pca_torch.precision import unit_roundoff
from pca_torch.scatter import Scatter
from tests.support import samples

CPU = torch.device("cpu")
EXTENDED = np.finfo(np.longdouble).eps < 2.0**-60
extended = pytest.mark.skipif(not EXTENDED, reason="long double is no longer than double here")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def exact(x, w=None):
    """Scatter of the rows in long double: eleven more bits than what is judged."""
    a = x.double().numpy().astype(np.longdouble)
    w = np.ones(len(a), np.longdouble) if w is None else w.numpy().astype(np.longdouble)
    z = a - (w[:, None] * a).sum(0) / w.sum()
    return (z * w[:, None]).T @ z


def off(scatter, want, scale=None):
    """‖computed - true‖₂, of the scaled matrix if there is a scale."""
    error = (scatter.matrix.numpy().astype(np.longdouble) - want).astype(np.float64)
    scale = np.ones(len(error)) if scale is None else scale.numpy()
    return np.linalg.norm(error / np.outer(scale, scale), 2)


def summed(x, dtype, size=64):
    scatter = Scatter((x.shape[1],), CPU, dtype)
    for part in x.double().split(size):
        scatter.add(part)
    return scatter


@extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [5, 64, 500])
@pytest.mark.parametrize("block", range(4))
def test_the_bound_holds_and_is_useful(block, size, dtype):
    ratios = []
    for seed in range(25 * block, 25 * block + 25):
        g = torch.Generator().manual_seed(seed)
        n, d = int(torch.randint(2, 300, (), generator=g)), int(torch.randint(1, 12, (), generator=g))
        x = samples(n, d, decay=0.3 + 0.7 * float(torch.rand((), generator=g)), seed=seed)
        x = x + 10.0 ** (seed % 5) * torch.randn(d, generator=g, dtype=torch.float64)
        scatter = summed(x, dtype, size)
        error, bound = off(scatter, exact(x)), scatter.error()
        assert error <= bound, (seed, error / bound)
        ratios.append(bound / max(error, 1e-300))
    assert np.median(ratios) < (30 if dtype == torch.float32 else 1e5)  # measured, against worst case


@extended
def test_columns_of_other_size_do_not_hide_a_small_one():
    """A wide column must not lend its trace to a narrow one far from zero once both are scaled."""
    worst = 0.0
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(200, 3, generator=g, dtype=torch.float64) * torch.tensor([1e4, 1.0, 1e-4]).double()
        x += torch.tensor([0.0, 1e2, 1e4])
        scatter = summed(x, torch.float64, 5)
        want = exact(x)
        scale = (scatter.diagonal / 199).sqrt()
        error = off(scatter, want, scale)
        assert error <= scatter.error(scale)
        by_trace = scatter.error() / scatter.diagonal.sum().item() * 3 * 199
        worst = max(worst, error / by_trace)
    assert worst > 1  # control: the bound of the unscaled sums, scaled like their trace


@extended
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
@pytest.mark.parametrize("second", [torch.float32, torch.float64])
def test_a_merge_is_as_exact_as_the_coarser_of_the_two(first, second):
    x = samples(900, 16, offset=30.0)
    one, other = summed(x[:100], first), summed(x[100:], second)
    before = other.matrix, other.error()
    one.merge(other)
    assert torch.equal(other.matrix, before[0])
    assert other.error() == before[1]
    error = off(one, exact(x))
    assert error <= one.error()
    assert one.measured is (torch.float32 in {first, second})
    if one.measured:
        gamma = (one.depth + 4) * unit_roundoff(torch.float64) * one.diagonal.sum().item()
        assert error > 100 * gamma  # control: the bound of float64 products alone would be false
    one.add(x[:50])  # and what comes after is measured as well
    assert off(one, exact(torch.cat([x, x[:50]]))) <= one.error()


@extended
def test_a_measured_error_is_scaled_too():
    x = samples(800, 6, decay=0.2, offset=3.0)
    scatter = summed(x, torch.float32)
    scale = (scatter.diagonal / 799).sqrt()
    assert off(scatter, exact(x), scale) <= scatter.error(scale) < 1e-3 * 800


@extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_rows(dtype):
    x = samples(500, 5, offset=10.0)
    w = 10 * torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1e-3
    scatter = Scatter((5,), CPU, dtype)
    for rows, weights in zip(x.split(120), w.split(120), strict=True):
        scatter.add(rows, weights)
    assert off(scatter, exact(x, w)) <= scatter.error()
    assert scatter.weight == pytest.approx(w.sum().item(), rel=1e-14)
    assert scatter.weight_sq == pytest.approx(w.square().sum().item(), rel=1e-14)


def test_a_merge_of_nothing_and_into_nothing():
    x = samples(50, 4)
    full, empty = summed(x, torch.float64), Scatter((4,), CPU, torch.float64)
    matrix = full.matrix
    full.merge(empty)
    assert torch.equal(full.matrix, matrix)
    empty.merge(full)
    assert torch.equal(empty.matrix, matrix)
    assert torch.equal(empty.mean, full.mean)


def test_rows_are_not_changed():
    x = samples(40, 3, offset=2.0)
    before = x.clone()
    Scatter((3,), CPU, torch.float32).add(x, torch.ones(40, dtype=torch.float64))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_given_up_are_summed_as_copies_are(dtype):
    x = samples(300, 6, offset=40.0)
    x[::50] *= 100  # apart in float64
    copied, given = Scatter((6,), CPU, dtype), Scatter((6,), CPU, dtype)
    copied.add(x)
    given.add(x.clone(), owned=True)
    assert torch.equal(given.matrix, copied.matrix)
    assert torch.equal(given.mean, copied.mean)
    assert given.error() == copied.error()


@extended
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_that_runs_out_leaves_the_sums_as_they_were(dtype, monkeypatch):
    x = samples(400, 5, offset=10.0)
    scatter = summed(x[:100], dtype)
    before = scatter.matrix, scatter.mean.clone(), scatter.n, scatter.error()

    def fail(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "add_gram", fail)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            scatter.add(x[100:])
    assert not scatter.torn
    assert torch.equal(scatter.matrix, before[0])
    assert torch.equal(scatter.mean, before[1])
    assert (scatter.n, scatter.error()) == before[2:]
    scatter.add(x[100:])
    assert off(scatter, exact(x)) <= scatter.error()
    assert off(scatter, exact(x[:-1])) > scatter.error()  # control: a row short


def test_memory_that_runs_out_between_two_parts_is_told(monkeypatch):
    x = samples(200, 5)
    x[::50] *= 1e4
    scatter, add, sizes = Scatter((5,), CPU, torch.float32), module.add_gram, []

    def fail(target, rows, dtype):
        sizes.append(len(rows))
        if len(sizes) > 1:
            raise torch.OutOfMemoryError("full")
        add(target, rows, dtype)

    monkeypatch.setattr(module, "add_gram", fail)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        scatter.add(x)
    assert sizes == [196, 4]
    assert scatter.torn
