"""What Ritz pairs prove of the true eigenvalues, on matrices of known spectrum."""

import math
from functools import cache

import pytest
import torch

from pca_torch.ritz import Ritz, rayleigh_ritz, reach, room, upper_values
from tests.matrices import U64, eigenvalues, frame, noise, power, turned


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SPECTRA = {
    "power": power(30),
    "flat": 1 + 1e-3 * torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "tied": torch.tensor([5.0, 4.0, *[2.0] * 8, *[1.0] * 20], dtype=torch.float64),
    "massive": torch.cat([torch.tensor([1e9], dtype=torch.float64), power(29)]),
    "rank 5": torch.cat([power(5), torch.zeros(25, dtype=torch.float64)]),
    "zero": torch.zeros(30, dtype=torch.float64),
}


def near_pairs(matrix, p, size, seed):
    """Ritz pairs of p eigenvectors that are off by `size`, which no subspace of C contains."""
    leading = torch.linalg.eigh(matrix).eigenvectors.mT.flip(0)[:p]
    rows = torch.linalg.qr((leading + size * noise(*leading.shape, seed=seed)).mT).Q.mT
    return rayleigh_ritz(rows, rows @ matrix)


def complement_of(ritz):
    """(D - p, D) orthonormal rows that no Ritz vector reaches."""
    return torch.linalg.qr(ritz.vectors.mT, mode="complete").Q[:, len(ritz.vectors) :].mT


def largest_beyond(matrix, ritz):
    """μ, the largest eigenvalue of C on the complement of the Ritz vectors."""
    rest = complement_of(ritz)
    return eigenvalues(rest @ matrix @ rest.mT)[0].item() if len(rest) else 0.0


def rounding(matrix):
    """What the truth and the pairs are off by: products and an eigensolver."""
    return 32 * U64 * math.sqrt(len(matrix)) * torch.linalg.matrix_norm(matrix, 2).item()


@cache
def cases():
    return list(_cases())


def _cases():
    for name, values in SPECTRA.items():
        matrix = turned(values, seed=len(name))
        for p in (1, 3, 8, 29):
            for size in (1e-6, 1e-3, 1e-1, 10.0):
                for seed in range(3):
                    yield name, matrix, near_pairs(matrix, p, size, seed)


def test_no_eigenvalue_exceeds_its_bound():
    for name, matrix, ritz in cases():
        for count in (1, len(ritz.values), len(ritz.values) + 1):
            upper = upper_values(ritz, largest_beyond(matrix, ritz), count)
            assert upper.shape == (count,)
            assert bool((eigenvalues(matrix)[:count] <= upper + rounding(matrix)).all()), name


def test_without_the_residual_the_bounds_would_fail():
    """Control: max(θ_i, μ), which forgets that V and its complement are coupled."""
    broken = 0
    for _, matrix, ritz in cases():
        blind = Ritz(ritz.values, ritz.vectors, ritz.values[:, None] * ritz.vectors)
        assert blind.gram.abs().max() == 0
        upper = upper_values(blind, largest_beyond(matrix, ritz), len(ritz.values))
        broken += bool((eigenvalues(matrix)[: len(ritz.values)] > upper + rounding(matrix)).any())
    assert broken > 50


@pytest.mark.parametrize("p", [1, 4, 8])
def test_exact_pairs_have_sharp_bounds(p):
    matrix = turned(power(30))
    ritz = near_pairs(matrix, p, 0.0, 0)
    true = eigenvalues(matrix)
    upper = upper_values(ritz, true[p].item(), p + 1)
    assert bool(((upper[:p] - true[:p]).abs() <= rounding(matrix)).all())
    assert true[p] <= upper[p] <= true[p] + (true[p - 1] - true[p]) / 8 + rounding(matrix)


def test_the_bound_is_quadratic_in_the_residual():
    matrix = turned(power(30))
    true = eigenvalues(matrix)[:4]
    excess = []
    for size in (1e-2, 1e-3, 1e-4):
        ritz = near_pairs(matrix, 4, size, 0)
        excess.append((upper_values(ritz, largest_beyond(matrix, ritz), 4) - true).sum().item())
    assert 50 < excess[0] / excess[1] < 200
    assert 50 < excess[1] / excess[2] < 200


