"""Many callables timed in rounds, each in an order of its own, until the rounds or the time are over."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pairs import said, timed, waiting_for

SLOW = 5.0  # seconds; what takes longer runs once
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

    def ratios(self, other: "Runs") -> list[float]:
        """Its seconds over those of another, within each round that both ran in.

        Args:
            other: what it is compared with.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return [a / b for a, b in pairs if a is not None and b is not None]


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    deadline: float,
    *,
    slow: float = SLOW,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Runs]:
    """Run every callable once, in the order given, then those that are not slow again, in random orders.

    Nothing starts after the deadline. A further round is of all that are not slow or, where these do not fit
    before the deadline by what was seen, of the quickest of them. Garbage is collected before each run.

    Args:
        calls: by name; one that raises is not run again, and keeps what it raised.
        rounds: at most.
        deadline: reading of `clock` at which time is over.
        slow: seconds; what takes longer runs once.
        clock: seconds.
    """
    gc.freeze()  # what the packages hold is not searched each time
    runs = {name: Runs() for name in calls}
    for name, call in calls.items():
        if clock() < deadline:
            _run(runs[name], call, clock)
        else:
            runs[name].failure, runs[name].seconds = OUT_OF_TIME, [None]
    shuffled = random.Random(0)  # so that none follows the same neighbour in every round
    for _ in range(1, rounds):
        again = (n for n, run in runs.items() if run.failure is None and max(run.taken) <= slow)
        chosen = _fitting(again, runs, deadline - clock())
        if not chosen:
            break
        shuffled.shuffle(chosen)
        for name in chosen:
            if clock() < deadline:  # others may have taken longer than before
                _run(runs[name], calls[name], clock)
        length = max(len(run.seconds) for run in runs.values())
        for run in runs.values():
            run.seconds += [None] * (length - len(run.seconds))
    return runs


def _fitting(names: Iterable[str], runs: Mapping[str, Runs], left: float) -> list[str]:
    """The quickest, as many as fit in what is left; not one of many, which is compared with nothing."""
    chosen, quickest = [], sorted(names, key=lambda one: runs[one].median)
    for name in quickest:
        left -= runs[name].median
        if left < 0:
            break
        chosen.append(name)
    return chosen if len(chosen) > 1 or chosen == quickest else []


def _run(run: Runs, call: Callable[[], Any], clock: Callable[[], float]) -> None:
    """One more time; the answer of the first is kept."""
    try:
        seconds, answer = timed(call, waiting_for("cpu"), clock)
    except Exception as error:  # whatever a package raises is what there is to say about it
        run.failure, run.answer, seconds = said(error), None, None
    else:
        run.answer = run.answer if run.seconds else answer
    run.seconds.append(seconds)
