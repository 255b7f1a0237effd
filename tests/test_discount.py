"""Discounted rows weigh what they should: covariances with explicit weights decay^age, in long double."""

import copy
import math

import numpy as np
import pytest
import torch

from pca_torch.centred_sums import FAINT, CentredSums
from pca_torch.head_moments import HeadMoments
from pca_torch.heads import decompose_heads
from pca_torch.moments import Moments
from pca_torch.precision import unit_roundoff
from pca_torch.solvers import decompose
from tests.support import samples

H, E = 3, 4
D = H * E
U64 = unit_roundoff(torch.float64)
LENGTHS = [700, 3, 41, 5000, 1, 300]  # long batches, and short ones that wait
KINDS = {"one": (Moments, (D,)), "heads": (HeadMoments, (H, E))}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fresh(kind, precision="float64"):
    make, sizes = KINDS[kind]
    return make(*sizes, precision=precision)


def batches(lengths=LENGTHS, *, offset=3.0, seed=0):
    """float32 rows, each batch with a spread of its own, so that it matters what it weighs."""
    return [
        (1 + i % 4) * samples(n, D, decay=0.8, offset=offset, seed=97 * seed + i, dtype=torch.float32)
        for i, n in enumerate(lengths)
    ]


def averaged(kind, parts, decay, precision="float64"):
    """Exponentially weighted: what was counted before each batch weighs `decay` times as much."""
    statistic = fresh(kind, precision)
    for part in parts:
        statistic.discount(decay).merge(fresh(kind, precision).update(part))
    return statistic


def weights(parts, decay):
    """(N,) decay^age in long double; the last batch has age 0."""
    ages = np.repeat(np.arange(len(parts))[::-1], [len(part) for part in parts])
    return np.longdouble(decay) ** ages


def truth(parts, w):
    """Mean and scatter of weighted rows in long double."""
    x = torch.cat(parts).double().numpy().astype(np.longdouble)
    mean = (w[:, None] * x).sum(0) / w.sum()
    return mean, (w[:, None] * (x - mean)).T @ (x - mean)


def divisor(w):
    return float(w.sum() - np.square(w).sum() / w.sum())


def blocks(kind, matrix):
    """(1, D, D) or (H, E, E): what the statistic keeps of a D×D matrix."""
    if kind == "one":
        return matrix[None]
    return np.stack([matrix[i * E : (i + 1) * E, i * E : (i + 1) * E] for i in range(H)])


def judged(kind, statistic, parts, w, rounds):
    """‖computed - true‖₂ of each covariance, and what it may be.

    The certificate bounds the scatter; Σw and Σw² have been rounded three times in each round, which
    moves every variance by as many u of itself.
    """
    _, scatter = truth(parts, w)
    want = blocks(kind, scatter / divisor(w)).astype(np.float64)
    got = statistic.covariance().reshape(want.shape).numpy()
    certified = torch.as_tensor(statistic.scatter_error()).reshape(-1).numpy() / statistic.divisor()
    size = np.linalg.norm(want, 2, axis=(1, 2))
    return np.linalg.norm(got - want, 2, axis=(1, 2)), certified + (3 * rounds + 4) * U64 * size


# --- the definition ------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("decay", [0.5, 0.9, 1.0])
def test_it_is_the_covariance_of_rows_that_weigh_decay_to_their_age(kind, precision, decay):
    parts, w = batches(), weights(batches(), decay)
    statistic = averaged(kind, parts, decay, precision)
    error, allowed = judged(kind, statistic, parts, w, len(parts))
    assert (error <= allowed).all()
    other, _ = judged(kind, statistic, parts, weights(parts, 0.999 * decay), len(parts))
    assert (other > allowed).all()  # control: a decay that is a little less
    mean, _ = truth(parts, w)
    assert np.abs(statistic.mean.numpy() - mean).max() < sum(LENGTHS) * U64 * torch.cat(parts).abs().max()
    assert statistic.n_samples == sum(LENGTHS)


