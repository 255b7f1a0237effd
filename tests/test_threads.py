"""Small problems run on one thread, each core takes its own, and the caller's threads come back."""

import threading

import pytest
import torch

from pca_torch import threads
from pca_torch.threads import one_thread, side_by_side


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_small_problems_run_on_one_thread_which_gives_the_others_back():
    with pytest.raises(ZeroDivisionError), one_thread(threads.SMALL):
        _ = 1 // (torch.get_num_threads() - 1)
    assert torch.get_num_threads() == 2
    with one_thread(threads.SMALL + 1):  # large ones gain by all of them
        assert torch.get_num_threads() == 2


def test_overlapping_fits_give_the_threads_back():
    inside, both, first_left = threading.Event(), threading.Event(), threading.Event()

    def first():
        with one_thread(10):
            inside.set()
            both.wait(10)
        first_left.set()

    def second():
        inside.wait(10)
        with one_thread(10):
            both.set()
            first_left.wait(10)

    runs = [threading.Thread(target=run) for run in (first, second)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert torch.get_num_threads() == 2


def test_each_core_takes_a_part_and_the_answers_keep_their_order():
    x, meet, seen = torch.arange(5.0)[:, None], threading.Barrier(2, timeout=10), []

    def work(part):
        meet.wait()  # both are at work at once, or this fails
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return part * 2

    answers = side_by_side(work, x)
    assert torch.equal(torch.cat(answers), 2 * x)
    assert [len(answer) for answer in answers] == [3, 2]
    assert len({thread for thread, _ in seen}) == 2
    assert {count for _, count in seen} == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("shape", [(4, threads.SMALL + 1), (1, 3), (0, 3)], ids=["large", "one", "none"])
def test_large_single_and_absent_problems_stay_together(shape):
    seen = []

    def work(part):
        seen.append((part.shape, threading.get_ident(), torch.get_num_threads()))
        return part

    assert len(side_by_side(work, torch.zeros(shape))) == 1
    assert seen == [(shape, threading.get_ident(), 2)]


def test_an_error_of_one_part_comes_out_and_gives_the_threads_back():
    def work(part):
        if part.max() > 2:
            raise ValueError("the second half")
        return part

    with pytest.raises(ValueError, match="the second half"):
        side_by_side(work, torch.arange(4.0)[:, None])
    assert torch.get_num_threads() == 2


def test_the_callers_autocast_does_not_reach_the_parts():
    x = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parts = side_by_side(lambda part: part @ part, x)
    assert torch.equal(torch.cat(parts), x @ x)
