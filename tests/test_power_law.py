"""The exponent of a spectrum that falls as a power of the index: laws in closed form, and `polyfit`."""

import math

import numpy as np
import pytest

from pca_torch import spectrum
from tests.reports import result

EPS = np.finfo(float).eps


def index(first, last):
    return np.arange(first, last + 1, dtype=float)


@pytest.mark.parametrize("exponent", [0.25, 1.0, 2.5])
@pytest.mark.parametrize("fit_range", [(1, 3), (6, 100), (40, 120)])
@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_a_power_law_has_its_exponent(exponent, fit_range, size):
    fit = spectrum.alpha_req(size * index(1, 120) ** -exponent, fit_range, floor=0.0)
    j = index(*fit_range)
    # a logarithm is off by EPS·(1 + |ln λ|), a slope by that over the spread of ln j
    off = EPS * (2 + abs(math.log(size)) + exponent * math.log(120)) / np.log(j).std()
    assert fit.alpha == pytest.approx(exponent, abs=2 * off)
    assert fit.r2 == pytest.approx(1, abs=EPS * 100 + (off / exponent) ** 2 * 100)
    assert (fit.first, fit.last) == fit_range
    slope = np.polyfit(j, -exponent * np.log(j), 1)[0]
    assert abs(-slope - exponent) > 1e10 * off  # the index in place of its logarithm


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fit_range", [(6, 100), (11, 50)])
def test_the_fit_is_that_of_polyfit(seed, fit_range):
    """`polyfit` weighs residuals, not their squares, so it takes the square roots of 1/j."""
    noise = np.random.default_rng(seed).exponential(size=150)
    variances = np.sort(noise * index(1, 150) ** -1.3)[::-1].copy()
    j = index(*fit_range)
    y = np.log(variances[fit_range[0] - 1 : fit_range[1]])
    line = np.polyfit(np.log(j), y, 1, w=j**-0.5)
    missed = y - np.polyval(line, np.log(j))
    r2 = 1 - (missed**2).sum() / ((y - y.mean()) ** 2).sum()
    fit = spectrum.alpha_req(variances, fit_range)
    tolerance = 1000 * EPS  # both solve for two numbers in a well-conditioned system
    assert fit.alpha == pytest.approx(-line[0], rel=tolerance)
    assert fit.r2 == pytest.approx(r2, rel=tolerance)
    for weights, shift in ((np.ones_like(j), 0), (1 / j, 0), (j**-0.5, 1), (j**-0.5, -1)):
        other = np.polyfit(np.log(j + shift), y, 1, w=weights)
        assert abs(other[0] - line[0]) > 1e6 * tolerance  # no weights, squared ones, an index off by one


def test_the_range_ends_where_variances_are_noise_or_unknown():
    law = index(1, 40) ** -1.0
    noisy = np.concatenate([law, np.full(60, 1e-18)])
    for given in (law, noisy, result(noisy, floor=1e-12), result(law, d=100, total=9.0)):
        fit = spectrum.alpha_req(given)
        assert (fit.first, fit.last) == (6, 40)
        assert fit.alpha == pytest.approx(1, abs=1e-13)
    deep = spectrum.alpha_req(noisy, floor=0.0)  # what the noise would make of it
    assert (deep.last, deep.alpha > 5) == (100, True)
    assert spectrum.alpha_req(result(law, floor=law[20])).last == 20


@pytest.mark.parametrize("m", [0, 1, 5, 7])
def test_two_points_are_no_fit(m):
    fit = spectrum.alpha_req(index(1, m) ** -1.0)
    assert (fit.alpha, fit.r2, fit.first, fit.last) == (None, None, 6, m)
    assert spectrum.alpha_req(index(1, m + 3) ** -1.0, (m + 1, m + 9)).last == m + 3
    assert spectrum.alpha_req([0.0] * 20).alpha is None


@pytest.mark.parametrize("level", [1.0, 0.1, 3e-300])
def test_equal_variances_have_no_r2(level):
    fit = spectrum.alpha_req([level] * 20)
    assert fit.alpha == pytest.approx(0, abs=1e-12)
    assert fit.r2 is None
    assert spectrum.alpha_req([level * (1 + 2 * EPS)] * 10 + [level] * 10).r2 is None
    assert 0 < spectrum.alpha_req([level * (1 + 1e-9)] * 10 + [level] * 10).r2 < 1


@pytest.mark.parametrize(
    "fit_range", [(0, 9), (6, 7), (9, 6), (6,), (1, 2, 3), (1.0, 9.0), (True, 9), "19", 9, None]
)
def test_a_fit_range_out_of_range_is_refused(fit_range):
    with pytest.raises(ValueError, match="`fit_range` must be two indices from 1 on that span 3 or more"):
        spectrum.alpha_req([2.0, 1.0], fit_range)
