"""Batched Jacobi rotations: known spectra without rounding, the order of pairs, convergence."""

import itertools
import math

import pytest
import torch

from pca_torch import jacobi
from pca_torch.jacobi import jacobi_eigh
from pca_torch.precision import unit_roundoff
from pca_torch.svd import LinAlgError

SPECTRA = {  # whole numbers, descending
    "falling": lambda e: list(range(e, 0, -1)),
    "identity": lambda e: [1] * e,
    "zero": lambda e: [0] * e,
    "rank one": lambda e: [7] + [0] * (e - 1),
    "tied": lambda e: [4] * (e // 2) + [1] * (e - e // 2),
    "massive": lambda e: [10**9, *range(e - 1, 0, -1)],
    "wide": lambda e: [*range(e // 2, 0, -1)] + [0] * (e - e // 2),
}
U = unit_roundoff(torch.float64)
CASES = [(kind, e) for kind in SPECTRA for e in (1, 2, 3, 7, 16, 33, 64)]


def known_spectrum(kind, e, batch):
    """Matrices (batch, e, e) with whole eigenvalues (e,), in float64 without any rounding.

    Reflections I - 2vvᵀ/‖v‖² with v = ±1 in blocks of a power of two have entries of few binary digits.
    Two of them, with blocks that overlap, keep every sum within 20 digits after the point.
    """
    g = torch.Generator().manual_seed(e)
    want = torch.tensor(SPECTRA[kind](e), dtype=torch.float64)
    sizes = [1 << bit for bit in range(e.bit_length()) if e >> bit & 1]
    turned = []
    for _ in range(batch):
        c = torch.diag(want)
        for blocks in (sizes, sizes[::-1]):
            signs = [2 * torch.randint(0, 2, (n, 1), generator=g).double() - 1 for n in blocks]
            h = torch.block_diag(*(torch.eye(len(v)).double() - 2 * v @ v.mT / len(v) for v in signs))
            c = h @ c @ h
        assert torch.equal(c * 2**20, (c * 2**20).round())
        turned.append(c)
    return torch.stack(turned), want


@pytest.fixture(autouse=True)
def one_thread():
    """Small operations wait for each other on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def limit(e, dtype=torch.float64):
    """Of λ, residual and orthonormality over ‖C‖_F; see `decompose_batch`."""
    return (10 * math.sqrt(e) + 40) * unit_roundoff(dtype)


@pytest.mark.parametrize(("kind", "e"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_known_spectra(kind, e, dtype):
    c, want = known_spectrum(kind, e, batch=3)
    c = c.to(dtype)
    before = c.clone()
    values, rows = jacobi_eigh(c)
    assert torch.equal(c, before)
    assert (values.dtype, rows.shape) == (dtype, (3, e, e))
    assert bool((values.diff() <= 0).all())
    size = torch.linalg.matrix_norm(c.double())[:, None]
    rounded = unit_roundoff(dtype) * size if dtype == torch.float32 else 0  # of the entries: Weyl
    assert bool(((values.double() - want).abs() <= limit(e, dtype) * size + rounded).all())
    v = rows.double()
    assert (v @ v.mT - torch.eye(e, dtype=torch.float64)).abs().max() <= limit(e, dtype)
    lost = torch.linalg.vector_norm(c.double() @ v.mT - v.mT * values.double()[:, None], dim=-2)
    assert bool((lost <= limit(e, dtype) * size).all())


def test_each_matrix_of_a_batch_is_solved_as_if_alone():
    c = torch.cat([known_spectrum(kind, 9, batch=1)[0] for kind in SPECTRA])
    values, _ = jacobi_eigh(c)
    for one, have in zip(c, values, strict=True):
        want = torch.linalg.eigvalsh(one).flip(0)
        assert (have - want).abs().max() <= 2 * limit(9) * torch.linalg.matrix_norm(one)


def test_a_matrix_that_is_not_definite():
    c = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[-3.0, 0.0], [0.0, -1.0]]], dtype=torch.float64)
    values, rows = jacobi_eigh(c)
    assert values.tolist() == [[2, -2], [-1, -3]]
    torch.testing.assert_close(
        rows[0].abs(), torch.full((2, 2), 0.5**0.5, dtype=torch.float64), rtol=4 * U, atol=0
    )


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e150, 1e300])
def test_any_size_of_the_entries(scale):
    c, want = known_spectrum("falling", 16, batch=2)
    values, _ = jacobi_eigh(c / 16 * scale)
    assert bool(((values / scale - want / 16).abs() <= limit(16) * torch.linalg.matrix_norm(c)[0]).all())


@pytest.mark.parametrize("even", [2, 4, 6, 10, 64])
def test_a_sweep_meets_every_pair_once_and_ends_where_it_began(even):
    order, places, met = jacobi._next_round(even), list(range(even)), []
    for _ in range(even - 1):
        met += [frozenset((places[i], places[i + even // 2])) for i in range(even // 2)]
        places = [places[i] for i in order]
    assert places == list(range(even))
    assert len(met) == len(set(met)) == even * (even - 1) // 2


def test_convergence_is_quadratic_in_the_end():
    """Off-diagonal sums of squares after each sweep: once small, the next one is near the square."""
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=torch.float64)).Q
    c = (q * torch.arange(1.0, 13, dtype=torch.float64) @ q.mT)[None]
    c, order, off = (c + c.mT) / 2, torch.tensor(jacobi._next_round(12)), []
    for _ in range(8):
        for _ in range(11):
            c, _ = jacobi._rotate_pairs(c, c)
            c = c[:, order][:, :, order]
        off.append((c - torch.diag_embed(c.diagonal(dim1=-2, dim2=-1))).norm().item())
    assert off == sorted(off, reverse=True)  # never grows
    gap = 1.0
    late = [(a, b) for a, b in itertools.pairwise(off) if a < gap / 4]
    assert late
    assert all(b <= a * a / gap + 12 * 12 * U * 12 for a, b in late)  # Wilkinson, Numer. Math. 4, 1962


def test_half_of_the_spectrum_tied_converges():
    """Without leaving noise alone, large rotations inside the set of ties halve the rest each sweep only."""
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(5, 17, 17, generator=g, dtype=torch.float64)).Q
    c = q * torch.tensor([4.0] * 8 + [1.0] * 9, dtype=torch.float64) @ q.mT
    values, _ = jacobi_eigh((c + c.mT) / 2, sweeps=15)
    assert (values - torch.tensor([4.0] * 8 + [1.0] * 9)).abs().max() <= limit(17) * 12
    with pytest.raises(LinAlgError, match="did not converge in 3 sweeps; use another driver"):
        jacobi_eigh((c + c.mT) / 2, sweeps=3)


def test_empty_batches_and_nan():
    values, rows = jacobi_eigh(torch.zeros(0, 5, 5))
    assert (values.shape, rows.shape) == ((0, 5), (0, 5, 5))
    values, _ = jacobi_eigh(torch.full((1, 3, 3), torch.nan))
    assert bool(values.isnan().all())


def test_rows_are_orthonormal_after_hundreds_of_rotations(monkeypatch):
    """Control: without the last step the rotations alone drift beyond the limit."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 128, 64, generator=g, dtype=torch.float64)
    eye = torch.eye(64, dtype=torch.float64)
    _, rows = jacobi_eigh(x.mT @ x)
    assert (rows @ rows.mT - eye).abs().max() <= limit(64)
    monkeypatch.setattr(jacobi, "_orthonormalised", lambda rows: rows)
    _, rows = jacobi_eigh(x.mT @ x)
    assert (rows @ rows.mT - eye).abs().max() > limit(64)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SPECTRA)
def test_known_spectra_on_a_gpu(kind):
    c, want = known_spectrum(kind, 64, batch=3)
    values, _ = jacobi_eigh(c.cuda())
    assert bool(((values.cpu() - want).abs() <= limit(64) * torch.linalg.matrix_norm(c)[:, None]).all())
