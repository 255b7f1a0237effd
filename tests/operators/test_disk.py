"""Samples on disk: several files and short blocks give what the rows in memory give."""

import re

import numpy as np
import pytest
import torch

from pca_torch import NpySource
from pca_torch.operators import OnDisk
from tests.operators import truths


def written(folder, x, cuts=(), block_rows=7):
    """Sources of the rows of `x`, cut into files."""
    sources = []
    for number, part in enumerate(np.split(x.numpy(), cuts)):
        path = folder / f"part_{number}.npy"
        np.save(path, part)
        sources.append(NpySource(path, block_rows=block_rows))
    return sources


@pytest.mark.parametrize("block_rows", [1, 7, None])
@pytest.mark.parametrize("options", truths.OPTIONS.values(), ids=truths.OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "spread", "ratio"), [case for case in truths.INPUTS if case[0] != torch.bfloat16]
)
def test_products_are_within_what_they_say(tmp_path, dtype, spread, ratio, options, block_rows):
    x = truths.rows_of(dtype, spread, ratio)
    op, want = OnDisk(written(tmp_path, x, (1, 40), block_rows), **options), truths.covariance(x, **options)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    truths.check_facts(op, x, **options)


@pytest.mark.parametrize("ratio", [1e2, 1e4])
def test_the_bound_refuses_sums_that_are_centred_afterwards(tmp_path, ratio):
    x = truths.rows_of(torch.float64, 1.0, ratio)
    op, want = OnDisk(written(tmp_path, x)), truths.covariance(x)
    mean = x.mean(0)
    op.apply = lambda v: ((v @ x.mT) @ x - len(x) * (v @ mean)[:, None] * mean) / (len(x) - 1)
    assert truths.largest_error(op, want) > truths.allowed(op, want)


def test_the_bound_refuses_blocks_centred_by_their_own_mean(tmp_path):
    x = truths.rows_of(torch.float64, 1.0, 0.0)
    op, want = OnDisk(written(tmp_path, x)), truths.covariance(x)
    z = torch.cat([part - part.mean(0) for part in x.split(7)])
    op.apply = lambda v: (v @ z.mT) @ z / (len(x) - 1)
    assert truths.largest_error(op, want) > 1e3 * truths.allowed(op, want)


def test_passes_are_counted(tmp_path):
    op = OnDisk(written(tmp_path, truths.rows_of(torch.float32, 1.0, 1.0), (30,)))
    assert op.passes == 1
    op.apply(truths.units(14))
    op.apply(truths.units(14))
    assert op.passes == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_with_nan_or_inf(tmp_path, value):
    x = truths.rows_of(torch.float64, 1.0, 1e2)
    x[[3, 50, 51, 89], [0, 1, 2, 13]] = value
    sources = written(tmp_path, x, (40,))
    name = re.escape(str(tmp_path / "part_0.npy"))
    with pytest.raises(ValueError, match=f"{name}: `x` has 1 of 7 samples with NaN or inf"):
        OnDisk(sources)
    op, good = OnDisk(sources, nonfinite="drop"), x[x.isfinite().all(1)]
    want = truths.covariance(good)
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    assert (op.n_dropped, op.problem.n_samples) == (4, 86)
    truths.check_facts(op, good)


def test_blocks_without_a_good_row(tmp_path):
    x = truths.rows_of(torch.float64, 1.0, 1e2)
    x[7:14] = float("nan")
    op, want = OnDisk(written(tmp_path, x), nonfinite="drop"), truths.covariance(torch.cat([x[:7], x[14:]]))
    assert truths.largest_error(op, want) <= truths.allowed(op, want)
    assert op.n_dropped == 7


def test_one_source_and_no_row_in_a_file(tmp_path):
    x = truths.rows_of(torch.float64, 1.0, 1.0)
    want = truths.covariance(x)
    for number, cuts in enumerate([(), (0, 90)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = written(folder, x, cuts) if cuts else written(folder, x)[0]
        op = OnDisk(data)
        assert truths.largest_error(op, want) <= truths.allowed(op, want)


def test_the_coarsest_dtype_counts(tmp_path):
    for name, dtype in (("a", np.float64), ("b", np.float16), ("c", np.int32)):
        np.save(tmp_path / f"{name}.npy", np.arange(12).reshape(4, 3).astype(dtype))
    sources = {name: NpySource(tmp_path / f"{name}.npy") for name in "abc"}
    assert OnDisk(list(sources.values())).problem.dtype == torch.float16
    assert OnDisk(sources["c"]).problem.dtype == torch.float64


def test_a_constant_offset_is_no_direction(tmp_path):
    op = OnDisk(written(tmp_path, torch.full((1000, 3), 1e4 / 3, dtype=torch.float64), (400,)))
    assert op.problem.constant
    assert op.apply(torch.eye(3, dtype=torch.float64)).abs().max() <= op.problem.error


@pytest.mark.parametrize(
    ("n", "ddof", "message"),
    [
        (0, 1, "`x` has no rows that count; give at least one sample"),
        (1, 1, "`ddof` = 1 needs more than 1 samples, got 1; give more, or pass ddof=0"),
    ],
)
def test_too_few_rows(tmp_path, n, ddof, message):
    with pytest.raises(ValueError, match=message):
        OnDisk(written(tmp_path, torch.ones(n, 3)), ddof=ddof)


def test_bad_sources_and_options(tmp_path):
    with pytest.raises(ValueError, match="`sources` is empty; give at least one `NpySource`"):
        OnDisk([])
    first = written(tmp_path, torch.ones(4, 3))
    np.save(tmp_path / "other.npy", np.ones((4, 5)))
    with pytest.raises(ValueError, match=r"other\.npy: 5 columns, but .*part_0\.npy has 3; all files must"):
        OnDisk([*first, NpySource(tmp_path / "other.npy")])
    with pytest.raises(ValueError, match="`nonfinite` must be one of 'raise', 'drop', got 'skip'"):
        OnDisk(first, nonfinite="skip")


def test_a_file_that_changes_between_passes(tmp_path):
    op = OnDisk(written(tmp_path, truths.rows_of(torch.float64, 1.0, 1.0)))
    np.save(tmp_path / "part_0.npy", np.ones((91, 14)))
    with pytest.raises(ValueError, match="the file changed after it was opened"):
        op.apply(truths.units(14))
