"""`Moments`: any split, order, mask and weighting gives the float64 answer, and the error bound holds."""

import copy
import math
import pickle
import sys
from functools import partial

import pytest
import torch

import pca_torch as pt
from pca_torch import centred_sums, rfactor, scatter
from pca_torch.head_moments import HeadMoments
from pca_torch.intake import CHUNK_ROWS, SMALLEST_PART
from pca_torch.moments import Moments
from pca_torch.precision import exact_products
from tests.support import samples

U32 = torch.finfo(torch.float32).eps / 2


def covariance(x, ddof=1):
    x = x.double()
    return torch.cov(x.mT, correction=ddof)


def spectral(matrix):
    return torch.linalg.matrix_norm(matrix, 2).item()


def within(moments, x, ddof=1):
    """The statistic is as close to the float64 covariance as it says."""
    off = spectral(moments.covariance(ddof) - covariance(x, ddof))
    assert off <= moments.scatter_error() / moments.divisor(ddof)
    torch.testing.assert_close(
        moments.mean, x.double().mean(0), rtol=1e-13, atol=1e-13 * x.double().abs().max().item()
    )


SPLITS = [[3000], [1, 7, 992, 2000], [250] * 12, [2999, 1], [1] * 40 + [2960]]


@pytest.mark.parametrize("split", SPLITS, ids=["one", "odd", "even", "tail", "single"])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_any_split_gives_the_covariance(split, offset, dtype, precision):
    x = samples(3000, 24, offset=offset, dtype=dtype, seed=1)
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist()
    moments = Moments(24, precision=precision)
    parts = x.split(split)
    for i in order:
        moments.update(parts[i])
    assert moments.n_samples == 3000
    within(moments, x)
    # control: the one-pass formula in the dtype of the data, at an offset of a hundred deviations
    mean = x.float().mean(0)
    naive = ((x.float().mT @ x.float()).double() - 3000 * torch.outer(mean.double(), mean.double())) / 2999
    if offset >= 1e2:
        assert spectral(naive - covariance(x)) > moments.scatter_error() / 2999


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_merging_is_updating(precision):
    x = samples(5000, 12, offset=50.0, dtype=torch.float32)
    parts = [Moments(12, precision=precision).update(part) for part in x.split([10, 4000, 990])]
    whole = Moments(12, precision=precision)
    for part in parts:
        before = part.covariance()
        whole.merge(part)
        assert torch.equal(part.covariance(), before)
    within(whole, x)
    whole.merge(Moments(12))
    within(whole, x)
    within(Moments(12, precision=precision).merge(whole), x)


def test_wide_scatter_is_that_of_the_plain_product():
    """From 512 columns on only block rows are multiplied."""
    x = samples(700, 520, decay=0.999, dtype=torch.float64)
    within(Moments(520).update(x), x)
    assert torch.equal(Moments(520).update(x).covariance(), Moments(520).update(x).covariance().mT)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_error_bound_holds_and_is_useful(seed, precision):
    g = torch.Generator().manual_seed(seed)
    n, d = int(torch.randint(2, 400, (), generator=g)), int(torch.randint(1, 20, (), generator=g))
    x = samples(
        n, d, decay=float(torch.rand((), generator=g)) * 0.9 + 0.05, offset=10.0 ** (seed % 4), seed=seed
    )
    x = x.float()
    moments = Moments(d, precision=precision).update(x)
    off = spectral((moments.covariance(0) - covariance(x, 0)) * n)
    assert off <= moments.scatter_error()
    scale = U32 if precision == "float32" else 2.0**-53
    assert moments.scatter_error() <= 1e3 * scale * moments.trace * math.sqrt(n)  # no bound of everything


def sinks(n=2048, d=64, size=1e4):
    """Typical rows, and one row in 128 that is `size` times longer, along one direction."""
    x = samples(n, d, decay=0.95, dtype=torch.float32)
    x[::128] += size * torch.nn.functional.normalize(samples(1, d, seed=9, dtype=torch.float32))
    return x


