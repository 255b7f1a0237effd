"""The tests that are marked for a GPU, in a process of their own with a time limit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from bench.gpu.record import Recorder, say

ROOT = Path(__file__).parents[2]
LIMITS = {"cuda": 150.0, "cpu": 200.0}  # seconds; a CPU may be shared
NEEDS = {"tests/test_models.py": "gguf"}  # files that cannot be read without an optional package
SHOWN = 20  # failures that are named


def run(recorder: Recorder) -> None:
    """Run them, and record how many passed, which failed, and what was warned of.

    Where the time was up before the last of them, that is recorded as unfinished, and is not wrong unless one
    failed or none passed.
    """
    files, left_out = _files()
    limit = min(LIMITS[recorder.device.type], max(recorder.left, 1.0))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.jsonl"
        code, tail = _pytest(files, log, recorder.device.type, limit)
        seen = _read(log)
    outcomes = Counter(line["outcome"] for line in seen if "outcome" in line)
    failures = [line for line in seen if line.get("outcome") == "failed"]
    warned = Counter(line["warning"] for line in seen if "warning" in line)
    passed, finished = outcomes["passed"], code is not None
    ok = passed > 0 and not failures and code in {0, None}
    recorder.line(
        part="tests",
        case="marked gpu",
        device=recorder.device.type,
        seconds=time.monotonic() - start,
        **{"passed": passed, "failed_tests": len(failures), "skipped_tests": outcomes["skipped"]},
        **{"failures": failures[:SHOWN], "warnings": dict(warned), "left_out": left_out},
        **{"exit_code": code, "finished": finished, "output": "" if ok and finished else tail, "ok": ok},
    )
    recorder.counts["rows"] += 1
    recorder.counts["wrong"] += not ok
    recorder.counts["unfinished"] += not finished
    say(f"tests: {passed} passed, {len(failures)} failed, {outcomes['skipped']} skipped")
    if not finished:
        say(f"tests: unfinished, stopped after {limit:.0f} s; those that are left were not run")
    for failure in failures[:SHOWN]:
        say(f"  {failure['name']}")


def _read(log: Path) -> list[dict]:
    """Whole lines of the log; the last may have been cut off."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _files() -> tuple[list[str], list[str]]:
    """Files with such tests, and those that cannot be read here, with what they lack."""
    found = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    names = [path.relative_to(ROOT).as_posix() for path in found]
    lacking = {name: NEEDS[name] for name in names if name in NEEDS and not _installed(NEEDS[name])}
    left_out = [f"{name}: needs {package}" for name, package in lacking.items()]
    return [name for name in names if name not in lacking], left_out


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _pytest(files: list[str], log: Path, device: str, limit: float) -> tuple[int | None, str]:
    """Exit code, None where the time was up, and the end of what was printed."""
    command = [sys.executable, "-m", "pytest", *files, "-m", "gpu", "-q", "-p", "tests.gpu.log"]
    command += ["-p", "no:cacheprovider", "-W", "default", "--timeout", "60"]
    environment = {
        **os.environ,
        "PCA_TORCH_TEST_DEVICE": device,
        "PCA_TORCH_TEST_LOG": str(log),
        **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")[-3000:]
