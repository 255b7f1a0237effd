"""Block Lanczos: what it finds, when it stops, and what it does when it gives up."""

import itertools

import pytest
import torch

from pca_torch.lanczos import lanczos
from pca_torch.prover import Prover
from tests.matrices import U64, Unformed, eigenvalues, generator, operator, power, turned

D = 120
SPECTRA = {
    "power": power(D),
    "flat": torch.linspace(1.0, 0.5, D, dtype=torch.float64),
    "tied at 5": torch.tensor([9.0, 8.0, 7.0, *[6.0] * 9, *[1.0] * (D - 12)], dtype=torch.float64),
    "tied, wide": torch.tensor([*[2.0] * 40, *[1.0] * (D - 40)], dtype=torch.float64),
    "massive": torch.cat([torch.tensor([1e9], dtype=torch.float64), power(D - 1)]),
    "rank 3": torch.cat([power(3), torch.zeros(D - 3, dtype=torch.float64)]),
    "identity": torch.ones(D, dtype=torch.float64),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(op, k, *, tol=1e-6, block=4, most: int | None = 40, effort=10 * D, seed=0, share=None, count=None):
    g = generator(seed)
    prover = Prover(op, tol, share, g)
    return lanczos(op, count or (lambda _: k), prover, block=block, most=most, effort=effort, generator=g)


@pytest.mark.parametrize("kind", [operator, Unformed])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("k", "block"), [(1, 1), (5, 4), (12, 3)])
def test_what_is_missed_is_what_was_allowed(kind, name, k, block):
    matrix = turned(SPECTRA[name])
    op, tol = kind(matrix), 1e-5
    found = run(op, k, tol=tol, block=block, most=4 * max(k, block), effort=20 * k + 40 * D)
    want = SPECTRA[name]
    if found is None:  # a matrix is handed on rather than worn out
        assert kind is operator
        return
    assert found.k == k
    theta = found.ritz.values[:k]
    rounding = 16 * U64 * D * want[0].item()
    assert bool((theta <= want[:k] + rounding).all())  # Cauchy
    if found.fallbacks == ():
        missed = (want[:k] - theta).sum().item()
        assert missed <= min(tol * want.sum().item(), 1e4 * tol * want[k - 1].item()) + k * rounding
    square = found.ritz.vectors @ found.ritz.vectors.mT
    assert (square - torch.eye(len(square), dtype=torch.float64)).abs().max() <= 20 * U64 * D**0.5
    left = torch.linalg.qr(found.ritz.vectors.mT, mode="complete").Q[:, len(found.ritz.vectors) :].mT
    if len(left):
        assert eigenvalues(left @ matrix @ left.mT)[0].item() <= found.bound.below + rounding


@pytest.mark.parametrize("name", ["power", "massive"])
def test_it_stops_before_the_space_is_whole(name):
    op = Unformed(turned(SPECTRA[name]))
    found = run(operator(turned(SPECTRA[name])), 3, tol=1e-4)
    assert found is not None
    assert len(found.ritz.values) < D // 2
    assert run(op, 3, tol=1e-4) is not None


def test_restarts_keep_the_basis_small(monkeypatch):
    """A flat spectrum takes several restarts; without them the basis would be the whole space."""
    sizes = []

    def count(basis):
        sizes.append(basis.size)
        return 2

    op = operator(turned(SPECTRA["flat"]))
    found = run(op, 2, tol=1e-4, block=4, most=40, effort=40 * D, count=count)
    assert found is not None
    assert max(sizes) <= 40 + 4
    assert any(later < earlier for earlier, later in itertools.pairwise(sizes))
    assert found.ritz.values.tolist()[:2] == pytest.approx(SPECTRA["flat"][:2].tolist(), rel=1e-3)
    sizes.clear()
    assert run(op, 2, tol=1e-4, most=None, effort=40 * D, count=count) is not None
    assert max(sizes) > 44


def test_copies_of_a_tie_wider_than_the_block_are_found():
    matrix = turned(SPECTRA["tied, wide"])
    found = run(operator(matrix), 10, block=2, most=60, effort=40 * D)
    assert found is None or found.ritz.values[:10].tolist() == pytest.approx([2.0] * 10, rel=1e-9)
    found = run(Unformed(matrix), 10, block=2, most=60, effort=40 * D)
    assert found is not None
    assert found.ritz.values[:10].tolist() == pytest.approx([2.0] * 10, rel=1e-9)


def test_a_matrix_is_given_back_and_an_operator_says_how_far_it_came():
    matrix = turned(SPECTRA["flat"])
    assert run(operator(matrix), 5, tol=1e-12, effort=30) is None
    best = run(Unformed(matrix), 5, tol=1e-12, effort=30)
    assert best is not None
    assert "not reached; raise `tol`" in best.fallbacks[0]
    assert best.bound.below >= SPECTRA["flat"][0].item() * 0.9
    assert run(Unformed(matrix), 20, effort=12) is None  # fewer directions than were asked for


def test_a_share_that_is_not_reached_is_nothing():
    assert run(Unformed(turned(SPECTRA["flat"])), None, effort=40, count=lambda _: None) is None


@pytest.mark.parametrize("kind", [operator, Unformed])
def test_the_same_seed_gives_the_same_bits_and_the_global_generator_rests(kind):
    matrix = turned(SPECTRA["power"])
    before = torch.get_rng_state()
    one, two, other = (run(kind(matrix), 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.ritz.vectors, two.ritz.vectors)
    assert not torch.equal(one.ritz.vectors, other.ritz.vectors)
