"""What does watching the spectra add to the time of a training run?

The run of scripts/train_monitored three times at once, from one seed and over the same batches: without a
monitor, and with one that logs every 50 and every 10 steps. The three take turns after every step, in an
order that rotates, so that what slows the machine for a while slows all of them. What counts is the time of
a round of 50 steps over that without a monitor in the same round: one step of it is sampled, or five. The
losses must be bitwise the same. `--clock wall` needs a quiet machine.
"""

import argparse
import gc
import importlib.machinery
import importlib.util
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from pairs import HERE, RESULTS, parser, record

import pca_torch as pt

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PLAIN = "plain"
LIMITS = {50: 1.02, 10: 1.08}  # what a monitor of so many steps may cost
ROUND = 50  # steps
ROUNDS = 8
WARMUP = 10  # steps before the first round, the first of which is sampled
TINY = ["--width", "32", "--layers", "2", "--heads", "2", "--length", "16", "--batch", "4"]


def script() -> ModuleType:
    """The example that is measured, as a module."""
    loader = importlib.machinery.SourceFileLoader(
        "train_monitored", str(HERE.parent / "scripts" / "train_monitored")
    )
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def start(stack: ExitStack, sizes: Sequence[str], folder: Path) -> dict[str, Callable[[], float]]:
    """Makes a step of each run; what it returns is the loss.

    Args:
        stack: ends the monitors.
        sizes: options of the script.
        folder: of the logs.
    """
    example = script()
    steps: dict[str, Callable[[], float]] = {}
    for every in (None, *LIMITS):
        training = example.Training(example.parser().parse_args(list(sizes)))
        if every is None:
            steps[PLAIN] = training.step
            continue
        path = folder / f"{every}.jsonl"
        monitor = stack.enter_context(pt.SpectrumMonitor(training.model, "layers.*", every, path=path))
        steps[name_of(every)] = monitored(training.step, monitor)
    return steps


def monitored(step: Callable[[], float], monitor: pt.SpectrumMonitor) -> Callable[[], float]:
    """A step of training and of its monitor.

    Args:
        step: of training.
        monitor: told of it.
    """

    def both() -> float:
        loss = step()
        monitor.step()
        return loss

    return both


def name_of(every: int) -> str:
    """What a monitored run is called.

    Args:
        every: steps between two records.
    """
    return f"every {every}"


def measure(
    sizes: Sequence[str], rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, list[float]], float]:
    """Seconds of every step of each run after the first ones, and the last loss of all.

    Args:
        sizes: options of the script.
        rounds: of `ROUND` steps.
        clock: seconds.

    Raises:
        RuntimeError: a monitored run had another loss.
    """
    gc.freeze()  # what the packages hold is not searched each time
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        steps = start(stack, sizes, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        turns = itertools.cycle([[*steps][i:] + [*steps][:i] for i in range(len(steps))])
        for number in range(1, WARMUP + rounds * ROUND + 1):
            losses = {}
            for name in next(turns):
                begin = clock()
                losses[name] = steps[name]()
                seconds[name].append(clock() - begin)
            if len({loss.hex() for loss in losses.values()}) > 1:
                raise RuntimeError(f"step {number}: the losses differ, {losses}.")
    return {name: taken[WARMUP:] for name, taken in seconds.items()}, losses[PLAIN]


def facts_of(seconds: dict[str, list[float]], loss: float) -> dict[str, Any]:
    """What is recorded: ratios within rounds, their median and range, and what a sampled step adds.

    Args:
        seconds: of `measure`.
        loss: likewise.
    """
    rounds = {
        name: [sum(taken[i : i + ROUND]) for i in range(0, len(taken), ROUND)]
        for name, taken in seconds.items()
    }
    found: dict[str, Any] = {
        "rounds": rounds,
        "step_seconds": statistics.median(seconds[PLAIN]),
        "loss": loss,
    }
    for every in LIMITS:
        name = name_of(every)
        ratios = [ours / plain for ours, plain in zip(rounds[name], rounds[PLAIN], strict=True)]
        sampled = slice((-WARMUP - 1) % every, None, every)  # the rounds begin after the warm-up
        found[name] = {
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "sampled_step_seconds": statistics.median(seconds[name][sampled]),
        }
    return found


def table() -> str:
    """The last record as a Markdown table."""
    path = RESULTS / "monitor_cost.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if not lines:
        return "Not yet measured; `python bench/monitor_cost.py` takes minutes."
    last = json.loads(lines[-1])
    rows = [
        "| logged | over the run without | least and most | at most | a sampled step over a plain one |",
        "|---|---|---|---|---|",
    ]
    for every, limit in LIMITS.items():
        one = last[name_of(every)]
        spread = f"{one['ratio_min']:.3f} to {one['ratio_max']:.3f}, {len(last['rounds'][PLAIN])} rounds"
        step = one["sampled_step_seconds"] / last["step_seconds"]
        rows.append(f"| every {every} steps | {one['ratio']:.3f} | {spread} | {limit:.2f} | {step:.2f} |")
    return "\n".join(rows)


def options() -> argparse.ArgumentParser:
    """Those of every script here, and how much is measured."""
    given = parser(__doc__, n=None, d=None)
    given.add_argument("--clock", choices=list(CLOCKS), default="wall", help="seconds of which (%(default)s)")
    given.add_argument("--tiny", action="store_true", help="sizes of a test; nothing is recorded")
    given.add_argument("--table", action="store_true", help="print what is recorded, measure nothing")
    given.set_defaults(pairs=ROUNDS)
    return given


def main() -> None:
    """Measure, print and record; or print what is recorded."""
    given = options()
    args = given.parse_args()
    if args.table:
        print(table())
        return
    if args.device != "cpu":
        given.error("`--device` must be cpu: the example trains there.")
    if args.pairs < 1:
        given.error(f"`--pairs` must be at least 1, got {args.pairs}.")
    facts = facts_of(*measure(TINY if args.tiny else (), args.pairs, CLOCKS[args.clock]))
    print(f"a step takes {1e3 * facts['step_seconds']:.0f} ms; the losses are bitwise the same")
    for every, limit in LIMITS.items():
        one = facts[name_of(every)]
        print(
            f"every {every}: {one['ratio']:.4f} ({one['ratio_min']:.4f}–{one['ratio_max']:.4f}), "
            f"at most {limit:.2f}; a sampled step takes {1e3 * one['sampled_step_seconds']:.0f} ms"
        )
    if not args.tiny:
        record("monitor_cost", args, **facts)


if __name__ == "__main__":
    main()
