"""`scripts/gpu_check` on the CPU: every part, every row right, what is wrong on purpose called wrong."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu_table, spectra
from bench.gpu import run, suite
from bench.gpu.record import Recorder, Row, Verdict, free
from bench.gpu.samples import samples, truth_of
from bench.spectra import SPECTRA
from tests.support import truth as svd_truth

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
U64 = torch.finfo(torch.float64).eps / 2


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The whole script once, in a process of its own: what it printed and what it recorded."""
    out = tmp_path_factory.mktemp("gpu_check")
    command = [sys.executable, ROOT / "scripts" / "gpu_check", "--device", "cpu", "--out", out]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=out, timeout=280, check=False)
    lines = [json.loads(line) for line in (out / "gpu_check.jsonl").read_text().splitlines()]
    return done, lines, out


def of_part(lines, part):
    return [line for line in lines if line["part"] == part]


def test_it_ends_well_and_prints_within_80_columns(checked):
    done, lines, _ = checked
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    summary = of_part(lines, "summary")[0]
    assert [summary[name] for name in ("wrong", "failed", "skipped", "unfinished")] == [0, 0, 0, 0]
    assert summary["finished"]
    assert summary["rows"] == sum("error" in line or line["part"] == "tests" for line in lines)


def test_the_environment_comes_first(checked):
    first = checked[1][0]
    assert first["part"] == "environment"
    assert {"torch", "python", "device", "device_type", "commit", "threads"} <= first.keys()
    assert first["device_type"] == "cpu"
    assert {line["run"] for line in checked[1]} == {first["run"]}


def test_every_part_is_there(checked):
    lines = checked[1]
    cases = {(line["part"], line.get("case")) for line in lines}
    assert cases >= {
        ("tests", "marked gpu"),
        ("ceilings", "product"),
        ("ceilings", "copy"),
        ("truth", "float64 on the device"),
        ("blocks", "torch Householder QR"),
        ("blocks", "Cholesky QR twice"),
        ("heads", "torch eigh"),
        ("heads", "jacobi"),
        ("heads", "decompose_batch"),
        ("leading", "krylov"),
        ("leading", "krylov, float32 products"),
        ("leading", "randomized"),
        ("leading", "torch svd_lowrank, niter=4"),
        ("leading", "lanczos on C"),
        ("leading", "chebyshev on C"),
        ("sums", "Moments, float32 products"),
        ("sums", "RFactor"),
        ("all", "covariance_eigh"),
        ("all", "torch eigh of C"),
        ("all", "tsqr"),
        ("all", "torch svd of LAPACK"),
        ("capture", "Moments"),
        ("capture", "TokenViews"),
        ("control", "divisor N"),
        ("control", "a random direction"),
    }
    krylov = {(line["spectrum"], line["dtype"]) for line in lines if line.get("case") == "krylov"}
    assert krylov == {(spectrum, dtype) for spectrum in SPECTRA for dtype in ("float32", "bfloat16")}


def test_the_largest_come_last_and_what_may_fail_there_at_the_very_end(checked):
    rows = [line for line in checked[1] if line["part"] in {"leading", "sums", "all"}]
    sizes = [size for size, _ in itertools.groupby(line["n"] for line in rows)]
    assert sizes == sorted(set(sizes))
    for size in set(sizes):
        slow = [line["case"] for line in rows if line["n"] == size and line["dtype"] == "float32"]
        assert {"tsqr", "torch svd of LAPACK"} <= set(slow)
    assert [line["case"] for line in rows[-2:]] == ["tsqr", "torch svd of LAPACK"]


def test_every_row_has_its_error_within_its_bound(checked):
    rows = [line for line in checked[1] if "error" in line and not line.get("control")]
    for row in rows:
        assert row["ok"]
        assert row["bound"] is None or row["error"] <= row["bound"], row
    free = {row["case"] for row in rows if row["bound"] is None}
    assert free == {"torch svd_lowrank, niter=4"}  # all others promise something
    assert all(row["of_limit"] > 0 for row in rows if row.get("limit"))


def test_what_is_wrong_on_purpose_is_called_wrong(checked):
    controls = of_part(checked[1], "control")
    assert len(controls) == 2
    for row in controls:
        assert row["control"]
        assert row["error"] > 10 * row["bound"]


def test_the_marked_tests_ran(checked):
    tests = of_part(checked[1], "tests")[0]
    assert tests["finished"]
    assert tests["exit_code"] == 0
    assert tests["failures"] == []
    assert tests["passed"] > 400
    assert tests["skipped_tests"] < 30


def test_lines_of_a_cpu_are_no_figures_of_a_gpu(checked):
    assert gpu_table.table(checked[2]).startswith("Not yet measured")


