"""Spectrum functions against hand-worked spectra and float64 numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pca_torch import decompose, spectrum
from tests.cases.reported import compare
from tests.reports import result
from tests.support import GOLDEN, reported_case, samples, truth

FUNCTIONS = [
    spectrum.participation_ratio,
    spectrum.effective_rank,
    spectrum.entropy_rank,
    spectrum.stable_rank,
    spectrum.top_share,
    spectrum.nesum,
    spectrum.condition,
]
EPS = np.finfo(float).eps


def entropy_power(p):
    """exp(-Σ p ln p) of a numpy vector without zeros, normalised here."""
    p = p / p.sum()
    return math.exp(-(p * np.log(p)).sum())


# ---------------------------------------------------------------- shares


def test_cumulative_is_the_worked_example():
    case = GOLDEN["squared_spectrum_64_25_9_2"]
    got = spectrum.cumulative(case["squared_singular_values"])
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), case["cumulative"], rtol=0, atol=4e-16)  # sums of four ratios ≤ 1


@pytest.mark.parametrize("name", ["two_values_6_2", "five_points_3p8_0p2"])
def test_ratio_is_the_worked_example(name):
    case = GOLDEN[name]
    got = spectrum.ratio(np.square(case["singular_values"]))
    np.testing.assert_allclose(got.numpy(), case["ratio"], rtol=4e-16)


def test_ratio_of_a_truncated_spectrum_is_of_the_whole_total():
    case = GOLDEN["spectrum_dominant"]
    want = [case["first"] / case["total"]]
    assert spectrum.ratio([case["first"]], case["total"]).tolist() == want
    assert spectrum.ratio(result([case["first"]], total=case["total"])).tolist() == want


def test_zero_total_gives_zeros_everywhere():
    zero = result([0.0, 0.0, 0.0])
    for given in (zero, [0.0, 0.0, 0.0], torch.zeros(0)):
        assert not spectrum.ratio(given).any()
        assert not spectrum.cumulative(given).any()
        assert [spectrum.rank(given, share) for share in (0.5, 0.99, 1)] == [0, 0, 0]
        assert [f(given) for f in FUNCTIONS] == [0.0] * len(FUNCTIONS)
    assert spectrum.rankme([0.0, 0.0, 0.0]) == spectrum.rankme([]) == 0


# ---------------------------------------------------------------- rank


@pytest.mark.parametrize(("share", "want"), GOLDEN["squared_spectrum_64_25_9_2"]["rank_for"].items())
@pytest.mark.parametrize("wrap", [list, torch.tensor, result], ids=["list", "tensor", "result"])
def test_rank_is_the_worked_example(wrap, share, want):
    """0.98 is reached exactly: the slack of 1e-12 must forgive the rounding of the sum."""
    variances = GOLDEN["squared_spectrum_64_25_9_2"]["squared_singular_values"]
    assert spectrum.rank(wrap(variances), float(share)) == want


def test_rank_for_the_reported_threshold_of_one():
    case = reported_case("rank_threshold_one")
    evr = case["x"]["evr_rounded"]
    got = {"rank_at_1": spectrum.rank(evr, 1.0), "rank_at_0999999": spectrum.rank(evr, 0.999999)}
    assert compare(case, got) == []
    with pytest.raises(ValueError, match=r"the 64 computed hold 0\.9999998"):
        spectrum.rank(evr, 1.0, total=1.0)  # with the rounding as a missing direction, no number is right


def test_reported_massive_token_changes_the_spectrum():
    case = reported_case("massive_token")
    x = case["x"]["X"]
    views = {"all": x, "dropped": np.delete(x, case["x"]["drop"], axis=0)}
    variances = {name: np.linalg.eigvalsh(np.cov(rows.T))[::-1].copy() for name, rows in views.items()}
    got = {f"evr1_{name}": spectrum.top_share(v) for name, v in variances.items()}
    got |= {f"rank95_{name}": spectrum.rank(v, 0.95) for name, v in variances.items()}
    assert len(got) == len(case["expect"])
    assert compare(case, got) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [1e-6, 0.3, 0.9, 0.999])
def test_rank_is_the_smallest_k_that_reaches_the_share(seed, share):
    variances = np.sort(np.random.default_rng(seed).exponential(size=200) ** 2)[::-1].copy()
    shares = [math.fsum(variances[:k]) / math.fsum(variances) for k in range(201)]
    k = spectrum.rank(variances, share)
    assert shares[k - 1] < share <= shares[k]


def test_rank_forgives_the_rounding_of_the_sum():
    """Ten equal variances: k/10 takes k of them, though 0.1 + … + 0.1 can fall short of it."""
    assert np.cumsum(np.full(10, 0.1))[7] < 0.8
    assert [spectrum.rank([1.0] * 10, k / 10) for k in range(1, 10)] == list(range(1, 10))


def test_rank_of_everything_counts_variances_above_the_floor():
    noisy = [4.0, 1.0, 1e-13, 1e-17, 0.0]
    assert spectrum.rank(noisy, 1.0) == 3  # 5·2.2e-16·4 = 4.4e-15
    assert spectrum.rank(noisy, 1) == 3
    assert spectrum.rank(noisy, 1, floor=1e-10) == 2
    assert spectrum.rank(result(noisy, floor=1e-14), 1) == 3
    assert spectrum.rank(result(noisy, floor=1e-12), 1) == 2


def test_rank_forgives_the_error_of_the_ratio():
    """0.9 is missed by 1e-9: one direction with an error of 1e-8, two without."""
    variances = [0.9 - 1e-9, 0.1 + 1e-9]
    assert spectrum.rank(variances, 0.9) == 2
    assert spectrum.rank(variances, 0.9, error=1e-8) == 1
    assert spectrum.rank(result(variances, error=1e-8), 0.9) == 1
    assert spectrum.rank(result(variances, error=1e-10), 0.9) == 2


@pytest.mark.parametrize("share", [0.5, 0.9, 0.95, 0.99])
def test_a_sloppy_certificate_lowers_the_rank_by_one_at_most(share):
    variances = 0.97 ** np.arange(300)
    sharp, sloppy = result(variances, n=400, d=300), result(variances, n=400, d=300, error=1.0)
    assert 0 <= spectrum.rank(sharp, share) - spectrum.rank(sloppy, share) <= 1


def test_errors_of_variances_beyond_the_kept_ones_are_those_of_the_last():
    """The share is missed by 3e-9 at k = 3; only one error, of 2e-9, is certified."""
    variances = [0.4, 0.3, 0.2 - 3e-9, 0.1 + 3e-9]
    assert spectrum.rank(result(variances, k=1, error=2e-9), 0.9) == 3
    assert spectrum.rank(result(variances, k=1, error=0.9e-9), 0.9) == 4


@pytest.mark.parametrize("share", [0.9, 1, 1.0])
def test_rank_beyond_the_known_variances_is_refused(share):
    for given, total in ((result([5.0, 2.0], total=10.0), None), ([5.0, 2.0], 10.0)):
        assert spectrum.rank(given, 0.7, total=total) == 2
        with pytest.raises(ValueError, match=r"more than 2 directions, the 2 computed hold 0\.7 of it"):
            spectrum.rank(given, share, total=total)


def test_rank_of_everything_is_known_once_the_floor_is_reached():
    """The known variances end in noise, so nothing beyond them can stand above it."""
    truncated = result([5.0, 2.0, 1e-9], total=7.0 + 2e-9, floor=1e-8)
    assert spectrum.rank(truncated, 1.0) == 2


def test_a_rest_that_may_be_all_noise_is_no_missing_variance():
    """97 unknown variances of up to 1e-8 each could be 97e-8, twice that could not."""
    noise = result([5.0, 2.0, 1.0], d=100, total=8 + 97e-8, floor=1e-8)
    assert spectrum.rank(noise, 1.0) == 3
    assert spectrum.participation_ratio(noise) == pytest.approx(64 / 30, rel=1e-12)
    with pytest.raises(ValueError, match="more than 3 directions"):
        spectrum.rank(result([5.0, 2.0, 1.0], d=100, total=8 + 194e-8, floor=1e-8), 1.0)


def test_all_variances_are_known_when_there_are_as_many_as_samples_or_features():
    """The total and the sum differ by the rounding of two routes; a rank of 99.9999999 % still exists."""
    wide = result([5.0, 2.0], n=2, d=50, total=7.0 + 1e-8)
    assert spectrum.rank(wide, 1 - 1e-10) == 2
    assert spectrum.participation_ratio(wide) == spectrum.participation_ratio([5.0, 2.0])


# ---------------------------------------------------------------- effective dimensions


def test_effective_dimensions_of_4_3_2_1():
    v = np.array([4.0, 3, 2, 1])
    want = {
        spectrum.participation_ratio: v.sum() ** 2 / (v**2).sum(),
        spectrum.effective_rank: entropy_power(np.sqrt(v)),
        spectrum.entropy_rank: entropy_power(v),
        spectrum.stable_rank: v.sum() / v[0],
        spectrum.top_share: v[0] / v.sum(),
    }
    assert want[spectrum.entropy_rank] == pytest.approx(3.596, abs=5e-4)  # the quoted value of each formula
    assert want[spectrum.effective_rank] == pytest.approx(3.880, abs=5e-4)
    for function, value in want.items():
        for given in (v, result(v), torch.tensor(v) * 1e200, torch.tensor(v) * 1e-200):
            assert function(given) == pytest.approx(value, rel=1e-14), function.__name__


def test_effective_rank_is_of_singular_values():
    """Singular values 4, 3, 2, 1 are variances 16, 9, 4, 1."""
    sigma = np.array([4.0, 3, 2, 1])
    assert spectrum.effective_rank(sigma**2) == pytest.approx(entropy_power(sigma), rel=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS[:4], ids=lambda f: f.__name__)
def test_equal_variances_count_themselves(function):
    assert function([3.0] * 7 + [0.0] * 5) == pytest.approx(7, rel=1e-14)


@pytest.mark.parametrize("function", FUNCTIONS[:3], ids=lambda f: f.__name__)
def test_entropies_of_a_truncated_spectrum_are_refused(function):
    match = f"`{function.__name__}` needs every variance.*more than 2 directions"
    with pytest.raises(ValueError, match=match):
        function(result([5.0, 2.0], total=10.0))
    with pytest.raises(ValueError, match=match):
        function([5.0, 2.0], 10.0)


def test_top_share_and_stable_rank_need_the_total_only():
    truncated = result([5.0, 2.0], total=10.0)
    assert spectrum.top_share(truncated) == pytest.approx(5 / 10, rel=1e-15)
    assert spectrum.stable_rank(truncated) == pytest.approx(10 / 5, rel=1e-15)


# ---------------------------------------------------------------- by their publications


def test_the_hand_worked_singular_values_4_3_2_1():
    """σ = 4, 3, 2, 1: λ = 16, 9, 4, 1, Σσ = 10, Σλ = 30, Σλ² = 354.

    σ/Σσ = 4/10 … 1/10, whose entropy is ln 10 - (4 ln 4 + 3 ln 3 + 2 ln 2)/10; λ/Σλ = 16/30 … 1/30, whose
    entropy is ln 30 - (16 ln 16 + 9 ln 9 + 4 ln 4)/30.
    """
    v = [16.0, 9.0, 4.0, 1.0]
    of_sigma = 10 / (4**0.4 * 3**0.3 * 2**0.2)
    of_lambda = 30 / (16 ** (16 / 30) * 9 ** (9 / 30) * 4 ** (4 / 30))
    assert spectrum.effective_rank(v) == pytest.approx(of_sigma, rel=1e-14)
    assert spectrum.rankme(v, eps=0) == pytest.approx(of_sigma, rel=1e-14)
    assert spectrum.entropy_rank(v) == pytest.approx(of_lambda, rel=1e-14)
    assert spectrum.participation_ratio(v) == pytest.approx(900 / 354, rel=1e-14)
    assert spectrum.stable_rank(v) == pytest.approx(30 / 16, rel=1e-14)
    assert spectrum.nesum(v) == pytest.approx(30 / 16, rel=1e-14)
    assert spectrum.condition(v) == pytest.approx(4, rel=1e-14)
    assert of_sigma - of_lambda > 0.6  # variances in place of singular values are another number


def test_rankme_adds_eps_to_every_share_the_zero_ones_too():
    """σ = 3, 1, 0: -Σ p ln p with p = 3/4 + eps, 1/4 + eps, eps."""
    eps = 1e-3
    want = math.exp(-sum(p * math.log(p) for p in (0.75 + eps, 0.25 + eps, eps)))
    assert spectrum.rankme([9.0, 1.0, 0.0], eps) == pytest.approx(want, rel=1e-14)
    uncentred = replace(result([9.0, 1.0], n=50, d=3, floor=1e-9), centred=False)
    assert spectrum.rankme(uncentred, eps) == pytest.approx(want, rel=1e-14)  # the third was not computed
    assert spectrum.rankme([9.0, 1.0], eps) < want - eps
    assert spectrum.rankme([9.0, 1.0, 0.0]) == pytest.approx(
        math.exp(-sum(p * math.log(p) for p in (0.75 + 1e-7, 0.25 + 1e-7, 1e-7))), rel=1e-14
    )


@pytest.mark.parametrize(("n", "d"), [(60, 12), (9, 12)], ids=["tall", "wide"])
def test_rankme_and_stable_rank_are_of_the_samples_as_they_are(n, d):
    x = samples(n, d, offset=3.0)
    sigma = np.linalg.svd(x.numpy(), compute_uv=False)
    shares = sigma / sigma.sum() + 1e-7
    wanted = {
        spectrum.rankme: math.exp(-(shares * np.log(shares)).sum()),
        spectrum.stable_rank: np.linalg.norm(x) ** 2 / np.linalg.norm(x, 2) ** 2,
    }
    tolerance = 100 * EPS * sigma[0] / sigma[-1]  # what an SVD can do for the smallest share
    uncentred = decompose(x, svd_solver="full", center=False)
    centred = decompose(x, svd_solver="full").spectrum
    for function, want in wanted.items():
        assert function(uncentred) == pytest.approx(want, rel=tolerance)
        assert function(centred) > want * 1.5  # the offset is the first direction of what is not centred


@pytest.mark.parametrize(("n", "d"), [(60, 12), (9, 12)], ids=["tall", "wide"])
def test_nesum_and_condition_are_of_the_centred_samples(n, d):
    x = samples(n, d, offset=3.0)
    variances = truth(x)[1][: min(n - 1, d)]  # the last of n centred rows follows from the others
    pca = decompose(x, svd_solver="full")
    tolerance = 100 * EPS * (variances[0] / variances[-1]).item()
    assert spectrum.nesum(pca) == pytest.approx((variances / variances[0]).sum().item(), rel=tolerance)
    assert spectrum.condition(pca) == pytest.approx(
        (variances[0] / variances[-1]).sqrt().item(), rel=tolerance
    )
    as_they_are = decompose(x, svd_solver="full", center=False)
    assert spectrum.condition(as_they_are) == pytest.approx(np.linalg.cond(x.numpy()), rel=tolerance)
    assert abs(spectrum.condition(as_they_are) / spectrum.condition(pca) - 1) > 0.1


def test_the_condition_ends_at_the_floor():
    assert spectrum.condition([4.0, 1.0, 1e-17]) == 2
    assert spectrum.condition([4.0, 1.0, 1e-4]) == pytest.approx(200, rel=1e-14)
    assert spectrum.condition([4.0, 1.0, 1e-4], floor=1e-3) == 2
    assert spectrum.condition(result([4.0, 1.0, 1e-4], floor=1e-3)) == 2
    assert spectrum.condition(result([4.0, 1.0], total=6.0)) == 2  # a lower bound: three are not known


@pytest.mark.parametrize(
    ("function", "centred"), [(spectrum.rankme, True), (spectrum.nesum, False), (spectrum.alpha_req, False)]
)
def test_a_result_of_the_other_kind_is_refused(function, centred):
    given = replace(result([4.0, 1.0], d=2), centred=centred)
    match = f"`{function.__name__}` is defined for .*; decompose with `center={not centred}`"
    with pytest.raises(ValueError, match=match):
        function(given)
    function(given.spectrum)


@pytest.mark.parametrize("eps", [-1e-9, 1.0, math.nan])
def test_an_eps_out_of_range_is_refused(eps):
    with pytest.raises(ValueError, match=r"`eps` must be a number in \[0, 1\)"):
        spectrum.rankme([2.0, 1.0], eps)


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize("share", [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=r"`share` must be in \(0, 1\]"):
        spectrum.rank([2.0, 1.0], share)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([[2.0, 1.0]], "`spectrum` must be one-dimensional"),
        ([1.0, 2.0], "`spectrum` must be in descending order"),
        ([1.0, -1e-20], "`spectrum` must hold finite variances"),
        ([math.inf, 1.0], "`spectrum` must hold finite variances"),
        ([2.0, math.nan], "`spectrum` must hold finite variances"),
    ],
)
@pytest.mark.parametrize(
    "function", [spectrum.ratio, spectrum.cumulative, spectrum.rankme, spectrum.alpha_req, *FUNCTIONS]
)
def test_what_is_no_spectrum_is_refused(function, given, match):
    with pytest.raises(ValueError, match=match):
        function(given)


@pytest.mark.parametrize("total", [2.9, -1.0, math.inf, math.nan])
def test_a_total_below_the_sum_is_refused(total):
    with pytest.raises(ValueError, match="`total` must be finite and at least 3, the sum of the variances"):
        spectrum.ratio([2.0, 1.0], total)


def test_a_spectrum_of_words_is_refused():
    with pytest.raises(TypeError, match="`spectrum` must be a numeric array"):
        spectrum.ratio(["a", "b"])


def test_the_input_stays_as_it_was():
    given = torch.tensor([3.0, 2.0, 1.0])
    before = given.clone()
    spectrum.rank(given, 0.9)
    spectrum.effective_rank(given)
    assert torch.equal(given, before)
