"""Threads and small problems: LAPACK does not divide them well, so each core takes problems of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["one_thread", "side_by_side"]

BITE = 2**21  # bytes of a part: with what it takes beside it, about the cache of a core
SMALL = 512  # rows up to which an eigenproblem runs on one thread
Answer = TypeVar("Answer")


@contextmanager
def one_thread(rows: int) -> Generator[None]:
    """An eigenproblem of so many rows inside runs on one thread, if it is small.

    Threaded LAPACK waits for busy cores: two milliseconds of work on 200 rows then take half a second.

    Args:
        rows: of the matrix.
    """
    if rows > SMALL:
        yield
        return
    own = _enter_one()
    try:
        yield
    finally:
        _leave_one(own)


def side_by_side(work: Callable[[Tensor], Answer], problems: Tensor) -> list[Answer]:
    """`work` on parts of a batch that fit in the cache, as many at a time as there are cores.

    Each runs on one thread. Large problems, and those that are not on a CPU, stay together.

    Args:
        work: takes a part (b, …) of the problems; the caller's grad mode and autocast do not reach it.
        problems: (B, …, E); those with E up to 512 are small.

    Returns:
        The answers, in the order of the parts.
    """
    if problems.device.type != "cpu" or problems.shape[-1] > SMALL or len(problems) < 2:
        return [work(problems)]
    cores = torch.get_num_threads()
    bites = max(cores, -(-problems.nbytes // BITE))
    parts = problems.tensor_split(min(bites, len(problems)))

    def alone(part: Tensor) -> Answer:
        torch.get_num_threads()  # torch tells a new thread how many it has when it first asks
        return work(part)

    with one_thread(0), ThreadPoolExecutor(cores) as pool:
        return list(pool.map(alone, parts))


class _Inside(threading.local):
    depth = 0  # of this thread


class _Threads:
    """Who runs on one thread now, and how many there were before the first of them."""

    here = _Inside()
    lock = threading.Lock()
    inside = 0
    before = 1


def _enter_one() -> int:
    """Take this thread to one; what it goes back to."""
    here = _Threads.here
    with _Threads.lock:
        own = torch.get_num_threads()
        if not _Threads.inside:
            _Threads.before = own
        elif own == 1:  # a thread starts with what torch was told last, here the one of the others
            own = _Threads.before
        _Threads.inside += not here.depth
        here.depth += 1
        torch.set_num_threads(1)
    return own


def _leave_one(own: int) -> None:
    """Give back what this thread had: torch counts for each of them."""
    here = _Threads.here
    with _Threads.lock:
        here.depth -= 1
        if not here.depth:
            _Threads.inside -= 1
            torch.set_num_threads(own)
