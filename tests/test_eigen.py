"""Eigenpairs of a symmetric matrix, with and without the subset solver of SciPy."""

import pytest
import torch

from pca_torch import eigen
from pca_torch.eigen import eigenpairs
from tests.matrices import U64, power, turned

D = 80
VALUES = {"power": power(D), "tied": torch.tensor([2.0] * 10 + [1.0] * 70, dtype=torch.float64)}


@pytest.fixture(params=["scipy", "without"])
def route(request, monkeypatch):
    """The subset solver from the first row on, or none."""
    monkeypatch.setattr(eigen, "SUBSET_FROM", 0)
    if request.param == "scipy":
        pytest.importorskip("scipy")
    else:
        monkeypatch.setattr(eigen, "_scipy_linalg", lambda: None)
    return request.param


def check(matrix, values, vectors, want):
    bound = 8 * U64 * D * want[0].item()  # backward error of a symmetric eigensolver
    assert (values - want).abs().max() <= bound
    k = len(vectors)
    assert torch.linalg.matrix_norm(vectors @ matrix - values[:k, None] * vectors, 2) <= bound
    square = vectors @ vectors.mT - torch.eye(k, dtype=torch.float64)
    assert square.abs().max() <= 8 * U64 * D


@pytest.mark.parametrize("name", VALUES)
def test_all_pairs(route, name):
    matrix = turned(VALUES[name])
    values, vectors = eigenpairs(matrix)
    assert vectors.shape == (D, D)
    check(matrix, values, vectors, VALUES[name])


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("k", [1, 7, 40])
def test_the_leading_pairs(route, name, k):
    matrix, seen = turned(VALUES[name]), []

    def choose(values):
        seen.append(values)
        return k

    values, vectors = eigenpairs(matrix, choose)
    assert len(vectors) == (k if route == "scipy" else D)
    check(matrix, values, vectors, VALUES[name])
    if route == "scipy":  # values come before vectors, and none is negative
        assert len(seen) == 1
        assert bool((seen[0] >= 0).all())


def test_more_than_half_or_none_at_all(route):
    matrix = turned(power(D))
    assert len(eigenpairs(matrix, lambda _: 41)[1]) == D  # all cost no more
    values, vectors = eigenpairs(matrix, lambda _: 0)
    assert len(vectors) == (0 if route == "scipy" else D)
    assert (values - power(D)).abs().max() <= 8 * U64 * D


def test_a_share_of_the_values_decides(route):
    matrix = turned(power(D))
    half = int((power(D).cumsum(0) / power(D).sum() < 0.8).sum()) + 1
    _, vectors = eigenpairs(matrix, lambda values: int((values.cumsum(0) / values.sum() < 0.8).sum()) + 1)
    assert len(vectors) == (half if route == "scipy" else D)


def test_the_matrix_is_not_changed(route):
    matrix = turned(power(D))
    before = matrix.clone()
    eigenpairs(matrix, lambda _: 3)
    assert torch.equal(matrix, before)


def test_small_problems_take_all(monkeypatch):
    monkeypatch.setattr(eigen, "_scipy_linalg", lambda: object())  # whose `eigh` would be missed
    assert len(eigenpairs(turned(power(D)), lambda _: 1)[1]) == D
