"""How fast, and how right, is PCA here and in every peer?

All methods of a workload run in turn in one process on the same float32 samples with the same number of
threads, after each has run on a small problem, in an order that differs from round to round. What is slow
runs once, and where the time is over further rounds are left out; both are said. Beside each time stand its
errors (see judge.py) and the ratio to the fastest route of pca_torch that is as right, the median of the
ratios within a round. Below 1 the peer is faster: "ahead" if it is right, "coarser" if it is not.

    python bench/peers.py           # all of it, below 15 minutes on two cores
    python bench/peers.py --large   # top and share of 8192×4096, about 20 minutes
    python bench/peers.py --workload top --size 2048x1024 --k 32
"""

import argparse
import contextlib
import math
import os
import random
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import torch
from judge import Tolerance, Truth, judge, of_heads, tolerance
from methods import METHODS, Method
from pairs import RESULTS, environment, said
from rounds import SLOW, Runs, interleaved
from rows import Row, compare, record, show
from torch import Tensor
from workloads import LARGE, WORKLOADS, Workload, resized, samples_of, tiny

CHECKS = ("numpy", "scipy", "threadpoolctl")  # versions that count beside those of the methods


# ---------------------------------------------------------------- one workload and spectrum
def measure(
    workload: Workload,
    spectrum: str,
    methods: Sequence[Method],
    rounds: int,
    deadline: float,
    slow: float = SLOW,
) -> tuple[list[Row], Tolerance]:
    """Rows of all methods, and what counts as right.

    Args:
        workload: the question.
        spectrum: one of `workload.spectra`.
        methods: those asked for.
        rounds: at most.
        deadline: reading of the clock at which time is over.
        slow: seconds; what takes longer runs once.
    """
    x, truth = data_and_truth(workload.shape, spectrum, workload.lifted)
    data = list(x.split(workload.batch)) if workload.kind == "batches" else x
    asked = in_order(method for method in methods if method.kind == workload.kind)
    rows = {m.title: Row(m, Runs([], failure=m.missing(workload.name))) for m in asked}
    calls = {name: _call(row.method, data, workload.k) for name, row in rows.items() if not row.runs.failure}
    small = tiny(workload)
    first = _small(small)
    for name in calls:
        with contextlib.suppress(Exception):  # it will be said when it fails at full size
            rows[name].method.fit(first, small.k)
    for name, runs in interleaved(calls, rounds, deadline, slow=slow).items():
        rows[name].runs = runs
        if runs.failure is None:
            _judge(rows[name], truth, workload)
    limit = tolerance(truth, workload)
    compare(list(rows.values()), limit)
    return sorted(rows.values(), key=lambda row: row.runs.median if row.runs.taken else math.inf), limit


def in_order(methods: Iterable[Method]) -> list[Method]:
    """The order of the first round: a fixed random one, and slow classes last.

    Args:
        methods: those asked for.
    """
    found = list(methods)
    random.Random(0).shuffle(found)
    return sorted(found, key=lambda method: method.slow)


def _call(method: Method, data: Any, k: Any) -> Callable[[], Any]:
    return lambda: method.fit(data, k)


def _small(workload: Workload) -> Any:
    x = samples_of(workload.shape, "power", workload.lifted)
    return list(x.split(workload.batch)) if workload.kind == "batches" else x


def _judge(row: Row, truth: Truth | list[Truth], workload: Workload) -> None:
    """Note how wrong the answer of a row is, and forget the answer.

    Args:
        row: of a method that answered.
        truth: of the workload.
        workload: the question.
    """
    answer, row.runs.answer = row.runs.answer, None
    try:
        row.verdict = judge(truth, workload, answer)
    except Exception as error:  # NaN, another shape than was asked for, or whatever else was returned
        row.runs.failure = f"no answer: {said(error)}"
        return
    if math.isinf(row.verdict.error):
        row.runs.failure = "no answer: not finite, or of another size"


@lru_cache(maxsize=4)  # several workloads ask about the same samples
def data_and_truth(shape: tuple[int, ...], spectrum: str, lifted: int) -> tuple[Tensor, Truth | list[Truth]]:
    """The samples and what is true of them, or of each head.

    Args:
        shape: (N, D) or (H, N, E).
        spectrum: of the samples.
        lifted: K of a massive spectrum.
    """
    x = samples_of(shape, spectrum, lifted)
    return x, Truth(x) if len(shape) == 2 else of_heads(x)


