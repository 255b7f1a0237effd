"""Samples in memory: products, both ways to keep them, and the Gram matrix of wide ones."""

import numpy as np
import pytest
import torch

from pca_torch.operators import Rows, rows
from tests.operators import truths

WEIGHTS = torch.rand(90, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.1


@pytest.fixture(params=["kept", "chunked"])
def way(request, monkeypatch):
    """A centred copy, or centring chunks of 16 rows in every product."""
    if request.param == "chunked":
        monkeypatch.setattr(rows, "free_memory", lambda device: 0)
        monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 14 * 16)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("options", truths.OPTIONS.values(), ids=truths.OPTIONS)
@pytest.mark.parametrize(("dtype", "spread", "ratio"), truths.INPUTS)
def test_products_are_within_what_they_say(dtype, spread, ratio, options, weights):
    x = truths.rows_of(dtype, spread, ratio)
    op, want = Rows(x, weights, **options), truths.covariance(x, weights, **options)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    truths.check_facts(op, x, weights, **options)


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_the_bound_refuses_sums_that_are_centred_afterwards(ratio):
    x = truths.rows_of(torch.float64, 1.0, ratio)
    op, want = Rows(x), truths.covariance(x)
    mean = x.mean(0)
    op.apply = lambda v: ((v @ x.mT) @ x - len(x) * (v @ mean)[:, None] * mean) / (len(x) - 1)
    assert truths.largest_error(op, want) > truths.allowed(op, want)


def test_the_bound_refuses_uncentred_rows():
    x = truths.rows_of(torch.float64, 1.0, 0.0) + 1e-6
    op, want = Rows(x), truths.covariance(x)
    op.apply = Rows(x, center=False).apply
    assert truths.largest_error(op, want) > 1e3 * truths.allowed(op, want)


def test_a_kept_copy_and_chunks_agree(monkeypatch):
    x = truths.rows_of(torch.float32, 1.0, 1e2)
    kept = Rows(x, WEIGHTS, standardize=True)
    monkeypatch.setattr(rows, "free_memory", lambda device: 8 * x.numel() / rows.COPY_SHARE - 1)
    monkeypatch.setattr(rows, "CHUNK_BYTES", 1)  # less than a row: one at a time
    chunked = Rows(x, WEIGHTS, standardize=True)
    assert kept._prepared
    assert not chunked._prepared
    v = truths.units(14)
    off = (kept.apply(v) - chunked.apply(v)).norm(dim=1).max().item()
    assert off <= 2 * kept.noise * torch.linalg.matrix_norm(kept.apply(v[:14]), 2).item()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("options", truths.OPTIONS.values(), ids=truths.OPTIONS)
def test_scores_gather_and_gram(options, weights):
    """Each is one or two products with Z, whose own entries are rounded to u; ‖Z‖ bounds what comes of it."""
    x = truths.rows_of(torch.float64, 1.0, 1e2)
    op = Rows(x, weights, **options)
    z = truths.standard(x, weights, **{k: v for k, v in options.items() if k != "ddof"})
    z = z * np.sqrt(op.problem.divisor) if options.get("standardize") else z
    size = float(np.linalg.norm(z.astype(float)))
    v = truths.units(14)
    q = torch.randn(90, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    bound = op.noise * size
    assert np.abs(op.scores(v).numpy() - z @ v.mT.numpy()).max() <= bound
    assert np.abs(op.gather(q).numpy() - q.mT.numpy() @ z).max() <= bound * q.norm().item()
    gram = op.gram()
    assert torch.equal(gram, gram.mT)
    assert np.abs(gram.numpy() - z @ z.T / op.problem.divisor).max() <= 2 * bound * size / op.problem.divisor


@pytest.mark.usefixtures("way")
def test_the_gram_matrix_has_the_variances(monkeypatch):
    monkeypatch.setattr(rows, "CHUNK_BYTES", 8 * 20 * 7)  # columns of 20 rows, seven at a time
    x = truths.rows_of(torch.float32, 1.0, 1e2, n=20, d=500)
    op, want = Rows(x), truths.covariance(x)
    found, true = torch.linalg.eigvalsh(op.gram()), np.linalg.eigvalsh(want.astype(float))
    assert op.gram().shape == (20, 20)
    assert np.abs(found.numpy()[1:] - true[-19:]).max() <= 4 * truths.allowed(
        op, want
    )  # and two eigensolvers


def test_a_constant_offset_is_no_direction():
    """The mean of equal float64 rows is off by its last digit, which would stand there as a variance."""
    x = torch.full((1000, 3), 1e4 / 3, dtype=torch.float64)
    op = Rows(x)
    assert op.problem.constant
    assert op.apply(torch.eye(3, dtype=torch.float64)).abs().max() <= (1e4 * 2**-52) ** 2


def test_samples_are_not_changed_and_need_no_gradient():
    x = truths.rows_of(torch.float64, 1.0, 1e2)
    before = x.clone()
    op = Rows(x.requires_grad_(), center=False)
    assert not op.apply(truths.units(14)).requires_grad
    assert torch.equal(x.detach(), before)
    assert op._x.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("n", "ddof", "message"),
    [
        (0, 1, "`x` has no rows that count; give at least one sample"),
        (1, 1, "`ddof` = 1 needs more than 1 samples, got 1; give more, or pass ddof=0"),
        (3, 3.5, "`ddof` = 3.5 needs more than 3.5 samples, got 3"),
    ],
)
def test_too_few_rows(n, ddof, message):
    with pytest.raises(ValueError, match=message):
        Rows(torch.ones(n, 3), ddof=ddof)


def test_squares_that_overflow():
    with pytest.raises(ValueError, match="values whose squares leave float64; divide it"):
        Rows(torch.tensor([[1e200], [-1e200]], dtype=torch.float64))


def test_constant_columns_keep_their_scale():
    x = torch.cat([truths.rows_of(torch.float64, 1.0, 1.0), torch.full((90, 1), 7.0)], 1)
    with pytest.warns(UserWarning, match="1 of 15 columns are constant"):
        op = Rows(x, standardize=True)
    assert op.problem.scale is not None
    assert op.problem.scale[-1] == 1
    assert not op.problem.constant