def test_loud_rows_do_not_drown_the_others_in_float32():
    x = sinks()
    want = torch.linalg.eigvalsh(covariance(x)).flip(0)
    ours = torch.linalg.eigvalsh(Moments(64, precision="float32").update(x).covariance()).flip(0)
    centred = (x.double() - x.double().mean(0)).float()
    plain = torch.linalg.eigvalsh((centred.mT @ centred).double() / 2047).flip(0)
    typical = want[1:].max().item()
    assert (ours - want)[1:].abs().max() < 1e-5 * typical
    assert (plain - want)[1:].abs().max() > 1e-5 * typical  # control: one product for all rows


def test_exact_extreme_rows_merge_into_a_float32_statistic():
    x, far = sinks(size=0.0), 1e6 * samples(30, 64, seed=5, dtype=torch.float32)
    moments = Moments(64, precision="float32").update(x).merge(Moments(64, precision="float64").update(far))
    both = torch.cat([x, far])
    within(moments, both)
    assert moments.scatter_error() < 1e-9 * moments.trace


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_weights_are_repeated_rows(precision):
    x = samples(40, 5, offset=3.0)
    times = torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(0))
    repeated = x.repeat_interleave(times, 0)
    moments = (
        Moments(5, precision=precision).update(x[:10], weights=times[:10]).update(x[10:], weights=times[10:])
    )
    error = moments.scatter_error() / moments.divisor(0)
    assert spectral(moments.covariance(0) - covariance(repeated, 0)) <= error + 1e-15
    w = times.double()
    assert moments.divisor(1) == pytest.approx(float(w.sum() - w.square().sum() / w.sum()), rel=1e-14)
    assert moments.n_effective == pytest.approx(float(w.sum() ** 2 / w.square().sum()), rel=1e-14)
    assert moments.n_samples == int((times > 0).sum())
    assert moments.sum_weights == pytest.approx(w.sum().item(), rel=1e-15)


def test_weights_and_rows_without_mix():
    x = samples(30, 4)
    moments = Moments(4).update(x[:10]).update(x[10:], weights=torch.full((20,), 2.0))
    want = covariance(torch.cat([x[:10], x[10:], x[10:]]), 0)
    torch.testing.assert_close(moments.covariance(0), want, rtol=1e-12, atol=1e-12)


def test_masked_rows_are_selected():
    x = samples(24, 3, offset=1.0)
    mask = torch.arange(24) % 3 != 0
    dirty = x.clone()
    dirty[~mask] = math.nan
    for kind in (torch.bool, torch.int64, torch.float32):
        moments = Moments(3).update(dirty.reshape(2, 12, 3), mask=mask.reshape(2, 12).to(kind))
        within(moments, x[mask])
    assert Moments(3).update(x, mask=torch.zeros(24)).n_samples == 0


def test_groups_are_kept_apart():
    x = samples(60, 4, offset=2.0)
    moments = Moments(4, groups=3)
    for start in range(0, 60, 5):
        moments.update(x[start : start + 5], group=start // 5 % 3)
    within(moments, x)
    index = torch.arange(60) // 5 % 3
    for g in range(3):
        within(moments.group(g), x[index == g])
    alone = moments.group(1)
    alone.update(x)
    assert (alone.n_samples, moments.n_samples) == (80, 60)
    with pytest.raises(ValueError, match=r"`group` must be an integer in 0\.\.2, got 3"):
        moments.update(x, group=3)


def snapshot(moments):
    """Everything the statistic says, from a copy: reading sums what waits."""
    moments = copy.deepcopy(moments)
    return [
        moments.n_samples,
        moments.n_dropped,
        moments.scatter_error(),
        *moments.covariance().flatten().tolist(),
    ]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.full((5, 3), math.nan), {}, "5 of 5 samples with NaN or inf"),
        (torch.ones(5, 4), {}, r"must end in 3 features, got shape \(5, 4\)"),
        (torch.ones(3, 5), {}, r"pass `x\.mT`"),
        (torch.ones(5, 3), {"mask": torch.full((5,), 0.5)}, "`weights`"),
        (torch.ones(5, 3), {"mask": torch.ones(4)}, "leading shape"),
        (torch.ones(5, 3), {"weights": -torch.ones(5)}, "not negative"),
        (torch.ones(5, 3), {"weights": torch.ones(4)}, "leading shape"),
    ],
)
def test_a_refused_batch_leaves_no_trace(x, options, message):
    moments = Moments(3).update(samples(600, 3)).update(samples(7, 3))
    before = snapshot(moments)
    with pytest.raises(ValueError, match=message):
        moments.update(x, **options)
    assert snapshot(moments) == before