# ---------------------------------------------------------------- the machine
@contextlib.contextmanager
def threads(count: int) -> Generator[list[dict[str, Any]]]:
    """Equal threads for torch and for the libraries below NumPy and SciPy, whose facts are given.

    Args:
        count: threads.
    """
    import scipy.linalg  # ruff: ignore[unused-import]  so that its library is there to be limited
    from threadpoolctl import threadpool_info, threadpool_limits

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with threadpool_limits(count):
            keys = ("internal_api", "version", "architecture", "num_threads")
            yield [{key: found.get(key) for key in keys} for found in threadpool_info()]
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(methods: Sequence[Method]) -> dict[str, str | None]:
    """Versions of what the numbers depend on; None where it is not installed.

    Args:
        methods: those asked for.
    """
    names = packages_distributions()
    found: dict[str, str | None] = {}
    for package in dict.fromkeys((*CHECKS, *(method.package for method in methods))):
        try:
            found[package] = version(names.get(package, [package])[0])
        except PackageNotFoundError:
            found[package] = None
    return found


# ---------------------------------------------------------------- the run
def parts(chosen: Sequence[Workload], spectra: Sequence[str] | None) -> list[tuple[Workload, str]]:
    """Every workload with each of its spectra.

    Args:
        chosen: workloads.
        spectra: those asked for instead of a workload's own.
    """
    return [(workload, spectrum) for workload in chosen for spectrum in spectra or workload.spectra]


def deadline_of(part: int, todo: Sequence[tuple[Workload, str]], start: float, end: float) -> float:
    """When a part is over: what is left is shared by weight among those to come, so that none starves.

    Args:
        part: index of it.
        todo: all parts.
        start: reading of the clock.
        end: of all parts.
    """
    weights = [workload.weight for workload, _ in todo[part:]]
    return start + max(0.0, end - start) * weights[0] / sum(weights)


def arguments() -> argparse.Namespace:
    """The options, checked; `workloads` are those to run."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--workload", nargs="+", choices=list(WORKLOADS), help="(all)")
    options.add_argument("--spectrum", nargs="+", help="instead of those of the workload")
    options.add_argument("--method", nargs="+", help="those whose name has one of these words")
    options.add_argument("--size", help="NxD, or HxNxE of heads")
    options.add_argument("--k", type=int, help="components, where they are counted")
    options.add_argument("--rounds", type=int, default=3, help="at most (%(default)s)")
    options.add_argument("--large", action="store_true", help="top and share at 8192x4096")
    options.add_argument("--minutes", type=float, help="then no new run starts (12, or 20 if --large)")
    options.add_argument("--slow", type=float, help="seconds; what takes longer runs once (5, 10 if --large)")
    options.add_argument("--threads", type=int, help="of each method (all cores it may use)")
    options.add_argument("--tiny", action="store_true", help="small sizes, one thread: does it run?")
    options.add_argument("--out", type=Path, help="folder of the JSON lines (bench/results; none if --tiny)")
    given = options.parse_args()
    given.threads = given.threads or (1 if given.tiny else cores())
    given.minutes = given.minutes or (20 if given.large else 12)
    given.slow = given.slow or (2 * SLOW if given.large else SLOW)
    given.out = given.out or (None if given.tiny else RESULTS)
    try:
        shape = tuple(map(int, given.size.split("x"))) if given.size else None
        known = LARGE if given.large else WORKLOADS
        chosen = [known[name] for name in given.workload or known]
        sized = (tiny(workload) if given.tiny else workload for workload in chosen)
        given.workloads = [resized(workload, shape, given.k) for workload in sized]
    except KeyError as error:
        options.error(f"`--large` has {' and '.join(LARGE)} alone, got {error.args[0]}.")
    except ValueError as error:
        options.error(str(error))
    return given


def main() -> None:
    """Measure, print and record every part."""
    given = arguments()
    warnings.simplefilter("ignore")  # of packages about each other; nothing here is decided by one
    words = given.method or [""]
    methods = [method for method in METHODS if any(word in method.title for word in words)]
    todo = parts(given.workloads, given.spectrum)
    end = time.perf_counter() + 60 * given.minutes
    with threads(given.threads) as libraries:
        facts = {
            "environment": {**environment("cpu"), "versions": versions(methods), "libraries": libraries},
            "rounds": given.rounds,
            "run": uuid.uuid4().hex,  # its lines belong together
        }
        for part, (workload, spectrum) in enumerate(todo):
            deadline = deadline_of(part, todo, time.perf_counter(), end)
            rows, limit = measure(workload, spectrum, methods, given.rounds, deadline, given.slow)
            show(workload, spectrum, rows, limit)
            if given.out:
                record(workload, spectrum, rows, limit, facts, given.out)
    print(f"\nonce: slower than {given.slow:g} s, or no time for another round")


if __name__ == "__main__":
    sys.exit(main())
