"""`RFactor`: any split, order, mask and weighting gives the R of the centred rows, within its own error."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

from pca_torch import rfactor as module
from pca_torch.rfactor import RFactor
from tests.support import samples

U64 = torch.finfo(torch.float64).eps / 2
EPS = float(np.finfo(np.longdouble).eps)  # of the truth below


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def extended(x, w=None):
    """Scatter and mean in long double; centred twice, its own rounding of the mean would show."""
    a = x.double().numpy().astype(np.longdouble)
    w = np.ones(len(a), np.longdouble) if w is None else w.numpy().astype(np.longdouble)
    first = w @ a / w.sum()
    second = w @ (a - first) / w.sum()
    z = (a - first - second) * np.sqrt(w)[:, None]
    return z.T @ z, first + second, w.sum()


def distance(scatter, r):
    """‖RᵀR - S‖₂."""
    r = r.numpy().astype(np.longdouble)
    return np.linalg.norm(np.asarray(r.T @ r - scatter, np.float64), 2)


def allowed(error, scatter, n):
    """What ‖E‖₂ ≤ sσ₁ allows for ‖(Z + E)ᵀ(Z + E) - ZᵀZ‖₂, and γ tr S for the truth."""
    top = np.linalg.norm(np.asarray(scatter, np.float64), 2)
    return (2 * error + error**2) * top + (n + 8) * EPS * float(np.trace(scatter))


def within(factor, x, w=None):
    """R and mean are as close to the long double ones as `error` says, and R is upper triangular."""
    scatter, mean, weight = extended(x, w)
    r = factor.r
    assert r.dtype == torch.float64
    assert len(r) <= x.shape[1]
    assert torch.equal(r, r.triu())
    assert distance(scatter, r) <= allowed(factor.error, scatter, len(x))
    # a mean is off by its last digit, and by s deviations of its column
    doubt = U64 * np.abs(mean) + factor.error * np.sqrt(np.diag(scatter) / weight)
    assert bool((np.abs(factor.mean.numpy() - mean) <= doubt + EPS * len(x) * np.abs(mean)).all())


def without_shift(parts):
    """Scatter of a wrong merge: every part centred by its own mean, and the row of the shift left out."""
    return sum(extended(part)[0] for part in parts)


def without_digits(parts):
    """Scatter of a merge in exact arithmetic but for the means, rounded to float64."""
    parts = [part for part in parts if len(part)]
    scatter, mean, weight = 0.0, np.zeros(parts[0].shape[1]), 0
    for part in parts:
        own, at, n = extended(part)
        delta = np.asarray(at, np.float64) - mean
        total = weight + int(n)
        scatter = scatter + own + (weight * int(n) / total) * np.outer(delta, delta)
        mean, weight = mean + delta * (int(n) / total), total
    return scatter


SPLITS = [[3000], [1, 7, 2992], [250] * 12, [2999, 1], [1] * 40 + [2960]]


@pytest.mark.parametrize("split", SPLITS, ids=["one", "odd", "even", "tail", "single"])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_any_split_gives_the_factor(split, offset, dtype, precision):
    x = samples(3000, 24, offset=offset, dtype=dtype, seed=1)
    parts = x.split(split)
    for flush in (False, True):
        factor = RFactor(24, precision=precision)
        for i in torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist():
            factor.update(parts[i])
            if flush:  # every part a factorisation of its own: the most merges, the most rounding
                factor.flush()
        assert factor.n_samples == 3000
        within(factor, x)
        if len(parts) > 1:
            scatter = extended(x)[0]
            wrong = np.linalg.norm(np.asarray(without_shift(parts) - scatter, np.float64), 2)
            assert wrong > allowed(factor.error, scatter, 3000)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_merging_is_updating(precision):
    x = samples(5000, 12, offset=50.0, dtype=torch.float32)
    parts = [RFactor(12, precision=precision).update(part) for part in x.split([10, 4000, 990])]
    whole = RFactor(12, precision=precision)
    for part in parts:
        before = part.r
        whole.merge(part)
        assert torch.equal(part.r, before)
    within(whole, x)
    kept = whole.r
    whole.merge(RFactor(12))
    assert torch.equal(whole.r, kept)
    within(RFactor(12, precision=precision).merge(whole), x)
    within(whole.merge(whole), torch.cat([x, x]))


@pytest.mark.parametrize(
    "shape", [(1, 5), (2, 5), (5, 5), (6, 5), (40, 150), (700, 150), (9000, 2), (300, 1)]
)
def test_shapes(shape):
    x = samples(*shape, decay=0.999, offset=3.0)
    within(RFactor(shape[1]).update(x), x)
    factor = RFactor(shape[1])
    for part in x.split(max(1, len(x) // 3)):
        factor.update(part).flush()
    within(factor, x)


@pytest.mark.parametrize("d", [3, 600])
def test_short_batches_wait_until_they_are_worth_a_factorisation(d):
    n = max(512, d)
    x = samples(n, d, decay=0.999)
    one, many = RFactor(d).update(x), RFactor(d)
    for row in x:
        many.update(row)
    assert torch.equal(many.r, one.r)
    assert many.error == one.error  # one factorisation


def problem(seed):
    """Columns of very different spread and offset, in parts of random length."""
    g = torch.Generator().manual_seed(seed)
    n, d = int(torch.randint(2, 200, (), generator=g)), int(torch.randint(1, 12, (), generator=g))
    spread = 10.0 ** torch.randint(-4, 5, (d,), generator=g).double()
    offset = 10.0 ** torch.randint(-4, 5, (d,), generator=g).double()
    x = torch.randn(n, d, generator=g, dtype=torch.float64) * spread + offset
    cuts = torch.randint(0, n + 1, (seed % 6,), generator=g).sort().values
    return x, [part for part in x.tensor_split(cuts) if len(part)]


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_error_bound_holds_and_is_useful(precision):
    u, noticed, merged = torch.finfo(getattr(torch, precision)).eps / 2, 0, 0
    for seed in range(300):
        x, parts = problem(seed)
        factor = RFactor(x.shape[1], precision=precision)
        for part in parts:
            factor.update(part).flush()
        within(factor, x)
        assert factor.error <= 100 * len(parts) * u * math.sqrt(max(x.shape))  # no bound of everything
        scatter, deviation = extended(x)[0], x.std(0).numpy()
        if x.shape[1] > 1:  # nor is it spent on the largest column: every column may be scaled
            scaled = scatter / np.outer(deviation, deviation)
            assert distance(scaled, factor.r / x.std(0)) <= allowed(factor.error, scaled, len(x))
        if len(parts) > 1:
            merged += 1
            wrong = np.linalg.norm(np.asarray(without_shift(parts) - scatter, np.float64), 2)
            noticed += bool(wrong > allowed(factor.error, scatter, len(x)))
    assert noticed == merged > 200


def test_an_offset_costs_nothing():
    """Means carry twice the digits of float64: at 10⁸ deviations plain ones would stand in R."""
    x = samples(600, 8, offset=1e8)
    parts = x.split(20)
    factor = RFactor(8)
    for part in parts:
        factor.update(part).flush()
    within(factor, x)
    scatter = extended(x)[0]
    rounded = np.linalg.norm(np.asarray(without_digits(parts) - scatter, np.float64), 2)
    assert rounded > allowed(factor.error, scatter, 600)


def test_constant_columns_stay_constant_to_the_square_of_the_roundoff():
    factor = RFactor(3)
    for n in (1, 7, 300, 4, 513):
        factor.update(torch.tensor([0.1, 1e4 / 3, 7.0], dtype=torch.float64).expand(n, 3)).flush()
    spread = torch.linalg.vector_norm(factor.r, dim=0) / math.sqrt(factor.n_samples)
    assert bool((spread <= U64 * 64 * U64 * factor.mean).all())


def test_the_heavier_side_carries_the_mean():
    """One far row first: the means of what follows must not be rounded to its distance."""
    x = samples(4001, 5, seed=3)
    x[0] += 1e6
    factor = RFactor(5).update(x[:1])
    factor.flush()
    for part in x[1:].split(1000):
        factor.update(part)
    within(factor, x)


@pytest.mark.parametrize("power", [-200, 200])
def test_float32_factors_keep_the_range_of_float64(power):
    x, scale = samples(700, 6, offset=2.0), 2.0**power
    plain, scaled = (RFactor(6, precision="float32").update(rows) for rows in (x, x * scale))
    assert torch.equal(scaled.r, plain.r * scale)
    assert not bool(
        (x * scale).float().isfinite().all() & (x * scale).float().any()
    )  # control: float32 has not


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_weights_are_repeated_rows(precision):
    x = samples(40, 5, offset=3.0)
    times = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(0))
    factor = RFactor(5, precision=precision)
    factor.update(x[:10], weights=times[:10]).flush()
    factor.update(x[10:], weights=times[10:])
    within(factor, x.repeat_interleave(times, 0))
    w = times.double()
    assert factor.divisor(1) == pytest.approx(float(w.sum() - w.square().sum() / w.sum()), rel=1e-14)
    assert factor.n_effective == pytest.approx(float(w.sum() ** 2 / w.square().sum()), rel=1e-14)
    assert factor.n_samples == int((times > 0).sum())
    assert factor.sum_weights == pytest.approx(w.sum().item(), rel=1e-15)


def test_fractional_weights_and_rows_without_mix():
    x = samples(600, 4, offset=1e3)
    w = torch.rand(590, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.01
    both = torch.cat([torch.ones(10, dtype=torch.float64), w])
    within(RFactor(4).update(x[:10]).update(x[10:], weights=w), x, both)
    within(RFactor(4).update(x[:10]).update(x[10:200], weights=w[:190]), x[:200], both[:200])  # both wait


def test_masked_rows_are_selected():
    x = samples(24, 3, offset=1.0)
    mask = torch.arange(24) % 3 != 0
    dirty = x.clone()
    dirty[~mask] = math.nan
    for kind in (torch.bool, torch.int64, torch.float32):
        factor = RFactor(3).update(dirty.reshape(2, 12, 3), mask=mask.reshape(2, 12).to(kind))
        within(factor, x[mask])
    assert RFactor(3).update(x, mask=torch.zeros(24)).n_samples == 0


def snapshot(factor):
    """Everything the statistic says, from a copy: reading factors what waits."""
    factor = copy.deepcopy(factor)
    return [
        factor.n_samples,
        factor.n_dropped,
        factor.error,
        factor.input_dtype,
        *factor.r.flatten().tolist(),
    ]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.full((5, 3), math.nan), {}, "5 of 5 samples with NaN or inf"),
        (torch.full((5, 3), 1e200, dtype=torch.float64), {}, "whose squares leave float64"),
        (torch.ones(5, 4), {}, r"must end in 3 features, got shape \(5, 4\)"),
        (torch.ones(3, 5), {}, r"pass `x\.mT`"),
        (torch.ones(5, 3), {"mask": torch.full((5,), 0.5)}, "`weights`"),
        (torch.ones(5, 3), {"mask": torch.ones(4)}, "leading shape"),
        (torch.ones(5, 3), {"weights": -torch.ones(5)}, "not negative"),
        (torch.ones(5, 3), {"weights": torch.ones(4)}, "leading shape"),
    ],
)
def test_a_refused_batch_leaves_no_trace(x, options, message):
    factor = RFactor(3).update(samples(600, 3)).update(samples(7, 3))
    before = snapshot(factor)
    with pytest.raises(ValueError, match=message):
        factor.update(x, **options)
    assert snapshot(factor) == before


def test_bad_rows_can_be_dropped_and_are_counted():
    x = samples(50, 3)
    x[[4, 9]] = math.inf
    factor = RFactor(3, nonfinite="drop").update(x)
    assert (factor.n_samples, factor.n_dropped) == (48, 2)
    within(factor, x[x.isfinite().all(1)])
    assert RFactor(3).merge(factor).n_dropped == 2


@pytest.mark.parametrize("n", [20, 2000])
def test_the_rows_are_neither_kept_nor_changed(n):
    x = samples(n, 3)
    given = x.clone()
    factor = RFactor(3).update(given)
    assert torch.equal(given, x)
    given.zero_()
    within(factor, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_any_real_dtype(dtype):
    x = (samples(300, 4, offset=3.0) * 3).to(dtype) if dtype != torch.bool else samples(300, 4) > 0
    factor = RFactor(4).update(x)
    within(factor, x)
    assert factor.input_dtype == (dtype if dtype.is_floating_point else torch.float64)


def test_small_batches_of_several_dtypes_wait_together():
    batches = [torch.tensor([[70000], [1]]), torch.tensor([[1.5], [2.0]], dtype=torch.float16)]
    factor = RFactor(1)
    for batch in batches:
        factor.update(batch)
    within(factor, torch.cat([batch.double() for batch in batches]))
    assert factor.input_dtype == torch.float16


def test_inference_mode_autocast_and_gradients_change_nothing():
    x = samples(700, 8, dtype=torch.float32)
    want = RFactor(8, precision="float32").update(x).r
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        factor = RFactor(8, precision="float32").update(x.clone())
        assert torch.equal(factor.r, want)
    leaf = x.clone().requires_grad_()
    assert not RFactor(8).update(leaf * 2).r.requires_grad
    assert torch.equal(factor.r, want)
    within(factor.update(x), torch.cat([x, x]))  # an inference tensor would refuse


def test_the_random_generator_is_left_alone():
    before = torch.get_rng_state()
    RFactor(8, precision="float32").update(samples(700, 8)).flush()
    assert torch.equal(torch.get_rng_state(), before)


def test_copies_are_independent():
    x = samples(30, 3)
    factor = RFactor(3).update(x)
    for other in (copy.deepcopy(factor), pickle.loads(pickle.dumps(factor))):
        other.update(x)
        assert (other.n_samples, factor.n_samples) == (60, 30)
        within(factor, x)
    factor.flush()
    alone = RFactor(3).merge(factor)
    alone.update(x).flush()
    within(factor, x)
    factor.mean.zero_()
    factor.r.zero_()
    within(factor, x)


def test_the_matrices_for_looking():
    x = samples(500, 6, offset=7.0)
    factor = RFactor(6).update(x)
    torch.testing.assert_close(factor.covariance(), torch.cov(x.mT), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(factor.second_moment(), x.mT @ x / 500, rtol=1e-13, atol=1e-11)
    assert factor.trace == pytest.approx(torch.cov(x.mT).trace().item() * 499, rel=1e-13)


def test_a_merge_is_as_exact_as_the_coarser_of_the_two():
    x = samples(600, 4)
    fine, coarse = (RFactor(4, precision=p).update(x) for p in ("float64", "float32"))
    assert (fine.product_dtype, coarse.product_dtype) == (torch.float64, torch.float32)
    assert coarse.error > 1e4 * fine.error
    both = RFactor(4, precision="float64").merge(fine).merge(coarse)
    assert both.product_dtype == torch.float32
    assert both.error > coarse.error
    within(both, torch.cat([x, x]))
    assert both.input_dtype == torch.float64
    assert both.merge(RFactor(4).update(x.bfloat16())).input_dtype == torch.bfloat16


def test_a_merge_that_fails_leaves_no_trace(monkeypatch):
    x = samples(30, 3)
    x[2] = math.inf
    factor = RFactor(3, nonfinite="drop").update(x.double())
    other = RFactor(3, nonfinite="drop", precision="float32").update(x.float())
    before = factor.n_samples, factor.n_dropped, factor.input_dtype, factor.product_dtype, factor.r

    def full(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        other.flush()
        patch.setattr(module, "_merged", full)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            factor.merge(other)
    after = factor.n_samples, factor.n_dropped, factor.input_dtype, factor.product_dtype, factor.r
    assert before[:-1] == after[:-1]
    assert torch.equal(before[-1], after[-1])
    factor.merge(other)
    assert (factor.n_samples, factor.n_dropped) == (58, 2)
    assert (factor.input_dtype, factor.product_dtype) == (torch.float32, torch.float32)


def test_nothing_to_divide_by_is_an_error():
    with pytest.raises(ValueError, match="no rows were counted"):
        RFactor(3).covariance()
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        RFactor(3).update(torch.ones(1, 3)).covariance()
    assert not RFactor(3).update(torch.ones(1, 3)).covariance(0).any()
    empty = RFactor(3)
    assert (empty.n_samples, empty.trace, empty.n_effective, empty.error) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_features": 0}, "n_features"),
        ({"n_features": 3, "precision": "float16"}, "precision"),
        ({"n_features": 3, "nonfinite": "zero"}, "nonfinite"),
        ({"n_features": 400_000}, "GiB"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        RFactor(**arguments)


def test_only_like_merges_with_like():
    with pytest.raises(ValueError, match="`other` has 4 features, this statistic has 3; merge"):
        RFactor(3).merge(RFactor(4))


def test_a_device_is_kept_for_the_first_rows():
    assert RFactor(2, device="cpu").update(samples(3, 2).float()).product_dtype == torch.float64
    assert RFactor(2).update(samples(3, 2)).device == torch.device("cpu")
