"""Panels over the optimizer steps: what the two pictures of a run share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pca_torch._figures import new_figure
from pca_torch._labels import clip, printable, short_names
from pca_torch.monitor.history import History, SiteHistory

__all__ = ["finish", "label_decades", "label_steps", "make_panels", "marked", "plain", "series"]

ACROSS = 4  # panels side by side
LONGEST_TITLE = 84  # characters of a line over the panels
MARGIN = (1.2, 1.2)  # inches for the colour bar, and for the title and the key
MOST_TICKS = 5
MOST_COLUMNS = 9  # of the key
WIDE = 12  # inches
SHORT = 2000  # ratio of the ends of an axis
MOST_DECADES = 7
LARGEST = 1e300  # that is drawn: beyond it the margins and the ticks of an axis overflow


def make_panels(count: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure of `count` axes, at most four side by side.

    Args:
        count: how many.
        size: width and height of each, in inches.

    Returns:
        The figure and its axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    across = min(ACROSS, count)
    down = -(-count // across)
    wide = max(across, 2) * size[0] + MARGIN[0]  # a title needs the room of two
    figure = new_figure((wide, down * size[1] + MARGIN[1]))
    grid = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


def series(site: SiteHistory, metric: str, steps: Sequence[int]) -> np.ndarray:
    """A metric as a line over the steps (S,), with NaN where it breaks.

    It does where the site has no record, where the metric is not defined, and where a value is too large.

    Args:
        site: of the run.
        metric: its name in the log.
        steps: of the run, ascending (S,).
    """
    known = dict(zip(site.steps, site.values(metric), strict=True))
    values = np.array([known.get(step) for step in steps], dtype=float)  # of None it makes NaN
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


def marked(values: np.ndarray, few: int) -> list[int]:
    """Places of the points that get a marker: all of them, or only those that no line shows.

    Args:
        values: of a line (S,), NaN where it breaks.
        few: up to so many points all are marked.
    """
    if len(values) <= few:
        return list(range(len(values)))
    known = np.pad(np.isfinite(values), 1)
    return np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:]).tolist()


def label_steps(panels: Sequence[Any], steps: Sequence[int]) -> None:
    """The same whole steps on all horizontal axes, named under the lowest panel of each column.

    Args:
        panels: what `make_panels` made.
        steps: of the run, ascending.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter

    margin = max(0.5, 0.04 * (steps[-1] - steps[0]))
    for i, axes in enumerate(panels):
        few = len(steps) <= MOST_TICKS
        axes.xaxis.set_major_locator(
            FixedLocator(steps) if few else MaxNLocator(MOST_TICKS, integer=True, steps=(1, 2, 5, 10))
        )
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlim(steps[0] - margin, steps[-1] + margin)
        axes.tick_params(labelsize=8)
        if i + ACROSS >= len(panels):
            axes.set_xlabel("optimizer step", fontsize=9)


def label_decades(axis: Any, ratio: float) -> None:
    """Plain numbers on a logarithmic axis: powers of ten, and where it is short 2 and 5 between them.

    Args:
        axis: horizontal or vertical one.
        ratio: of its ends.
    """
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < SHORT else (1,), numticks=MOST_DECADES))
    axis.set_major_formatter(FormatStrFormatter("%.4g"))
    axis.set_minor_formatter(NullFormatter())


def finish(figure: Any, history: History, what: str, handles: Sequence[Any]) -> None:
    """The title above the panels and the key below them.

    Args:
        figure: what `make_panels` made.
        history: the run.
        what: what is drawn, in words.
        handles: what the key explains, with labels.
    """
    run = history.run
    every = f"{run.get('window', '?')} of every {run.get('every_n_steps', '?')} steps"
    above = " · ".join([str(run.get("model", "unnamed model")), every, f"{history.view} tokens"])
    _, pattern = short_names([site.name for site in history.sites])
    below = what if pattern == "*" else f"{what}, sites {pattern}"
    figure.suptitle("\n".join(plain(line, LONGEST_TITLE) for line in (above, below)), fontsize=12)
    if handles:
        columns = min(len(handles), MOST_COLUMNS if figure.get_figwidth() > WIDE else ACROSS)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)


def plain(words: str, longest: int) -> str:
    """Text of a file as text of a picture.

    Args:
        words: anything.
        longest: characters that are left at most.
    """
    return clip(printable(words), longest).replace("$", r"\$")  # two of them would be mathematics
