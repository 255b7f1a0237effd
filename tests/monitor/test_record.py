"""Which variances of a spectrum a record keeps."""

import itertools
import math

import pytest
import torch

from pca_torch.monitor.record import POINTS, thinned


@pytest.mark.parametrize("m", [0, 1, 2, 127, 128, 129, 130, 200, 768, 4096, 16384])
def test_as_many_variances_as_fit_in_order_with_both_ends(m):
    spectrum = torch.arange(m, 0, -1, dtype=torch.float64) / 3
    index, variance = thinned(spectrum)
    assert len(index) == len(set(index)) == min(m, POINTS)
    assert index == sorted(index)
    assert not m or (index[0], index[-1]) == (1, m)
    assert variance == pytest.approx([spectrum[i - 1].item() for i in index], rel=5e-7)  # seven digits


def test_they_lie_evenly_in_the_logarithm_where_whole_numbers_allow():
    index, _ = thinned(torch.ones(16384))
    ratio = 16384 ** (1 / (POINTS - 1))
    apart = [math.log(after / before) for before, after in itertools.pairwise(index) if before > 100]
    # rounding to whole numbers moves an index by a half, so a quotient by 1/index at most
    assert max(abs(distance - math.log(ratio)) for distance in apart) < 1 / 100
    linear = [math.log(1 + 16384 / POINTS / before) for before in (129, 8000)]  # evenly in the index itself
    assert abs(linear[0] - math.log(ratio)) > 1 / 100
