"""A pytest plugin: a JSON line per outcome and warning, so that a run that was stopped still tells."""

import json
import os
from pathlib import Path

REASON = 1500  # characters of what went wrong, the last ones


def _write(**facts):
    with Path(os.environ["PCA_TORCH_TEST_LOG"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def _failure(report):
    return {"reason": str(report.longrepr)[-REASON:]} if report.failed else {}


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:
        _write(name=report.nodeid, outcome=report.outcome, seconds=report.duration, **_failure(report))


def pytest_collectreport(report):
    if report.failed:
        _write(name=report.nodeid, outcome="failed", **_failure(report))


def pytest_warning_recorded(warning_message):
    _write(warning=f"{warning_message.category.__name__}: {warning_message.message}"[:200])
