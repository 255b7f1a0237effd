"""Variance along chosen directions."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

import pca_torch as pt
from tests.support import samples

X = samples(40, 5, decay=0.5, offset=3.0)
EPS = torch.finfo(torch.float64).eps
# vᵀCv/vᵀv in float64: N products for an entry of C, D² for the form, on either side; C ≤ its trace
BOUND = 2 * (40 + 25) * EPS * X.var(0).sum().item()


def along(v, ddof=1):
    """Variance of the samples projected on the unit vector of `v`, without a covariance."""
    v = np.asarray(v, dtype=float)
    return np.var(X.numpy() @ (v / np.linalg.norm(v)), ddof=ddof)


def close(have, want):
    np.testing.assert_allclose(have, want, rtol=0, atol=BOUND)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("length", [1.0, 3.0, 1e-200, 1e200])
def test_it_is_the_variance_of_the_projections_whatever_the_length(ddof, length):
    v = torch.tensor([[1.0, 2, -1, 0, 0.5], [0, 0, 0, 1, 0]]).double()
    want = [along(row, ddof) for row in v]
    close(pt.subspace.captured(X, v * length, ddof=ddof), want)
    assert abs(want[0] - along(v[0], 1 - ddof)) > BOUND  # the other divisor would fail


def test_samples_and_their_statistic_agree():
    v = torch.eye(5)[:2]
    moments = pt.Moments(5)
    for batch in X.split(7):
        moments.update(batch)
    close(pt.subspace.captured(moments, v), pt.subspace.captured(X, v))


def test_one_direction_is_a_scalar():
    one = pt.subspace.captured(X, [1, 0, 0, 0, 0])
    assert one.shape == ()
    assert one.dtype == torch.float64
    close(one, along([1, 0, 0, 0, 0]))


def test_leading_dimensions_of_samples_and_directions_stay():
    have = pt.subspace.captured(X.reshape(4, 10, 5), torch.eye(5).reshape(1, 5, 5))
    assert have.shape == (1, 5)
    close(have[0], [along(v) for v in np.eye(5)])


def test_components_capture_their_variances_and_all_of_them_the_total():
    pca = pt.PCA().fit(X)
    close(pt.subspace.captured(X, pca.components_), pca.explained_variance_)
    moments = pt.Moments(5).update(X)
    share = pt.subspace.captured(moments, torch.eye(5)).sum() / (moments.trace / moments.divisor())
    assert share.item() == pytest.approx(1, rel=(40 + 25) * EPS)


def test_between_two_components_lies_the_mean_of_their_variances():
    pca = pt.PCA(2).fit(X)
    middle = pca.components_.sum(0)
    close(pt.subspace.captured(X, middle), pca.explained_variance_.mean())


def test_the_offset_does_not_count():
    v = [1.0, 1, 1, 1, 1]
    far = X + 1e6  # rounding the samples to eps·1e6 moves each projection by √5 of that at most
    moved = 4 * math.sqrt(5) * EPS * 1e6 * math.sqrt(along(v))
    assert abs(pt.subspace.captured(far, v).item() - along(v)) < moved + BOUND


def test_nothing_is_changed_or_differentiated():
    v = torch.eye(5, dtype=torch.float64, requires_grad=True)
    before = pt.Moments(5).update(X)
    covariance = before.covariance().clone()
    assert not pt.subspace.captured(before, v).requires_grad
    assert torch.equal(before.covariance(), covariance)
    assert torch.equal(v.detach(), torch.eye(5).double())


@pytest.mark.parametrize("bad", [[0.0] * 5, [math.nan] + [1.0] * 4, [math.inf] + [0.0] * 4])
def test_directions_must_point_somewhere(bad):
    with pytest.raises(ValueError, match="`basis` must hold finite directions of non-zero length"):
        pt.subspace.captured(X, [[1.0] * 5, bad])


def test_directions_must_have_the_same_features():
    with pytest.raises(ValueError, match=r"`basis` must end in 5 features, got shape \(5, 2\).*`basis\.mT`"):
        pt.subspace.captured(X, torch.ones(5, 2))


def test_too_few_rows():
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        pt.subspace.captured(X[:1], torch.eye(5))
    assert pt.subspace.captured(X[:1], torch.eye(5), ddof=0).tolist() == [0] * 5


# ---------------------------------------------------------------- angles and overlap
def rotation(d, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q


def pair(angles, d, seed=0):
    """Two sets of rows with these principal angles, turned and mixed at random."""
    k = len(angles)
    turn, angles = rotation(d, seed), torch.as_tensor(angles, dtype=torch.float64)
    a, b = turn[:k], angles.cos()[:, None] * turn[:k] + angles.sin()[:, None] * turn[k : 2 * k]
    return rotation(k, seed + 1) @ a, rotation(k, seed + 2) @ b


ANGLES = [0.0, 1e-13, 1e-9, 1e-5, 0.3, math.pi / 4, 1.2, math.pi / 2 - 1e-9, math.pi / 2]
D = 30
# rows come out of two products of length D and are orthonormalised again: D·eps for each of the three, twice
TURNED = 6 * D * EPS


@pytest.mark.parametrize("seed", range(5))
def test_angles_of_any_size_to_the_last_digits(seed):
    a, b = pair(ANGLES, D, seed)
    found = pt.subspace.principal_angles(a, b)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found, ANGLES, rtol=0, atol=TURNED)
    cosines = torch.linalg.svdvals(a @ b.mT).clamp(max=1)
    assert (cosines.acos() - torch.tensor(ANGLES)).abs().max() > 1e4 * TURNED  # what cosines alone give


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("j", "k"), [(1, 1), (3, 7), (7, 3), (6, 6)])
def test_angles_are_those_of_scipy(j, k, dtype):
    g = torch.Generator().manual_seed(j * k)
    a, b = (torch.randn(n, 16, generator=g, dtype=dtype) for n in (j, k))
    want = scipy.linalg.subspace_angles(a.double().numpy().T, b.double().numpy().T)[::-1]
    found = pt.subspace.principal_angles(a, b)
    # both bend a span by D·eps·κ of its rows
    bend = 16 * EPS * sum(torch.linalg.cond(x.double()).item() for x in (a, b))
    np.testing.assert_allclose(found, want, rtol=0, atol=4 * bend)
    overlap = pt.subspace.overlap(a, b)
    assert overlap == pytest.approx((np.cos(want) ** 2).sum() / min(j, k), abs=8 * bend)
    assert pt.subspace.overlap(a, b, "max") == pytest.approx(overlap * min(j, k) / max(j, k), rel=4 * EPS)


def test_the_rank_comes_before_the_angles():
    e = torch.eye(6, dtype=torch.float64)
    twice = torch.stack([e[0], e[0], e[1], torch.zeros(6), 3 * e[1] - e[0]])
    assert len(pt.subspace.orthonormal_rows(twice)) == 2
    np.testing.assert_allclose(pt.subspace.principal_angles(twice, e[:2]), [0, 0], atol=TURNED)
    assert pt.subspace.overlap(twice, e[:1], "max") == pytest.approx(1 / 2, abs=TURNED)
    nothing = torch.zeros(4, 6)
    assert pt.subspace.orthonormal_rows(nothing).shape == (0, 6)
    assert pt.subspace.principal_angles(nothing, e).shape == (0,)
    assert not pt.subspace.overlap(nothing, e)
    assert not pt.subspace.overlap(e[:0], e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_direction(dtype):
    g = torch.Generator().manual_seed(0)
    low = torch.randn(40, 5, generator=g, dtype=torch.float64) @ torch.randn(
        5, 200, generator=g, dtype=torch.float64
    )
    stored = low.to(dtype)
    assert len(pt.subspace.orthonormal_rows(stored)) == 5
    assert np.linalg.matrix_rank(stored.double().numpy()) == 40  # the rounding taken for directions
    assert len(pt.subspace.orthonormal_rows(low, rtol=0.99)) == 1


@pytest.mark.parametrize("length", [1e-200, 1.0, 1e200])
def test_lengths_do_not_matter(length):
    a, b = pair([0.1, 0.7], 8)
    np.testing.assert_allclose(pt.subspace.principal_angles(a * length, b), [0.1, 0.7], atol=TURNED)


def test_one_row_and_integers_and_results():
    assert pt.subspace.principal_angles([1, 0, 0], [[1, 1, 0]]).item() == pytest.approx(math.pi / 4)
    pca = pt.decompose(X, 3)
    np.testing.assert_allclose(pt.subspace.principal_angles(pca, pca.components), [0] * 3, atol=TURNED)
    assert len(pt.subspace.orthonormal_rows(pca, 2)) == 2


def test_null_components_of_a_result_are_no_directions():
    flat = torch.cat([X[:, :2], torch.zeros(40, 3)], 1)
    pca = pt.decompose(flat)
    assert pca.n_components == 5
    assert len(pt.subspace.orthonormal_rows(pca)) == 2
    with pytest.warns(UserWarning, match="total variance is zero"):
        constant = pt.decompose(torch.ones(40, 5))
    assert not pt.subspace.overlap(constant, constant)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (np.eye(3), np.eye(4), "`a` and `b` must have the same features, got 3 and 4"),
        (np.full((2, 3), math.nan), np.eye(3), "`a` must be finite, got 2 of 2 rows"),
        (np.eye(3), np.array([[0, math.inf, 1.0]]), "`b` must be finite, got 1 of 1 rows"),
        (np.ones((2, 2, 3)), np.eye(3), r"`a` must be rows \(K, D\) with D ≥ 1, got shape \(2, 2, 3\)"),
        (np.eye(3), np.ones((3, 0)), r"`b` must be rows \(K, D\) with D ≥ 1"),
    ],
)
@pytest.mark.parametrize("measure", [pt.subspace.principal_angles, pt.subspace.overlap])
def test_what_spans_nothing_is_refused(measure, a, b, message):
    with pytest.raises(ValueError, match=message):
        measure(a, b)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="`normalise` must be one of 'min', 'max', got 'mean'"):
        pt.subspace.overlap(np.eye(3), np.eye(3), "mean")
    with pytest.raises(ValueError, match=r"`rtol` must be a number in \[0, 1\), got 1"):
        pt.subspace.overlap(np.eye(3), np.eye(3), rtol=1)
    with pytest.raises(ValueError, match=r"`k` must be in 0\.\.3, the rows of `basis`, got 4"):
        pt.subspace.orthonormal_rows(np.eye(3), 4)


# ---------------------------------------------------------------- chance
@pytest.mark.parametrize(("i", "j", "d"), [(1, 1, 2), (4, 8, 32), (8, 8, 32), (20, 25, 40), (3, 15, 16)])
@pytest.mark.parametrize("normalise", ["min", "max"])
def test_chance_is_what_random_subspaces_show(i, j, d, normalise):
    n, g = 4000, torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(n, d, j, generator=g, dtype=torch.float64)).Q
    size = min(i, j) if normalise == "min" else max(i, j)
    seen = q[:, :i].square().sum((1, 2)) / size  # against the first i axes, which is no loss of generality
    found = pt.subspace.random_overlap(i, j, d, normalise)
    assert abs(seen.mean().item() - found.mean) < 5 * found.std / math.sqrt(n)
    # the variance of a variance is (kurtosis - 1)/n of its square; seen are kurtoses up to 3.3
    spread = 5 * math.sqrt(2.5 / n)
    assert abs(seen.var().item() / found.std**2 - 1) < spread
    independent = 2 * i * j / d**2 / size**2  # as if squares of entries were independent
    assert abs(seen.var().item() / independent - 1) > spread
    assert found.sigmas(found.mean + 3 * found.std) == pytest.approx(3)


def test_chance_in_closed_form():
    line = pt.subspace.random_overlap(1, 1, 2)  # cos² of a uniform angle
    assert (line.mean, line.std) == (0.5, pytest.approx(math.sqrt(1 / 8)))
    for whole in (pt.subspace.random_overlap(3, 5, 5), pt.subspace.random_overlap(1, 1, 1)):
        assert (whole.mean, whole.std) == (1.0, 0.0)
        assert whole.sigmas(1.0) is None
    assert pt.subspace.random_overlap(0, 5, 8) == pt.subspace.RandomOverlap(0.0, 0.0)


@pytest.mark.parametrize("sizes", [(9, 1, 8), (1, 9, 8), (-1, 2, 8), (1, 1, 0)])
def test_chance_needs_dimensions_that_exist(sizes):
    with pytest.raises(ValueError, match=r"must be (in 0\.\.8|an integer ≥ 0|a positive integer)"):
        pt.subspace.random_overlap(*sizes)


# ---------------------------------------------------------------- shared variance
SPAN = torch.randn(3, 12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
ROWS = samples(60, 12, decay=0.7, offset=2.0, seed=3)


def share_of(rows, span):
    """Share of the squared distances from the mean that is left by projecting on the span."""
    rows = (rows - rows.mean(0)).numpy()
    q = scipy.linalg.orth(span.numpy().T)
    return np.square(rows @ q).sum() / np.square(rows).sum()


# two sums of N·D numbers and a basis that is off by D·eps
SHARE = (60 * 12 + 12) * EPS


def test_shares_of_samples_and_statistics_are_exact():
    want = share_of(ROWS, SPAN)
    for data in (ROWS, pt.Moments(12).update(ROWS)):
        share = pt.subspace.captured_share(data, SPAN)
        assert share.low == share.high
        assert abs(share.low - want) < SHARE
    raw = np.square(ROWS.numpy() @ scipy.linalg.orth(SPAN.numpy().T)).sum() / np.square(ROWS.numpy()).sum()
    assert abs(raw - want) > SHARE  # not centred it would be another


@pytest.mark.parametrize("solver", ["covariance_eigh", "randomized"])
@pytest.mark.parametrize("k", [0, 1, 3, 6, 11, 12])
@pytest.mark.parametrize("span", [SPAN, SPAN[:1], torch.eye(12).double()[:7]], ids=["3", "1", "7"])
def test_shares_of_a_result_hold_the_exact_one(k, span, solver):
    result = pt.decompose(ROWS, k, solver)
    share, want = pt.subspace.captured_share(result, span), share_of(ROWS, span)
    slack = SHARE + 2 * sum(result.certificate.variance_error) / result.total_variance.item()
    assert share.low - slack <= want <= share.high + slack
    if k == 12:
        assert share.high - share.low < slack
    elif 0 < k < 11:
        assert share.high - share.low > slack  # what was dropped is not guessed


def test_both_ends_of_a_share_are_reached():
    variance = torch.tensor([5.0, 3.0, 2.0, 1.0]).double()
    n = 8
    score = torch.linalg.qr(samples(n, 4, decay=1.0) - samples(n, 4, decay=1.0).mean(0)).Q
    for leaning, end in ((1, "high"), (3, "low")):  # towards the largest, or the smallest dropped direction
        rows = score * (variance * (n - 1)).sqrt()
        result = pt.decompose(rows, 1, "covariance_eigh")
        span = torch.eye(4).double()[[0]] + 0.5 * torch.eye(4).double()[[leaning]]
        share = pt.subspace.captured_share(result, span)
        assert getattr(share, end) == pytest.approx(share_of(rows, span), abs=10 * SHARE)
        assert share.low < share.high


def test_shares_between_two_results_and_none():
    a, b = pt.decompose(ROWS, 4), pt.decompose(samples(60, 12, decay=0.7, seed=9), 2)
    in_b, in_a = pt.subspace.captured_between(a, b)
    for found, data, basis in ((in_b, a, b), (in_a, b, a)):
        want = pt.subspace.captured_share(data, basis.components)
        assert (found.low, found.high) == (
            pytest.approx(want.low, abs=SHARE),
            pytest.approx(want.high, abs=SHARE),
        )
    with pytest.warns(UserWarning, match="total variance is zero"):
        nothing = pt.decompose(torch.ones(9, 12), 2)
    assert pt.subspace.captured_between(a, nothing) == (pt.subspace.CapturedShare(0.0, 0.0),) * 2
    scaled = pt.decompose(ROWS, 4, standardize=True)
    with pytest.raises(ValueError, match="`a` and `b` must both be standardised, or neither"):
        pt.subspace.captured_between(a, scaled)
    with pytest.raises(
        ValueError, match=r"`basis` must end in 12 features, as `data` has, got shape \(2, 3\)"
    ):
        pt.subspace.captured_share(a, torch.eye(3)[:2])
