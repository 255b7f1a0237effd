"""The suites run at tiny sizes: an error beside every time, pairs in turn; no time counts."""

import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.support import BENCH, bench_module

pytest.importorskip("pytest_benchmark", reason="the suites need pytest-benchmark, which `dev` installs")

ROOT = BENCH.parent
SUITES = {path.stem.removeprefix("test_") for path in BENCH.glob("test_*.py")}
ROUNDS = 2
U32, U64 = (torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64))


def run(*words, **more):
    """Pytest in a process of its own, on one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env = {**own, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **more}  # else nothing is timed there
    command = [sys.executable, "-m", "pytest", *map(str, words)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=env, timeout=240, check=False
    )


suites = bench_module("suites")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All suites, once: what the terminal showed and what was recorded."""
    folder = tmp_path_factory.mktemp("suites")
    ran = run("bench", "--benchmark-only", "--size", "tiny", "--rounds", ROUNDS, "--results", folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [json.loads(line) for line in (folder / "suites.jsonl").read_text().splitlines()]
    return ran.stdout, lines


def test_every_suite_records_its_cases(done):
    _, lines = done
    assert {line["suite"] for line in lines} == SUITES
    assert len({(line["suite"], line["case"]) for line in lines}) == len(lines)
    for line in lines:
        seconds = line["seconds"]
        assert len(seconds["ours"]) == len(seconds["theirs"]) == ROUNDS  # the warm-up is left out
        assert min(*seconds["ours"], *seconds["theirs"]) > 0
        assert 0 < line["ratio_min"] <= line["ratio"] <= line["ratio_max"] < math.inf
        assert {"torch", "threads", "cpus", "device", "commit"} <= line["environment"].keys()
        assert (line["size"], line["rounds"], line["device"]) == ("tiny", ROUNDS, "cpu")


def test_no_time_stands_without_its_error(done):
    shown, lines = done
    assert "Legend:" not in shown  # the table of pytest-benchmark has no errors
    clock = re.compile(r"\d (s|ms|µs)\b")
    rows = [row for row in shown.splitlines() if clock.search(row)]
    assert len(rows) == len(lines)
    for row, line in zip(rows, sorted(lines, key=lambda line: line["suite"]), strict=True):
        assert len(row) <= 100
        assert row.startswith(line["case"])
        assert len(line["case"]) < 35
        errors = [suites.error(line["errors"][side]) for side in ("ours", "theirs")]
        assert re.search(rf"s +{re.escape(errors[0])} .*s +{re.escape(errors[1])} ", row)
        assert line["question"] in shown
        assert line["what"] in shown


def size_of(case):
    """N and D, or N tokens and D."""
    n, d = re.search(r"(\d+)(?: tokens)?×(\d+)", case).groups()
    return int(n), int(d)


def limit(line):
    """Largest error that a correct answer in float64 may show, by suite.

    A float64 sum of N products is off by N·u·|x|ᵀ|x|, which has the trace of C as its norm at most, and an
    eigensolver or a factorisation adds D·u of that; both sides of a comparison may be off so. In units of
    λ₁ the trace is D at most, in units of ‖C‖_F it is √D.
    """
    suite = line["suite"]
    if suite == "import":
        return 0
    if suite == "symmetric_product":
        u = U64 if line["case"].endswith("float64") else U32
        n, d = size_of(line["case"])
        x = bench_module("spectra").samples("power", n, d, d).double()
        return n * u / (1 - n * u) * (x.abs().mT @ x.abs()).max().item()  # γ |x|ᵀ|x|, Higham 2002, §3.1
    if suite == "small_covariances":
        n, d = 30, size_of(line["case"])[1]  # rows of each matrix, see there
        return 2 * (n + d) * U64 * d
    n, d = size_of(line["case"])
    if suite == "certificate":
        return 2 * (n + d) * U64 * d
    if suite == "iterations":
        return 1e-6 + 2 * d * (n + d) * U64 + 2 * d * U32**2  # asked for; of the truth; float32 components
    return 2 * (n + d) * U64 * math.sqrt(d)


def test_errors_are_within_their_limits(done):
    _, lines = done
    for line in lines:
        errors = [e for e in line["errors"].values() if e is not None]
        assert errors
        assert all(math.isfinite(e) for e in errors)
        assert max(map(abs, errors)) <= limit(line), line["case"]
        if line["suite"] not in {"import", "iterations", "symmetric_product"}:
            assert limit(line) < U32  # control: sums in float32 would not pass
    product = {line["case"].split(", ")[1]: line for line in lines if line["suite"] == "symmetric_product"}
    assert product["float32"]["errors"]["ours"] > limit(product["float64"])  # control: float32 is seen


def test_only_the_plain_forward_has_nothing_to_judge(done):
    _, lines = done
    unjudged = {(line["suite"], side) for line in lines for side, e in line["errors"].items() if e is None}
    assert unjudged == {("capture", "theirs")}


def test_import_time_stands_beside_its_aim(done):
    shown, lines = done
    (line,) = (line for line in lines if line["suite"] == "import")
    gaps = sorted(a - b for a, b in zip(line["seconds"]["ours"], line["seconds"]["theirs"], strict=True))
    assert line["beside"] == {"added_seconds": pytest.approx(sum(gaps) / 2), "aim_seconds": 0.3}
    assert "added seconds: " in shown


TOY = '''"""Do pairs alternate?"""

from pathlib import Path


def test_toy(versus, tmp_path):
    """Log who runs."""
    log = Path({log!r})

    def side(name):
        with log.open("a") as file:
            print(name, file=file)
        return name

    versus("toy", lambda: side("ours"), lambda: side("theirs"), against="itself", what="letters",
           judge=len, prepare=lambda: side("prepare"), beside=lambda timing: {{"pairs": len(timing.ratios)}})
'''


def test_ratios_are_taken_within_pairs():
    summary = bench_module("pairs").Timing((1.0, 4.0, 3.0), (2.0, 2.0, 12.0)).to_dict()
    assert (summary["ratio"], summary["ratio_min"], summary["ratio_max"]) == (0.5, 0.25, 2.0)
    assert summary["quartiles"]["ours"] == [2.0, 3.0, 3.5]
    assert summary["quartiles"]["ratio"] == [0.375, 0.5, 1.25]


@pytest.mark.parametrize("option", ["--benchmark-only", "--benchmark-disable"])
def test_pairs_alternate(tmp_path, option):
    log, toy = tmp_path / "log", tmp_path / "test_toy.py"
    toy.write_text(TOY.format(log=str(log)))
    words = ("-p", "conftest", "--rootdir", tmp_path, toy, option, "--rounds", 3, "--results", tmp_path)
    ran = run("-c", ROOT / "pyproject.toml", *words, PYTHONPATH=str(BENCH))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    pair = ["prepare", "theirs", "ours"]
    if option == "--benchmark-disable":
        assert log.read_text().split() == pair
        assert not (tmp_path / "suites.jsonl").exists()
        return
    assert log.read_text().split() == pair * 4  # the first is the warm-up
    (line,) = map(json.loads, (tmp_path / "suites.jsonl").read_text().splitlines())
    a, b = line["seconds"]["ours"], line["seconds"]["theirs"]
    ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    assert [line["ratio_min"], line["ratio"], line["ratio_max"]] == ratios
    assert (line["errors"], line["beside"]) == ({"ours": 4, "theirs": 6}, {"pairs": 3})


def test_what_is_missing_is_named():
    ran = run("bench", "-p", "no:benchmark")
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "the suites need pytest-benchmark: `pip install pytest-benchmark`." in ran.stderr


def test_the_last_line_of_a_case_counts(tmp_path):
    def line(case, ratio, suite="one"):
        text = {"suite": suite, "case": case, "against": "that", "what": "of it", "ratio": ratio}
        errors = {"ours": 2e-16, "theirs": None}
        return json.dumps({**text, "ratio_min": ratio / 2, "ratio_max": 20 * ratio, "errors": errors})

    assert suites.rows(tmp_path) == []
    lines = [line("a", 9.0), line("b", 3.0), line("a", 1.0), line("a", 2.0, suite="two")]
    (tmp_path / "suites.jsonl").write_text("\n".join(lines))
    assert suites.rows(tmp_path, "one") == [
        "| a | that | 1.00 (0.50–20) | of it: 2e-16 and - |",
        "| b | that | 3.00 (1.50–60) | of it: 2e-16 and - |",
    ]
    assert len(suites.rows(tmp_path)) == 3
