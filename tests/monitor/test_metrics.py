"""What is read off one spectrum, against rows in float64 and against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from pca_torch import Moments, decompose
from pca_torch.monitor.drift import DRIFT
from pca_torch.monitor.metrics import METRICS, check_metrics, logged_names, measure, needs_uncentred
from tests.reports import result
from tests.support import samples

EPS = np.finfo(float).eps
LAW = ("alpha_req", "alpha_req_r2", "alpha_req_from", "alpha_req_to")


def solved(x):
    """The two spectra of rows as a stream gives them: of the covariance, and of the second moment."""
    moments = Moments(x.shape[1]).update(x)
    second = torch.linalg.eigvalsh(moments.second_moment()).flip(0)
    return decompose(moments, min(8, *x.shape), "covariance_eigh"), second


def entropy_power(p):
    p = p[p > 0] / p.sum()
    return math.exp(-(p * np.log(p)).sum())


def from_rows(x):
    """Every metric from an SVD of the rows, centred or as they are."""
    n, d = x.shape
    plain = np.linalg.svd(x.numpy(), compute_uv=False)
    sigma = np.linalg.svd((x - x.mean(0)).numpy(), compute_uv=False)[: min(n - 1, d)]
    v, shares = sigma**2 / (n - 1), plain / plain.sum() + 1e-7
    j = np.arange(1, len(v) + 1)
    line = np.polyfit(np.log(j[5:100]), np.log(v[5:100]), 1, w=j[5:100] ** -0.5)
    missed = np.log(v[5:100]) - np.polyval(line, np.log(j[5:100]))
    ranks = {f"rank_{p}": int((np.cumsum(v) / v.sum() < p / 100).sum()) + 1 for p in (50, 90, 95, 99)}
    return ranks | {
        "participation_ratio": v.sum() ** 2 / (v**2).sum(),
        "effective_rank": entropy_power(sigma),
        "rankme": math.exp(-(shares * np.log(shares)).sum()),
        "entropy_rank": entropy_power(v),
        "stable_rank": (plain**2).sum() / plain[0] ** 2,
        "nesum": v.sum() / v[0],
        "alpha_req": -line[0],
        "alpha_req_r2": 1 - (missed**2).sum() / np.square(np.log(v[5:100]) - np.log(v[5:100]).mean()).sum(),
        "alpha_req_from": 6,
        "alpha_req_to": min(len(v), 100),
        "total_variance": x.var(0).sum().item(),
        "condition": sigma[0] / sigma[-1],
    }


@pytest.mark.parametrize(("n", "d"), [(300, 24), (15, 24), (400, 120)], ids=["tall", "wide", "long"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_metrics_are_those_of_the_rows(n, d, dtype):
    x = samples(n, d, decay=0.5 ** (5 / d), offset=2.0, dtype=dtype)
    pca, second = solved(x)
    found, want = measure(METRICS, pca, second), from_rows(x.double())
    assert list(found) == list(logged_names([name for name in METRICS if name != "drift"]))
    # eigenvalues are off by 2D·EPS of the largest, the one of the offset: relative to the last that counts,
    off, last = 2 * d * EPS * second[0].item(), pca.spectrum[min(n - 1, d) - 1].item()
    # and in place of the N-th, which is zero, stands that error: a share of the singular values, an entropy
    stray = math.sqrt(off) / pca.spectrum.sqrt().sum().item() if n <= d else 0.0
    tolerance = off / last + (stray * (1 - math.log(stray)) if stray else 0.0)
    assert tolerance < 1e-5
    for name, value in found.items():
        assert isinstance(value, float)
        assert value == pytest.approx(want[name], rel=tolerance), name
    # what would be measured by the wrong one of the two spectra, or of variances for singular values
    assert abs(want["stable_rank"] / want["nesum"] - 1) > 0.1
    assert abs(want["rankme"] / want["effective_rank"] - 1) > 0.1
    assert abs(want["entropy_rank"] / want["effective_rank"] - 1) > 0.1


def test_the_hand_worked_singular_values_4_3_2_1():
    """λ = 16, 9, 4, 1 of 30: after one direction 53 %, then 83 %, 97 %, all."""
    given = result([16.0, 9.0, 4.0, 1.0], d=4)
    found = measure(METRICS, given, torch.tensor([50.0, 9.0, 4.0, 1.0]), fit_range=(1, 4))
    ranks = {"rank_50": 1, "rank_90": 3, "rank_95": 3, "rank_99": 4}
    assert {name: found[name] for name in ranks} == ranks
    assert found["total_variance"] == 30
    assert found["condition"] == pytest.approx(4, rel=4 * EPS)
    assert found["nesum"] == pytest.approx(30 / 16, rel=4 * EPS)
    assert found["stable_rank"] == pytest.approx(64 / 50, rel=4 * EPS)
    assert (found["alpha_req_from"], found["alpha_req_to"]) == (1, 4)
    assert measure(("rank_53", "rank_54", "rank_83.4", "rank_100"), given) == {
        "rank_53": 1,
        "rank_54": 2,
        "rank_83.4": 3,
        "rank_100": 4,
    }


def test_zero_and_few_variances():
    """Nothing varies: rank and dimension 0, so that an alarm on a rank hears of it; no condition, no law."""
    zero = torch.zeros(30)
    found = measure(METRICS, result([0.0] * 30, d=30), zero)
    undefined = {"condition", *LAW}
    assert {name for name, value in found.items() if value is None} == undefined
    assert {value for name, value in found.items() if name not in undefined} == {0.0}
    few = measure(METRICS, result([4.0, 2.0, 1.0], d=3), zero + 1)
    assert {name for name, value in few.items() if value is None} == set(LAW)


@pytest.mark.filterwarnings("ignore:total variance is zero")
def test_rows_that_are_all_the_same():
    """The centred spectrum is nothing, that of the rows as they are is one direction."""
    pca, second = solved(torch.full((50, 6), 3.0))
    found = measure(METRICS, pca, second)
    assert found["rank_95"] == found["nesum"] == 0
    assert found["stable_rank"] == pytest.approx(1, rel=1e-14)
    noise = math.sqrt(6 * 6 * EPS)  # of a singular value, the root of what an eigenvalue of six is off by
    assert found["rankme"] == pytest.approx(1, abs=6 * (1e-7 + noise) * -math.log(1e-7))
    assert found["condition"] is None


def test_rounding_below_zero_and_beyond_the_samples_does_not_count():
    """Ten samples: the second moment has ten eigenvalues, what follows is noise of both signs."""
    second = torch.tensor([4.0] * 10 + [1e-15] * 10 + [-1e-15] * 10)
    given = result([4.0] * 9, n=10, d=30)
    assert measure(("rankme",), given, second)["rankme"] == pytest.approx(10, rel=1e-5)
    shares = np.full(10, 0.1) + 1e-7
    want = math.exp(-(shares * np.log(shares)).sum())
    assert measure(("rankme",), given, second)["rankme"] == pytest.approx(want, rel=10 * EPS)
    assert abs(math.exp(-(shares * np.log(shares)).sum() - 20 * 1e-7 * math.log(1e-7)) - want) > 1e-5


def test_what_needs_the_uncentred_spectrum():
    assert needs_uncentred(METRICS)
    assert needs_uncentred(("rank_95", "rankme"))
    assert needs_uncentred(("stable_rank",))
    others = tuple(name for name in METRICS if name not in {"rankme", "stable_rank"})
    assert not needs_uncentred((*others, len))
    assert measure(others, result([4.0, 1.0], d=2))["nesum"] == pytest.approx(5 / 4, rel=EPS)
    with pytest.raises(ValueError, match="`uncentred` must be given for 'rankme', got None"):
        measure(METRICS, result([4.0, 1.0], d=2))


# ---------------------------------------------------------------- names and functions


def top_variance(pca):
    return pca.spectrum[0]


def tenth(pca):
    return None if len(pca.spectrum) < 10 else pca.spectrum[9].item()


def test_functions_of_the_result():
    metrics = check_metrics(["rank_80", top_variance, tenth, "drift"])
    assert logged_names(metrics) == ("rank_80", "top_variance", "tenth", *DRIFT)
    assert measure(metrics, result([4.0, 1.0])) == {"rank_80": 1, "top_variance": 4, "tenth": None}


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (math.nan, "nan"),
        (torch.tensor(math.inf), "inf"),
        ("4", "str"),
        (True, "bool"),
        (torch.ones(2), "Tensor"),
        (1j, "complex"),
    ],
)
def test_a_function_that_gives_no_number_is_named_and_ends_nothing(value, got):
    def odd(pca):
        return value

    with pytest.warns(UserWarning, match=f"the metric `odd` is not logged: .*a finite number.*, got {got}"):
        found = measure((odd, "rank_100"), result([4.0, 1.0]))
    assert found == {"odd": None, "rank_100": 2}


def numbered(name):
    """A function called `name`."""

    def function(pca):
        return 1.0

    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("metrics", "error", "match"),
    [
        ("rank_95", TypeError, "`metrics` must be a sequence of names and functions, got 'rank_95'"),
        (None, TypeError, "`metrics` must be a sequence"),
        ([95], TypeError, "`metrics` must hold names and functions of a `PCAResult`, got 95"),
        (["efective_rank"], ValueError, "got 'efective_rank'; the nearest is 'effective_rank'"),
        (["rank_me"], ValueError, "takes \"rank_P\" .*, 0 < P ≤ 100, got 'rank_me'"),
        (["rank_0"], ValueError, "0 < P ≤ 100, got 'rank_0'"),
        (["rank_100.5"], ValueError, "0 < P ≤ 100, got 'rank_100.5'"),
        (["rank_1e1"], ValueError, "0 < P ≤ 100, got 'rank_1e1'"),
        (["rank_95", "rank_95"], ValueError, "name each metric once, got 'rank_95' again"),
        ([tenth, tenth], ValueError, "name each metric once, got 'tenth' again"),
        ([numbered("nesum")], ValueError, "name each metric once, got 'nesum' again"),
        ([numbered("alpha_req_r2")], ValueError, "got 'alpha_req_r2' again"),
        ([numbered("drift_gap")], ValueError, "got 'drift_gap' again"),
        ([lambda pca: 1.0], ValueError, "must hold functions that have a name, got <function"),
    ],
)
def test_metrics_that_are_none(metrics, error, match):
    with pytest.raises(error, match=match):
        check_metrics(metrics)


def test_names_that_are_metrics():
    assert check_metrics(METRICS) == METRICS
    with pytest.raises(ValueError, match="`metrics` is empty"):
        check_metrics([])
    assert check_metrics(["rank_99.5", "rank_100"]) == ("rank_99.5", "rank_100")
    assert len(set(logged_names(METRICS))) == len(METRICS) + 3 + 4  # of two metrics there are 4 and 5 numbers


def test_the_result_of_a_fraction_of_percent():
    """0.995 of 1000: 995 of the first direction alone reach it."""
    given = result([995.0, 5.0], d=2)
    assert measure(("rank_99.5", "rank_99.6"), given) == {"rank_99.5": 1, "rank_99.6": 2}
