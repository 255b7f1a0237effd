"""Signs, the symmetric product and the fixed random signs."""

import pytest
import torch

from pca_torch.linalg import PLAIN_BELOW, SIGN_TIE, add_gram, fix_signs, mirror, panels, rademacher
from pca_torch.precision import unit_roundoff
from tests.support import samples


@pytest.mark.parametrize("d", [1, 2, 511, 512, 513, 520, 1000, 4096])
def test_panels_cover_every_column_once(d):
    ranges = panels(d)
    assert [j for start, stop in ranges for j in range(start, stop)] == list(range(d))
    assert len(ranges) == (1 if d < PLAIN_BELOW else 8)


@pytest.mark.parametrize("d", [1, 7, 511, 513, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_symmetric_product_is_the_plain_one(d, dtype):
    """A sum of n products obeys |E| ≤ n·u |X|ᵀ|X| (Higham 2002, 3.5), in the dtype of the product."""
    n = 40
    x = samples(n, d, decay=0.99, dtype=dtype)
    before = samples(d, d, decay=0.99, seed=1)
    before = before + before.mT
    target = before.clone()
    add_gram(target, x.double(), dtype)
    size = x.double().abs()
    bound = n * unit_roundoff(dtype) * (size.mT @ size) + 4 * unit_roundoff(torch.float64) * before.abs()
    have, want = mirror(target), before + x.double().mT @ x.double()
    assert bool(((have - want).abs() <= 2 * bound).all())  # twice: `want` is a product too
    assert torch.equal(have, have.mT)
    short = x[1:].double()
    assert not bool(((before + short.mT @ short - want).abs() <= 2 * bound).all())  # control: a row short


def test_adding_no_rows_adds_nothing():
    target = torch.eye(600, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        add_gram(target, torch.zeros(0, 600, dtype=torch.float64), dtype)
    assert torch.equal(target, torch.eye(600, dtype=torch.float64))


def test_the_largest_entry_of_each_row_is_positive():
    v = torch.tensor([[0.1, -0.9, 0.3], [0.8, 0.1, -0.2]])
    assert torch.equal(fix_signs(v), torch.stack([-v[0], v[1]]))
    assert torch.equal(fix_signs(-v), fix_signs(v))
    assert torch.equal(v[0], torch.tensor([0.1, -0.9, 0.3]))  # not in place


@pytest.mark.parametrize("excess", [-0.9, 0.0, 0.9])
def test_among_nearly_equal_entries_the_first_decides(excess):
    v = torch.tensor([[-0.5, 0.5 * (1 + excess * SIGN_TIE), 0.1]], dtype=torch.float64)
    assert torch.equal(fix_signs(v), -v)


def test_a_clearly_larger_entry_decides():
    v = torch.tensor([[-0.5, 0.5 * (1 + 3 * SIGN_TIE), 0.1]], dtype=torch.float64)
    assert torch.equal(fix_signs(v), v)


def test_the_signs_of_a_batch_are_those_of_each_matrix():
    v = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    alone = torch.stack([fix_signs(rows) for rows in v.reshape(6, 5, 4)]).reshape(v.shape)
    assert torch.equal(fix_signs(v), alone)
    assert not torch.equal(alone, v)


@pytest.mark.parametrize("shape", [(0, 4), (2, 1), (0, 3, 4), (2, 0, 4), (2, 3, 1)])
def test_signs_of_no_rows_or_one_column(shape):
    assert torch.equal(fix_signs(-torch.ones(shape)), torch.ones(shape))


def test_random_signs_are_the_same_everywhere_and_cost_the_global_generator_nothing():
    state = torch.get_rng_state()
    signs = rademacher(300, 8, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.device("meta"):  # a caller's default device, as `torch.set_default_device` sets it
        assert torch.equal(rademacher(300, 8, torch.device("cpu")), signs)
    assert signs.unique().tolist() == [-1, 1]
    # columns of independent signs: an inner product has deviation √300, 5 of them is one in 10⁶
    assert (signs.mT @ signs - 300 * torch.eye(8, dtype=torch.float64)).abs().max() < 5 * 300**0.5
