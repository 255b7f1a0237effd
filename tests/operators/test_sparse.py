"""Sparse samples: every layout, implicit centring under large means, and never a dense copy."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import scipy.sparse
import torch

from pca_torch.operators import Rows, Sparse, is_sparse
from tests.operators import truths

WEIGHTS = torch.rand(90, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def mixed(dtype, spread, ratio, n=90, d=14):
    """Rows whose even columns have no zeros and their full mean, and whose odd ones are mostly zeros."""
    x = truths.rows_of(dtype, spread, ratio, n, d)
    x[torch.rand(n, d, generator=torch.Generator().manual_seed(2)) < 0.8 * (torch.arange(d) % 2)] = 0
    x[:, 1] = 0
    x[3, 1] = 1  # one entry
    return x


def stored(x, layout=torch.sparse_csr):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compressed layouts are in beta
        return x.to_sparse(layout=layout)


@pytest.fixture(autouse=True)
def never_dense(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a sparse matrix was made dense")

    monkeypatch.setattr(torch.Tensor, "to_dense", refuse)
    for array in (scipy.sparse.csr_matrix, scipy.sparse.coo_array, scipy.sparse.csr_array):
        monkeypatch.setattr(array, "toarray", refuse)
        monkeypatch.setattr(array, "todense", refuse)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("options", truths.OPTIONS.values(), ids=truths.OPTIONS)
@pytest.mark.parametrize(("dtype", "spread", "ratio"), truths.INPUTS)
def test_products_are_within_what_they_say(dtype, spread, ratio, options, weights):
    x = mixed(dtype, spread, ratio)
    op, want = Sparse(stored(x), weights, **options), truths.covariance(x, weights, **options)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    truths.check_facts(op, x, weights, **options)


@pytest.mark.parametrize("ratio", [1e4, 1e6])
def test_the_bound_refuses_a_mean_that_is_subtracted_afterwards(ratio):
    """(Xᵀ(Xv) - N·mean·mean v) / (N - 1) rounds at the size of the mean squared, the bound at its root."""
    x = truths.rows_of(torch.float64, 1.0, ratio)
    op, want = Sparse(stored(x)), truths.covariance(x)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    mean = x.mean(0)
    op.apply = lambda v: ((v @ x.mT) @ x - len(x) * (v @ mean)[:, None] * mean) / (len(x) - 1)
    assert truths.largest_error(op, want) > truths.allowed(op, want)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 1e4])
def test_the_bound_refuses_uncentred_rows(ratio):
    x = mixed(torch.float64, 1.0, ratio)
    op, want = Sparse(stored(x)), truths.covariance(x)
    op.apply = Sparse(stored(x), center=False).apply
    assert truths.largest_error(op, want) > 1e3 * truths.allowed(op, want)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool]
)
def test_layouts_and_dtypes(layout, dtype):
    x = (3 * mixed(torch.float64, 1.0, 1.0)).to(dtype)
    op, want = Sparse(stored(x, layout)), truths.covariance(x)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    assert op.problem.dtype == (dtype if dtype.is_floating_point else torch.float64)


@pytest.mark.parametrize("name", ["csr_matrix", "coo_array", "csc_array", "lil_array", "dok_array"])
def test_scipy(name):
    x = mixed(torch.float64, 1.0, 1.0)
    op, want = Sparse(getattr(scipy.sparse, name)(x.numpy())), truths.covariance(x)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)


def test_entries_that_stand_twice_are_summed():
    x = torch.tensor([[0.0, 5.0], [3.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    want = truths.covariance(x)
    twice = torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 0, 2], [1, 0, 1, 1]]),
        torch.tensor([2.0, 3.0, 3.0, -1.0], dtype=torch.float64),
        (3, 2),
        check_invariants=True,
    )
    starts, places, values = np.array([0, 2, 3, 4]), np.array([1, 1, 0, 1]), np.array([2.0, 3.0, 3.0, -1.0])
    for given in (twice, scipy.sparse.csr_array((values, places, starts), shape=(3, 2))):
        op = Sparse(given)
        assert truths.largest_error(op, want) <= truths.allowed(op, want)
        np.testing.assert_allclose(op.problem.variance.numpy(), want.diagonal().astype(float), rtol=1e-14)


def test_places_in_any_order_and_zeros_that_are_stored():
    starts, places, values = np.array([0, 3, 3, 4]), np.array([2, 0, 1, 1]), np.array([2.0, 0.0, 3.0, -1.0])
    x = torch.tensor([[0, 3, 2], [0, 0, 0], [0, -1, 0]], dtype=torch.float64)
    op = Sparse(scipy.sparse.csr_array((values, places, starts), shape=(3, 3)))
    want = truths.covariance(x)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    assert op.problem.variance[0] == 0


@pytest.mark.parametrize("options", truths.OPTIONS.values(), ids=truths.OPTIONS)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
def test_scores_and_gather_are_those_of_dense_rows(options, weights):
    """At the size of the uncentred rows, for these are what is rounded."""
    x = mixed(torch.float64, 1.0, 1e2)
    op, dense = Sparse(stored(x), weights, **options), Rows(x, weights, **options)
    scale = 1.0 if op.problem.scale is None else op.problem.scale
    bound = 2 * dense.noise * (x / scale).norm().item()
    v = truths.units(14)
    q = torch.randn(90, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (op.scores(v) - dense.scores(v)).abs().max().item() <= bound
    assert (op.gather(q) - dense.gather(q)).abs().max().item() <= bound * q.norm().item()


def test_rows_of_weight_zero_do_not_count():
    x = mixed(torch.float64, 1.0, 1e2)
    mask = (torch.arange(90) % 3 > 0).double()
    holes = x.clone()
    holes[mask == 0] = float("nan")
    op, want = Sparse(stored(holes), mask), truths.covariance(x[mask > 0])
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    assert (op.problem.n_samples, op.problem.divisor, op.n_rows) == (60, 59, 90)


def test_a_full_column_is_left_with_no_zeros_whatever_the_weights():
    """Σw by subtraction leaves 10⁻¹³, which a mean of 10⁸ squared makes a variance of 10³."""
    x = torch.zeros(5000, 2, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    x[:, 0] = 1e8 + torch.randn(5000, generator=g, dtype=torch.float64)
    x[7, 1] = 1
    w = torch.rand(5000, generator=g, dtype=torch.float64) + 1e-3
    want = truths.covariance(x, w).diagonal().astype(float)
    np.testing.assert_allclose(Sparse(stored(x), w).problem.variance.numpy(), want, rtol=1e-12)
    order = torch.randperm(5000, generator=g)
    left = (w.sum() - sum(part.sum() for part in w[order].split(7))).abs().item()  # control
    assert left * 1e16 / w.sum().item() > 1e-12 * want[0]


def test_constant_data_have_no_direction():
    x = torch.zeros(1000, 3, dtype=torch.float64)
    x[:, 1] = 1e4 / 3
    op = Sparse(stored(x))
    assert op.problem.constant
    assert op.apply(torch.eye(3, dtype=torch.float64)).abs().max().item() <= op.problem.error
    assert op.noise < 1.1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 2), "`x` must be a matrix in COO, CSR or CSC layout, got torch.strided of shape"),
        (torch.ones(2, 3, 4).to_sparse(), "COO, CSR or CSC layout, got torch.sparse_coo of shape"),
        (torch.ones(3, 4).to_sparse(1), "COO, CSR or CSC layout, got torch.sparse_coo of shape"),
        (np.ones((3, 2)), "`x` must be sparse, a tensor or a SciPy array, got ndarray"),
        (scipy.sparse.csr_array((3, 0)), "`x` must have at least one column, got shape"),
        (scipy.sparse.csr_array((0, 3)), "`x` has no rows that count"),
        (scipy.sparse.csr_array((1, 3)), "`ddof` = 1 needs more than 1 samples, got 1"),
    ],
)
def test_what_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        Sparse(x)


def test_complex_entries_and_large_integers_are_refused():
    with pytest.raises(TypeError, match=r"`x` must be real, got torch\.complex64"):
        Sparse(torch.eye(2, dtype=torch.complex64).to_sparse())
    with pytest.raises(TypeError, match="`x` holds integers beyond 2"):
        Sparse(torch.full((2, 2), 2**53 + 1).to_sparse())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_rows_with_nan_or_inf_are_counted(value):
    x = mixed(torch.float32, 1.0, 1.0)
    x[2, 1:5] = value
    x[5, 3] = value
    x[89, 13] = value
    for layout in LAYOUTS:
        with pytest.raises(ValueError, match="`x` has 3 of 90 samples with NaN or inf"):
            Sparse(stored(x, layout))


def test_what_is_sparse():
    x = torch.eye(4)
    assert is_sparse(x.to_sparse())
    assert is_sparse(stored(x))
    assert is_sparse(scipy.sparse.eye_array(4))
    assert not is_sparse(x)
    assert not is_sparse(x.numpy())


def test_the_input_is_not_changed():
    x = stored(mixed(torch.float64, 1.0, 1.0))
    before = x.values().clone()
    op = Sparse(x, WEIGHTS, standardize=True)
    op.apply(truths.units(14))
    assert torch.equal(x.values(), before)


SCRIPT = """
import numpy as np, scipy.sparse, torch
from pca_torch.operators import Sparse
from pca_torch.solvers import randomized

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024

def decomposed(n, d, entries):
    r = np.random.default_rng(0)
    at = r.integers(0, n, entries), r.integers(0, d, entries)
    x = scipy.sparse.csr_array((r.standard_normal(entries), at), shape=(n, d))
    before = memory("VmRSS")
    randomized.solve(Sparse(x), 20, random_state=0)
    return memory("VmHWM") - before

decomposed(1000, 1000, 1000)  # libraries load their threads and buffers
print(decomposed(20_000, 20_000, 400_000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
def test_memory_is_that_of_the_entries_and_the_sketch():
    """D×D would be 3.2 GB, and so would dense rows. Warnings are errors there, and the first of a process."""
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert float(done.stdout) < 300
