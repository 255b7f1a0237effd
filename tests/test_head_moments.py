"""`HeadMoments`: each head is what `Moments` of that head is, whatever the split, the order and the mask."""

import copy
import itertools
import json
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from pca_torch import head_scatter
from pca_torch.head_moments import HeadMoments
from pca_torch.heads import decompose_heads
from pca_torch.moments import Moments
from pca_torch.precision import unit_roundoff
from pca_torch.solvers import decompose
from pca_torch.tokens import TokenViews
from tests.support import samples, truth

H, E = 3, 8
U32, U64 = (unit_roundoff(dtype) for dtype in (torch.float32, torch.float64))
SPLITS = [[3000], [1, 7, 992, 2000], [2999, 1], [1] * 40 + [2960], [300] * 10]


def heads(n=3000, h=H, e=E, *, offset=0.0, dtype=torch.float64, seed=0):
    """(n, h, e) rows; each head has a spectrum, a rotation and a size of its own."""
    parts = [
        10.0**-i * samples(n, e, decay=0.6 + 0.1 * (i % 3), offset=offset, seed=97 * seed + i)
        for i in range(h)
    ]
    return torch.stack(parts, 1).to(dtype)


def spectral(matrices):
    return torch.linalg.matrix_norm(matrices, 2)


def within(statistic, x, ddof=1):
    """Every head is as close to the float64 covariance of its rows as the statistic says."""
    want = torch.stack([torch.cov(head.mT, correction=ddof) for head in x.double().unbind(1)])
    allowed = statistic.scatter_error() / (len(x) - ddof)
    assert (spectral(statistic.covariance(ddof) - want) <= allowed).all()
    mean = x.double().mean(0).flatten()
    torch.testing.assert_close(statistic.mean, mean, rtol=1e-13, atol=1e-13 * x.double().abs().max().item())


@pytest.mark.parametrize("split", SPLITS, ids=["one", "odd", "tail", "single", "even"])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_any_split_in_any_order_gives_the_covariance_of_each_head(split, offset, dtype, precision):
    x = heads(offset=offset, dtype=dtype)
    parts = x.split(split)
    statistic = HeadMoments(H, E, precision=precision)
    for i in torch.randperm(len(split), generator=torch.Generator().manual_seed(0)).tolist():
        statistic.update(parts[i])
    assert (statistic.n_samples, statistic.n_features) == (3000, H * E)
    within(statistic, x)
    # control: the one-pass formula in float32 is beyond the bound of every head
    one = x.float()
    mean = one.mean(0).double()
    raw = torch.einsum("nhi,nhj->hij", one, one).double() - 3000 * mean[:, :, None] * mean[:, None, :]
    want = torch.stack([torch.cov(head.mT) for head in x.double().unbind(1)])
    if offset:
        assert (spectral(raw / 2999 - want) > statistic.scatter_error() / 2999).all()


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_head_is_the_moments_of_its_rows(precision):
    """The same algebra in the same order: only the product is another call."""
    x = heads(offset=30.0, dtype=torch.float32)
    statistic, alone = HeadMoments(H, E, precision=precision), Moments(E, precision=precision)
    for part in x.split([5, 700, 2295]):
        statistic.update(part)
        alone.update(part[:, 1])
    one = statistic.head(1)
    assert isinstance(one, Moments)
    assert torch.equal(one.covariance(), statistic.covariance()[1])
    assert torch.equal(one.second_moment(), statistic.second_moment()[1])
    assert one.scatter_error() == statistic.scatter_error()[1].item()
    assert (one.n_samples, one.input_dtype, one.product_dtype) == (
        alone.n_samples,
        alone.input_dtype,
        alone.product_dtype,
    )
    allowed = (one.scatter_error() + alone.scatter_error()) / 2999
    assert spectral(one.covariance() - alone.covariance()) <= allowed
    one.update(x[:600, 1])
    assert (one.n_samples, statistic.n_samples) == (3600, 3000)