def test_nothing_is_left_on_the_cpu():
    """The same tests on a device that is one in name only, see tests/gpu/pretend.py."""
    files = "test_pretend or test_places or test_rows"
    chosen = f"{files} or one_covariance or random_problems or (keeps_its_word and rank)"
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "tests.gpu.pretend", "-k", chosen]
    env = {**os.environ, "PCA_TORCH_TEST_DEVICE": "pretend", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 60


# ---------------------------------------------------------------- the recorder
def recorder(folder, minutes=1.0):
    return Recorder(folder, CPU, minutes)


def read(folder):
    return [json.loads(line) for line in (folder / "gpu_check.jsonl").read_text().splitlines()]


def row(run=lambda: 1.0, error=0.0, bound=1.0, flops=1.0, case="ours", **more):
    return Row("part", case, run, lambda _: Verdict(error, bound), {"n": 2, "d": 3}, flops, **more)


@pytest.mark.parametrize(
    ("error", "bound", "control", "ok"),
    [
        (0.5, 1.0, False, True),
        (2.0, 1.0, False, False),
        (math.nan, None, False, False),
        (2.0, None, False, True),
        (2.0, 1.0, True, True),
        (0.5, 1.0, True, False),
    ],
)
def test_a_row_is_right_or_wrong(error, bound, control, ok, tmp_path):
    record = recorder(tmp_path)
    record.measure(row(error=error, bound=bound, control=control))
    assert read(tmp_path)[0]["ok"] is ok
    assert record.counts["wrong"] == (not ok)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), ValueError("bad"), RuntimeError("cu")])
def test_a_row_that_fails_is_recorded_and_the_next_one_runs(error, tmp_path):
    def fail():
        raise error

    record = recorder(tmp_path)
    assert record.measure(row(fail)) is None
    assert record.measure(row(fail, case="torch svd")) is None
    assert record.measure(row(lambda: 7)) == 7
    ours, theirs, after = read(tmp_path)
    assert ours["failed"] == theirs["failed"] == f"{type(error).__name__}: {error}"
    assert (ours["ok"], theirs["ok"], after["ok"]) == (False, True, True)
    assert record.counts == {"rows": 1, "wrong": 1, "failed": 2, "skipped": 0, "unfinished": 0}


def test_a_row_that_would_take_too_long_is_not_begun(tmp_path, monkeypatch):
    called = []
    record = recorder(tmp_path)
    record.measure(row())
    record._paces["part", "ours", "None"] = 1.0, 10.0  # a second for ten flops
    record.measure(row(lambda: called.append(2), flops=210.0))
    record.measure(row(lambda: called.append(1), flops=190.0, repeats=0))
    record._paces["part", "ours", "None"] = 1.0, 10.0
    monkeypatch.setattr(record, "deadline", record.started)
    record.measure(row(lambda: called.append(3), flops=10.0))
    assert called == [1]
    assert [line.get("skipped") for line in read(tmp_path)] == [
        None,
        "would take 21 s",
        None,
        "the time is up",
    ]


def test_data_that_cannot_be_made_are_recorded_and_the_run_goes_on(tmp_path):
    def rows():
        yield row()
        raise torch.OutOfMemoryError("no room")

    record = recorder(tmp_path)
    record.measure_all("leading", rows())
    first, second = read(tmp_path)
    assert first["ok"]
    assert (second["part"], second["failed"]) == ("leading", "OutOfMemoryError: no room")
    assert record.counts["wrong"] == 1


