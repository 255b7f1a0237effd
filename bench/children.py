"""Functions run in a process of their own, so that its peak of memory is theirs and no one else's."""

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pairs import said, timed, waiting_for

FORKS = multiprocessing.get_context("forkserver")  # of a server that has computed nothing, so no threads hang
FORKS.set_forkserver_preload(["torch", "pca_torch"])


class ChildError(Exception):
    """The function raised, ran out of time, or its process ended."""


def in_child(function: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
    """What `function(*args)` returns in a fresh process.

    Args:
        function: at the top level of a module; what it takes and returns is pickled.
        args: of the function.
        limit: seconds after which the process is ended; None waits for ever.

    Raises:
        ChildError: with one line that says why.
    """
    receive, send = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_answer, args=(send, function, args), daemon=True)
    process.start()
    send.close()
    try:
        if not receive.poll(limit):
            raise ChildError(f"more than {limit:g} s")
        failed, answer = receive.recv()
    except EOFError:
        process.join()
        raise ChildError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        receive.close()
        process.kill()
        process.join()
    if failed:
        raise ChildError(answer)
    return answer


def _answer(send: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        answer = False, function(*args)
    except Exception as error:  # whatever it is, the parent reports it
        answer = True, said(error)
    send.send(answer)


def resident() -> tuple[int, int]:
    """Bytes resident now and at most so far, of this process alone.

    Not `ru_maxrss`: across exec that starts at the peak of the process before, and would hide ours.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return 1024 * kib["VmRSS"], 1024 * kib["VmHWM"]


def forget_the_peak() -> None:
    """The highest memory so far is the present one from here on, where Linux lets a process say so."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak of a small fit before stays in the figure


def measured(run: Callable[[], Any], repeats: int, stop_after: float) -> tuple[Any, list[float], int]:
    """The last answer, the seconds of each run, and the bytes at the peak beyond what was there before.

    Args:
        run: what is measured.
        repeats: runs.
        stop_after: seconds of one run after which it is not run again.
    """
    forget_the_peak()
    before, _ = resident()
    seconds, answer = [], None
    while len(seconds) < repeats and not (seconds and seconds[-1] > stop_after):
        answer = None  # makes room for the next one
        spent, answer = timed(run, waiting_for("cpu"))
        seconds.append(spent)
    _, peak = resident()
    return answer, seconds, peak - before