def test_trace_and_second_moment_are_those_of_the_rows():
    x = heads(offset=4.0)
    statistic = HeadMoments(H, E).update(x)
    want = (x - x.mean(0)).square().sum().item()
    assert statistic.trace == pytest.approx(want, rel=3000 * U64)
    raw = torch.einsum("nhi,nhj->hij", x, x) / 3000
    trace = raw.diagonal(dim1=1, dim2=2).sum(1)
    assert (spectral(statistic.second_moment() - raw) <= 2 * 3000 * U64 * trace).all()


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_bound_holds_and_is_useful(seed, precision):
    """Against sums in long double where that is longer; the bound is no bound of everything."""
    g = torch.Generator().manual_seed(seed)
    n, h, e = (int(torch.randint(low, high, (), generator=g)) for low, high in ((2, 400), (1, 6), (1, 9)))
    x = heads(n, h, e, offset=10.0 ** (seed % 4), dtype=torch.float32, seed=seed)
    statistic = HeadMoments(h, e, precision=precision).update(x)
    exact = x.double().numpy().astype(np.longdouble)
    exact = exact - exact.sum(0) / n
    scale = U32 if precision == "float32" else U64
    for i in range(h):
        want = exact[:, i].T @ exact[:, i]
        error = statistic.covariance(0)[i].numpy().astype(np.longdouble) * n - want
        off = np.linalg.norm(error.astype(np.float64), 2)
        bound = statistic.scatter_error()[i].item()
        assert off <= bound
        size = float(np.trace(want)) + n * float(x[:, i].double().mean(0).square().sum()) * U64 / scale
        assert bound <= 1e3 * scale * math.sqrt(n) * size


def test_rows_that_are_loud_in_one_head_do_not_drown_it_in_float32():
    x = heads(2048, 2, 16, dtype=torch.float32)
    x[::128, 1] += 1e4 * samples(1, 16, seed=9, dtype=torch.float32)
    statistic = HeadMoments(2, 16, precision="float32").update(x)
    within(statistic, x)
    want = torch.linalg.eigvalsh(torch.cov(x[:, 1].double().mT))
    centred = (x[:, 1].double() - x[:, 1].double().mean(0)).float()
    plain = torch.linalg.eigvalsh((centred.mT @ centred).double() / 2047)
    error = (torch.linalg.eigvalsh(statistic.covariance()[1]) - want)[:-1].abs().max()
    assert error < 1e-5 * want[-2] < (plain - want)[:-1].abs().max()  # control: one product for all rows


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_merging_in_any_order_is_updating(precision):
    x = heads(900, offset=50.0, dtype=torch.float32)
    parts = [HeadMoments(H, E, precision=precision).update(part) for part in x.split([10, 600, 290])]
    before = [part.covariance() for part in parts]
    for order in itertools.permutations(parts):
        whole = HeadMoments(H, E, precision=precision)
        for part in order:
            whole.merge(part)
        within(whole, x)
    assert all(torch.equal(part.covariance(), was) for part, was in zip(parts, before, strict=True))
    whole.merge(HeadMoments(H, E))
    within(whole, x)


def test_a_merge_is_as_exact_as_the_coarser_of_the_two():
    x = heads(900, offset=30.0, dtype=torch.float32)
    for first, second in itertools.product(["float32", "float64"], repeat=2):
        one, other = HeadMoments(H, E, precision=first), HeadMoments(H, E, precision=second)
        one.update(x[:500]).merge(other.update(x[500:]))
        within(one, x)
        assert (one.product_dtype == torch.float32) == ("float32" in {first, second})
        one.update(x[:600])
        within(one, torch.cat([x, x[:600]]))


@pytest.mark.parametrize("shape", [(24, H, E), (24, H * E), (2, 12, H, E), (2, 12, H * E)])
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_masked_rows_are_selected_in_either_shape(shape, kind):
    x = heads(24, offset=1.0)
    mask = torch.arange(24) % 3 != 0
    dirty = x.clone()
    dirty[~mask] = math.nan
    lead = (24,) if shape[0] == 24 else (2, 12)
    statistic = HeadMoments(H, E).update(dirty.reshape(shape), mask=mask.reshape(lead).to(kind))
    within(statistic, x[mask])
    assert HeadMoments(H, E).update(x, mask=torch.zeros(24)).n_samples == 0


def test_one_head_takes_rows_of_its_features_a_single_row_too():
    x = heads(40, 1, E)
    statistic = HeadMoments(1, E)
    for row in x.squeeze(1):
        statistic.update(row[None])
    within(statistic, x)
    assert HeadMoments(1, E).update(x.squeeze(1)[:, None], mask=torch.ones(40, 1)).n_samples == 40


def test_a_single_row_has_no_covariance():
    statistic = HeadMoments(H, E)
    with pytest.raises(ValueError, match="no rows were counted"):
        statistic.covariance()
    with pytest.raises(ValueError, match="no rows were counted"):
        statistic.second_moment()
    assert torch.equal(statistic.mean, torch.zeros(H * E, dtype=torch.float64))
    statistic.update(heads(1, offset=3.0))
    assert not statistic.covariance(0).any()
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        statistic.covariance()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.uint8])
def test_any_real_dtype_longer_than_a_chunk(dtype):
    x = (heads(5000, 2, 4, offset=3.0) * 3).to(dtype)
    statistic = HeadMoments(2, 4).update(x)
    within(statistic, x)
    assert statistic.input_dtype == (dtype if dtype.is_floating_point else torch.float64)
    assert statistic.head(0).input_dtype == statistic.input_dtype


