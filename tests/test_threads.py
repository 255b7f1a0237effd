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


@pytest.mark.parametrize("who_leaves_first", ["first", "second"])
def test_overlapping_fits_give_each_thread_its_own_count_back(who_leaves_first):
    """torch counts for each thread, and a new thread starts with what any of them set last."""
    inside, both = threading.Event(), threading.Event()
    left = {"first": threading.Event(), "second": threading.Event()}
    counts = {}

    def run(name, entered, wait_for):
        with one_thread(10):
            entered.set()
            assert wait_for.wait(10)
            with one_thread(10):  # one of its own inside
                pass
            assert torch.get_num_threads() == 1
            if name != who_leaves_first:
                assert left[who_leaves_first].wait(10)
        counts[name] = torch.get_num_threads()
        left[name].set()

    def second():
        assert inside.wait(10)
        run("second", both, both)

    other = threading.Thread(target=second)
    other.start()
    run("first", inside, both)
    other.join()
    assert counts == {"first": 2, "second": 2}
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


def test_many_problems_are_cut_to_what_a_cache_holds(monkeypatch):
    monkeypatch.setattr(threads, "BITE", 3 * 8 * 4)  # three problems of eight float32
    x, seen = torch.arange(80.0).reshape(10, 8), set()

    def work(part):
        seen.add(threading.get_ident())
        return part + 1

    answers = side_by_side(work, x)
    assert torch.equal(torch.cat(answers), x + 1)
    assert [len(answer) for answer in answers] == [3, 3, 2, 2]
    assert len(seen) <= 2


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
