"""The benchmark against the peers: every method does what it should, and what is said of it is true."""

import json
import math
import re
import warnings

import numpy as np
import pytest
import torch

from tests.support import BENCH, bench_module, bench_script
from tests.support import truth as svd_truth

U32, U64 = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64))


names = (
    "judge",
    "methods",
    "pairs",
    "peer_tables",
    "peers",
    "picture",
    "rounds",
    "rows",
    "table",
    "workloads",
)
judge, methods, pairs, peer_tables, peers, picture, rounds, peer_rows, table, workloads = map(
    bench_module, names
)
TINY = {name: workloads.tiny(workload) for name, workload in workloads.WORKLOADS.items()}


def data_of(workload, spectrum="power"):
    """The samples as a method takes them, and their truth."""
    x, truth = peers.data_and_truth(workload.shape, spectrum, workload.lifted)
    return (list(x.split(workload.batch)) if workload.kind == "batches" else x), truth


# --- rounds ------------------------------------------------------------------------------------------
class Stage:
    """Callables that take as long as they are told, on a clock that nothing else moves."""

    def __init__(self, **costs):
        self.time, self.log = 0.0, []
        self.calls = {name: self.call(name, iter(seconds)) for name, seconds in costs.items()}

    def call(self, name, seconds):
        def work():
            self.log.append(name)
            self.time += next(seconds)
            return f"{name} {len(self.log)}"

        return work

    def play(self, rounds_=3, deadline=1000.0):
        return rounds.interleaved(self.calls, rounds_, deadline, clock=lambda: self.time)


