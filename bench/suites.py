"""The results of the pytest-benchmark suites: a table for the terminal and rows of Markdown."""

from pathlib import Path
from typing import Any

import numpy as np
from pairs import lines_of

Line = dict[str, Any]
HEAD = f"{'case':35}{'ours':>8}{'error':>7}{'theirs':>9}{'error':>7}  {'ratio':17}against"


def stored(folder: Path) -> list[Line]:
    """The last line of each suite and case, in the order of the first.

    Args:
        folder: of `suites.jsonl`.
    """
    return list({(line["suite"], line["case"]): line for line in lines_of(folder, "suites")}.values())


def error(value: float | None) -> str:
    """An error, or "-" of what gives no answer that could be wrong."""
    return "-" if value is None else f"{value:.0e}" if value else "0"


def ratio(line: Line) -> str:
    """Median and range over the pairs."""
    middle, low, high = (
        f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in (line["ratio"], line["ratio_min"], line["ratio_max"])
    )
    return f"{middle} ({low}–{high})"


def clock(seconds: float) -> str:
    """Three digits and a unit."""
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if seconds >= s), ("µs", 1e-6))
    return f"{seconds / size:.3g} {unit}"


def table(lines: list[Line]) -> list[str]:
    """Lines of at most 100 columns; no time stands without its error.

    Args:
        lines: as they are recorded, by suite.
    """
    found = []
    for suite in dict.fromkeys(line["suite"] for line in lines):
        own = [line for line in lines if line["suite"] == suite]
        found += ["", own[0]["question"], f"    error: {own[0]['what']}", HEAD]
        for line in own:
            ours, theirs = (
                f"{clock(np.median(line['seconds'][side])):>8}{error(line['errors'][side]):>7}"
                for side in ("ours", "theirs")
            )
            found.append(f"{line['case']:35}{ours} {theirs}  {ratio(line):17}{line['against']}")
            found += [f"    {name.replace('_', ' ')}: {value:.3g}" for name, value in line["beside"].items()]
    return found


def rows(folder: Path, suite: str | None = None) -> list[str]:
    """Rows of a Markdown table: job, against, time ratio, accuracy beside it.

    Args:
        folder: of `suites.jsonl`.
        suite: only this one; None is all.
    """
    found = []
    for line in stored(folder):
        if suite in {None, line["suite"]}:
            both = " and ".join(error(line["errors"][side]) for side in ("ours", "theirs"))
            found.append(f"| {line['case']} | {line['against']} | {ratio(line)} | {line['what']}: {both} |")
    return found