@kinds
def test_it_is_what_numpy_calls_a_weighted_covariance(kind):
    parts = batches()
    w = weights(parts, 0.7).astype(np.float64)
    x = torch.cat(parts).double().numpy()
    want = blocks(kind, np.cov(x.T, aweights=w))
    got = averaged(kind, parts, 0.7).covariance().reshape(want.shape).numpy()
    allowed = 4 * len(x) * U64 * np.trace(want, axis1=1, axis2=2)  # γ_N tr C of either sum, and of its mean
    assert (np.linalg.norm(got - want, 2, axis=(1, 2)) <= allowed).all()
    ignored = blocks(kind, np.cov(x.T))
    assert (np.linalg.norm(got - ignored, 2, axis=(1, 2)) > allowed).all()  # control: all rows weigh the same


@kinds
def test_divisor_and_effective_number_are_those_of_the_weights(kind):
    parts, w = batches(), weights(batches(), 0.6)
    statistic = averaged(kind, parts, 0.6)
    assert statistic.divisor() == pytest.approx(divisor(w), rel=20 * U64)
    assert statistic.divisor(0) == pytest.approx(float(w.sum()), rel=20 * U64)
    assert statistic.n_effective == pytest.approx(float(w.sum() ** 2 / np.square(w).sum()), rel=60 * U64)
    assert statistic.n_effective < 0.9 * statistic.n_samples  # control: the number of rows
    assert fresh(kind).n_effective == 0
    assert fresh(kind).update(parts[2]).n_effective == len(parts[2])


def test_weights_of_rows_and_discounts_multiply():
    x, w = torch.cat(batches([50])), torch.linspace(0.5, 2, 50, dtype=torch.float64)
    twice = Moments(D).update(x[:30], weights=w[:30]).discount(0.25).update(x[30:], weights=w[30:])
    at_once = Moments(D).update(x, weights=torch.cat([w[:30] / 4, w[30:]]))
    for one, other in ((twice, at_once), (twice.group(0), at_once)):
        assert one.sum_weights == pytest.approx(other.sum_weights, rel=50 * U64)
        assert one.n_effective == pytest.approx(other.n_effective, rel=100 * U64)
        allowed = (one.scatter_error() + other.scatter_error()) / one.divisor()
        assert torch.linalg.matrix_norm(one.covariance() - other.covariance(), 2) <= allowed


def test_all_groups_are_discounted():
    parts = batches([40, 50])
    statistic = Moments(D, groups=2).update(parts[0], group=0).update(parts[1], group=1)
    statistic.discount(0.5).update(parts[1], group=0)
    assert [statistic.group(i).sum_weights for i in range(2)] == [20 + 50, 25]


def test_a_head_carries_its_weights_into_what_is_decomposed():
    """Every variance is as close to the true one as its certificate says."""
    parts = batches([300, 200, 100])
    w = weights(parts, 0.5)
    statistic = averaged("heads", parts, 0.5)
    want = blocks("heads", truth(parts, w)[1] / divisor(w)).astype(np.float64)
    for found, matrix in zip(decompose_heads(statistic), want, strict=True):
        variances = torch.from_numpy(np.linalg.eigvalsh(matrix)[::-1].copy())
        off = (found.explained_variance - variances).abs()
        assert (off <= torch.tensor(found.certificate.variance_error) + 20 * U64 * variances[0]).all()
    alone = averaged("one", parts, 0.5)
    assert decompose(alone).n_samples == 600
    assert statistic.head(1).n_effective == alone.n_effective


# --- over a long time ----------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_hundreds_of_rounds_stay_exact_and_possible(kind, precision):
    parts = batches([7] * 400)
    statistic = averaged(kind, parts, 0.9, precision)
    error, allowed = judged(kind, statistic, parts, weights(parts, 0.9), len(parts))
    assert (error <= allowed).all()
    largest = statistic.covariance().reshape(len(allowed), -1).amax(1).numpy()
    assert (allowed < (1e-5 if precision == "float32" else 1e-9) * largest).all()  # the bound is of use
    assert statistic.n_samples == 2800
    assert statistic.n_effective == pytest.approx(
        7 * (1 + 0.9) / (1 - 0.9), rel=1e-9
    )  # of a geometric series
    type(statistic).from_state(*statistic.to_state())