def snapshot(statistic):
    """Everything the statistic says, from a copy: reading sums what waits."""
    statistic = copy.deepcopy(statistic)
    numbers = [statistic.scatter_error(), statistic.covariance().flatten(), statistic.mean]
    return [statistic.n_samples, statistic.n_dropped, *torch.cat(numbers).tolist()]


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.full((5, H, E), math.nan), {}, "5 of 5 samples with NaN or inf"),
        (torch.ones(5, H, E + 1), {}, rf"must end in {H * E} features, got shape \(5, 3, 9\)"),
        (torch.ones(5, H + 1, E), {}, rf"must end in {H * E} features, got shape \(5, 4, 8\)"),
        (torch.ones(5, H, E), {"mask": torch.full((5,), 0.5)}, "`mask` must hold 0 and 1 only"),
        (torch.ones(5, H, E), {"mask": torch.ones(5, H)}, r"leading shape of `x`, \(5,\), got \(5, 3\)"),
    ],
)
def test_a_refused_batch_leaves_no_trace(x, options, message):
    statistic = HeadMoments(H, E).update(heads(600)).update(heads(7))
    before = snapshot(statistic)
    with pytest.raises(ValueError, match=message):
        statistic.update(x, **options)
    assert snapshot(statistic) == before


def test_bad_rows_can_be_dropped_and_are_counted():
    x = heads(50)
    x[4, 0, 0], x[9, 2] = math.inf, math.nan
    statistic = HeadMoments(H, E, nonfinite="drop").update(x)
    assert (statistic.n_samples, statistic.n_dropped) == (48, 2)
    within(statistic, x[x.isfinite().flatten(1).all(1)])
    assert HeadMoments(H, E, nonfinite="drop").merge(statistic).n_dropped == 2


def test_nothing_is_shared():
    x = heads(20)
    given = x.clone()
    statistic = HeadMoments(H, E).update(given)
    given.zero_()
    within(statistic, x)
    copies = [statistic.covariance(), statistic.mean, statistic.second_moment(), statistic.scatter_error()]
    kept = [part.clone() for part in copies]
    statistic.update(heads(2000, offset=9.0)).covariance()
    assert all(map(torch.equal, copies, kept))
    for other in (copy.deepcopy(statistic), pickle.loads(pickle.dumps(statistic))):
        other.update(x)
        assert (other.n_samples, statistic.n_samples) == (2040, 2020)


def test_inference_mode_and_autocast_change_nothing():
    x = heads(700, dtype=torch.float32)
    want = HeadMoments(H, E, precision="float32").update(x).covariance()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        statistic = HeadMoments(H, E, precision="float32").update(x.clone())
    assert torch.equal(statistic.covariance(), want)
    assert statistic.update(x).n_samples == 1400  # an inference tensor would refuse


