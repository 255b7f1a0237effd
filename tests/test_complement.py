"""Bounds on what Ritz vectors leave over: proved by Cholesky, by the trace, and with high probability."""

import math

import pytest
import torch

from pca_torch import complement
from pca_torch.complement import STATED, cholesky_proves, probe, trace_bound
from pca_torch.ritz import Ritz, rayleigh_ritz
from tests.matrices import U64, Unformed, eigenvalues, frame, generator, operator, power, turned


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leading(matrix, p):
    """The p leading eigenpairs."""
    rows = torch.linalg.eigh(matrix).eigenvectors.mT.flip(0)[:p].contiguous()
    return rayleigh_ritz(rows, rows @ matrix)


def beyond(matrix, ritz):
    """μ, the largest eigenvalue of C on the complement of any orthonormal rows."""
    rest = torch.linalg.qr(ritz.vectors.mT, mode="complete").Q[:, len(ritz.vectors) :].mT
    return eigenvalues(rest @ matrix @ rest.mT)[0].item()


SPECTRA = {
    "power": power(40),
    "flat": torch.linspace(1.0, 0.9, 40, dtype=torch.float64),
    "tied": torch.tensor([3.0, 2.0, *[1.0] * 38], dtype=torch.float64),
    "massive": torch.cat([torch.tensor([1e6], dtype=torch.float64), power(39)]),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("p", [1, 2, 10])
def test_cholesky_accepts_a_bound_just_above_and_refuses_one_just_below(name, p):
    op = operator(turned(SPECTRA[name]))
    ritz = leading(op.matrix, p)
    mu = beyond(op.matrix, ritz)
    proved = cholesky_proves(op.matrix, ritz, 1.0001 * mu, op.noise)
    assert proved is not None
    assert 1.0001 * mu <= proved <= 1.0002 * mu
    assert cholesky_proves(op.matrix, ritz, 0.9999 * mu, op.noise) is None


@pytest.mark.parametrize("seed", range(20))
def test_cholesky_never_proves_too_little_of_a_space_that_is_not_invariant(seed):
    op = operator(turned(power(40), seed))
    ritz = rayleigh_ritz(rows := frame(5, 40, seed + 1), rows @ op.matrix)
    mu = beyond(op.matrix, ritz)
    for s in (mu * torch.linspace(0.9, 1.1, 41, dtype=torch.float64)).tolist():
        proved = cholesky_proves(op.matrix, ritz, s, op.noise)
        assert proved is None or proved >= mu * (1 - 40 * U64)
    before = op.matrix.clone()
    assert cholesky_proves(op.matrix, ritz, 0.999 * mu, op.noise) is None
    assert torch.equal(op.matrix, before)


def test_the_trace_bounds_and_is_exact_where_one_direction_is_left():
    matrix = turned(power(6))
    for p in range(6):
        ritz = leading(matrix, p) if p else Ritz(*(matrix.new_zeros(0, *s) for s in ((), (6,), (6,))))
        bound = trace_bound(ritz, matrix.trace().item(), operator(matrix).noise)
        assert bound.kind == "deterministic"
        assert bound.below >= eigenvalues(matrix)[p].item() * (1 - 100 * U64)
    assert bound.below == pytest.approx(eigenvalues(matrix)[5].item(), rel=1e-12)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("products", [1, 2])
def test_a_probe_is_never_below_the_truth(name, products):
    op = Unformed(turned(SPECTRA[name]))
    ritz = leading(turned(SPECTRA[name]), 3)
    mu, stated = beyond(turned(SPECTRA[name]), ritz), 0
    for seed in range(400):
        bound = probe(op, ritz, generator(seed), products=products)
        assert bound.below >= mu
        stated += bound.kind == STATED
    # the trace is better after one product, and where a start alone exhausts what is left
    assert stated > 0 or products == 1 or name == "tied"


def test_single_starts_fall_short_as_often_as_is_stated(monkeypatch):
    """Control of the probe: of single starts that may fail half the time, some lie below the truth."""
    monkeypatch.setattr(complement, "PROBE_COLUMNS", 1)
    monkeypatch.setattr(complement, "FAILURE", 0.5)
    matrix = turned(torch.cat([torch.ones(1), torch.linspace(0, 0.7, 49)]).double())
    op, none = Unformed(matrix), leading(matrix, 0)
    below = sum(probe(op, none, generator(seed), products=5).below < 1 for seed in range(400))
    assert 0 < below < 200


@pytest.mark.parametrize("name", ["flat", "power"])
def test_a_probe_of_24_products_is_within_a_tenth(name):
    d = 500
    values = power(d) if name == "power" else torch.linspace(1.0, 0.5, d, dtype=torch.float64)
    matrix = turned(values)
    ritz = leading(matrix, 4)
    op, mu = Unformed(matrix), values[4].item()
    bound = probe(op, ritz, generator())
    assert mu <= bound.below < 1.1 * mu
    assert bound.kind == STATED
    assert op.products <= complement.PROBE_COLUMNS * complement.PROBE_PRODUCTS
    assert probe(op, ritz, generator()).below == bound.below


def test_a_probe_stops_as_soon_as_it_knows():
    matrix = turned(torch.linspace(1.0, 0.5, 200, dtype=torch.float64))
    ritz, op = leading(matrix, 2), Unformed(matrix)
    enough = probe(op, ritz, generator(), enough=2.0)
    few = op.products
    assert enough.below <= 2.0
    hopeless = probe(op, ritz, generator(), enough=0.5)  # a Ritz value above it shows that no more will do
    assert hopeless.below > 0.98
    assert max(few, op.products - few) <= 4 * complement.PROBE_COLUMNS


def test_a_probe_of_nothing_is_nothing():
    matrix = turned(power(5))
    assert probe(operator(matrix), leading(matrix, 5), generator()).below <= 100 * operator(matrix).noise
    flat = probe(operator(0 * matrix), leading(0 * matrix, 2), generator())
    assert flat.below == 0


def largest_ritz_values(values, q, starts):
    """(starts,) ξ of Krylov spaces of dimension q from Gaussian starts, for a diagonal matrix."""
    v = torch.randn(starts, len(values), generator=generator(), dtype=torch.float64)
    basis = []
    for _ in range(q):
        v /= v.norm(dim=1, keepdim=True)
        basis.append(v)
        v = v * values
        for row in (*basis, *basis):
            v = v - (v * row).sum(1, keepdim=True) * row
    b = torch.stack(basis, 1)
    return torch.linalg.eigvalsh(b * values @ b.mT)[:, -1]


@pytest.mark.parametrize(("q", "epsilon"), [(2, 0.5), (3, 0.3), (5, 0.1), (5, 0.3)])
def test_the_stated_tail_holds_and_its_constant_is_no_larger_than_it_must_be(q, epsilon):
    """P[ξ < (1 - ε)μ] ≤ √(2n/π) / cosh((2q - 1) artanh √ε) for one start; 2q + 1 would be too good."""
    n, starts = 50, 20_000
    tail = math.sqrt(2 * n / math.pi)
    worst = 0.0
    for edge in (1 - epsilon, 1.0, 0.9 * (1 - epsilon)):
        rest = torch.linspace(0, edge, n - 1, dtype=torch.float64)
        xi = largest_ritz_values(torch.cat([torch.ones(1, dtype=torch.float64), rest]), q, starts)
        worst = max(worst, (xi < 1 - epsilon).double().mean().item())
    bound = tail / math.cosh((2 * q - 1) * math.atanh(math.sqrt(epsilon)))
    spread = 4 * math.sqrt(max(worst, 1 / starts) / starts)
    assert worst <= bound + spread
    assert worst > bound / 4
    if bound < 0.5:
        assert worst > tail / math.cosh((2 * q + 1) * math.atanh(math.sqrt(epsilon))) + spread