@kinds
def test_rows_of_long_ago_are_forgotten_without_underflow(kind):
    """2000 rounds at a half would be 1e-602: what is left is nothing beside new rows, and a possible sum."""
    old, new = batches([400, 30])
    statistic = fresh(kind).update(100 * old)
    for _ in range(2000):
        statistic.discount(0.5)
    assert 0 < statistic.divisor(0) <= 1.01 * FAINT
    assert statistic.n_effective == pytest.approx(400, rel=1e-9)
    back = type(statistic).from_state(*statistic.to_state())
    assert back.covariance().isfinite().all()
    for one in (statistic, back):
        error, allowed = judged(kind, one.merge(fresh(kind).update(new)), [new], np.ones(30), 2000)
        assert (error <= allowed).all()
        assert one.n_effective == pytest.approx(30, rel=1e-12)


# --- nothing else changes ------------------------------------------------------------------------------


def same(one, other):
    (tensors, facts), (others, told) = one.to_state(), other.to_state()
    return (
        facts == told
        and tensors.keys() == others.keys()
        and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    )


@kinds
def test_a_factor_of_one_and_no_rows_change_nothing(kind):
    statistic = fresh(kind).update(torch.cat(batches()))
    before = copy.deepcopy(statistic)
    assert same(statistic.discount(1).discount(1.0), before)
    assert not same(statistic.discount(0.5), before)
    assert same(fresh(kind).discount(0.5), fresh(kind))
    assert fresh(kind).discount(0.5).update(batches()[0]).n_effective == LENGTHS[0]


def test_heads_that_were_never_discounted_are_saved_as_they_always_were():
    statistic = HeadMoments(H, E).update(torch.cat(batches([700, 900])))
    _, facts = statistic.to_state()
    assert facts["sums"] == {"dtype": "float64", "n": 1600, "depth": 1601, "merges": 1}
    assert HeadMoments.from_state(*statistic.to_state()).divisor() == 1599
    _, facts = statistic.discount(0.5).to_state()
    assert (facts["sums"]["weight"], facts["sums"]["weight_sq"]) == (800, 400)


@kinds
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_discounted_statistic_goes_on_bit_for_bit_from_its_file(kind, precision):
    parts = batches()
    statistic = averaged(kind, parts, 0.9, precision)
    back = type(statistic).from_state(*statistic.to_state())
    assert same(back, statistic)
    for one in (statistic, back):
        one.discount(0.3).update(parts[0])
    assert same(back, statistic)
    assert torch.equal(back.covariance(), statistic.covariance())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_sq": 399.0},
            r"head 0: `weight` and `weight_sq` must be those of 1600 rows, got 800.0, 399",
        ),
        ({"weight": 0.0}, "`weight` and `weight_sq` must be those of 1600 rows"),
        ({"weight": -1.0}, "`weight` must be a number from 0"),
        ({"weight_sq": None}, "`weight_sq` must be a number from 0"),
    ],
)
def test_weights_of_heads_that_no_rows_have_are_refused(changes, message):
    tensors, facts = HeadMoments(H, E).update(torch.cat(batches([700, 900]))).discount(0.5).to_state()
    facts["sums"] |= changes
    with pytest.raises(ValueError, match=message):
        HeadMoments.from_state(tensors, facts)


@kinds
@pytest.mark.parametrize("factor", [0, -0.5, 1.5, math.nan, True, "0.9", None])
def test_other_factors_are_refused(kind, factor):
    statistic = fresh(kind).update(batches()[0])
    before = copy.deepcopy(statistic)
    with pytest.raises(ValueError, match=r"`factor` must be a number above 0, at most 1, got"):
        statistic.discount(factor)
    assert same(statistic, before)


def test_an_interrupted_discount_says_so(monkeypatch):
    parts = batches([600, 700])
    statistic = Moments(D, groups=2).update(parts[0], group=0).update(parts[1], group=1)
    discount, calls = CentredSums.discount, []

    def interrupted(self, factor):
        calls.append(factor)
        if len(calls) == 2:
            raise KeyboardInterrupt
        discount(self, factor)

    monkeypatch.setattr(CentredSums, "discount", interrupted)
    with pytest.raises(KeyboardInterrupt):
        statistic.discount(0.5)
    with pytest.raises(RuntimeError, match=r"interrupted while it counted rows.*start a new one"):
        statistic.discount(0.5)
