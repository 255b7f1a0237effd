"""Two views of one site: what is extreme, whatever the order, the batches, the padding and the memory."""

import copy
import pickle
from functools import partial
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from pca_torch import moments, scatter, tokens
from pca_torch.intake import CHUNK_ROWS
from pca_torch.moments import Moments
from pca_torch.row_stream import RowStream
from pca_torch.tokens import NormHistogram, TokenViews
from tests.cases.reported import compare, rank_for
from tests.support import reported_case, samples, truth

BIN = 2 ** (1 / 128) - 1  # largest distance of two norms in one bin, relative to the smaller


class Record:
    """A statistic that keeps every row it was given, so each row can be looked up afterwards."""

    def __init__(self, d: int) -> None:
        self.rows = torch.empty(0, d, dtype=torch.float64)

    @property
    def n_samples(self) -> int:
        return len(self.rows)

    @property
    def n_features(self) -> int:
        return self.rows.shape[1]

    @property
    def mean(self) -> Tensor:
        return self.rows.mean(0) if len(self.rows) else self.rows.new_zeros(self.rows.shape[1])

    @property
    def trace(self) -> float:
        return (self.rows - self.mean).square().sum().item()

    def update(self, x: Tensor, mask: Tensor | None = None) -> Self:
        self.rows = torch.cat([self.rows.to(x.device), (x if mask is None else x[mask]).double()])
        return self

    def merge(self, other: "Record") -> Self:
        return self.update(other.rows)

    def to_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"rows": self.rows}, {}

    def ordered(self) -> Tensor:
        """The rows by their first entry, which no two rows of our data share."""
        return self.rows[self.rows[:, 0].argsort()]


class Refusing(Record):
    """A statistic that takes no row above 50, as one that finds a fault `TokenViews` does not look for."""

    def update(self, x: Tensor, mask: Tensor | None = None) -> Self:
        if (x > 50).any():
            raise ValueError("`x` is refused.")
        return super().update(x, mask)


def views(d: int, **options) -> TokenViews[Record]:
    return TokenViews(partial(Record, d), **options)


def streamed(x: Tensor, size: int, **options) -> TokenViews[Record]:
    stream = views(x.shape[1], **options)
    for batch in x.split(size):
        stream.update(batch)
    return stream


