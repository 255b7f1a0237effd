"""A basis that grows: orthonormal, complete behind a massive direction, its projection known for nothing."""

import math

import pytest
import torch

from pca_torch.basis import Basis, orthonormalise
from tests.matrices import U64, frame, noise, operator, power, turned

D = 60
NONE = torch.empty(0, D, dtype=torch.float64)


def off_orthonormal(*rows):
    """|BBᵀ - I|, largest entry."""
    b = torch.cat(rows)
    return (b @ b.mT - torch.eye(len(b), dtype=torch.float64)).abs().max().item()


ROUNDING = 10 * U64 * D**0.5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("inside", [0, 10, 50])
def test_rows_are_orthonormal_to_all_and_span_what_is_new(inside):
    basis, w = frame(inside, D, seed=1), noise(8, D)
    rows, first = orthonormalise(w, basis)
    assert rows.shape == (8, D)
    assert off_orthonormal(basis, rows) <= ROUNDING
    torch.testing.assert_close(first, basis @ w.mT, rtol=0, atol=0)
    left = w - (w @ basis.mT) @ basis
    assert (left - (left @ rows.mT) @ rows).abs().max() <= ROUNDING * w.norm()


def test_what_stands_behind_a_massive_direction_is_kept():
    """Rows of 10⁹ in one direction and 1 of their own; dropping relative to the largest would lose those."""
    massive, w = frame(1, D, seed=2), noise(6, D)
    rows, _ = orthonormalise(w + 1e9 * noise(6, 1, seed=3) * massive, NONE, noise=1e9 * 8 * U64 * D**0.5)
    assert len(rows) == 6
    assert off_orthonormal(rows) <= ROUNDING
    span = torch.linalg.qr((w - (w @ massive.mT) @ massive).mT).Q.mT
    weak = rows - (rows @ massive.mT) @ massive  # five of them besides the massive one
    assert torch.linalg.svdvals(weak @ span.mT)[:5].min() > 1 - 1e-6
    relative, _ = orthonormalise(w + 1e9 * noise(6, 1, seed=3) * massive, NONE, noise=1e-5 * 1e9)
    assert len(relative) == 1  # control: a floor of 10⁻⁵ of the largest


def test_copies_zeros_and_members_of_the_basis_are_dropped():
    basis, w = frame(5, D, seed=1), noise(3, D)
    small = 8 * U64 * D**0.5 * w.norm().item()
    doubled = torch.cat([w, w[:2], 0 * w[:1], basis[:2]])
    rows, first = orthonormalise(doubled, basis, small)
    assert len(rows) == 3
    assert first.shape == (5, 8)
    assert off_orthonormal(basis, rows) <= ROUNDING
    none, _ = orthonormalise(basis.clone(), basis, small)
    assert none.shape == (0, D)


def test_the_input_is_not_changed():
    basis, w = frame(5, D), noise(3, D)
    before = w.clone()
    orthonormalise(w, basis)
    assert torch.equal(w, before)


def grown(matrix, blocks, block=4, **options):
    op = operator(matrix)
    basis = Basis(op.apply, op.problem.mean, **options)
    following, _ = orthonormalise(noise(block, D), NONE)
    for _ in range(blocks):
        if len(following):
            following = basis.append(following, op.noise)
    return op, basis, following


def check(op, basis):
    scale = 8 * U64 * D * torch.linalg.matrix_norm(op.matrix, 2).item()
    assert off_orthonormal(basis.rows) <= ROUNDING
    torch.testing.assert_close(basis.images, basis.rows @ op.matrix, rtol=0, atol=scale)
    torch.testing.assert_close(basis.projected, basis.rows @ op.matrix @ basis.rows.mT, rtol=0, atol=scale)
    assert torch.equal(basis.projected, basis.projected.mT)


@pytest.mark.parametrize("values", [power(D), 1e9 * power(D, 6.0), torch.ones(D, dtype=torch.float64)])
@pytest.mark.parametrize("room", [0, 3, 50])
def test_images_and_projection_are_known(values, room):
    op, basis, following = grown(turned(values), 7, room=room)
    check(op, basis)
    assert basis.products == basis.size
    if len(following):
        assert off_orthonormal(basis.rows, following) <= ROUNDING


def test_the_identity_adds_nothing_to_a_space():
    _, basis, following = grown(torch.eye(D, dtype=torch.float64), 1)
    assert (basis.size, len(following)) == (4, 0)


def test_it_goes_on_from_ritz_vectors():
    op, basis, following = grown(turned(power(D)), 6)
    values, turn = torch.linalg.eigh(basis.projected)
    turn = turn.mT.flip(0)[:9]
    vectors, images = turn @ basis.rows, turn @ basis.images
    basis.restart(vectors, images, values.flip(0)[:9])
    assert basis.size == 9
    assert basis.products == 24  # those before count on
    check(op, basis)
    assert off_orthonormal(basis.rows, following) <= 2 * ROUNDING
    for _ in range(3):
        following = basis.append(following, op.noise)
    check(op, basis)


def test_images_that_nobody_reads_are_not_kept():
    _, kept, _ = grown(turned(power(D)), 5)
    _, lean, _ = grown(turned(power(D)), 5, keep_images=False)
    assert torch.equal(lean.projected, kept.projected)
    assert len(lean.images) == 0


@pytest.fixture
def cholesky_first(monkeypatch):
    """What a GPU does, on the CPU; counts Householder's factorisations."""
    from pca_torch import basis

    seen, qr = [], torch.linalg.qr

    def counted(*args, **options):
        seen.append(args)
        return qr(*args, **options)

    monkeypatch.setattr(basis, "CHOLESKY_FIRST", ("cpu",))
    monkeypatch.setattr(torch.linalg, "qr", counted)
    return seen


@pytest.mark.parametrize("inside", [0, 10])
@pytest.mark.parametrize("condition", [1.0, 1e4])
def test_cholesky_alone_gives_orthonormal_rows(cholesky_first, inside, condition):
    basis = frame(inside, D, seed=1)
    w = torch.logspace(0, -math.log10(condition), 8, dtype=torch.float64)[:, None] * frame(8, D, seed=5)
    w = turned(torch.ones(8, dtype=torch.float64)) @ w  # rows that lean on each other
    cholesky_first.clear()
    rows, _ = orthonormalise(w, basis, 8 * U64)
    assert len(rows) == 8
    assert off_orthonormal(basis, rows) <= ROUNDING
    left = w - (w @ basis.mT) @ basis
    assert (left - (left @ rows.mT) @ rows).abs().max() <= ROUNDING * w.norm()
    assert not cholesky_first


@pytest.mark.parametrize("name", ["massive", "copies", "zero"])
def test_householder_takes_over_where_cholesky_would_lose_rows(cholesky_first, name):
    w = noise(6, D)
    if name == "massive":
        w = w + 1e9 * noise(6, 1, seed=3) * frame(1, D, seed=2)
    elif name == "copies":
        w[3:] = w[:3]
    else:
        w[2] = 0
    want = {"massive": 6, "copies": 3, "zero": 5}[name]
    cholesky_first.clear()
    rows, _ = orthonormalise(w, NONE, 8 * U64 * D**0.5 * w.norm().item() / 6)
    assert cholesky_first
    assert len(rows) == want
    assert off_orthonormal(rows) <= ROUNDING
