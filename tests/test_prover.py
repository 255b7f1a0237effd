"""The stopping rule: how much may be missed, when a proof is tried, and what a refusal means."""

import pytest
import torch

from pca_torch import prover as module
from pca_torch.complement import STATED
from pca_torch.prover import Prover
from pca_torch.ritz import Ritz, rayleigh_ritz
from tests.matrices import Unformed, generator, noise, operator, power, turned

D = 80


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pairs(matrix, m, size=0.0, without=()):
    """The m leading pairs, each off by `size`, some of them left out."""
    rows = torch.linalg.eigh(matrix).eigenvectors.mT.flip(0)
    rows = torch.stack([row for i, row in enumerate(rows) if i not in without])[:m]
    rows = torch.linalg.qr((rows + size * noise(m, D)).mT).Q.mT
    return rayleigh_ritz(rows, rows @ matrix)


def prover(op, tol=1e-6, share=None):
    return Prover(op, tol, share, generator())


def test_what_may_be_missed_is_a_share_of_the_total_and_of_the_last_direction():
    matrix = turned(power(D))
    op, total = operator(matrix), power(D).sum().item()
    ritz = pairs(matrix, 20)
    for k in (1, 5, 20):
        last = ritz.values[k - 1].item()
        assert prover(op).allowed(ritz, k) == pytest.approx(min(1e-6 * total, 1e-2 * last))
        assert prover(op, tol=1e-5).allowed(ritz, k) == pytest.approx(min(1e-5 * total, 1e-1 * last))
    massive = turned(torch.cat([torch.tensor([1e9], dtype=torch.float64), power(D - 1)]))
    few = pairs(massive, 20)
    assert prover(operator(massive)).allowed(few, 10) == pytest.approx(1e-2 * few.values[9].item())
    noise_of_it = 10 * operator(massive).noise * few.values[0].item()
    assert prover(operator(massive), tol=1e-30).allowed(few, 10) == pytest.approx(noise_of_it)


def test_a_share_allows_no_more_than_would_make_another_k_right():
    matrix = turned(power(D))
    op, ritz = operator(matrix), pairs(matrix, 20)
    before, total = power(D)[:4].sum().item(), power(D).sum().item()
    share = (before + 1e-9) / total  # four directions hold almost as much: K = 5 takes a finer proof
    assert prover(op, share=share).allowed(ritz, 5) == pytest.approx(1e-9, rel=1e-3)


@pytest.mark.parametrize("kind", [operator, Unformed])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_converged_pairs_are_proved(kind, k):
    matrix = turned(power(D))
    judge = prover(kind(matrix), tol=1e-4)
    found = judge(pairs(matrix, 30, 1e-6), k, 8)
    assert found is not None
    assert not judge.refused
    assert found.k == k
    assert found.fallbacks == ()
    assert found.bound.kind == ("deterministic" if kind is operator else STATED)
    assert found.bound.below >= power(D)[len(found.ritz.values)].item()


@pytest.mark.parametrize("kind", [operator, Unformed])
def test_an_overlooked_direction_is_refused(kind):
    """All residuals are tiny, and the third direction is not among them."""
    matrix = turned(power(D))
    judge = prover(kind(matrix), tol=1e-4)
    blind = pairs(matrix, 30, 1e-9, without={2})
    assert judge(blind, 5, 8) is None
    assert judge.refused
    assert judge(pairs(matrix, 30, 1e-6), 5, 8) is not None
    assert not judge.refused


def test_no_proof_is_tried_too_early():
    matrix = turned(power(D))

    def none(*_, **__):
        pytest.fail("too early for a proof")

    op = Unformed(matrix)
    op.apply = none
    for early in (pairs(matrix, 12, 0.3), pairs(matrix, 5)):  # far off; no pair that says what follows
        judge = prover(op)
        assert judge(early, 5, 8) is None
        assert not judge.refused


def test_after_three_refusals_an_operator_gets_what_was_reached():
    """A bound at any price: a flat spectrum would be probed for ever."""
    values = torch.linspace(1.0, 0.5, D, dtype=torch.float64)
    matrix = turned(values)
    judge, blind = prover(Unformed(matrix), tol=1e-4), pairs(matrix, 30, 1e-9, without={0})
    answers = [judge(blind, 3, 8) for _ in range(module.PROBES)]
    assert answers[:-1] == [None] * (module.PROBES - 1)
    assert answers[-1].bound.below >= 1.0  # true nevertheless
    assert "3 probes did not prove" in answers[-1].fallbacks[0]


def test_the_best_there_is():
    matrix = turned(power(D))
    found = prover(Unformed(matrix)).best(pairs(matrix, 10, 0.3), 5)
    assert found.k == 5
    assert "raise `tol`" in found.fallbacks[0]
    rest = torch.linalg.qr(found.ritz.vectors.mT, mode="complete").Q[:, 10:].mT
    assert torch.linalg.eigvalsh(rest @ matrix @ rest.mT)[-1].item() <= found.bound.below


def test_the_whole_space_none_of_it_and_an_exhausted_rank():
    matrix = turned(power(D))
    judge = prover(operator(matrix))
    assert judge(pairs(matrix, D), 5, 8).bound.below == 0
    nothing = Ritz(matrix.new_zeros(0), matrix[:0], matrix[:0])
    assert judge(nothing, 0, 8).bound.below == pytest.approx(power(D).sum().item())
    low = turned(torch.cat([power(4), torch.zeros(D - 4, dtype=torch.float64)]))
    by_trace = prover(operator(low))(pairs(low, 4), 4, 8)
    assert by_trace.bound.below <= 100 * operator(low).noise
