"""What the suites share: options, runs of two sides in turn, and a report with an error beside each time.

pytest-benchmark calls `setup` before every round of what it times. The other side runs there, so rounds are
pairs A, B, A, B, … and a ratio is taken within each. Its own table is replaced: it has no errors.
"""

import argparse
import gc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pairs import RESULTS, Timing, record, timed, waiting_for
from suites import table

LINES = pytest.StashKey[list[dict[str, Any]]]()
WARMUP = 1


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suites."""
    group = parser.getgroup("suites")
    group.addoption("--size", choices=("tiny", "full"), default="full", help="of the data")
    group.addoption("--rounds", type=int, default=5, help="pairs of runs of each case")
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption("--results", help="folder of suites.jsonl (bench/results; none if tiny)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Silence the table of pytest-benchmark, and say so where that is missing.

    Raises:
        UsageError: it is.
    """
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError("the suites need pytest-benchmark: `pip install pytest-benchmark`.")
    config.option.benchmark_quiet = True
    config.stash[LINES] = []


def pytest_collection_finish() -> None:
    """What the imports hold is not searched for garbage before every run: that takes a tenth of a second."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the rows of this run."""
    for line in table(config.stash[LINES]):
        terminalreporter.write_line(line)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where the data are."""
    return request.config.getoption("--device")


@pytest.fixture
def sized(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`sized(full=..., tiny=...)` is the one that was asked for."""
    return lambda *, full, tiny: full if request.config.getoption("--size") == "full" else tiny


@pytest.fixture
def versus(benchmark: Any, request: pytest.FixtureRequest, device: str) -> Callable[..., None]:
    """Time two sides in turn, judge both answers, and record a line."""
    wait = waiting_for(device)

    def compare(
        case: str,
        ours: Callable[[], Any],
        theirs: Callable[[], Any],
        *,
        against: str,
        what: str,
        judge: Callable[[Any], float | None],
        prepare: Callable[[], None] | None = None,
        beside: Callable[[Timing], Mapping[str, float]] | None = None,
    ) -> None:
        """Run the pairs.

        Args:
            case: what is run, with its sizes; at most 34 letters.
            ours: what is timed.
            theirs: what it is compared with.
            against: the name of that, at most 15 letters.
            what: what the errors are.
            judge: the error of an answer; None where there is nothing to judge.
            prepare: runs before every pair and is not timed.
            beside: other numbers to show, given the timing.
        """
        answers: dict[str, Any] = {}
        seconds: list[float] = []

        def other_side() -> None:
            answers.clear()  # the last answers make room before the next ones
            if prepare is not None:
                prepare()
            spent, answers["theirs"] = timed(theirs, wait)
            seconds.append(spent)
            gc.collect()

        def this_side() -> None:
            answers["ours"] = ours()
            wait()

        options = request.config
        rounds = options.getoption("--rounds")
        benchmark.pedantic(this_side, setup=other_side, rounds=rounds, warmup_rounds=WARMUP, iterations=1)
        errors = {side: judge(answers[side]) for side in ("ours", "theirs")}
        if benchmark.stats is None:  # --benchmark-disable
            return
        ours_seconds = tuple(benchmark.stats.stats.data)
        timing = Timing(ours_seconds, tuple(seconds[WARMUP:]))
        line = {
            "suite": request.path.stem.removeprefix("test_"),
            "question": request.module.__doc__.splitlines()[0],
            "case": case,
            "against": against,
            "what": what,
            "errors": errors,
            "beside": {} if beside is None else dict(beside(timing)),
            **timing.to_dict(),
        }
        benchmark.extra_info.update(errors=errors, ratio=timing.ratio)
        options.stash[LINES].append(line)
        facts = {name: options.getoption(f"--{name}") for name in ("size", "rounds", "device")}
        out = options.getoption("--results") or (str(RESULTS) if facts["size"] == "full" else None)
        if out is not None:
            record("suites", argparse.Namespace(out=out, **facts), **line)

    return compare
