"""Filtered subspace iteration: the polynomial, the locks, and what is found."""

import math

import pytest
import torch

from pca_torch import chebyshev as module
from pca_torch.chebyshev import chebyshev
from pca_torch.prover import Prover
from pca_torch.ritz import rayleigh_ritz
from tests.matrices import U64, generator, noise, operator, power, turned

D = 150
SPECTRA = {
    "power": power(D),
    "flat": torch.linspace(1.0, 0.5, D, dtype=torch.float64),
    "tied at 5": torch.tensor([9.0, 8.0, 7.0, *[6.0] * 9, *[1.0] * (D - 12)], dtype=torch.float64),
    "tied beyond the block": torch.tensor([*[2.0] * 80, *[1.0] * (D - 80)], dtype=torch.float64),
    "massive": torch.cat([torch.tensor([1e9], dtype=torch.float64), power(D - 1)]),
    "rank 3": torch.cat([power(3), torch.zeros(D - 3, dtype=torch.float64)]),
    "identity": torch.ones(D, dtype=torch.float64),
    "zero": torch.zeros(D, dtype=torch.float64),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(matrix, k, tol=1e-6, seed=0):
    op, g = operator(matrix), generator(seed)
    return chebyshev(op, k, Prover(op, tol, None, g), generator=g)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("k", [1, 5, 12])
@pytest.mark.parametrize("tol", [1e-3, 1e-8])
def test_what_is_missed_is_what_was_allowed(name, k, tol):
    want = SPECTRA[name]
    found = run(turned(want), k, tol)
    assert found is not None
    rounding = 16 * U64 * D * want[0].item()
    theta = found.ritz.values[:k]
    missed = (want[:k] - theta).sum().item()
    assert -k * rounding <= missed
    assert missed <= min(tol * want.sum().item(), 1e4 * tol * want[k - 1].item()) + k * rounding
    assert found.bound.kind == "deterministic"


def test_it_gives_up_in_the_end(monkeypatch):
    monkeypatch.setattr(module, "ROUNDS", 1)
    assert run(turned(SPECTRA["flat"]), 5, 1e-12) is None


@pytest.mark.parametrize(("top", "edge"), [(1.0, 0.5), (1.0, 0.9), (10.0, 1e-3), (1.0, 0.0)])
def test_the_filter_is_one_at_the_top_and_small_below_the_edge(top, edge):
    """On a diagonal matrix every coordinate is multiplied by the polynomial's value at its entry."""
    grid = torch.cat([torch.linspace(0, edge, 50), torch.tensor([top])]).double()
    op = operator(grid.diag())
    value = module._filter(op, torch.ones(1, 51, dtype=torch.float64), op.matrix[:0], top, edge)[0]
    assert value[-1].item() == pytest.approx(1, rel=1e-9)
    bound = max(1e-12 * top, edge)
    degree = min(module.DEGREE, max(2, math.ceil(module.AMPLIFY / math.acosh(2 * top / bound - 1))))
    largest = 1 / math.cosh(degree * math.acosh(2 * top / bound - 1))  # |T_n| ≤ 1 there
    assert value[:-1].abs().max().item() <= largest * (1 + 1e-6) + 1e-15
    if edge:
        assert value[:-1].abs().max().item() >= 0.9 * largest  # as the minimax polynomial has it


def test_a_filter_without_room_leaves_the_rows_alone():
    op = operator(torch.eye(4, dtype=torch.float64))
    rows = noise(2, 4)
    assert torch.equal(module._filter(op, rows, rows[:0], 1.0, 1.0), rows)


def test_locked_rows_are_kept_out():
    values = torch.tensor([5.0, 3.0, 1.0, 0.5], dtype=torch.float64)
    op, fixed = operator(values.diag()), torch.eye(1, 4, dtype=torch.float64)
    filtered = module._filter(op, torch.ones(2, 4, dtype=torch.float64), fixed, 3.0, 1.0)
    assert filtered[:, 0].abs().max() <= 1e-12
    assert filtered[:, 1] == pytest.approx([1.0, 1.0])


def test_pairs_are_locked_on_the_scale_of_the_last_one_wanted():
    """A massive pair that is off by 10⁻⁶ of itself is off by ten times the K-th: not converged."""
    matrix = turned(SPECTRA["massive"])
    rows = torch.linalg.eigh(matrix).eigenvectors.mT.flip(0)[:6]
    exact = rayleigh_ritz(rows, rows @ matrix)
    assert module._converged(exact, 6, 1.0) == 6
    tilted = torch.linalg.qr((rows + 1e-8 * noise(6, D)).mT).Q.mT
    assert module._converged(rayleigh_ritz(tilted, tilted @ matrix), 6, 1.0) == 0


def test_little_that_may_be_missed_takes_sharper_pairs():
    matrix = turned(SPECTRA["power"])
    rows = torch.linalg.eigh(matrix).eigenvectors.mT.flip(0)[:6]
    tilted = torch.linalg.qr((rows + 1e-6 * noise(6, D)).mT).Q.mT
    ritz = rayleigh_ritz(tilted, tilted @ matrix)
    assert module._converged(ritz, 6, 1e-3) == 6
    assert module._converged(ritz, 6, 1e-12) == 0


def test_the_same_seed_gives_the_same_bits_and_the_global_generator_rests():
    matrix = turned(SPECTRA["power"])
    before = torch.get_rng_state()
    one, two, other = (run(matrix, 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.ritz.vectors, two.ritz.vectors)
    assert not torch.equal(one.ritz.vectors, other.ritz.vectors)
