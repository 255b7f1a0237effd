"""Covariances of many sets against those of each set, and against the formula that loses digits."""

import pytest
import torch

import pca_torch as pt
from pca_torch import batch_covariance
from tests.matrices import U64

U32 = torch.finfo(torch.float32).eps / 2


def sets(*shape, offset=0.0, seed=0, dtype=torch.float32):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.linspace(2, 0.1, shape[-1]) + offset).to(dtype)


def truth(x, center=True, ddof=1):
    """One set after the other, centred twice in float64."""
    flat = x.double().reshape(-1, *x.shape[-2:])
    found = []
    for z in flat:
        for _ in range(2 if center else 0):
            z = z - z.mean(0)
        found.append(z.mT @ z / (len(z) - ddof))
    return torch.stack(found).reshape(*x.shape[:-2], x.shape[-1], x.shape[-1])


def bound(x, want, u, center=True):
    """γ_N |z|ᵀ|z| ≤ γ_N tr C entrywise (Higham 2002, §3.1), twice: for the truth too, and one rounding of z.

    In float64 the mean is off by N·u·max|x|; centring a second time leaves the square of that.
    """
    n = x.shape[-2]
    return 2 * (n + 4) * u / (1 - n * u) * want.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]


@pytest.mark.parametrize("shape", [(50, 8), (3, 50, 7), (2, 3, 40, 1), (5, 2, 3)])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("precision", "u"), [("auto", U64), ("float32", U32)])
def test_each_set_is_as_if_alone(shape, center, dtype, precision, u):
    x = sets(*shape, dtype=dtype)
    before = x.clone()
    have, want = batch_covariance(x, center=center, precision=precision), truth(x, center)
    assert have.dtype == torch.float64
    assert have.shape == (*shape[:-2], shape[-1], shape[-1])
    assert torch.equal(have, have.mT)
    assert torch.equal(x, before)
    assert bool(((have - want).abs() <= bound(x, want, u)).all())


@pytest.mark.parametrize("offset", [1e2, 1e4])
@pytest.mark.parametrize(("precision", "u"), [("auto", U64), ("float32", U32)])
def test_an_offset_costs_nothing_where_sets_are_centred_first(offset, precision, u):
    x = sets(3, 400, 6, offset=offset)
    want = truth(x)
    limit = bound(x, want, u)
    assert bool(((batch_covariance(x, precision=precision) - want).abs() <= limit).all())
    z = x if precision == "float32" else x.double()  # control: XᵀX - n·mean·meanᵀ
    mean = z.mean(-2, keepdim=True)
    lost = (z.mT @ z - 400 * mean.mT @ mean).double() / 399
    assert bool(((lost - want).abs() > limit).any())


def test_constant_columns_have_no_variance():
    x = sets(2, 30, 4)
    x[..., 1] = 0.1
    assert bool((batch_covariance(x)[:, 1] == 0).all())


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float32_products_of_any_size(scale, dtype):
    x = (sets(2, 40, 4, dtype=torch.float64) * scale).to(dtype)
    have, want = batch_covariance(x, precision="float32"), truth(x)
    assert bool(((have - want).abs() <= bound(x, want, U32)).all())


def test_it_is_what_the_statistic_of_one_set_says():
    x = sets(2, 3, 60, 5)
    for ddof in (0, 1, 2.5):
        for i, j in ((0, 0), (1, 2)):
            want = pt.Moments(5).update(x[i, j]).covariance(ddof)
            limit = bound(x[i, j], want, U64)[0]
            assert bool(((batch_covariance(x, ddof=ddof)[i, j] - want).abs() <= limit).all())


def test_integers_arrays_and_gradients():
    x = torch.arange(24).reshape(2, 4, 3) ** 2
    want = truth(x)
    assert bool(((batch_covariance(x) - want).abs() <= bound(x, want, U64)).all())
    assert torch.equal(batch_covariance(x.numpy()), batch_covariance(x))
    leaf = sets(2, 9, 3).requires_grad_()
    assert not batch_covariance(leaf).requires_grad


def test_no_sets():
    assert batch_covariance(torch.zeros(0, 5, 3)).shape == (0, 3, 3)


def test_the_callers_shortcuts_and_modes_change_nothing():
    x = sets(5, 100, 16)
    want = batch_covariance(x, precision="float32")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(batch_covariance(x, precision="float32"), want)
    finally:
        torch.set_float32_matmul_precision(before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(batch_covariance(x, precision="float32"), want)
    with torch.inference_mode():
        assert torch.equal(batch_covariance(x, precision="float32"), want)


def test_any_number_of_threads_gives_the_same_digits():
    x, before = sets(7, 100, 16), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(batch_covariance(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


def test_the_heads_of_a_layer_are_solved_in_two_calls():
    x = sets(2, 3, 200, 8)
    result = pt.decompose_batch(batch_covariance(x), 4)
    for i, j in ((0, 0), (1, 2)):
        alone = pt.decompose(x[i, j], 4, "full")
        off = (result.explained_variance[i, j] - alone.explained_variance).abs()
        allowed = result.variance_error[i, j] + torch.tensor(alone.certificate.variance_error)
        assert bool((off <= allowed + bound(x[i, j], truth(x[i, j]), U64)[0, 0]).all())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3), r"`x` must have shape \(..., N, E\) with E ≥ 1, got \(3,\)"),
        (torch.zeros(2, 3, 0), r"`x` must have shape \(..., N, E\) with E ≥ 1, got \(2, 3, 0\)"),
        (torch.zeros(2, 1, 3), "`ddof` = 1 needs more than 1 samples, got 1"),
        (torch.zeros(2, 0, 3), "`x` has no rows that count"),
        (torch.full((3, 4), torch.nan), "`x` must be finite, and its squares too; drop its bad samples"),
        (
            torch.full((2, 4, 3), 1e200, dtype=torch.float64) * torch.arange(4)[:, None],
            r"set \[0\] of \(2,\) is",
        ),
    ],
)
def test_what_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        batch_covariance(x)


def test_the_set_that_is_not_finite_is_named():
    x = sets(2, 3, 10, 4)
    x[1, 0, 5, 2] = torch.inf
    with pytest.raises(ValueError, match=r"set \[1, 0\] of \(2, 3\) is not; leave it out"):
        batch_covariance(x)


@pytest.mark.parametrize(("option", "value"), [("center", 2), ("ddof", -1), ("precision", "half")])
def test_bad_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be"):
        batch_covariance(torch.zeros(4, 2), **{option: value})
