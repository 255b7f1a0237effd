"""The benchmark scripts run at tiny sizes, record what they saw, and judge by the truth; no time counts."""

import importlib.util
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pca_torch as pt
from tests.support import truth as svd_truth

BENCH = Path(__file__).parent.parent / "bench"
N, D, K = 200, 64, 8
SPECTRA = ("power", "flat", "massive", "massive9")
U32, U64 = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64))


def load(name):
    """A module of bench/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pairs, spectra, truth = load("pairs"), load("spectra"), load("truth")


def run(script, out, *options, path=None):
    """One script at tiny size in a process of its own, on one thread."""
    sizes = {"--n": N, "--d": D, "--k": K, "--pairs": 2, "--out": out}
    words = [str(word) for option in sizes.items() for word in option]
    search = [str(p) for p in (path, BENCH.parent) if p]  # the package that stands beside these tests
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, BENCH / f"{script}.py", *words, *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def lines(script, out, *options):
    """What the script recorded, after checks that hold for every script."""
    done = run(script, out, *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    found = [json.loads(line) for line in (out / f"{script}.jsonl").read_text().splitlines()]
    for line in found:
        assert math.isfinite(line["ratio"])
        assert line["ratio"] > 0
        assert (line["n"], line["d"], line["k"]) == (N, D, K)
        assert {"torch", "threads", "cpus", "device", "commit"} <= line["environment"].keys()
    return {line["case"]: line for line in found}


def share_bound(n=N, d=D):
    """Largest error of a share of the variance in float64.

    A covariance of N products and a spectrum of D values are each off by at most (N + D)·u of the trace
    in a norm, and K ≤ D of them are summed.
    """
    return 2 * d * (n + d) * U64


def true_share(x, k):
    _, variance, _ = svd_truth(x)
    return (variance[:k].sum() / variance.sum()).item()


# --- the instruments ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_samples_have_the_variances_they_claim(spectrum):
    n = 4000
    x = spectra.samples(spectrum, n, D, K).double()
    signs = 2.0 * torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(0)) - 1
    directions = spectra.rotate(torch.eye(D, dtype=torch.float64), signs)  # rows: where each axis goes
    assert torch.allclose(directions @ directions.mT, torch.eye(D, dtype=torch.float64), atol=D * U64)
    expected = spectra.variances(spectrum, D, K)
    seen = (x @ directions.mT).square().mean(0)
    # a mean of n squares of Gaussians is off by √(2/n) of itself, six such are never seen; float32 storage
    # adds noise of u32 times the size of a row, which the widest directions set
    storage = U32**2 * D * expected.sum() + 2 * U32 * (expected.sum() * expected).sqrt()
    assert ((seen - expected).abs() <= 6 * math.sqrt(2 / n) * expected + storage).all()
    wrong = spectra.variances(spectrum, D, K) * 1.2  # control: a fifth too much is seen
    assert ((seen - wrong).abs() > 6 * math.sqrt(2 / n) * wrong + storage).any()


@pytest.mark.parametrize(("spectrum", "ratio"), [("massive", 1e7), ("massive9", 1e9)])
@pytest.mark.parametrize(("d", "k"), [(D, K), (4096, 128)])
def test_massive_spectra_have_their_ratio(spectrum, ratio, d, k):
    values = spectra.variances(spectrum, d, k)
    assert (values[0] / values[k - 1]).item() == pytest.approx(ratio, rel=1e-12)
    assert (values.diff() <= 0).all()
    assert (values > 1e3 * values[k - 1]).sum() == min(9, k // 2)


def test_samples_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first = spectra.samples("power", 1100, D, K, seed=3)  # more than one block
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, spectra.samples("power", 1100, D, K, seed=3))
    assert not torch.equal(first, spectra.samples("power", 1100, D, K, seed=4))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_truth_is_that_of_an_svd(spectrum):
    x = spectra.samples(spectrum, N, D, K) + 3  # an offset, which centring has to take
    _, variance, components = svd_truth(x)
    c = truth.covariance(x)
    values = truth.eigenvalues(c)
    assert (values - variance).abs().max() <= (N + D) * U64 * variance.sum()
    best = variance[:K].sum() / variance.sum()
    assert truth.captured(c, components[:K]) == pytest.approx(best.item(), abs=share_bound())


def test_the_share_that_wrong_components_miss_is_seen():
    x = spectra.samples("power", N, D, K)
    _, variance, components = svd_truth(x)
    c = truth.covariance(x)
    for first in (1, 5):  # the second to the ninth direction, the sixth to the thirteenth
        expected = variance[first : first + K].sum() / variance.sum()
        seen = truth.captured(c, components[first : first + K])
        assert seen == pytest.approx(expected.item(), abs=share_bound())
        assert true_share(x, K) - seen > 1e9 * share_bound()


def test_captured_counts_the_span_and_not_the_rows():
    x = spectra.samples("power", N, D, K)
    _, _, components = svd_truth(x)
    c = truth.covariance(x)
    skewed = (
        torch.randn(K, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ components[:K]
    )
    bound = share_bound() * torch.linalg.cond(skewed).item()  # what a QR loses to skew rows
    assert truth.captured(c, skewed) == pytest.approx(true_share(x, K), abs=bound)


@pytest.mark.parametrize(("share", "rank"), [(0.5, 1), (0.6, 2), (0.9, 3), (1.0, 3)])
def test_rank_is_the_first_that_reaches_the_share(share, rank):
    assert truth.rank(torch.tensor([5.0, 3.0, 2.0]), share) == rank


def test_runs_alternate_and_ratios_are_taken_within_pairs(monkeypatch):
    clock, log = [0.0], []
    costs = {"ours": iter([50, 1, 4, 3]), "theirs": iter([70, 2, 2, 12])}
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: clock[0])

    def work(side):
        log.append(side)
        clock[0] += next(costs[side])
        return side, len(log)

    timing = pairs.interleaved(lambda: work("ours"), lambda: work("theirs"), pairs=3, warmup=1)
    assert log == ["ours", "theirs"] * 4
    assert (timing.ours, timing.theirs) == ((1, 4, 3), (2, 2, 12))
    assert timing.ratios == [0.5, 2.0, 0.25]
    assert timing.answers == (("ours", 7), ("theirs", 8))
    summary = timing.to_dict()
    assert (summary["ratio"], summary["ratio_min"], summary["ratio_max"]) == (0.5, 0.25, 2.0)
    assert summary["quartiles"]["ours"] == [2.0, 3.0, 3.5]


def test_memory_sees_what_is_allocated_and_not_what_the_caller_had():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import memory, numpy as np\n"
        "before, peak = memory.resident()\n"
        "np.ones(8 * 2**20); after, top = memory.resident()\n"
        "print(before, peak, after, top)"
    )
    held = bytearray(b"x") * 2**28
    done = subprocess.run([sys.executable, "-c", code, BENCH], capture_output=True, text=True, check=True)
    before, peak, after, top = map(int, done.stdout.split())
    caller = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert caller - peak > len(held) / 2  # ru_maxrss of the child would have started at this
    assert 0.9 * 2**26 < top - before < 1.5 * 2**26
    assert after - before < 0.5 * 2**26  # given back: only the peak knows of it


# --- the scripts -------------------------------------------------------------------------------------


def test_symmetric_product(tmp_path):
    found = lines("symmetric_product", tmp_path)
    x = spectra.samples("power", N, D, D).double()
    size = (x.abs().mT @ x.abs()).max().item()
    for case, u in (("float64", U64), ("float32", U32)):
        errors = found[case]["errors"]
        assert max(errors.values()) <= N * u / (1 - N * u) * size  # γ |x|ᵀ|x|, Higham 2002, §3.1
    assert found["float32"]["errors"]["error"] > N * U64 * size  # float32 was used, and the error seen


def check_top_k(line, solver):
    """The record of a spectrum against an SVD and against the same fit in this process."""
    x = spectra.samples(line["case"], N, D, K)
    _, variance, _ = svd_truth(x)
    errors, share = line["errors"], true_share(x, K)
    direction = (variance[K - 1] / variance.sum()).item()
    rounding = 2 * (N + D) * U64 / direction  # of λ_K: an error of (N + D)·u·tr C, relative to it
    assert errors["true_share"] == pytest.approx(share, abs=share_bound())
    basis = torch.linalg.qr(pt.decompose(x, K, solver).components.double().mT).Q
    captured = (truth.centred(x) @ basis).square().sum().item() / (N - 1) / variance.sum().item()
    # another thread count rounds otherwise, and may leave another part of what the bound allows
    assert errors["missed"] == pytest.approx(share - captured, abs=max(share_bound(), errors["bound"]))
    assert errors["missed"] <= errors["bound"] + share_bound()
    for name in ("missed", "bound"):
        assert errors[f"{name}_dir"] == pytest.approx(errors[name] / direction, rel=rounding)


@pytest.mark.parametrize("solver", ["covariance_eigh", "krylov"])
def test_top_k(tmp_path, solver):
    found = lines("top_k", tmp_path, "--solver", solver)
    assert set(found) == set(SPECTRA)
    for line in found.values():
        check_top_k(line, solver)


def test_all_components(tmp_path):
    line = lines("all_components", tmp_path)["power"]
    x = spectra.samples("power", N, D, D)
    _, variance, _ = svd_truth(x)
    errors = line["errors"]
    assert errors["largest"] == pytest.approx(variance[0].item(), rel=N * U64)
    assert errors["error"] <= 2 * (N + D) * U64 * (variance.sum() / variance[0]).item()
    # float32 is seen: its SVD is off by more than float64 can be, by less than its own bound on σ, twice
    assert N * U64 < errors["svd_error"] <= 2 * (N + D) * U32 * (variance.sum() / variance[0]).item()
    assert errors["further_off"] == 0


def test_variances_further_off_are_counted(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)  # for what the script imports
    compare = load("all_components").compare
    x = spectra.samples("power", N, D, D)
    _, variance, _ = svd_truth(x)
    wrong = variance.clone()
    wrong[[0, 3]] *= 1 + 1e-6
    assert compare(x, wrong, variance)["further_off"] == 2
    assert compare(x, variance, wrong)["further_off"] == 0
    assert compare(x, wrong, variance)["error"] == pytest.approx(1e-6, rel=1e-3)


def test_share(tmp_path):
    found = lines("share", tmp_path, "--share", "0.3", "0.6", "0.75")
    _, variance, _ = svd_truth(spectra.samples("power", N, D, D))
    reached = (variance.cumsum(0) / variance.sum()).tolist()
    for share in ("0.3", "0.6", "0.75"):
        expected = next(k for k, ratio in enumerate(reached, 1) if ratio >= float(share))
        errors = found[share]["errors"]
        assert (errors["k"], errors["true_k"], errors["limit_k"]) == (expected, expected, D // 8)
        assert expected <= D // 8


def test_streaming(tmp_path):
    if importlib.util.find_spec("torchdr") is None:
        pytest.skip("torchdr is not installed: `pip install --no-deps torchdr`")
    errors = lines("streaming", tmp_path, "--batch", "64")["power"]["errors"]
    x = spectra.samples("power", N, D, K)
    assert errors["true_share"] == pytest.approx(true_share(x, K), abs=share_bound())
    # float32 sums are off by E, ‖E‖ ≤ (N + D)·u·tr C, and turn K directions by ‖E‖/gap (Davis & Kahan):
    # their share falls by gap·angle² each, which is second order
    _, variance, _ = svd_truth(x)
    total, gap = variance.sum().item(), (variance[K - 1] - variance[K]).item()
    bound = K * (2 * (N + D) * U32 * total) ** 2 / gap / total
    for name in ("missed", "torchdr_missed"):
        assert -share_bound() <= errors[name] <= bound
    _, _, some = svd_truth(x[:64])  # control: the directions of one batch miss more
    assert true_share(x, K) - truth.captured(truth.covariance(x), some[:K]) > bound


def test_streaming_says_what_is_missing(tmp_path):
    (tmp_path / "torchdr.py").write_text("raise ImportError('hidden')\n")
    done = run("streaming", tmp_path, path=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("streaming.py needs torchdr and scikit-learn")
    assert not (tmp_path / "streaming.jsonl").exists()


def test_memory_of_dense_rows(tmp_path):
    found = lines("memory", tmp_path, "--pairs", "1", "--case", "wide", "disk")
    share = true_share(spectra.samples("power", N, D, K), K)
    for case, limit in {"wide": 200e6, "disk": D * D * 8}.items():
        line = found[case]
        # the components are stored in float32: their share is off by their rounding
        assert line["captured_ratio"] == pytest.approx(share, abs=2 * math.sqrt(D) * U32)
        assert line["limit"] == limit
        assert line["ratio"] == pytest.approx(line["above"] / limit)


def test_memory_of_sparse_rows(tmp_path, monkeypatch):
    line = lines("memory", tmp_path, "--pairs", "1", "--case", "sparse")["sparse"]
    monkeypatch.syspath_prepend(BENCH)  # for what the script imports
    memory = load("memory")
    memory.build("sparse", N, D, K, tmp_path)
    x = memory.load("sparse", N, D, tmp_path).to_dense()
    tolerance = 2 * math.sqrt(D) * U32 + line["missed_ratio_bound"]
    assert line["captured_ratio"] == pytest.approx(true_share(x, K), abs=tolerance)


def test_a_case_that_fails_says_why(tmp_path):
    done = run("memory", tmp_path, "--case", "wide", "--solver", "none")
    assert done.returncode == 1
    assert done.stderr.startswith("wide: ValueError: `svd_solver` must be one of")
