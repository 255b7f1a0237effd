"""A float32 eigenproblem made right: proved pairs beyond what float32 holds, or None."""

import pytest
import torch

from pca_torch import eigen, narrow
from pca_torch.linalg import generator_from
from pca_torch.prover import Prover
from pca_torch.solvers import krylov
from tests.matrices import U64, operator, power, turned

pytest.importorskip("scipy")
D, K = 120, 12
SPECTRA = {
    "power": power(D),
    "flat": torch.linspace(1.0, 0.5, D, dtype=torch.float64),
    "tied at 12": torch.tensor([3.0] * 6 + [2.0] * 10 + [1.0] * (D - 16), dtype=torch.float64),
    "rank 20": torch.tensor([1.0] * 20 + [0.0] * (D - 20), dtype=torch.float64),
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def solved(op, k=K, share=None, tol=1e-6):
    prover = Prover(op, tol, share, generator_from(0))
    return narrow.narrow(op, k, lambda values: krylov._reached(op, share, values), prover)


def missed(matrix, rows, values):
    """Share of the trace that the span of K rows misses of the best."""
    q = torch.linalg.qr(rows.double().mT).Q
    return ((values[: len(rows)].sum() - ((matrix @ q) * q).sum()) / values.sum()).item()


@pytest.mark.parametrize("scale", [1.0, 1e60, 1e-60])
@pytest.mark.parametrize("name", SPECTRA)
def test_pairs_are_proved_beyond_float32(name, scale):
    values = SPECTRA[name] * scale
    matrix = turned(values)
    before = matrix.clone()
    found = solved(operator(matrix))
    assert found is not None
    assert found.k == K
    assert found.arithmetic == "float32 eigenproblem refined in float64"
    have = found.ritz.values[:K]
    # θ ≤ λ, and what is missing is the square of the residual over the distance to what was left out
    gap = (values[K - 1] - values[len(found.ritz.values)]).item()
    lost = found.ritz.gram.trace().item() / gap + 8 * D * U64 * values[0].item()
    assert (have - values[:K]).abs().max() <= lost
    assert lost < 1e-9 * values[0]
    assert missed(matrix, found.ritz.vectors[:K], values) <= 1e-10
    outside = torch.eye(D, dtype=torch.float64) - found.ritz.vectors.mT @ found.ritz.vectors
    rest = torch.linalg.eigvalsh(outside @ matrix @ outside)[-1]
    assert rest <= found.bound.below + 8 * D * U64 * values[0]
    assert torch.equal(matrix, before)


def test_float32_alone_would_be_further_off():
    """Control: what the Rayleigh-Ritz step is for."""
    matrix = turned(power(D))
    raw = eigen.values_of(matrix.float()).double()[:K]
    found = solved(operator(matrix))
    assert found is not None
    assert (found.ritz.values[:K] - power(D)[:K]).abs().max() < (raw - power(D)[:K]).abs().max() / 1e4


@pytest.mark.parametrize("k", [3, 7, 12])
@pytest.mark.parametrize(("hair", "more"), [(-1e-8, 0), (1e-8, 1)])
def test_a_share_takes_the_right_count(k, hair, more):
    values = power(D)
    share = (values[:k].sum() / values.sum()).item() + hair
    found = solved(operator(turned(values)), k=None, share=share)
    assert found is not None
    assert found.k == k + more


def test_variances_that_float32_cannot_see_are_left_to_others():
    values = torch.cat([torch.tensor([1e9], dtype=torch.float64), power(D - 1)])
    assert solved(operator(turned(values))) is None
    total = values.sum().item()
    assert solved(operator(turned(values)), k=None, share=(values[:5].sum() / total).item()) is None


def test_more_than_half_a_refused_share_and_no_scipy(monkeypatch):
    op = operator(turned(power(D)))
    assert solved(op, k=D // 2) is None
    monkeypatch.setattr(narrow, "subset_solver", lambda _: False)
    assert solved(op) is None


def test_the_solver_of_some_is_asked_for_on_a_cpu_with_scipy_alone(monkeypatch):
    assert eigen.subset_solver(torch.eye(3))
    assert not eigen.subset_solver(torch.eye(3, device="meta"))
    monkeypatch.setattr(eigen, "_scipy_linalg", lambda: None)
    assert not eigen.subset_solver(torch.eye(3))


def test_values_and_rows_of_the_subset_solver():
    matrix = turned(power(D))
    assert (eigen.values_of(matrix) - power(D)).abs().max() <= 8 * D * U64
    rows = eigen.leading_rows(matrix, 5)
    assert rows.shape == (5, D)
    assert torch.linalg.matrix_norm(rows @ matrix - power(D)[:5, None] * rows) <= 8 * D * U64