def outliers(n: int = 2001, d: int = 8, share: float = 0.02, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of which a share, returned as booleans (n,), has 30 times the norm."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    far = torch.rand(n, generator=g) < share
    x[far] = torch.nn.functional.normalize(x[far]) * 30 * d**0.5
    return x, far


def with_norms(norms: Tensor, d: int = 4, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.nn.functional.normalize(torch.randn(len(norms), d, generator=g, dtype=torch.float64))
        * norms[:, None]
    )


def exact_threshold(norms: Tensor, units: float = 10) -> tuple[float, float]:
    """The threshold by exact medians, and how far a histogram of our bins may be from it.

    The histogram spreads every norm over its own bin, so it moves a norm X by at most h·X, h = BIN. The
    median m' stays in the bin of the median m: |m' - m| ≤ h·m. Half of the rows have |X - m| ≤ s, thus
    X ≤ m + s, and after the move |X' - m'| ≤ s + h(m + s) + h·m; so s' ≤ s + h(2m + s). The same backwards
    gives s ≤ s' + h(2m' + s'), hence s - s' ≤ h(2m' + s). The larger of MAD and bin width moves no more
    than its arguments, so |t' - t| ≤ h·m + units · 1.4826 · h(2m(1 + h) + s).
    """
    m = norms.median().item()
    s = (norms - m).abs().median().item()
    error = BIN * m + units * 1.4826 * BIN * (2 * m * (1 + BIN) + s)
    return m + units * max(1.4826 * s, BIN * m), error * (1 + 1e-9) + 1e-12 * m  # log2 rounds at bin edges


# ---------------------------------------------------------------- histogram


@pytest.mark.parametrize("power", [-60, 0, 60])
@pytest.mark.parametrize("shape", ["normal", "lognormal", "two_groups"])
def test_histogram_quantiles_are_within_the_width_of_a_bin(shape, power):
    z = torch.randn(4001, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    norms = {
        "normal": (10 + z).abs(),
        "lognormal": z.exp(),
        "two_groups": torch.where(z > 0.3, 40 + z, 3 + z.abs()),
    }
    norms = norms[shape] * 2.0**power
    histogram = NormHistogram().update(norms)
    m = norms.median().item()
    s = (norms - m).abs().median().item()
    assert abs(histogram.median() - m) <= BIN * m
    assert abs(histogram.mad() - s) <= BIN * (2 * m * (1 + BIN) + s)
    want, error = exact_threshold(norms)
    assert abs(histogram.threshold(10) - want) <= error
    assert abs(m + 10 * s - want) > error  # control: without 1.4826
    if shape != "normal":  # where a plain deviation is the same thing
        assert abs(m + 10 * norms.std().item() - want) > error


def test_histogram_of_a_stream_is_the_histogram_of_the_whole():
    norms = torch.randn(1000, generator=torch.Generator().manual_seed(3)).exp()
    whole = NormHistogram().update(norms)
    parts = [NormHistogram().update(part) for part in norms.flip(0).split([1, 0, 99, 900])]
    merged = parts[0].merge(parts[1]).merge(parts[2]).merge(parts[3])
    assert torch.equal(merged.counts, whole.counts)
    assert merged.n_samples == 1000
    assert merged.threshold(10) == whole.threshold(10)


def test_histogram_places_quantiles_inside_a_bin():
    inside = 1 + BIN * (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # evenly over the bin above 1
    histogram = NormHistogram().update(inside)
    assert histogram.median() == pytest.approx(1 + BIN / 2, rel=1e-12)
    assert histogram.mad() == pytest.approx(BIN / 4, rel=1e-9)


def test_histogram_takes_zeros_and_the_ends_of_the_range():
    assert NormHistogram().update(torch.zeros(3)).threshold(10) == 0
    assert NormHistogram().update(torch.tensor([0.0, 0.0, 5.0])).median() == 0
    histogram = NormHistogram().update(
        torch.tensor([1e-300, 1e300, 1e300, 2.0**127, 2.0**127], dtype=torch.float64)
    )
    assert histogram.n_samples == 5
    assert 2.0**127 <= histogram.median() <= 2.0**128


def test_histogram_refuses_what_is_no_norm():
    histogram = NormHistogram().update(torch.ones(2))
    with pytest.raises(ValueError, match=r"`norms` must be finite and not negative, got 2 of 3 others"):
        histogram.update(torch.tensor([1.0, -1.0, float("nan")]))
    assert histogram.n_samples == 2
    with pytest.raises(ValueError, match="no rows were counted"):
        NormHistogram().median()


# ---------------------------------------------------------------- which rows are extreme


def test_massive_token_of_a_reported_case():
    case = reported_case("massive_token")
    x = torch.from_numpy(case["x"]["X"])
    everything, typical, extreme = views(16).update(x[None]).result()
    got = {}
    for name, statistic in (("all", everything), ("dropped", typical)):
        variance = truth(statistic.rows)[1]
        ratio = (variance / variance.sum()).numpy()
        got |= {f"evr1_{name}": ratio[0], f"rank95_{name}": rank_for(ratio, 0.95)}
    assert set(got) == set(case["expect"])
    assert not compare(case, got)
    assert (extreme.count, extreme.n_samples, extreme.positions) == (1, 512, {0: 1})
    total = (x - x.mean(0)).square().sum()
    assert extreme.trace_share == pytest.approx(((x[0] - x.mean(0)).square().sum() / total).item(), rel=1e-12)
    assert extreme.exact
    assert not extreme.heavy_tailed


def test_sink_that_comes_first_and_alone_is_extreme():
    x = torch.from_numpy(reported_case("massive_token")["x"]["X"])
    stream = views(16).update(x[None, :1]).update(x[None, 1:], positions=torch.arange(1, 512)[None])
    _, typical, extreme = stream.result()
    assert torch.equal(typical.ordered(), x[1:][x[1:, 0].argsort()])
    assert extreme.positions == {0: 1}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clear_outliers_are_found_exactly(seed):
    x, far = outliers(seed=seed)
    everything, typical, extreme = views(8).update(x).result()
    assert 0 < extreme.count == far.sum()
    assert torch.equal(typical.ordered(), x[~far][x[~far, 0].argsort()])
    assert torch.equal(everything.ordered(), x[x[:, 0].argsort()])
    assert extreme.exact
    assert not extreme.positions  # rows without a sequence have no place in one
    mean = x.mean(0)
    share = (x[far] - mean).square().sum() / (x - mean).square().sum()
    assert extreme.trace_share == pytest.approx(share.item(), rel=1e-12)


@pytest.mark.parametrize("max_held", [128, 512])
@pytest.mark.parametrize("drift", [0.9, 1.0, 1.1])
def test_borderline_rows_differ_from_exact_medians_only_within_the_bound(drift, max_held):
    g = torch.Generator().manual_seed(4)
    norms = (0.7 * torch.randn(20001, generator=g, dtype=torch.float64)).exp()
    norms[10000:] *= drift  # so that the threshold of the first half is not that of the end
    x = with_norms(norms)
    norms = x.norm(dim=1)
    threshold, error = exact_threshold(norms)
    _, typical, extreme = streamed(x, 3000, max_held=max_held).result()
    assert extreme.exact
    kept = typical.rows.norm(dim=1)
    assert kept.max() <= threshold + error
    assert len(kept) >= (norms <= threshold - error).sum()
    assert (norms > extreme.threshold).sum() == extreme.count
    assert ((norms - threshold).abs() < error).sum() > 5  # the data do come close to the threshold


def test_heavy_tailed_norms_give_the_same_view_twice():
    g = torch.Generator().manual_seed(5)
    x = torch.randn(6001, 8, generator=g, dtype=torch.float64)
    x /= torch.randn(6001, 1, generator=g, dtype=torch.float64)  # multivariate Cauchy
    threshold, error = exact_threshold(x.norm(dim=1))
    assert (x.norm(dim=1) > threshold + error).double().mean() > 0.05
    everything, typical, extreme = views(8).update(x).result()
    assert extreme.heavy_tailed
    assert extreme.count > 0.05 * 6001
    assert typical is everything
    assert torch.equal(everything.ordered(), x[x[:, 0].argsort()])


@pytest.mark.parametrize("count", [50, 51])
def test_outliers_end_at_five_percent(count):
    x = torch.ones(1000, 3)
    x[:count] = 100
    extreme = views(3).update(x).result()[2]
    assert extreme.count == count
    assert extreme.heavy_tailed == (count > 50)


def test_norms_within_the_resolution_have_no_extremes():
    norms = torch.ones(1000, dtype=torch.float64)
    norms[:20] = 1.045  # 10 bins are 5.4 %, of which the place of the median in its bin takes 0.5 %
    assert views(4).update(with_norms(norms)).result()[2].count == 0
    norms[:20] = 1.07
    assert views(4).update(with_norms(norms)).result()[2].count == 20


@pytest.mark.parametrize("d", [3, 768])
def test_rows_of_equal_norm_have_no_extremes(d):
    g = torch.Generator().manual_seed(6)
    x = torch.nn.functional.normalize(torch.randn(2000, d, generator=g)) * d**0.5
    everything, typical, extreme = views(d).update(x).result()
    assert (extreme.count, extreme.trace_share, extreme.exact) == (0, 0.0, True)
    assert typical is everything
    assert everything.n_samples == 2000


@pytest.mark.parametrize("n", [1, 300])
def test_zero_rows_have_no_extremes(n):
    everything, _, extreme = views(5).update(torch.zeros(n, 5)).result()
    assert everything.n_samples == n
    assert (extreme.count, extreme.threshold, extreme.trace_share, extreme.exact) == (0, 0.0, 0.0, True)


# ---------------------------------------------------------------- one pass, any order, bounded memory


@pytest.mark.parametrize("size", [1, 7, 300, 1201])
def test_neither_order_nor_batch_size_matters(size):
    x, _ = outliers(n=1201, seed=7)
    _, want, extreme = streamed(x, 400).result()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(size))
    _, got, again = streamed(x[order], size).result()
    assert torch.equal(got.ordered(), want.ordered())
    assert (again.count, again.threshold) == (extreme.count, extreme.threshold)
    assert extreme.exact
    assert again.exact
    want, got = want.rows.mT.cov(), got.rows.mT.cov()
    assert (got - want).norm() <= 1e-12 * want.norm()  # N·u = 1.3e-13 and a factor for the centring


def test_a_small_store_is_exact_on_a_stationary_stream():
    x, far = outliers(n=4001, seed=8)
    stream = views(8, max_held=16)
    for start in range(0, 4001, 50):
        batch = x[start : start + 50]
        stream.update(batch, positions=torch.arange(len(batch)))
        assert len(stream._held) <= 16
    _, typical, extreme = stream.result()
    assert far.sum() > 16  # more than the store can hold
    assert extreme.exact
    assert torch.equal(typical.ordered(), x[~far][x[~far, 0].argsort()])
    places, counts = (torch.arange(4001) % 50)[far].unique(return_counts=True)
    assert extreme.positions == dict(zip(places.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("scales", [(1, 100), (100, 1)], ids=["growing", "shrinking"])
def test_a_stream_that_changes_scale_says_it_is_not_exact(scales):
    x = samples(5000, 8, decay=1.0, seed=9)
    x[:2000] *= scales[0]
    x[2000:] *= scales[1]
    assert not streamed(x, 250, max_held=64).result()[2].exact
    mixed = x[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    assert streamed(mixed, 250, max_held=64).result()[2].exact  # control: the same rows, mixed


def test_memory_is_bounded_when_every_row_is_far():
    stream = views(2, max_held=32)
    for power in range(40):  # each batch towers over everything before it
        stream.update(with_norms(torch.full((50,), 4.0**power, dtype=torch.float64), d=2))
        assert len(stream._held) <= 32
    assert stream.n_samples == stream.result()[0].n_samples == 2000


@pytest.mark.parametrize("cut", [1, 300, 2000])
@pytest.mark.parametrize("max_held", [16, 512])
def test_merge_of_two_parts_equals_one_pass(cut, max_held):
    x, _ = outliers(seed=10)
    x = x[None]
    places = torch.arange(2001)[None] % 10
    whole = views(8).update(x, positions=places)
    left = views(8, max_held=max_held).update(x[:, :cut], positions=places[:, :cut])
    right = views(8, max_held=max_held).update(x[:, cut:], positions=places[:, cut:])
    before = right.result()
    assert left.merge(right) is left
    assert len(left._held) <= max_held
    got, want = left.result(), whole.result()
    assert got[2].positions == want[2].positions
    assert (got[2].count, got[2].threshold, got[2].exact) == (want[2].count, want[2].threshold, True)
    assert torch.equal(got[1].ordered(), want[1].ordered())
    assert got[2].trace_share == pytest.approx(want[2].trace_share, rel=1e-12)
    assert right.result()[2] == before[2]  # the other one is left alone
    assert torch.equal(right.result()[0].rows, before[0].rows)


def test_merge_of_parts_on_another_scale_says_it_is_not_exact():
    typical = samples(3000, 8, decay=1.0, seed=9)
    large = samples(2000, 8, decay=1.0, seed=10) * 100  # typical there, extreme in the whole
    assert not streamed(typical, 500).merge(streamed(large, 500)).result()[2].exact
    spiked = outliers(2001, 8)[0]  # extreme there, typical in the whole
    large = samples(4000, 8, decay=1.0, seed=10) * 100
    assert not streamed(large, 500).merge(streamed(spiked, 500, max_held=16)).result()[2].exact


def test_merge_with_empty_views_changes_nothing():
    x, _ = outliers(seed=11)
    want = views(8).update(x).result()
    for got in (views(8).merge(views(8).update(x)), views(8).update(x).merge(views(8))):
        assert got.result()[2] == want[2]
        assert torch.equal(got.result()[1].ordered(), want[1].ordered())


def test_result_can_be_asked_in_the_middle():
    x, _ = outliers(seed=12)
    stream, undisturbed = views(8), views(8)
    for batch in x.split(500):
        stream.update(batch)
        undisturbed.update(batch)
        early = stream.result()
        early[0].update(torch.ones(1, 8))  # what was handed out is not shared
    assert stream.result()[2] == undisturbed.result()[2]
    assert torch.equal(stream.result()[1].rows, undisturbed.result()[1].rows)


# ---------------------------------------------------------------- masks, positions, inputs


def padded(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of 30, 100 and 170 tokens with a sink at place 0 and one at place 20, padded to 170."""
    g = torch.Generator().manual_seed(13)
    x = torch.full((3, 170, 6), 1e4, dtype=torch.float64)
    mask = torch.zeros(3, 170, dtype=torch.int64)
    kept = []
    for i, length in enumerate((30, 100, 170)):
        tokens = torch.randn(length, 6, generator=g, dtype=torch.float64)
        tokens[0, 1] += 500
        tokens[20, 2] += 300
        start = 170 - length if side == "left" else 0
        x[i, start : start + length] = tokens
        mask[i, start : start + length] = 1
        kept.append(tokens)
    return x, mask, torch.cat(kept)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_for_nothing_and_shifts_no_position(side, dtype):
    x, mask, kept = padded(side)
    everything, typical, extreme = views(6).update(x, mask.to(dtype)).result()
    assert torch.equal(everything.ordered(), kept[kept[:, 0].argsort()])
    assert (extreme.count, extreme.n_samples) == (6, 300)
    assert extreme.positions == {0: 3, 20: 3}
    assert typical.rows.norm(dim=1).max() < 100


def test_positions_can_be_given():
    x, mask, _ = padded("left")
    positions = torch.arange(170).expand(3, 170) + 1000
    extreme = views(6).update(x, mask, positions=positions).result()[2]
    assert extreme.positions == {1000: 1, 1020: 1, 1070: 1, 1090: 1, 1140: 1, 1160: 1}
    unknown = views(6).update(x, mask, positions=torch.full((3, 170), -1)).result()[2]
    assert (unknown.count, unknown.positions) == (6, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32])
def test_every_dtype_is_classified_by_float64_norms(dtype):
    x, far = outliers(seed=14)
    x = (x * 800).to(dtype)  # in float16 the norms of the extreme rows, 67882, would overflow
    original = x.clone()
    everything, typical, extreme = views(8).update(x).result()
    assert torch.equal(x, original)
    assert extreme.count == far.sum()
    assert sorted(everything.rows.tolist()) == sorted(x.tolist())
    assert sorted(typical.rows.tolist()) == sorted(x[~far].tolist())


def test_rows_outlive_the_activation_they_came_from():
    x, _ = outliers(n=600, seed=15)
    want = views(8).update(x[:100]).update(x[100:]).result()
    buffer, stream = x.clone(), views(8)
    stream.update(buffer[:100]).update(buffer[100:])
    buffer.fill_(float("nan"))
    assert torch.equal(stream.result()[0].rows, want[0].rows)


def test_arrays_and_tensors_with_gradients_are_taken():
    x, far = outliers(seed=16)
    assert views(8).update(x.numpy()).result()[2].count == far.sum()
    stream = views(8).update(x.clone().requires_grad_())
    assert not stream.result()[0].rows.requires_grad


def test_extreme_rows_go_to_their_own_statistic():
    made = []

    def make_extreme() -> Record:
        made.append(Record(8))
        return made[-1]

    x, far = outliers(seed=17)
    stream = TokenViews(partial(Record, 8), make_extreme).update(x[~far][:1000])
    stream.result()
    assert not made  # none extreme, none made
    stream.update(x)
    assert stream.result()[2].count == made[-1].n_samples == far.sum()


def test_state_made_in_inference_mode_can_be_used_outside():
    x, far = outliers(seed=18)
    with torch.inference_mode():
        stream = views(8).update(x[:1000].clone())
        early = stream.result()[0]
    assert not early.rows.is_inference()  # such a tensor would refuse to be updated in place out here
    assert not stream._held.values.is_inference()
    assert stream.update(x[1000:]).result()[2].count == far.sum()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda stream: pickle.loads(pickle.dumps(stream))])
def test_copies_go_on_by_themselves(copied):
    x, _ = outliers(seed=19)
    stream = views(8, max_held=16).update(x[:900])
    twin = copied(stream)
    want = stream.update(x[900:]).result()
    assert twin.n_samples == 900
    got = twin.update(x[900:]).result()
    assert got[2] == want[2]
    assert torch.equal(got[1].rows, want[1].rows)


# ---------------------------------------------------------------- with the statistic of the package


@pytest.mark.parametrize("size", [1, 90, 1201])
def test_views_of_moments_have_the_covariance_of_their_rows(size):
    x, far = outliers(n=1201, seed=23)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(size))
    stream = TokenViews(partial(Moments, 8, precision="float64"), max_held=32)
    for batch in x[order].split(size):
        stream.update(batch)
    everything, typical, extreme = stream.result()
    assert extreme.exact
    assert (everything.n_samples, typical.n_samples) == (1201, 1201 - far.sum())
    for got, rows in ((everything, x), (typical, x[~far])):
        want = rows.mT.cov()
        assert (got.covariance() - want).norm() <= 1e-12 * want.norm()
    mean = x.mean(0)
    share = (x[far] - mean).square().sum() / (x - mean).square().sum()
    assert extreme.trace_share == pytest.approx(share.item(), rel=1e-12)


def test_moments_made_in_inference_mode_and_pickled_go_on():
    x, far = outliers(seed=24)
    with torch.inference_mode():
        stream = TokenViews(partial(Moments, 8, precision="float64"))
        stream.update(x[:1000].clone())
        stream.result()
    stream = pickle.loads(pickle.dumps(stream)).update(x[1000:])
    typical = stream.merge(TokenViews(partial(Moments, 8, precision="float64"))).result()[1]
    want = x[~far].mT.cov()
    assert (typical.covariance() - want).norm() <= 1e-12 * want.norm()


def test_updates_do_not_read_the_statistic():
    class Buffering(Record):
        """As `Moments`, which has to sum the rows it has buffered whenever it is read."""

        reads = 0

        @property
        def mean(self) -> Tensor:
            self.reads += 1
            return super().mean

    made = []

    def make() -> Buffering:
        made.append(Buffering(4))
        return made[-1]

    stream = TokenViews(make)
    for row in samples(400, 4, seed=25):
        stream.update(row[None])
    assert len(made[0].rows) > 0
    assert made[0].reads == 1  # D, once


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("n", [400, 2001, 2 * CHUNK_ROWS + 77])
def test_rows_widened_once_give_the_statistic_of_rows_widened_by_itself(n, precision, dtype, monkeypatch):
    """`absorb` is a shortcut, not another answer: a statistic that lacks it gets the same views."""
    x, far = outliers(n, seed=26)
    x = x.to(dtype)
    kept = x.clone()
    fast, plain = (TokenViews(partial(Moments, 8, precision=precision)) for _ in range(2))
    fast.update(x[None]).update(x[: n // 2])
    with monkeypatch.context() as patch:
        patch.delattr(RowStream, "absorb")
        plain.update(x[None]).update(x[: n // 2])
    assert torch.equal(x, kept)  # only the copy is overwritten
    want = torch.cat([x, x[: n // 2]]).double()
    typical = torch.cat([x[~far], x[: n // 2][~far[: n // 2]]]).double()
    for views_of in (fast, plain):
        everything, others, extreme = views_of.result()
        assert (extreme.count, extreme.exact) == (far.sum() + far[: n // 2].sum(), True)
        assert everything.input_dtype == dtype
        for statistic, rows in ((everything, want), (others, typical)):
            error = statistic.scatter_error() / statistic.divisor()
            assert torch.linalg.matrix_norm(statistic.covariance() - rows.mT.cov(), 2) <= error
            assert statistic.n_samples == len(rows)
        less = typical[n // 20 :].mT.cov()  # control: a twentieth of the rows is missing
        wrong = torch.linalg.matrix_norm(others.covariance() - less, 2)
        assert wrong > others.scatter_error() / others.divisor()


def test_rows_are_widened_once(monkeypatch):
    """The cost that counts: neither a second float64 copy nor a second look for what is not finite."""
    x = outliers(600, seed=27)[0].float()
    stream = TokenViews(partial(Moments, 8)).update(x)
    monkeypatch.setattr(moments.Intake, "select", None)
    monkeypatch.setattr(Moments, "update", None)
    added = []
    original = scatter.Scatter.add
    monkeypatch.setattr(
        scatter.Scatter, "add", lambda s, rows, w, *, owned: added.append(owned) or original(s, rows, w)
    )
    stream.update(x)
    assert added == [True]


def test_the_running_threshold_is_taken_anew_for_an_eighth_more_rows(monkeypatch):
    x, far = outliers(4000, seed=28)
    seen, original = [], NormHistogram.threshold
    monkeypatch.setattr(
        NormHistogram, "threshold", lambda h, units: seen.append(h.n_samples) or original(h, units)
    )
    stream = streamed(x, 100)
    assert seen == [
        300,
        400,
        500,
        600,
        700,
        800,
        900,
        1100,
        1300,
        1500,
        1700,
        2000,
        2300,
        2600,
        3000,
        3400,
        3900,
    ]
    extreme = stream.result()[2]
    assert extreme.exact
    assert extreme.count == far.sum()


@pytest.mark.parametrize("given", [True, False])
def test_rows_selected_before_count_as_masked_ones(given):
    x, mask, _ = padded("left")
    places = torch.arange(170).expand(3, 170)
    masked = views(6).update(x, mask, positions=places if given else None).result()
    keep = mask.bool()
    chosen = views(6).update_rows(x[keep], positions=places[keep] if given else None).result()
    assert torch.equal(chosen[1].rows, masked[1].rows)
    assert chosen[2].positions == (masked[2].positions if given else {})
    assert chosen[2].count == masked[2].count == 6
    with pytest.raises(ValueError, match=r"`rows` must end in 6 features, got shape \(5, 7\)"):
        views(6).update_rows(torch.zeros(5, 7))
    with pytest.raises(ValueError, match=r"`positions` must be integers in the leading shape of `x`, \(5,\)"):
        views(6).update_rows(torch.zeros(5, 6), torch.zeros(4, dtype=torch.int64))


def test_parts_are_halved_where_memory_runs_out(monkeypatch):
    x, far = outliers(CHUNK_ROWS + 300, seed=29)
    want = TokenViews(partial(Moments, 8)).update(x[None]).result()
    add, taken = scatter.add_gram, []

    def full(target, rows, dtype):
        if len(rows) > 1100:
            raise torch.OutOfMemoryError("full")
        taken.append(len(rows))
        add(target, rows, dtype)

    monkeypatch.setattr(scatter, "add_gram", full)
    stream = TokenViews(partial(Moments, 8), max_held=2 * len(x)).update(x[None])
    waiting = len(stream._typical._intake)
    assert sum(taken) + waiting == len(x) - len(stream._held)  # each row once
    assert waiting < sum(taken)
    got = stream.result()
    assert got[2] == want[2]
    assert got[0].n_samples == stream.n_samples == len(x)
    for have, rows in ((got[0], x), (got[1], x[~far])):
        error = have.scatter_error() / have.divisor()
        assert torch.linalg.matrix_norm(have.covariance() - rows.mT.cov(), 2) <= error


def test_a_failure_amid_the_rows_is_told():
    class Failing(Record):
        """Keeps a part of the rows, then fails."""

        def update(self, x: Tensor, mask: Tensor | None = None) -> Self:
            super().update(x[:1])
            raise KeyboardInterrupt

    stream = TokenViews(partial(Failing, 4))
    stream.update(samples(200, 4, seed=1))  # held, all of them
    with pytest.raises(KeyboardInterrupt):
        stream.update(samples(200, 4, seed=2))
    for attempt in (stream.result, lambda: stream.update(samples(9, 4)), lambda: views(4).merge(stream)):
        with pytest.raises(RuntimeError, match="these views were interrupted while they counted rows"):
            attempt()


def test_a_long_batch_that_is_not_finite_leaves_no_trace():
    x = outliers(2 * CHUNK_ROWS, seed=30)[0].float()
    stream = views(8).update(x[:1000])
    before = stream.result()
    broken = x.clone()
    broken[-1, 3] = float("nan")  # in the last part
    with pytest.raises(ValueError, match=r"`x` has 1 of 8192 samples with NaN or inf\. Drop them"):
        stream.update(broken)
    assert stream.result()[2] == before[2]
    assert torch.equal(stream.result()[0].rows, before[0].rows)
    large = torch.full((5000, 8), 3e38)  # whose float32 sum is infinite
    assert views(8).update(large).n_samples == 5000


@pytest.mark.parametrize("n", [10, 2 * CHUNK_ROWS])
def test_squares_that_leave_float64_are_refused(n):
    x = torch.full((n, 8), 1e71, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`x` has samples of norm beyond 1e\+70"):
        views(8).update(x)
    assert views(8).update(x / 1e3).n_samples == n


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_taken_out_in_place(seed):
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 30, (), generator=g))
    rows, far = torch.arange(n).double()[:, None], torch.rand(n, generator=g) < torch.rand((), generator=g)
    want = rows[~far, 0].tolist()
    assert sorted(tokens._without(rows, far)[:, 0].tolist()) == want


@pytest.mark.gpu
def test_cuda_gives_the_views_of_the_cpu():
    x, mask, _ = padded("left")
    want, got = views(6, max_held=4).update(x, mask), views(6, max_held=4).update(x.cuda(), mask.cuda())
    assert got.result()[2].positions == want.result()[2].positions
    assert torch.equal(got.result()[1].ordered().cpu(), want.result()[1].ordered())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_batch_that_is_not_finite_leaves_no_trace(bad, dtype):
    x = outliers(seed=20)[0].to(dtype)
    broken = x[500:800].clone()
    broken[[3, 40], 2] = bad
    stream, undisturbed = views(8), views(8)
    for batch in x.split(400):
        stream.update(batch)
        undisturbed.update(batch)
        with pytest.raises(ValueError, match=r"`x` has 2 of 300 samples with NaN or inf\. Drop them"):
            stream.update(broken)
        assert stream.n_samples == undisturbed.n_samples
        assert stream.result()[2] == undisturbed.result()[2]
        assert torch.equal(stream.result()[0].rows, undisturbed.result()[0].rows)


def test_what_is_not_finite_may_be_masked():
    x, far = outliers(seed=21)
    x = torch.cat([torch.full((1, 8), float("nan"), dtype=torch.float64), x])
    mask = torch.arange(len(x)) > 0
    assert views(8).update(x, mask).result()[2].count == far.sum()
    assert views(8).update(x[:1], mask[:1]).n_samples == 0


def test_a_batch_the_statistic_refuses_leaves_no_trace():
    x = samples(900, 4, seed=22)
    stream = TokenViews(partial(Refusing, 4)).update(x[:600])
    before = stream.result()
    with pytest.raises(ValueError, match="`x` is refused"):
        stream.update(torch.cat([x[600:], torch.full((1, 4), 60.0)]))
    after = stream.result()
    assert after[2] == before[2]
    assert torch.equal(after[0].rows, before[0].rows)


def test_shapes_and_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"`x` must end in 8 features, got shape \(5, 9\)"):
        views(8).update(torch.zeros(5, 9))
    with pytest.raises(ValueError, match=r"`mask` must have the leading shape of `x`, \(2, 3\)"):
        views(8).update(torch.zeros(2, 3, 8), torch.ones(3, 2))
    with pytest.raises(
        ValueError, match=r"`positions` must be integers in the leading shape of `x`, \(2, 3\)"
    ):
        views(8).update(torch.zeros(2, 3, 8), positions=torch.arange(3))
    with pytest.raises(ValueError, match=r"`positions` must be integers .* got torch\.float32"):
        views(8).update(torch.zeros(2, 3, 8), positions=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"`other` must have 8 features, got 9"):
        views(8).merge(views(9))
    for max_held in (1, 2.5):
        with pytest.raises(ValueError, match="`max_held` must be an integer of at least 2"):
            views(8, max_held=max_held)


def test_a_result_needs_a_row():
    with pytest.raises(ValueError, match="no rows were counted"):
        views(8).result()
    with pytest.raises(ValueError, match="no rows were counted"):
        views(8).update(torch.zeros(2, 8), mask=np.zeros(2)).result()


def test_positions_of_heads_are_those_of_their_token():
    x = torch.randn(2, 60, 4, 3, generator=torch.Generator().manual_seed(0))
    x[0, 7, 3] *= 1e4
    extreme = TokenViews(lambda: Moments(3)).update(x).result()[2]
    assert dict(extreme.positions) == {7: 1}