def test_pairs_of_the_whole_space_are_their_own_bounds():
    matrix = turned(power(6))
    rows = frame(6, 6, seed=3)
    ritz = rayleigh_ritz(rows, rows @ matrix)
    assert upper_values(ritz, 99.0, 8).tolist() == [*ritz.values.tolist(), 0.0, 0.0]
    assert upper_values(ritz.first(0), 0.0, 2).tolist() == [0.0, 0.0]  # nothing known, nothing there


def test_ritz_pairs_are_those_of_the_projection():
    matrix, rows = turned(power(20)), frame(7, 20, seed=1)
    ritz = rayleigh_ritz(rows, rows @ matrix)
    projected = rows @ matrix @ rows.mT
    torch.testing.assert_close(ritz.values, eigenvalues(projected), rtol=0, atol=rounding(matrix))
    torch.testing.assert_close(ritz.images, ritz.vectors @ matrix, rtol=0, atol=rounding(matrix))
    square = ritz.vectors @ ritz.vectors.mT
    torch.testing.assert_close(square, torch.eye(7, dtype=torch.float64), rtol=0, atol=7 * 8 * U64)
    few = rayleigh_ritz(rows, rows @ matrix, projected, keep=3)
    torch.testing.assert_close(few.values, ritz.values[:3], rtol=0, atol=rounding(matrix))
    assert few.vectors.shape == (3, 20)


def test_the_leading_pairs_keep_what_was_worked_out():
    matrix = turned(power(20))
    ritz = near_pairs(matrix, 6, 1e-2, 0)
    fresh = ritz.first(3)
    worked_out = ritz.gram
    later = ritz.first(3)
    assert "gram" in later.__dict__
    assert torch.equal(later.gram, worked_out[:3, :3])
    torch.testing.assert_close(later.gram, fresh.gram, rtol=1e-14, atol=0)


def missed_at_most(ritz, k, c, delta):
    """Σ_{i≤K} max(λ_i(Θ + G/δ), c) - Σθ, from the definition."""
    head = eigenvalues(ritz.values.diag() + ritz.gram / delta)
    return (head[:k].clamp_min(c) - ritz.values[:k]).sum().item()


def test_room_is_the_largest_bound_that_proves_it():
    proved = 0
    for _, matrix, ritz in cases():
        p, total = len(ritz.values), matrix.trace().item()
        for k in {1, p // 2, p} - {0}:
            for beta in (1e-6 * total, 1e-2 * total):
                s = room(ritz, k, beta) if beta else None
                if s is None:
                    continue
                proved += 1
                c = ritz.values[k - 1].item() + beta / (2 * k)
                if s < c:  # else δ is below the last digit of c
                    assert missed_at_most(ritz, k, c, c - s) <= beta + k * rounding(matrix)
                if 1e-4 * c < c - s < c:  # more room would not do: δ is found to a hundredth
                    assert missed_at_most(ritz, k, c, (c - s) / 1.02) > beta - k * rounding(matrix)
                if largest_beyond(matrix, ritz) <= s:
                    missed = eigenvalues(matrix)[:k].sum().item() - ritz.values[:k].sum().item()
                    assert missed <= beta + k * rounding(matrix)
    assert proved > 100


def test_reach_says_where_room_is_enough():
    """The pair that follows stands for the complement: where that would do, there is as much room."""
    agreed = refused = 0
    for _, _, ritz in cases():
        total = ritz.values.sum().item()
        for k, p in ((1, 1), (1, 4), (3, 6)):
            if p >= len(ritz.values) or total == 0:
                assert reach(ritz, p, k, 1e-3 * total) is None
                continue
            beta = 1e-3 * total
            s = room(ritz.first(p), k, beta)
            likely = (ritz.values[p] + ritz.gram[p, p].sqrt()).item()
            if reach(ritz, p, k, beta) is None:
                refused += 1
                continue
            assert s is not None
            c = ritz.values[k - 1].item() + beta / (2 * k)
            assert s >= likely - 0.02 * (c - likely)
            agreed += 1
    assert agreed > 10
    assert refused > 10
    ritz = next(ritz for name, _, ritz in cases() if name == "power" and len(ritz.values) == 8)
    assert reach(ritz, 2, 3, 1.0) is None  # fewer pairs than directions