def test_an_interrupt_leaves_whole_lines(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    record = recorder(tmp_path)
    record.measure(row())
    with pytest.raises(KeyboardInterrupt):
        record.measure(row(interrupt))
    assert len(read(tmp_path)) == 1


def test_the_exit_code_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(run.ceilings, "run", lambda recorder, small: recorder.measure(row(error=2.0)))
    assert not run.check(tmp_path, CPU, 1.0, ("ceilings",))
    monkeypatch.setattr(run.ceilings, "run", lambda recorder, small: recorder.measure(row()))
    assert run.check(tmp_path, CPU, 1.0, ("ceilings",))


def test_the_summary_is_written_whatever_happens(tmp_path, monkeypatch):
    def broken(recorder, small):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(run.ceilings, "run", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run.check(tmp_path, CPU, 1.0, ("ceilings",))
    last = read(tmp_path)[-1]
    assert (last["part"], last["finished"]) == ("summary", False)


def test_memory_is_given_back_even_where_cuda_has_broken_down(monkeypatch):
    def broken():
        called.append(1)
        raise RuntimeError("an illegal memory access was encountered")

    called = []
    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    free(torch.device("cuda", 0))
    assert called == [1]


PASSED, FAILED = {"name": "a", "outcome": "passed"}, {"name": "b", "outcome": "failed"}


@pytest.mark.parametrize(
    ("code", "outcomes", "wrong", "unfinished"),
    [
        (0, [PASSED], 0, 0),
        (1, [PASSED, FAILED], 1, 0),
        (None, [PASSED], 0, 1),
        (None, [PASSED, FAILED], 1, 1),
        (None, [], 1, 1),  # nothing is known to work
        (0, [], 1, 0),
        (3, [PASSED], 1, 0),  # pytest itself broke
    ],
)
def test_tests_without_an_end_are_not_wrong(code, outcomes, wrong, unfinished, tmp_path, monkeypatch, capsys):
    def stopped(files, log, device, limit):
        cut = '{"name": "c", "outc'
        log.write_text("".join(json.dumps(line) + "\n" for line in outcomes) + cut)
        return code, "the end of the output"

    monkeypatch.setattr(suite, "_pytest", stopped)
    assert run.check(tmp_path, CPU, 1.0, ("tests",)) is not bool(wrong)
    _, line, summary = read(tmp_path)
    assert (summary["wrong"], summary["unfinished"]) == (wrong, unfinished)
    assert (line["ok"], line["finished"]) == (not wrong, not unfinished)
    assert ("unfinished, stopped after" in capsys.readouterr().out) == bool(unfinished)


def test_cuda_is_refused_where_there_is_none(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = [sys.executable, ROOT / "scripts" / "gpu_check", "--device", "cuda", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs CUDA" in done.stderr


# ---------------------------------------------------------------- samples
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_truth_is_that_of_an_svd(spectrum):
    x = samples(spectrum, 300, 40, 8, dtype=torch.float32, device=CPU)
    found = truth_of(x)
    _, variances, _ = svd_truth(x)
    assert (found.values - variances).abs().max() <= 2 * found.slack
    assert found.slack < 1e-11 * found.total
    control = (x.double() - x[0].double()).mT @ (x.double() - x[0].double()) / 299
    assert (torch.linalg.eigvalsh(control).flip(0) - variances).abs().max() > 2 * found.slack


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_samples_have_the_variances_and_the_mean_that_they_are_called_after(spectrum):
    """Sample variances of Gaussian rows lie within (1 ± √(D/N))² of the true ones (Marchenko & Pastur)."""
    n, d, k = 5000, 32, 8
    x = samples(spectrum, n, d, k, dtype=torch.float64, device=CPU)
    want = spectra.variances(spectrum, d, k)
    have = torch.linalg.eigvalsh(torch.cov(x.mT)).flip(0)
    edge = (d / n) ** 0.5 + 4 / n**0.5
    assert bool((((have / want).sqrt() - 1).abs() < edge).all())
    spread = (want.sum() / n).sqrt()
    assert torch.linalg.vector_norm(x.mean(0) - spectra.mean(spectrum, d)) < 4 * spread
    half = samples(spectrum, n, d, k, dtype=torch.bfloat16, device=CPU)
    assert torch.equal(half, x.bfloat16())


# ---------------------------------------------------------------- table
def cuda_lines(run="a", name="NVIDIA H200"):
    yield {"part": "environment", "device_type": "cuda", "device": name, "torch": "2.11.0", "cuda": "13.0"}
    common = {"part": "leading", "n": 8192, "d": 4096, "k": 128, "spectrum": "power", "dtype": "float32"}
    yield common | {
        "case": "krylov",
        "seconds": 0.25,
        "error": 1e-8,
        "bound": 1e-6,
        "ok": True,
        "of_limit": 0.1,
    }
    yield common | {"case": "torch svd gesvd", "part": "all", "skipped": "would take 31 s", "ok": True}
    yield common | {"case": "krylov", "spectrum": "flat", "seconds": 1, "error": 1e-8, "bound": 1e-6}
    yield common | {"case": "torch svd_lowrank, niter=4", "seconds": 0.1, "error": 1e-6, "bound": None}
    yield {"part": "tests", "passed": 7, "failed_tests": 0, "finished": False}
    yield {"part": "capture", "case": "Moments", "seconds": 0.1, "ratio": 1.5, "error": 0.0, "bound": 1.0}


def stored(folder, *runs):
    lines = [{"run": str(i), **line} for i, run in enumerate(runs) for line in run]
    (folder / "gpu_check.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_without_a_gpu_the_table_is_one_sentence(tmp_path):
    sentence = gpu_table.table(tmp_path)
    assert sentence.startswith("Not yet measured")
    assert sentence.count(".") == 1
    assert sentence.endswith(".")
    stored(tmp_path, [{"part": "environment", "device_type": "cpu"}, *list(cuda_lines())[1:]])
    assert gpu_table.table(tmp_path) == sentence


def test_the_table_is_of_the_last_run_on_a_gpu(tmp_path):
    cpu = [{"part": "environment", "device_type": "cpu"}, *list(cuda_lines())[1:]]
    stored(tmp_path, cuda_lines(name="older"), cuda_lines(), cpu)
    text = gpu_table.table(tmp_path)
    assert "NVIDIA H200" in text
    assert "older" not in text
    assert "| krylov" in text
    assert "would take 31 s" in text
    assert "1.50" in text
    assert "7 tests passed, 0 failed, the rest did not fit the time:" in text
    promised, nothing = (next(r for r in text.splitlines() if name in r) for name in ("| krylov", "lowrank"))
    assert (promised.split("|")[-2].strip(), nothing.split("|")[-2].strip()) == ("1e-06", "")
    assert 'Where "may be" is empty the route promises nothing.' in text
    assert "flat" not in text
    assert text.endswith("1 rows on other spectra and in bfloat16 are in the file; 0 of all rows are wrong.")
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1