@pytest.mark.parametrize("n", [3, 2000])
def test_an_interrupt_loses_nothing_or_says_so(monkeypatch, n):
    """Rows that wait go on waiting; sums that hold a part of a batch are not used again."""
    x = heads(n)
    statistic = HeadMoments(H, E).update(heads(600)).update(x[:3])
    before = snapshot(statistic)
    add = head_scatter.HeadScatter._add_shifted

    def interrupted(self, *args):
        if n > 3 and len(args[0]) > 3:
            add(self, *args)  # the first chunk was counted
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(head_scatter.HeadScatter, "_add_shifted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _ = statistic.trace if n == 3 else statistic.update(x)
    if n == 3:
        assert snapshot(statistic) == before
        return
    for use in (lambda: statistic.trace, statistic.to_state, lambda: HeadMoments(H, E).merge(statistic)):
        with pytest.raises(RuntimeError, match=r"interrupted while it counted rows.*start a new one"):
            use()


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_chunk_is_halved_when_memory_runs_out(monkeypatch, precision):
    """Nothing is counted twice and nothing is torn; when not even a small part fits, that is said."""
    x = heads(3000, offset=3.0, dtype=torch.float32)
    statistic = HeadMoments(H, E, precision=precision).update(x[:700])
    limit, sizes, add = [400], [], head_scatter.HeadScatter.add

    def full(self, rows, *weights, **options):
        sizes.append(len(rows))
        if len(rows) > limit[0]:
            raise torch.OutOfMemoryError("full")
        add(self, rows, *weights, **options)

    monkeypatch.setattr(head_scatter.HeadScatter, "add", full)
    statistic.update(x[700:])
    assert max(sizes) > limit[0] > min(sizes)
    within(statistic, x)
    limit[0] = 0
    before = snapshot(statistic)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        statistic.update(x)
    limit[0] = 5000
    assert snapshot(statistic) == before


def test_memory_that_runs_out_between_near_and_far_rows_tears_the_sums(monkeypatch):
    """The near rows are in: to halve the chunk and try again would count them twice."""
    x = heads(1000, dtype=torch.float32)
    x[5] *= 100
    statistic = HeadMoments(H, E, precision="float32").update(x[:600])
    add = head_scatter.HeadScatter._add_shifted

    def full(self, part, near, weights, dtype):
        if dtype == torch.float64:
            raise torch.OutOfMemoryError("full")
        add(self, part, near, weights, dtype)

    monkeypatch.setattr(head_scatter.HeadScatter, "_add_shifted", full)
    with pytest.raises(RuntimeError, match="hold a chunk of rows in part; start new ones"):
        statistic.update(x)
    with pytest.raises(RuntimeError, match="interrupted while it counted rows"):
        statistic.covariance()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [20, 3000])
