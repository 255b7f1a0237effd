"""Which steps are sampled, against the rule written out."""

import pytest

from pca_torch.monitor.schedule import Schedule


@pytest.mark.parametrize(
    ("every", "window", "sampled", "ends"),
    [
        (5, 1, [1, 5, 10, 15], [1, 5, 10, 15]),
        (5, 2, [1, 2, 4, 5, 9, 10, 14, 15], [2, 5, 10, 15]),
        (5, 3, [3, 4, 5, 8, 9, 10, 13, 14, 15], [5, 10, 15]),
        (4, 4, [*range(1, 16)], [4, 8, 12]),
        (1, 1, [*range(1, 16)], [*range(1, 16)]),
    ],
)
def test_the_last_steps_of_every_n_and_the_first_of_the_run(every, window, sampled, ends):
    schedule = Schedule(every, window)
    steps = range(1, 16)
    assert [step for step in steps if schedule.is_sampled(step)] == sampled
    assert [step for step in steps if schedule.ends_window(step)] == ends


def test_every_window_is_of_its_length():
    for every in range(1, 9):
        for window in range(1, every + 1):
            schedule, counted = Schedule(every, window), 0
            for step in range(1, 50):
                counted += schedule.is_sampled(step)
                if schedule.ends_window(step):
                    assert counted == window
                    counted = 0


@pytest.mark.parametrize(("every", "window"), [(0, 1), (5, 0), (5, 6), (2.5, 1), (True, 1)])
def test_windows_that_do_not_fit_are_refused(every, window):
    with pytest.raises(ValueError, match=r"`(every_n_steps|window)` must be"):
        Schedule(every, window)