def test_bad_rows_can_be_dropped_and_are_counted():
    x = samples(50, 3)
    x[[4, 9]] = math.inf
    moments = Moments(3, nonfinite="drop").update(x)
    assert (moments.n_samples, moments.n_dropped) == (48, 2)
    within(moments, x[x.isfinite().all(1)])


def test_what_waits_is_a_copy_and_nothing_is_shared():
    x = samples(20, 3)
    given = x.clone()
    moments = Moments(3).update(given)
    given.zero_()
    within(moments, x)
    result = pt.decompose(moments)
    kept = result.mean.clone(), result.components.clone(), result.spectrum.clone()
    moments.update(samples(2000, 3, offset=9.0))
    moments.covariance()
    assert all(map(torch.equal, kept, (result.mean, result.components, result.spectrum)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_any_real_dtype(dtype):
    x = (samples(300, 4, offset=3.0) * 3).to(dtype) if dtype != torch.bool else samples(300, 4) > 0
    within(Moments(4).update(x), x)
    assert pt.decompose(Moments(4).update(x)).components.dtype == (
        torch.float32 if dtype.is_floating_point else torch.float64
    )


def test_inference_mode_and_autocast_change_nothing():
    x = samples(700, 8, dtype=torch.float32)
    want = Moments(8, precision="float32").update(x).covariance()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        moments = Moments(8, precision="float32").update(x.clone())
    assert torch.equal(moments.covariance(), want)
    moments.update(x)  # an inference tensor would refuse
    assert moments.n_samples == 1400


@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_the_callers_precision_is_left_as_it_was(setting):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with exact_products(torch.device("cpu")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == setting
        with pytest.raises(ValueError, match="inside"), exact_products(torch.device("cpu")):
            raise ValueError("inside")
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_copies_are_independent():
    x = samples(30, 3)
    moments = Moments(3).update(x)
    for other in (copy.deepcopy(moments), pickle.loads(pickle.dumps(moments))):
        other.update(x)
        assert (other.n_samples, moments.n_samples) == (60, 30)
        within(moments, x)


def test_second_moment_is_that_of_the_raw_rows():
    x = samples(500, 6, offset=7.0)
    raw = x.mT @ x / 500
    torch.testing.assert_close(Moments(6).update(x).second_moment(), raw, rtol=1e-13, atol=1e-11)


def test_nothing_to_divide_by_is_an_error():
    with pytest.raises(ValueError, match="no rows were counted"):
        Moments(3).covariance()
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        Moments(3).update(torch.ones(1, 3)).covariance()
    assert not Moments(3).update(torch.ones(1, 3)).covariance(0).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_features": 0}, "n_features"),
        ({"n_features": 3, "groups": 0}, "groups"),
        ({"n_features": 3, "precision": "float16"}, "precision"),
        ({"n_features": 3, "nonfinite": "zero"}, "nonfinite"),
        ({"n_features": 400_000}, "GiB"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Moments(**arguments)


def test_only_like_merges_with_like():
    with pytest.raises(ValueError, match="4 features in 1 groups, this statistic has 3"):
        Moments(3).merge(Moments(4))


def test_small_batches_of_several_dtypes_wait_together():
    batches = [torch.tensor([[70000], [1]]), torch.tensor([[1.5], [2.0]], dtype=torch.float16)]
    moments = Moments(1)
    for batch in batches:
        moments.update(batch)
    within(moments, torch.cat([batch.double() for batch in batches]))


def test_a_device_is_kept_for_the_first_rows():
    assert Moments(2, device="cpu").update(samples(3, 2).float()).product_dtype == torch.float64
    assert Moments(2, device="cpu").n_samples == 0


STATISTICS = ("moments.py", "row_stream.py", "rfactor.py", "scatter.py", "centred_sums.py", "intake.py")


class Interrupted:
    """Ctrl-C at the n-th line that runs in the statistics."""

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.endswith(STATISTICS):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def outcomes_of_interrupts(start, run):
    """What Ctrl-C at each line of `run` leaves of a statistic: "refused", or the rows that count."""
    x, outcomes = samples(900, 4), set()
    for at in range(1, 3000):
        statistic, before = start(x), sys.gettrace()
        sys.settrace(trace := Interrupted(at))
        try:
            run(statistic, x)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        if trace.left > 0:
            return outcomes  # this run was not interrupted: every line had its turn
        n = statistic.n_samples
        if getattr(statistic, "_torn", False):
            with pytest.raises(RuntimeError, match="interrupted while it counted rows"):
                statistic.covariance()
            outcomes.add("refused")
            continue
        outcomes.add(n)
        want = torch.cov(x[:n].mT)
        torch.testing.assert_close(statistic.covariance().view(4, 4), want, rtol=1e-9, atol=1e-12)
    pytest.fail("there are more lines than were interrupted")


KINDS = [pt.Moments, pt.RFactor, partial(HeadMoments, 1)]


@pytest.mark.parametrize("kind", KINDS, ids=["moments", "rfactor", "heads"])
def test_an_interrupt_never_counts_rows_twice_or_in_part(kind):
    outcomes = outcomes_of_interrupts(
        lambda x: kind(4).update(x[:300]), lambda statistic, x: statistic.update(x[300:600])
    )
    assert {300, 600} <= outcomes <= {300, 600, "refused"}


@pytest.mark.parametrize("kind", KINDS, ids=["moments", "rfactor", "heads"])
@pytest.mark.parametrize("waiting", [0, 40])
def test_an_interrupt_never_merges_in_part(kind, waiting):
    """Whatever waits, in the one or the other, goes on waiting or is counted."""

    def merge(statistic, x):
        other = kind(4).update(x[300:600])
        other.update(x[600 : 600 + waiting])
        statistic.merge(other)

    outcomes = outcomes_of_interrupts(lambda x: kind(4).update(x[:300]), merge)
    assert {300, 600 + waiting} <= outcomes <= {300, 600 + waiting, "refused"}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]], ids=["moments", "heads"])
@pytest.mark.parametrize("torn", ["one", "other"])
def test_torn_sums_are_not_merged(kind, torn, monkeypatch):
    """Nothing waits, so that nothing but the merge itself can refuse them."""
    pair = {name: kind(4).update(samples(600, 4)) for name in ("one", "other")}

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(centred_sums.CentredSums, "_shift", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair[torn].update(samples(600, 4))
    with pytest.raises(RuntimeError, match=r"interrupted while it counted rows.*start a new one"):
        pair["one"].merge(pair["other"])


def test_memory_that_runs_out_between_near_and_far_rows_counts_nothing_twice(monkeypatch):
    """The near rows are in: to halve the chunk and try again would count them twice."""
    x = samples(1000, 4, dtype=torch.float32)
    x[5] *= 100
    moments = Moments(4, precision="float32").update(x[:600])
    full, add = [], scatter.add_gram

    def once(target, rows, dtype):
        if len(rows) == 1 and not full:
            full.append(len(rows))
            raise torch.OutOfMemoryError("full")
        add(target, rows, dtype)

    monkeypatch.setattr(scatter, "add_gram", once)
    with pytest.raises(RuntimeError, match="hold a chunk of rows in part; start new ones"):
        moments.update(x)
    assert full == [1]
    with pytest.raises(RuntimeError, match="interrupted while it counted rows"):
        moments.covariance()


def test_a_group_is_saved_like_any_other():
    x = samples(30, 3)
    moments = Moments(3, groups=2).update(x[:10]).update(x[10:], group=1)
    for index, rows in enumerate((x[:10], x[10:])):
        again = Moments.from_state(*moments.group(index).to_state())
        within(again, rows)


class Full:
    """A function that finds no memory for more than `most` rows; the sizes that it was asked for."""

    def __init__(self, function, most, where):
        self.function, self.most, self.where = function, most, where
        self.taken, self.refused = [], []

    def __call__(self, *args):
        n = len(args[self.where])
        if n > self.most:
            self.refused.append(n)
            raise torch.OutOfMemoryError("full")
        self.taken.append(n)
        return self.function(*args)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_parts_are_halved_where_memory_runs_out(precision, weighted, monkeypatch):
    x = samples(CHUNK_ROWS + 900, 6, offset=1e3)
    w = torch.arange(1.0, len(x) + 1) if weighted else None
    want = Moments(6, precision=precision).update(x, weights=w)
    full = Full(scatter.add_gram, 700, 1)
    monkeypatch.setattr(scatter, "add_gram", full)
    moments = Moments(6, precision=precision).update(x[:40]).update(x, weights=w)
    moments.merge(Moments(6, precision=precision).update(x[40:]))  # what waits, too
    assert moments.n_samples == 2 * len(x)
    assert full.refused[:3] == [CHUNK_ROWS, CHUNK_ROWS // 2, CHUNK_ROWS // 4]
    assert sum(full.taken) == 2 * len(x)  # each row once
    monkeypatch.undo()
    want.merge(Moments(6, precision=precision).update(x))
    error = (moments.scatter_error() + want.scatter_error()) / want.divisor(0)
    assert spectral(moments.covariance(0) - want.covariance(0)) <= error
    short = Moments(6, precision=precision).update(x)
    short.update(x[:-1], weights=None if w is None else w[:-1])
    assert spectral(short.covariance(0) - want.covariance(0)) > error  # control: a row short


def test_halving_ends_and_counts_nothing(monkeypatch):
    x = samples(2000, 6)
    moments = Moments(6).update(x[:900])
    before = snapshot(moments)
    full = Full(scatter.add_gram, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(scatter, "add_gram", full)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            moments.update(x[900:])
    assert SMALLEST_PART // 2 <= full.refused[-1] <= SMALLEST_PART
    assert snapshot(moments) == before
    within(moments.update(x[900:]), x)


def test_halving_that_ends_amid_a_batch_is_told(monkeypatch):
    x, calls, add = samples(2000, 6), [], scatter.add_gram

    def full(target, rows, dtype):
        calls.append(len(rows))
        if len(rows) > 1000 or len(calls) > 2:
            raise torch.OutOfMemoryError("full")
        add(target, rows, dtype)

    monkeypatch.setattr(scatter, "add_gram", full)
    moments = Moments(6)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        moments.update(x)
    assert moments.n_samples == 1000
    with pytest.raises(RuntimeError, match="interrupted while it counted rows"):
        moments.covariance()


def test_an_rfactor_halves_its_parts_too(monkeypatch):
    x = samples(3000, 6, offset=5.0)
    full = Full(rfactor._centred, 800, 0)
    monkeypatch.setattr(rfactor, "_centred", full)
    factor = pt.RFactor(6).update(x)
    assert full.refused[:2] == [3000, 1500]
    assert sum(full.taken) == factor.n_samples == 3000
    torch.testing.assert_close(factor.covariance(), covariance(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [7, 511, 512, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_given_up_are_counted_as_an_update_counts_them(n, dtype):
    x = samples(n, 5, offset=3.0).to(dtype)
    given, updated = Moments(5).update(samples(3, 5)), Moments(5).update(samples(3, 5))
    given.absorb(x.to(torch.float64, copy=True), dtype)
    updated.update(x)
    assert torch.equal(given.covariance(), updated.covariance())
    assert given.input_dtype == updated.input_dtype == dtype
    assert given.n_samples == n + 3