def test_rows_that_were_widened_before_give_the_same(dtype, n):
    x = heads(n, offset=3.0, dtype=dtype)
    want = HeadMoments(H, E).update(x)
    got = HeadMoments(H, E)
    got.absorb(x.double().flatten(1), dtype)
    assert snapshot(got) == snapshot(want)
    assert got.input_dtype == dtype
    assert HeadMoments(H, E, precision="float32").update(x).merge(got).n_samples == 2 * n


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 0, "width": 3}, "`heads` must be a positive integer, got 0"),
        ({"heads": 2, "width": 1.5}, r"`width` must be a positive integer, got 1\.5"),
        ({"heads": 3, "width": 4, "precision": "float16"}, "`precision` must be one of"),
        ({"heads": 3, "width": 4, "nonfinite": "zero"}, "`nonfinite` must be one of"),
        ({"heads": 10**9, "width": 100}, "capture fewer heads"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadMoments(**arguments)


def test_only_like_merges_with_like_and_heads_are_counted():
    with pytest.raises(
        ValueError, match="`other` has 2 heads of 12 features, this statistic has 3 heads of 8"
    ):
        HeadMoments(3, 8).merge(HeadMoments(2, 12))
    with pytest.raises(ValueError, match="`other` has 24 features in 1 groups, this statistic has 3 heads"):
        HeadMoments(3, 8).merge(Moments(24))
    for index in (3, -1, 1.0):
        with pytest.raises(ValueError, match=rf"`index` must be an integer in 0\.\.2, got {index}"):
            HeadMoments(3, 8).head(index)
    assert HeadMoments(3, 8).head(0).n_samples == 0


# ---------------------------------------------------------------- decomposition


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_each_head_is_decomposed_as_its_rows(center, offset):
    """Float64 SVD of the collected rows is the judge, within the error that the certificate states."""
    x = heads(400, offset=offset)
    found = decompose_heads(HeadMoments(H, E).update(x), center=center)
    other = decompose_heads(HeadMoments(H, E).update(x), center=not center)
    assert len(found) == H
    for head, rows, wrong in zip(found, x.unbind(1), other, strict=True):
        mean, variance, vectors = truth(rows)
        if not center:
            _, s, vectors = torch.linalg.svd(rows, full_matrices=False)
            mean, variance = torch.zeros_like(mean), s**2 / 399
        error = torch.tensor(head.certificate.variance_error)
        judged = error + 50 * E * U64 * variance[0]  # LAPACK's SVD is off by some u·σ₁ per value itself
        assert ((head.explained_variance - variance).abs() <= judged).all()
        assert ((wrong.explained_variance - variance).abs() > judged).any()  # control: the other centring
        assert (head.components * vectors).sum(1).abs().sub(1).abs().max() < 1e-9
        assert (head.centred, head.n_samples) == (center, 400)
        torch.testing.assert_close(head.mean, mean, rtol=1e-12, atol=1e-12)


def test_a_share_keeps_another_number_of_each_head():
    x = heads(2000)
    found = decompose_heads(HeadMoments(H, E).update(x), 0.9)
    want = []
    for rows in x.unbind(1):
        _, variance, _ = truth(rows)
        want.append(int((variance.cumsum(0) / variance.sum() < 0.9).sum()) + 1)
    assert [head.n_components for head in found] == want
    assert len(set(want)) > 1
    assert all(len(head.spectrum) == E for head in found)


def test_a_head_goes_on_to_any_solver_with_its_certificate():
    statistic = HeadMoments(H, E).update(heads(500))
    for one, head in zip(decompose_heads(statistic, 2), range(H), strict=True):
        result = decompose(statistic.head(head), 2)
        assert torch.equal(result.components, one.components)
        assert result.certificate == one.certificate
    with pytest.raises(ValueError, match=r"`n_components` must be in 0\.\.8, the smaller of 500 samples"):
        decompose_heads(statistic, 9)


# ---------------------------------------------------------------- both views, and as a file


def sinks(n=600):
    """(4, n / 4, H·E) rows; the first token of each sequence is a hundred times longer."""
    x = heads(n, dtype=torch.float32).reshape(4, n // 4, H * E).clone()
    x[:, 0] *= 100
    return x


def test_both_views_of_the_heads_come_from_one_pass():
    x = sinks()
    views = TokenViews(partial(HeadMoments, H, E))
    for part in x.split(2):
        views.update(part)
    every, typical, extreme = views.result()
    within(every, x.reshape(-1, H, E))
    within(typical, x[:, 1:].reshape(-1, H, E))
    assert (extreme.count, extreme.positions) == (4, {0: 4})


STREAM = [[1], [7, 600], [511, 1, 3], [512], [300, 300, 300], [4100, 5], []]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("before", STREAM, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_statistic_goes_on_bit_for_bit(precision, before, dtype):
    x = heads(5000, 2, 4, offset=2.0, dtype=dtype)
    statistic = HeadMoments(2, 4, precision=precision, nonfinite="drop")
    first = x[: sum(before)].split(before) if before else []
    for part in first:
        statistic.update(part)
    tensors, facts = statistic.to_state()
    again = HeadMoments.from_state(
        {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))
    )
    for one in (statistic, again):
        for part in (x[:90], x[:700], x[5:6]):
            one.update(part)
    assert torch.equal(again.covariance(), statistic.covariance())
    assert snapshot(again) == snapshot(statistic)
    assert (again.precision, again.product_dtype, again.input_dtype) == (
        statistic.precision,
        statistic.product_dtype,
        statistic.input_dtype,
    )
    assert again.merge(statistic).n_samples == 2 * statistic.n_samples


def test_an_empty_statistic_is_saved_too():
    again = HeadMoments.from_state(*HeadMoments(H, E, precision="float32").to_state())
    assert (again.heads, again.width, again.precision, again.n_samples) == (H, E, "float32", 0)


NO_ROWS = {"n_features": H * E, "nonfinite": "raise", "n_dropped": 0, "dtype": None}
LIES = [
    ({"kind": "moments"}, {}, "`kind` must be"),
    ({"heads": 2}, {}, "2 heads of 8 must make 24 features"),
    ({"heads": 4, "width": 6}, {}, "must be of 4 heads of 6 features"),
    ({"heads": 0}, {}, "`heads` must be"),
    ({"precision": "half"}, {}, "`precision` must be"),
    ({"product_dtype": None}, {}, r"holds 'sums\.mean', which this"),
    ({"intake": NO_ROWS}, {}, "must both have a dtype"),
    ({"more": 1}, {}, "`more`|'more'"),
    ({}, {"sums.mean": torch.full((H, E), math.nan, dtype=torch.float64)}, "`mean` holds NaN"),
    ({}, {"sums.mean": torch.zeros(0, E, dtype=torch.float64)}, "`mean` must have at least one feature"),
    ({}, {"sums.slip": -torch.ones(H, E, dtype=torch.float64)}, "`slip` must be"),
    ({}, {"sums.scatter": torch.ones(H, E, dtype=torch.float64)}, "`scatter` must be"),
    ({}, {"sums.scatter": -torch.ones(H, 36, dtype=torch.float64)}, "head 0: `scatter` must have no entry"),
]


@pytest.mark.parametrize(("facts", "tensors", "message"), LIES, ids=[str(lie[2])[:20] for lie in LIES])
def test_a_state_that_no_statistic_has_is_refused(facts, tensors, message):
    saved, told = HeadMoments(H, E).update(heads(600)).to_state()
    assert HeadMoments.from_state(saved, told).n_samples == 600
    with pytest.raises(ValueError, match=message):
        HeadMoments.from_state(saved | tensors, told | facts)
