"""Many callables timed in turn: A, B, C, A, B, C, …, until the rounds or the time are over."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SLOW = 10.0  # seconds; what takes longer runs once
OUT_OF_TIME = "not run: out of time"


@dataclass
class Runs:
    """What one callable took in each round, and what it answered in the first."""

    seconds: list[float | None] = field(default_factory=list)  # None: not run in that round
    answer: Any = None
    failure: str | None = None  # why there is no answer

    @property
    def taken(self) -> list[float]:
        """Seconds of the rounds it ran in."""
        return [s for s in self.seconds if s is not None]

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.taken)

    @property
    def again(self) -> bool:
        """Whether it runs in further rounds."""
        return self.failure is None and max(self.taken) <= SLOW

    def ratios(self, other: "Runs") -> list[float]:
        """Its seconds over those of another, within each round that both ran in.

        Args:
            other: what it is compared with.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return [a / b for a, b in pairs if a is not None and b is not None]


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int, deadline: float, clock: Callable[[], float]
) -> dict[str, Runs]:
    """Run every callable once per round; the garbage of the one before is collected first.

    Nothing starts after the deadline, and a further round only if all of it fits before by what was seen,
    so that what runs again is compared within the same rounds.

    Args:
        calls: by name; one that raises is not run again, and keeps what it raised.
        rounds: at most.
        deadline: reading of `clock` at which time is over.
        clock: seconds.
    """
    gc.freeze()  # what the packages hold is not searched each time
    runs = {name: Runs() for name in calls}
    for name, call in calls.items():
        if clock() < deadline:
            _first(runs[name], call, clock)
        else:
            runs[name].failure, runs[name].seconds = OUT_OF_TIME, [None]
    for _ in range(1, rounds):
        lasting = {name: run for name, run in runs.items() if run.again}
        if not lasting or clock() + sum(run.median for run in lasting.values()) > deadline:
            break
        for name, run in runs.items():
            runs_now = name in lasting and clock() < deadline  # others may have taken longer than before
            run.seconds.append(_timed(calls[name], clock)[0] if runs_now else None)
    return runs


def _first(run: Runs, call: Callable[[], Any], clock: Callable[[], float]) -> None:
    """The run whose answer is kept."""
    try:
        seconds, run.answer = _timed(call, clock)
    except Exception as error:  # whatever a package raises is what there is to say about it
        first = str(error).strip().split("\n", maxsplit=1)[0]
        run.failure, seconds = f"{type(error).__name__}: {first}", None
    run.seconds.append(seconds)


def _timed(call: Callable[[], Any], clock: Callable[[], float]) -> tuple[float, Any]:
    gc.collect()
    start = clock()
    answer = call()
    return clock() - start, answer


def now() -> float:
    """The clock of a benchmark."""
    return time.perf_counter()