def test_methods_run_in_turn_and_ratios_are_taken_within_rounds():
    stage = Stage(a=[4, 1, 3], b=[2, 2, 2], c=[1, 1, 1])
    runs = stage.play()
    turns = [stage.log[i : i + 3] for i in (0, 3, 6)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 3
    assert turns[0] == ["a", "b", "c"]
    assert len(set(map(tuple, turns))) > 1  # the neighbours change
    assert runs["a"].seconds == [4, 1, 3]
    assert (runs["a"].median, runs["a"].answer) == (3, "a 1")
    assert runs["a"].ratios(runs["b"]) == [2, 0.5, 1.5]


def test_a_slow_method_runs_once():
    stage = Stage(a=[1, 1, 1], slow=[rounds.SLOW + 1], slower=[1, rounds.SLOW + 1])
    runs = stage.play()
    much = rounds.SLOW + 1
    assert runs["slow"].seconds == [much, None, None]
    assert runs["slower"].seconds == [1, much, None]  # what it took last counts
    assert runs["slow"].ratios(runs["a"]) == [much]
    patient = Stage(slow=[much] * 3, a=[1, 1, 1])
    assert rounds.interleaved(patient.calls, 3, 1e3, slow=much, clock=lambda: 0.0)["slow"].seconds == [0] * 3


def test_a_method_that_raises_says_so_and_the_others_go_on():
    stage = Stage(a=[1, 1, 1])

    def broken():
        raise TypeError("no n_components=0.95\nand more")

    runs = rounds.interleaved({"broken": broken, **stage.calls}, 3, 1000.0, clock=lambda: stage.time)
    assert runs["broken"].failure == "TypeError: no n_components=0.95"
    assert not runs["broken"].taken
    assert runs["a"].seconds == [1, 1, 1]


def test_a_method_that_raises_later_says_so_too():
    stage, calls = Stage(a=[1, 1, 1]), iter([2.0])

    def once():
        return next(calls)

    runs = rounds.interleaved({"once": once, **stage.calls}, 3, 1000.0, clock=lambda: stage.time)
    assert runs["once"].failure == "StopIteration: no reason given"
    assert runs["once"].answer is None
    assert runs["once"].seconds == [0, None, None]
    assert runs["a"].seconds == [1, 1, 1]


def test_nothing_starts_after_the_deadline():
    stage = Stage(a=[5, 5, 5], b=[3], c=[1])
    runs = stage.play(deadline=8.0)
    assert stage.log == ["a", "b"]
    assert runs["c"].failure == rounds.OUT_OF_TIME
    assert not runs["c"].taken


def test_a_round_that_does_not_fit_is_of_the_quickest():
    stage = Stage(a=[1, 1, 1], b=[4, 4, 4], c=[2, 2, 2])
    runs = stage.play(deadline=7.0 + 7.0 + 3.0)  # of a third round a and c fit
    assert runs["a"].seconds == [1, 1, 1]
    assert runs["b"].seconds == [4, 4, None]
    assert runs["c"].seconds == [2, 2, 2]
    two = Stage(a=[1, 1, 1], b=[4, 4, 4]).play(deadline=11.5)  # one alone has nothing to be compared with
    assert two["a"].seconds == [1, 1]


def test_a_round_that_takes_longer_than_it_looked_ends_at_the_deadline():
    stage = Stage(a=[1, 9], b=[1, 9])
    runs = stage.play(deadline=5.0)
    assert sorted([runs["a"].seconds, runs["b"].seconds], key=str) == [[1, 9], [1, None]]


def test_time_is_shared_among_what_is_to_come():
    todo = [(workload, "power") for workload in workloads.WORKLOADS.values()]
    weights = [workload.weight for workload, _ in todo]
    at = 0.0
    for part in range(len(todo)):  # each uses all it has: they end together, by weight
        end = peers.deadline_of(part, todo, at, 600.0)
        assert end - at == pytest.approx(600 * weights[part] / sum(weights))
        at = end
    assert at == pytest.approx(600)
    assert peers.deadline_of(1, todo, 700.0, 600.0) <= 700.0  # nothing is left: nothing starts
    unspent = peers.deadline_of(1, todo, 1.0, 600.0) - 1.0
    assert unspent > 600 * weights[1] / sum(weights)


def test_the_default_asks_for_all_that_is_promised():
    asked = peers.parts(list(workloads.WORKLOADS.values()), None)
    assert {spectrum for _, spectrum in asked} == {"power", "flat", "massive", "offset"}
    assert set(TINY) == {"top", "share", "all", "streaming", "heads", "wide"}
    assert peers.parts([TINY["top"]], ["flat"]) == [(TINY["top"], "flat")]


# --- the judge ---------------------------------------------------------------------------------------
def exact(workload, spectrum="power"):
    x, truth = data_of(workload, spectrum)
    _, variances, components = svd_truth(x if workload.kind == "rows" else torch.cat(x))
    return truth, variances, components


def rounding(workload):
    """Of a share in float64: products and a spectrum are each off by (N + D)·u of the trace, K are summed."""
    n, d = workload.shape[-2:]
    return 2 * d * (n + d) * U64


@pytest.mark.parametrize("spectrum", ["power", "flat", "massive", "offset"])
def test_the_right_directions_miss_nothing_and_others_what_they_should(spectrum):
    top = TINY["top"]
    truth, variances, components = exact(top, spectrum)
    small = rounding(top)
    assert truth.total == pytest.approx(variances.sum().item(), rel=small)
    found = judge.judge(truth, top, judge.Answer(components[: top.k], variances[: top.k]))
    assert found.error <= small
    assert found.variance <= (small * variances.sum() / variances[top.k - 1]).item()
    wrong = judge.judge(truth, top, judge.Answer(components[1 : top.k + 1], variances[: top.k] * 1.001))
    share = (variances[0] - variances[top.k]).item() / variances.sum().item()
    assert wrong.error == pytest.approx(share, abs=small)
    assert not judge.as_right(wrong.error, wrong.variance, judge.tolerance(truth, top))
    assert wrong.variance == pytest.approx(1e-3, rel=1e-6)
    assert wrong.facts["missed_direction"] == pytest.approx(
        (variances[0] / variances[top.k - 1] - variances[top.k] / variances[top.k - 1]).item(), rel=1e-6
    )


def test_the_tolerance_sees_behind_a_massive_direction():
    truth, variances, components = exact(TINY["top"], "massive")
    share = (variances[TINY["top"].k - 1] / variances.sum()).item()
    assert share < judge.MISSED  # losing the last direction would pass as nothing
    limit = judge.tolerance(truth, TINY["top"])
    assert limit == judge.Tolerance(pytest.approx(judge.DIRECTION * share, rel=1e-6), None)
    last_is_another = torch.cat([components[: TINY["top"].k - 1], components[-1:]])
    found = judge.judge(truth, TINY["top"], judge.Answer(last_is_another))
    assert limit.error < found.error < judge.MISSED
    assert not judge.as_right(found.error, found.variance, limit)
    assert found.variance is None


def test_a_share_wants_the_right_number():
    share = TINY["share"]
    truth, variances, components = exact(share)
    reached = (variances.cumsum(0) / variances.sum()).tolist()
    k = next(i for i, ratio in enumerate(reached, 1) if ratio >= share.k)
    assert judge.judge(truth, share, judge.Answer(components[:k])).error <= rounding(share)
    direction = (variances[k - 1] / variances.sum()).item()
    for other in (k - 1, k + 1):
        found = judge.judge(truth, share, judge.Answer(components[:other]))
        assert found.error >= direction * (1 - 1e-9)
        assert (found.facts["k"], found.facts["true_k"]) == (other, k)


def test_all_components_are_judged_by_their_variances():
    everything = TINY["all"]
    truth, variances, components = exact(everything)
    wrong = variances.clone()
    wrong[2] += 1e-3 * variances[0]
    found = judge.judge(truth, everything, judge.Answer(components, wrong))
    assert found.error == pytest.approx(1e-3, rel=1e-6)
    assert found.variance == pytest.approx(1e-3 * (variances[0] / variances[2]).item(), rel=1e-6)
    silent = judge.judge(truth, everything, judge.Answer(components))  # along the directions instead
    assert silent.error <= rounding(everything)
    assert silent.variance <= rounding(everything) * (variances.sum() / variances[-1]).item()
    short = judge.judge(truth, everything, judge.Answer(components[:-1], variances[:-1]))
    assert math.isinf(short.error)


@pytest.mark.parametrize("name", ["all", "heads"])
def test_turned_and_skew_directions_are_seen(name):
    """The first two turned into each other by an angle: ‖(C - λ₁)v‖ is (λ₁ - λ₂)·sin of it."""
    workload = TINY[name]
    x, truth = data_of(workload)
    sets = [svd_truth(head)[1:] for head in (x if name == "heads" else x[None])]
    variances, components = (torch.stack(parts) for parts in zip(*sets, strict=True))
    angle = 1e-3
    turned = components.clone()
    turned[-1, 0] = math.cos(angle) * components[-1, 0] + math.sin(angle) * components[-1, 1]
    turned[-1, 1] = math.cos(angle) * components[-1, 1] - math.sin(angle) * components[-1, 0]
    scaled = components.clone()
    scaled[0, -1] *= 1 + angle
    limit = judge.tolerance(truth, workload)

    def found(rows, reported=variances):
        answer = (rows, reported) if name == "heads" else (rows[0], None if reported is None else reported[0])
        return judge.judge(truth, workload, judge.Answer(*answer))

    right = found(components)
    small = rounding(workload) * workload.shape[-1]  # |VVᵀ - I| has D products to an entry
    assert right.error <= small
    assert judge.as_right(right.error, right.variance, limit)
    expected = (math.sin(angle) * (variances[-1, 0] - variances[-1, 1]) / variances[-1, 0]).item()
    for seen in (found(turned), found(turned, None)):
        assert seen.error == pytest.approx(expected, rel=1e-3)  # with cos of the angle
        assert not judge.as_right(seen.error, seen.variance, limit)
    assert found(scaled).error == pytest.approx((1 + angle) ** 2 - 1, abs=small)


def test_the_worst_head_counts():
    heads = TINY["heads"]
    x, truth = data_of(heads)
    _, variances, components = (torch.stack(parts) for parts in zip(*map(svd_truth, x), strict=True))
    variances[2, 0] *= 1.01
    found = judge.judge(truth, heads, judge.Answer(components, variances))
    assert found.error == pytest.approx(0.01, rel=1e-6)
    assert found.variance == pytest.approx(0.01, rel=1e-6)


def test_small_variances_count_where_all_are_asked_for():
    """Of a massive spectrum in float32 all of the small ones can be lost within the error alone."""
    everything = TINY["all"]
    truth, variances, components = exact(everything, "massive")
    limit = judge.tolerance(truth, everything)
    assert limit.error == pytest.approx(8 * math.sqrt(64) * U32)
    lost = variances.where(variances > 1e-6 * variances[0], 0.0)
    found = judge.judge(truth, everything, judge.Answer(components, lost))
    assert found.error <= limit.error
    assert found.variance == 1
    assert not judge.as_right(found.error, found.variance, limit)
    assert judge.as_right(found.error, 0.009, limit)
    assert judge.as_right(found.error, found.variance, limit.raised_to(found))


# --- the methods -------------------------------------------------------------------------------------
REFUSING = ("sklearn randomized", "sklearn arpack", "torch_pca randomized")  # a share


def approximate(method):
    """Whether its answer is right only as far as it happens to be: recorded, not asserted."""
    if method.name == "ExactIncrementalPCA":
        return False
    if method.kind == "batches":
        return not method.ours
    return any(word in method.title for word in ("randomized", "lowrank", "fbpca"))


def of_float32(workload, truth):
    """Largest share that a backward stable method in float32 may miss.

    Sums of N products and a factorisation are a covariance that is off by ‖E‖ ≤ 2(N + D)·u·tr C (Higham 2002,
    3.5), which turns K directions by ‖E‖/gap (Davis & Kahan): their share falls by gap·angle² each.
    """
    n, d = workload.shape[-2:]
    k = workload.k if isinstance(workload.k, int) else judge._true_k(truth, workload)
    gap = (truth.variances[k - 1] - truth.variances[k]).item() / truth.total
    return k * (2 * (n + d) * U32) ** 2 / gap


def cases(*names):
    """Every method that is asked, by workload."""
    return [
        pytest.param(name, method, id=f"{name}, {method.title}")
        for name in names
        for method in methods.METHODS
        if method.kind == TINY[name].kind and name not in method.lacks
        if name != "share" or method.title not in REFUSING
    ]


def answer_of(method, data, k):
    """Its answer, or a skip where it is not installed."""
    if not method.ours:
        pytest.importorskip(method.package, reason=f"{method.package} is not installed, see `scripts/peers`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packages about each other
        before = [part.clone() for part in data]
        answer = method.fit(data, k)
    assert all(map(torch.equal, data, before))  # the methods share their data
    return answer


def named(title):
    return next(method for method in methods.METHODS if method.title == title)


@pytest.mark.parametrize(("name", "method"), cases("top", "share", "streaming", "wide"))
def test_every_method_finds_what_it_should(name, method):
    workload = TINY[name]
    data, truth = data_of(workload)
    found = judge.judge(truth, workload, answer_of(method, data, workload.k))
    assert math.isfinite(found.error)
    assert found.facts["k"] == found.facts["true_k"]
    if not approximate(method):
        assert found.error <= of_float32(workload, truth)
    elif name == "streaming":  # why there is an exact one
        assert found.error > of_float32(workload, truth)


@pytest.mark.parametrize("title", REFUSING)
def test_some_refuse_a_share(title):
    data, _ = data_of(TINY["share"])
    with pytest.raises(ValueError, match=r"n_components=0\.8|integer number of components"):
        answer_of(named(title), data, 0.8)


@pytest.mark.parametrize(("name", "method"), cases("all", "heads"))
def test_every_method_finds_all_variances(name, method):
    workload = TINY[name]
    data, truth = data_of(workload)
    found = judge.judge(truth, workload, answer_of(method, data, workload.k))
    n, d = workload.shape[-2:]
    # sums of N products and a factorisation (Higham 2002, 3.5), in units of λ₁; half of it is one side's
    variances = (truth[0] if name == "heads" else truth).variances
    scale = (variances.sum() / variances[0]).item()
    assert found.error <= 4 * (n + d) * U32 * scale
    if method.ours and "float32" not in method.name:  # a float64 answer is told from a float32 one
        smallest = (variances.sum() / variances[-1]).item()
        assert found.variance <= 2 * (n + d) * U64 * smallest


def test_an_offset_is_told_from_a_right_answer():
    """The formula that subtracts the mean afterwards is wrong there, by more than float32 explains."""
    top = TINY["top"]
    data, truth = data_of(top, "offset")
    wrong, own = (
        judge.judge(truth, top, answer_of(named(f"{package} covariance_eigh"), data, top.k))
        for package in ("sklearn", "pca_torch")
    )
    assert own.error <= rounding(top)
    assert wrong.error > of_float32(top, truth)


def test_the_variances_of_an_exact_stream_divide_by_n():
    """TorchDR divides by N instead of N - 1, and the column says so."""
    stream = TINY["streaming"]
    data, truth = data_of(stream)
    found = judge.judge(truth, stream, answer_of(named("torchdr ExactIncrementalPCA"), data, stream.k))
    n, d = stream.shape
    ratio = (truth.variances.sum() / truth.variances[stream.k - 1]).item()
    assert found.variance == pytest.approx(1 / n, abs=2 * (n + d) * U32 * ratio)
    assert 1 / n > 2 * (n + d) * U32 * ratio  # it is not rounding


@pytest.mark.parametrize("title", ["torch pca_lowrank", "torch lobpcg", "fbpca pca"])
def test_the_global_generators_are_left_alone(title):
    data, _ = data_of(TINY["top"])
    before, state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first, again = (answer_of(named(title), data, 8) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert np.random.get_state()[1].tolist() == state
    assert (judge.as_tensor(first.components) == judge.as_tensor(again.components)).all()


# --- rows --------------------------------------------------------------------------------------------
def made_up(**fits):
    """Methods of a made-up package, and one of ours."""
    return [
        named("pca_torch covariance_eigh"),
        *(methods.Method("torch", name, "rows", fit) for name, fit in fits.items()),
    ]


def measured(asked, workload=TINY["top"]):
    rows, limit = peers.measure(workload, "power", asked, 2, math.inf)
    return {row.method.name: row for row in rows}, limit


def test_failures_are_rows():
    def raising(x, k):
        raise RuntimeError("it does not converge")

    def not_finite(x, k):
        return methods.Answer(torch.full((k, x.shape[1]), torch.nan))

    asked = made_up(raising=raising, not_finite=not_finite)
    absent = methods.Method("no_such_package", "PCA", "rows", raising)
    without = methods.Method("torch", "without", "rows", raising, {"top": "no top"})
    rows, limit = measured([*asked, absent, without])
    said = {name: row.runs.failure for name, row in rows.items()}
    assert said["raising"] == "RuntimeError: it does not converge"
    assert said["not_finite"].startswith("no answer:")
    assert said["PCA"] == "not installed"
    assert said["without"] == "no top"
    assert said["covariance_eigh"] is None
    for name, row in rows.items():
        text = peer_rows.line(row, limit)
        assert len(text) <= 80
        assert (said[name] or "") in text


LIMIT = judge.Tolerance(1e-6)


def row_of(title, seconds, error, ours):
    method = methods.Method("pca_torch" if ours else "peer", title, "rows", lambda x, k: None)
    return peer_rows.Row(method, rounds.Runs(list(seconds)), judge.Verdict(error, None, {}))


def test_a_peer_is_compared_with_our_fastest_that_is_as_right():
    coarse = row_of("coarse", [1.0, 1.0, 1.0], 1e-3, True)
    fine = row_of("fine", [4.0, 8.0, 4.0], 1e-9, True)
    exact_peer = row_of("exact", [2.0, 8.0, 4.0], 1e-15, False)
    sketch = row_of("sketch", [0.5, 0.5, 0.5], 2e-3, False)
    slow_sketch = row_of("slow sketch", [2.0, 2.0, 2.0], 1e-4, False)
    rows = [coarse, fine, exact_peer, sketch, slow_sketch]
    peer_rows.compare(rows, LIMIT)
    assert exact_peer.against == "pca_torch fine"  # both errors are below the limit: the same
    assert exact_peer.ratios == (0.5, 1.0, 1.0)
    assert (exact_peer.ratio, peer_rows.verdict(exact_peer, LIMIT)) == (1.0, "")
    assert sketch.against == "pca_torch coarse"
    assert (sketch.ratio, peer_rows.verdict(sketch, LIMIT)) == (0.5, "coarser")
    assert slow_sketch.against == "pca_torch fine"  # coarse is not as right
    assert fine.against == "pca_torch fine"
    exact_peer.ratios = (0.996,)  # is shown as 1.00
    assert peer_rows.verdict(exact_peer, LIMIT) == ""
    exact_peer.ratios = (0.99,)
    assert peer_rows.verdict(exact_peer, LIMIT) == "ahead"
    peer_rows.compare([sketch], LIMIT)
    alone = row_of("alone", [1.0], 1e-15, False)
    peer_rows.compare([alone], LIMIT)
    assert alone.ratio is None  # nothing of ours is there
    assert peer_rows.verdict(alone, LIMIT) == ""


def test_every_method_has_the_same_threads_and_gets_them_back():
    pytest.importorskip("threadpoolctl", reason="threadpoolctl comes with scikit-learn")
    before = torch.get_num_threads()
    with peers.threads(1) as libraries:
        assert torch.get_num_threads() == 1
        assert libraries
        assert all(library["num_threads"] == 1 for library in libraries)
    assert torch.get_num_threads() == before


def test_versions_name_what_is_missing():
    absent = methods.Method("no_such_package", "PCA", "rows", lambda x, k: None)
    found = peers.versions([absent, methods.METHODS[0]])
    assert found["no_such_package"] is None
    assert found["numpy"]
    assert found["pca_torch"]


@pytest.mark.parametrize(
    ("name", "shape", "k", "error"),
    [
        ("top", (5,), None, "`--size` of top must be NxD, got 5"),
        ("heads", (5, 6), None, "`--size` of heads must be HxNxE, got 5x6"),
        ("top", (100, 20), 21, r"`--k` of top must be in 1\.\.20, got 21"),
        ("streaming", (80, 20), 11, r"`--k` of streaming must be in 1\.\.10, got 11"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name, shape, k, error):
    with pytest.raises(ValueError, match=error):
        workloads.resized(workloads.WORKLOADS[name], shape, k)


def test_sizes_are_taken():
    new = workloads.resized(workloads.WORKLOADS["top"], (8192, 4096), 64)
    assert (new.shape, new.k, new.title) == ((8192, 4096), 64, "top 64 of 8192×4096")
    assert workloads.resized(workloads.WORKLOADS["share"], None, 64) == workloads.WORKLOADS["share"]


def test_the_script_runs_every_workload(tmp_path):
    pytest.importorskip("threadpoolctl", reason="threadpoolctl comes with scikit-learn")
    done = bench_script("peers", "--tiny", "--out", tmp_path, "--method", "pca_torch", "torch linalg")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    lines = [json.loads(line) for line in (tmp_path / "peers.jsonl").read_text().splitlines()]
    assert {line["workload"] for line in lines} == set(TINY)
    assert all(line["environment"]["versions"]["torch"] == torch.__version__ for line in lines)
    for line in lines:
        assert (line["error"] is None) == (line["status"] != "ok")
        if line["status"] == "ok":
            assert line["seconds"]
            assert line["error"] >= 0
            assert (line["ratio"] > 0) == (line["against"] is not None)
    timed = [text for text in done.stdout.splitlines() if re.search(r"\d\.\d{3} \(", text)]
    assert len(timed) == sum(line["status"] == "ok" for line in lines)
    assert all(re.search(r"\d\.\d{3} \(\S+\) +\S+ +\de[-+]\d\d", text) for text in timed)  # an error on each


def test_bad_options_are_one_sentence(tmp_path):
    done = bench_script("peers", "--workload", "top", "--size", "5", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("`--size` of top must be NxD, got 5.")
    assert not (tmp_path / "peers.jsonl").exists()


# --- tables and the picture --------------------------------------------------------------------------
def made(package, method, spectrum="power", **more):
    """A line as peers.py writes it."""
    line = {
        "title": "top 128 of 4096×2048",
        "k": 128,
        "spectrum": spectrum,
        "package": package,
        "method": method,
        "ours": package == "pca_torch",
        "status": "ok",
        "seconds": [1.0, 1.2, 1.1],
        "median": 1.1,
        "error": 2e-8,
        "variance": 3e-7,
        "tolerance": 1e-6,
        "tolerance_variance": None,
        "run": "second",
        "ratio": 1.0,
        "verdict": "",
    }
    return {**line, **more}


NOTHING = {"seconds": [], "median": None, "error": None, "variance": None, "ratio": None}
LINES = [
    made("pca_torch", "auto", median=9.9, run="first"),  # the last run counts
    made("torch", "linalg.svd", median=0.1, run="first"),
    made("pca_torch", "auto"),
    made("torch_pca", "full", median=0.8, ratio=0.9, error=3e-13, verdict="ahead"),  # in other rounds
    made("sklearn", "full", seconds=[12.34], median=12.34, ratio=11.2, error=1e-13),
    made("torch", "pca_lowrank", median=0.4, ratio=0.36, error=1.7e-3, verdict="coarser"),
    made("torchdr", "PCA", median=0.9, ratio=0.8, error=3e-13, variance=None, verdict="ahead"),
    made("fbpca", "pca", status="no share", **NOTHING),
    made("peft", "x", status="no share", **NOTHING),
    made("pca_torch", "auto", "flat", median=2.5),
    made("sklearn", "full", "flat", status="not run: out of time", **NOTHING),
]


def stored(folder, lines=LINES):
    (folder / "peers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_table_of_peers_has_an_error_beside_each_time(tmp_path):
    assert table.TABLES["peers"](stored(tmp_path)) == [
        "**Top 128 of 4096×2048**; error: share of the variance that the best directions hold and these do "
        "not.",
        "",
        "| | power, right below 1e-06 | flat, right below 1e-06 |",
        "|---|---|---|",
        "| torch pca_lowrank | 0.40 s, 0.36×; 2e-03 (3e-07) | no answer |",
        "| torch_pca full | 0.80 s, 0.90×, **ahead**; 3e-13 (3e-07) | no answer |",
        "| torchdr PCA | 0.90 s, 0.80×, **ahead**; 3e-13 | no answer |",
        "| **pca_torch auto** | 1.1 s, 1.0×; 2e-08 (3e-07) | 2.5 s, 1.0×; 2e-08 (3e-07) |",
        "| sklearn full | 12 s†, 11×; 1e-13 (3e-07) | no answer |",
        "",
        "No answer: fbpca pca, peft x (no share).",
    ]


def test_the_summary_names_who_is_ahead(tmp_path):
    assert table.TABLES["summary"](stored(tmp_path))[2:] == [
        "| top 128 of 4096×2048 | power | auto, 1.1 s | 2e-08 | torchdr PCA | 0.90 s | 3e-13 "
        "| 0.80× **ahead** |",
        "| top 128 of 4096×2048 | flat | auto, 2.5 s | 2e-08 | none is right |  |  |  |",
    ]


def claimed(folder, *more, **changes):
    """The aims and whether they are met, of lines that meet all but for the changes of one of them."""
    stream = {"workload": "streaming", "title": "stream", "against": "pca_torch partial_fit", "k": 8}
    heads = {"workload": "heads", "title": "heads", "against": "pca_torch batch", "k": None, "error": 1e-7}
    heads |= {"tolerance": 5e-6, "tolerance_variance": 1e-2}
    lines = [
        made("pca_torch", "partial_fit", **stream),
        made("sklearn", "IncrementalPCA", **{**stream, "ratio": 12.3, "error": 2e-3, **changes}),
        made("pca_torch", "auto", workload="top"),
        made("torch", "linalg.svd", workload="top", ratio=2.3),
        made("pca_torch", "batch", **heads),
        made("sklearn", "loop over full", **heads | {"ratio": 22.0}),
        made("sklearn", "loop over auto", **heads | {"ratio": 1.3}),
        *more,
    ]
    suite = {"suite": "import", "case": "import", "beside": {"added_seconds": 0.31, "aim_seconds": 0.3}}
    (folder / "suites.jsonl").write_text(json.dumps(suite) + "\n")
    return [line.strip("| ").split(" | ") for line in table.TABLES["claims"](stored(folder, lines))[2:]]


def test_claims_say_what_is_met(tmp_path):
    found = claimed(tmp_path)
    assert [(figure, met) for _, figure, met in found] == [
        ("12×; it misses 2e-03, here 2e-08", "yes"),
        ("the best of them, torch linalg.svd, takes 2.3× the time", "yes"),
        ("1/22.0; its error 1e-07, 1e-07 here", "yes"),
        ("1/1.3; its error 1e-07, 1e-07 here", "**no**"),
        ("0.31 s", "**no**"),
    ]


@pytest.mark.parametrize("change", [{"ratio": 9.9}, {"error": 3e-5}, {"error": 3e-2}])
def test_a_stream_that_is_not_as_claimed_is_told(tmp_path, change):
    assert claimed(tmp_path, **change)[0][-1] == "**no**"


def test_a_peer_that_is_ahead_is_told(tmp_path):
    ahead = made("torchdr", "PCA", workload="top", ratio=0.97, verdict="ahead")
    assert claimed(tmp_path, ahead)[1][1:] == [
        "the best of them, torchdr PCA, takes 0.97× the time",
        "**no**",
    ]


@pytest.mark.skipif(
    not (BENCH / "results" / "peers.jsonl").exists(), reason="`scripts/peers` was not run here"
)
def test_streams_are_as_the_readme_says_in_the_stored_results():
    found = peer_tables._streams(BENCH / "results")
    assert found
    assert all(met for _, _, met in found), found


def test_tables_of_nothing_are_empty(tmp_path):
    assert table.TABLES["peers"](tmp_path) == []
    assert len(table.TABLES["summary"](tmp_path)) == len(table.TABLES["claims"](tmp_path)) == 2


def test_the_picture_has_a_panel_for_each_question(tmp_path):
    figure = picture.draw(peer_tables.stored(stored(tmp_path)))
    power, flat = (axis for axis in figure.axes if axis.axison)
    assert (power.get_xscale(), power.get_yscale()) == ("log", "log")
    points = {
        (line.get_xdata()[0], line.get_ydata()[0]) for line in power.lines if len(line.get_xdata()) == 1
    }
    assert points == {(1.1, 2e-8), (12.34, 1e-13), (0.4, 1.7e-3), (0.9, 3e-13), (0.8, 3e-13)}
    hollow = {line.get_xdata()[0] for line in power.lines if line.get_markerfacecolor() == "none"}
    assert hollow == {0.4}  # it is not right
    assert len(flat.lines) == 2  # one method, and the tolerance
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels >= {"pca_torch", "sklearn", "random sketch", "SVD", "automatic choice"}
    done = bench_script("picture", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_every_method_has_a_colour_and_a_marker():
    for method in methods.METHODS:
        assert method.package in picture.COLOURS
        assert picture.marker({"package": method.package, "method": method.name})[1] != "other"
    assert picture.marker({"package": "x", "method": "y"}) == ("x", "other")


def test_no_picture_of_nothing(tmp_path):
    done = bench_script("picture", "--out", tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("has no answers; run `bench/peers.py` first.")
