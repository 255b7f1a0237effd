"""What several processes counted, merged on the first, is what one process counts that sees all rows."""

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pca_torch.distributed import merge_on_first, sum_counts
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.site_statistic import SiteStatistic
from pca_torch.statistic_file import load_statistics, save_statistics
from pca_torch.statistic_kinds import rebuilt
from pca_torch.tokens import TokenViews
from tests.support import samples

D, HEADS = 12, 3
SIZES = [2, 3]  # ranks: a group of two, and all
SEQUENCES = {2: [5, 9], 3: [5, 0, 9]}  # of 60 tokens, on each rank: of three the middle one has none
SITES = {"all": None, "heads": HEADS}  # seen by every rank that has tokens
NAMES = ["all", "heads", "only last", "only first", "nowhere"]
PATIENCE = 120  # seconds, for what takes five


# --- processes -----------------------------------------------------------------------------------------


def start_ranks(work: Callable[..., None], size: int, *words: Any) -> None:
    """`work(rank, *words)` in `size` new processes, joined by gloo; all must end well."""
    context = multiprocessing.get_context("spawn")
    folder = Path(words[0])
    ranks = [
        context.Process(target=_rank, args=(work, rank, size, folder / "store", words))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE
    try:
        for process in ranks:
            process.join(max(0, end - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()


def _rank(work: Callable[..., None], rank: int, size: int, store: Path, words: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the name of the host may not be known
    wait = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
    try:
        work(rank, *words)
    finally:
        dist.destroy_process_group()


# --- what each rank has --------------------------------------------------------------------------------


def activations(rank: int, size: int) -> torch.Tensor:
    """(B, 60, D) float32 with a sink at the first position of each sequence, larger on higher ranks."""
    b = SEQUENCES[size][rank]
    x = samples(b * 60, D, decay=0.8, offset=2.0, seed=rank, dtype=torch.float32).view(b, 60, D)
    x[:, 0] *= 60 + 10 * rank
    return x


def keep(rank: int, size: int) -> torch.Tensor:
    """(B, 60) booleans: sequences of several lengths, padded on the right."""
    b = SEQUENCES[size][rank]
    return torch.arange(60) < 60 - 7 * torch.arange(b)[:, None] % 40


def counted(rank: int, size: int, seen: bool = True, heads: int | None = None) -> SiteStatistic:
    """What a site of one rank holds."""
    site = SiteStatistic(heads)
    if seen and SEQUENCES[size][rank]:
        site.update(activations(rank, size), mask=keep(rank, size))
    return site


def statistics(rank: int, size: int) -> dict[str, SiteStatistic]:
    sites = {name: counted(rank, size, heads=heads) for name, heads in SITES.items()}
    sites["only last"] = counted(rank, size, rank == size - 1)
    sites["only first"] = counted(rank, size, rank == 0)
    return sites | {"nowhere": SiteStatistic()}


def state_of(site: SiteStatistic | None) -> Any:
    """All that a site holds, to be compared."""
    if site is None or site.views is None:
        return None
    tensors, facts = site.views.to_state()
    return {name: tensor.tolist() for name, tensor in tensors.items()}, facts


def error_of(job: Callable[[], object]) -> str:
    try:
        job()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# --- the work of one rank ------------------------------------------------------------------------------


def work(rank: int, folder: Path) -> None:
    """All that is tried, of three ranks and then of the last two of them as a group."""
    pair = dist.new_group([1, 2])
    for size, group, place in ((3, None, rank), (2, pair, rank - 1)):
        if place < 0:
            (folder / "outside").write_text(error_of(lambda: merge_on_first({}, pair)))
            continue
        told = found_by(place, size, group, folder / f"{size}.st")
        (folder / f"{size}.{place}.json").write_text(json.dumps(told))


def found_by(rank: int, size: int, group: Any, path: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    own = statistics(rank, size)
    before = {name: own[name].n_samples for name in own}
    merged = merge_on_first(own, group)
    told["has"] = merged is not None
    told["own"] = before == {name: own[name].n_samples for name in own}
    told["again"] = _merged_again(own, merged, group)
    if merged is not None:
        told["names"] = list(merged)
        told["counted"] = {name: site.n_samples for name, site in merged.items()}
        told["heads"] = {name: site.heads for name, site in merged.items()}
        views = {name: site.views for name, site in merged.items() if site.views is not None}
        save_statistics(path, views)
    told["counts"] = sum_counts({"kept": rank + 1, f"rank {rank}": 5}, group)
    told["errors"] = _errors(rank == size - 1, group)
    told["plain"] = _of_other_kinds(rank, group)
    return told


def _merged_again(own: Any, merged: Any, group: Any) -> bool:
    """A second call gives the same bits: nothing of the first has got into what the ranks hold."""
    again = merge_on_first(own, group)
    if merged is None or again is None:
        return merged is again
    return all(state_of(again[name]) == state_of(merged[name]) for name in merged)


def _errors(last: bool, group: Any) -> dict[str, str]:
    """What each rank is told when one of them is at fault, the last."""
    x = torch.randn(20, D)
    sites = {"a": Moments(D).update(x)} | ({"b": Moments(D)} if last else {})
    wide = {"a": Moments(D + last).update(torch.randn(20, D + last))}
    torn = {"a": Moments(D).update(x), "b": TokenViews(partial(Moments, D)).update(x)}
    torn["b"]._torn = last
    kinds = {"a": Moments(D).update(x) if last else HeadMoments(HEADS, D // HEADS).update(x)}
    cases = {"sites": sites, "features": wide, "torn": torn, "kinds": kinds}
    return {name: error_of(partial(merge_on_first, case, group)) for name, case in cases.items()}


def _of_other_kinds(rank: int, group: Any) -> Any:
    """Statistics without views, with weights, dropped rows and rows that wait; None is no rows."""
    x = torch.full((4, D), float(rank))
    x[0, 0] = torch.nan
    dropping = Moments(D, nonfinite="drop").update(x, weights=torch.full((4,), 0.5))
    heads = HeadMoments(HEADS, D // HEADS).update(x[1:]).discount(0.5)
    merged = merge_on_first({"m": dropping, "h": heads, "n": None if rank == 0 else dropping}, group)
    if merged is None:
        return None
    found = [[site.n_samples, site.divisor(0)] for site in merged.values()]
    return [*found, merged["m"].n_dropped, merged["m"].mean[1].item()]


# --- what they say -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    start_ranks(work, 3, path)
    return path


def told(folder, size):
    return [json.loads((folder / f"{size}.{rank}.json").read_text()) for rank in range(size)]


def own_views(rank, size, heads=None):
    """A copy, as a message would be."""
    views = counted(rank, size, heads=heads).views
    return views and rebuilt(*views.to_state())


def merged_in(order, size, heads=None):
    """Views of the ranks in some order; the first absorbs the others."""
    parts = [views for rank in order if (views := own_views(rank, size, heads))]
    for part in parts[1:]:
        parts[0].merge(part)
    return parts[0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SITES)
def test_the_merge_is_that_of_the_tree_bit_for_bit(folder, size, name):
    """What comes absorbs what is there: 1 absorbs 0, and 2 absorbs both."""
    found = load_statistics(folder / f"{size}.st")[name]
    tensors, facts = merged_in(range(size)[::-1], size, SITES[name]).to_state()
    if size == 3:
        tensors, facts = own_views(2, 3, SITES[name]).merge(own_views(0, 3, SITES[name])).to_state()
    got, said = found.to_state()
    assert said == facts
    assert tensors.keys() == got.keys()
    assert all(torch.equal(tensor, got[key]) for key, tensor in tensors.items())


def spectral(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SITES)
def test_it_is_one_process_that_saw_all_rows(folder, size, name):
    """Both views, within what either certificate allows; the extreme rows are the same."""
    alone = SiteStatistic(SITES[name])
    for rank in range(size):
        if SEQUENCES[size][rank]:
            alone.update(activations(rank, size), mask=keep(rank, size))
    found = load_statistics(folder / f"{size}.st")[name].result()
    want = alone.views.result()
    assert (found[2].count, found[2].positions) == (14, {0: 14})
    assert (want[2].count, want[2].positions) == (14, {0: 14})
    assert (found[2].exact, want[2].exact, want[2].heavy_tailed) == (True, True, False)
    assert found[2].threshold == want[2].threshold
    assert found[2].trace_share == pytest.approx(want[2].trace_share, rel=1e-12)
    part = counted(0, size, heads=SITES[name]).views.result()
    for one, other, less in zip(found[:2], want[:2], part[:2], strict=True):
        assert one.n_samples == other.n_samples
        allowed = (one.scatter_error() + other.scatter_error()) / other.divisor()
        off = spectral(one.covariance() - other.covariance())
        assert (off <= torch.as_tensor(allowed)).all()
        assert (spectral(less.covariance() - other.covariance()) > torch.as_tensor(allowed)).all()  # control


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SITES)
def test_any_order_is_within_the_bounds(folder, size, name):
    found = load_statistics(folder / f"{size}.st")[name].result()
    for order in itertools.permutations(range(size)):
        want = merged_in(order, size, SITES[name]).result()
        assert (found[2].count, found[2].threshold) == (want[2].count, want[2].threshold)
        for one, other in zip(found[:2], want[:2], strict=True):
            allowed = (one.scatter_error() + other.scatter_error()) / other.divisor()
            assert (spectral(one.covariance() - other.covariance()) <= torch.as_tensor(allowed)).all()


@pytest.mark.parametrize("size", SIZES)
def test_a_site_that_few_ranks_saw_is_theirs(folder, size):
    first, *others = told(folder, size)
    rows = [int(keep(rank, size).sum()) for rank in range(size)]
    assert first["names"] == NAMES
    assert first["counted"] == dict(zip(NAMES, [sum(rows), sum(rows), rows[-1], rows[0], 0], strict=True))
    assert first["heads"] == dict.fromkeys(NAMES) | {"heads": HEADS}
    saved = load_statistics(folder / f"{size}.st")
    for name, rank in (("only last", size - 1), ("only first", 0)):
        assert state_of_views(saved[name]) == state_of(counted(rank, size))
    assert not any(other["has"] for other in others)


def state_of_views(views):
    site = SiteStatistic()
    site.views = views
    return state_of(site)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_keeps_its_own(folder, size):
    assert all(rank["own"] and rank["again"] for rank in told(folder, size))


@pytest.mark.parametrize("size", SIZES)
def test_counts_are_added_by_name_on_every_rank(folder, size):
    want = {"kept": sum(range(size + 1))} | {f"rank {rank}": 5 for rank in range(size)}
    assert [rank["counts"] for rank in told(folder, size)] == [want] * size


@pytest.mark.parametrize("size", SIZES)
def test_what_fails_on_one_rank_fails_on_all_and_what_follows_works(folder, size):
    last = size - 1
    want = {
        "sites": "ValueError: `statistics` must hold the same sites on every rank, got 'b' on rank "
        f"{last} and not on rank 0 of the group; capture the same sites everywhere.",
        "features": "RuntimeError: rank 0 of the group could not merge site 'a': ValueError: `other` has "
        f"{D} features in 1 groups, this statistic has {D + 1} features in 1 groups; merge statistics of the "
        "same kind.",
        "torn": f"RuntimeError: rank {last} of the group could not merge site 'b': RuntimeError: these views "
        "were interrupted while they counted rows, and hold some of them in part; start new ones.",
        "kinds": "RuntimeError: rank 0 of the group could not merge site 'a': ValueError: `other` has "
        f"{HEADS} heads of {D // HEADS} features, this statistic has {D} features in 1 groups; merge "
        "statistics of the same kind.",
    }
    assert [rank["errors"] for rank in told(folder, size)] == [want] * size


def test_a_rank_outside_of_the_group_is_told(folder):
    message = "ValueError: `group` must hold this rank, got one that does not; call on its members alone."
    assert (folder / "outside").read_text() == message


@pytest.mark.parametrize("size", SIZES)
def test_statistics_without_views_and_none_at_all(folder, size):
    first, *others = (rank["plain"] for rank in told(folder, size))
    mean = sum(range(size)) / size
    rows, weight = 3 * size, 1.5 * size
    assert first == [[rows, weight], [rows, weight], [rows - 3, weight - 1.5], size, mean]
    assert others == [None] * (size - 1)


# --- one process ---------------------------------------------------------------------------------------


def test_one_process_has_what_it_gave(tmp_path):
    sites = {"a": Moments(D), "b": SiteStatistic(), "c": None}
    assert merge_on_first(sites) is sites
    assert sum_counts({"kept": 3}) == {"kept": 3}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert merge_on_first(sites) is sites
        assert sum_counts({"kept": 3}) == {"kept": 3}
    finally:
        dist.destroy_process_group()
