"""What power of N, D and K do the measured times and peaks of memory follow? Fits, tables and a picture.

A fit is a line through log(size) and log(seconds or bytes), by least squares, with the standard error of
its slope. Beside it stands the slope of the cost that the README states, over the same sizes: a sum such
as N·D²/2 + 9·D³ has no single exponent, so both are taken the same way. What ± holds is how far the
points lie off the line: noise of the medians and the bend of such a sum, not the spread of runs of one point.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pairs import lines_of

LETTERS = ("N", "D", "K")
RESOLUTION = 2**20  # bytes; smaller peaks are pages of the allocator and of libraries
Cost = Callable[[int, int, int], float]

TIME: dict[str, Cost] = {
    "krylov": lambda n, d, k: n * d**2 / 2 + 8 * d**2 * k,
    "covariance_eigh": lambda n, d, k: n * d**2 / 2 + 9 * d**3,
    "tsqr": lambda n, d, k: 2 * n * d**2 + 10 * d**3,
    "full": lambda n, d, k: 2 * n * d**2 + 10 * d**3,  # through QR where N > D
    "randomized": lambda n, d, k: n * d * (k + 10) * 10,
    "streaming": lambda n, d, k: n * d**2 / 2 + 8 * d**2 * k,
}
MEMORY: dict[str, Cost] = {
    "krylov": lambda n, d, k: d**2 + 12 * d * k,  # basis, images and Ritz vectors of 4K rows
    "covariance_eigh": lambda n, d, k: d**2,
    "tsqr": lambda n, d, k: d**2,
    "full": lambda n, d, k: n * d,
    "randomized": lambda n, d, k: n * d,  # a centred float64 copy, where that fits
    "streaming": lambda n, d, k: d**2 + 12 * d * k,
}
QUANTITIES: dict[str, dict[str, Cost]] = {"time": TIME, "memory": MEMORY}


@dataclass(frozen=True)
class Fit:
    """A power law through the points of one route, quantity and letter."""

    exponent: float
    error: float  # standard error of the exponent
    scale: float  # value at size 1
    theory: float  # exponent of the stated cost over the same sizes

    def __str__(self) -> str:
        return f"{_two(self.exponent)}±{self.error:.2f} ({_two(self.theory)})"


def power_law(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Exponent, its standard error, and the value at size 1, of a least-squares line through the logarithms.

    Args:
        sizes: three or more, not all the same.
        values: positive, one for each.
    """
    x, y = np.log(sizes), np.log(values)
    spread = ((x - x.mean()) ** 2).sum()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / spread
    level = y.mean() - slope * x.mean()
    left = ((y - level - slope * x) ** 2).sum()
    return float(slope), math.sqrt(left / (len(x) - 2) / spread), math.exp(level)


def stored(folder: Path) -> list[dict[str, Any]]:
    """The lines of `scaling.py`."""
    return lines_of(folder, "scaling")


def value(line: dict[str, Any], quantity: str) -> float:
    """Median seconds, or bytes at the peak."""
    return float(np.median(line["seconds"])) if quantity == "time" else line["above"]


def points(lines: list[dict[str, Any]], route: str, letter: str) -> list[dict[str, Any]]:
    """Lines of a sweep that were measured, by size."""
    found = [a for a in lines if a["case"] == route and letter in a["sweeps"] and a["skipped"] is None]
    return sorted(found, key=lambda line: line[letter.lower()])


def exponents(lines: list[dict[str, Any]]) -> dict[tuple[str, str, str], Fit]:
    """The fit of each route, quantity and letter that has three points of its own.

    Args:
        lines: of `scaling.py`. Those that another solver took over, and peaks too small to see, do not count.
    """
    found = {}
    for quantity, costs in QUANTITIES.items():
        least = RESOLUTION if quantity == "memory" else 0
        for route in costs:
            for letter in LETTERS:
                own = [a for a in points(lines, route, letter) if not a["handed_over"]]
                own = [a for a in own if value(a, quantity) > least]
                if len(own) < 3:
                    continue
                sizes = [a[letter.lower()] for a in own]
                slope, error, scale = power_law(sizes, [value(a, quantity) for a in own])
                theory, _, _ = power_law(sizes, [costs[route](a["n"], a["d"], a["k"]) for a in own])
                found[route, quantity, letter] = Fit(slope, error, scale, theory)
    return found


def cells(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Per route and quantity the fits as text, N, D, K."""
    fits = exponents(lines)
    return {
        route: {q: [str(fits.get((route, q, letter), "-")) for letter in LETTERS] for q in QUANTITIES}
        for route in TIME
        if any(line["case"] == route for line in lines)
    }


def worst(lines: list[dict[str, Any]], route: str) -> str:
    """The largest share of the variance that a route missed in any of its points, measured."""
    missed = [line["missed"] for line in lines if line["case"] == route and line["skipped"] is None]
    return f"{max(missed):.0e}" if missed else "-"


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Lines of at most 80 columns for a terminal."""
    found = ["fitted exponent ± its standard error (exponent of the stated cost, same sizes)"]
    for quantity in QUANTITIES:
        found += ["", f"{quantity:16}" + "".join(f"{letter:18}" for letter in LETTERS) + "missed"]
        for route, texts in cells(lines).items():
            found.append(f"{route:16}" + "".join(f"{t:18}" for t in texts[quantity]) + worst(lines, route))
    return found


def rows(folder: Path) -> list[str]:
    """The same as lines of Markdown, from the stored results.

    Args:
        folder: of `scaling.jsonl`.
    """
    lines = stored(folder)
    found = [
        "| route | time ~ N | time ~ D | time ~ K | memory ~ N | memory ~ D | memory ~ K | missed, at most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for route, texts in cells(lines).items():
        both = [*texts["time"], *texts["memory"]]
        found.append(f"| `{route}` | {' | '.join(both)} | {worst(lines, route)} |")
    return found


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time above, memory below, against N, D and K, with each fit and its exponent.

    Args:
        lines: of `scaling.py`.
        path: of the PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9.5), layout="constrained")
    panels = figure.subplots(2, 3, sharey="row")
    for row, quantity in zip(panels, QUANTITIES, strict=True):
        for axes, letter in zip(row, LETTERS, strict=True):
            _draw(axes, lines, quantity, letter)
        row[0].set_ylabel("seconds" if quantity == "time" else "MB beyond the input, at the peak")
    missed = ", ".join(f"{route} {worst(lines, route)}" for route in cells(lines))
    figure.suptitle(
        f"Share of the variance missed, at most: {missed}\nHollow: a dense solver took over, not in the fit",
        fontsize=10,
    )
    figure.savefig(path, dpi=100)


def _draw(axes: Any, lines: list[dict[str, Any]], quantity: str, letter: str) -> None:
    """One panel: points of each route, the fit through them, its exponent in the legend."""
    fits, unit, marks = exponents(lines), 1.0 if quantity == "time" else 1e-6, "os^vDP"
    for number, route in enumerate(TIME):
        found = [a for a in points(lines, route, letter) if value(a, quantity) > 0]
        if not found:
            continue
        fit, style = fits.get((route, quantity, letter)), {"color": f"C{number}", "marker": marks[number]}
        sizes = np.array([a[letter.lower()] for a in found])
        values = unit * np.array([value(a, quantity) for a in found])
        other = np.array([a["handed_over"] for a in found])
        name = route if fit is None else f"{route}  {_two(fit.exponent)} ± {fit.error:.2f}"
        axes.plot(sizes[~other], values[~other], linestyle="", label=name, **style)
        axes.plot(sizes[other], values[other], linestyle="", fillstyle="none", **style)
        if fit is not None:
            ends = sizes[~other][[0, -1]]
            axes.plot(ends, unit * fit.scale * ends**fit.exponent, "-", color=f"C{number}", alpha=0.6)
    axes.set(xscale="log", yscale="log", xlabel=_where(lines, letter))
    axes.set_xticks(sorted({a[letter.lower()] for a in lines if letter in a["sweeps"]}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2, "frameon": False}
    axes.legend(title="fitted exponent ± its standard error", fontsize=8, title_fontsize=8, **below)


def _two(number: float) -> str:
    """Two decimals, and no minus before zeros."""
    return f"{round(number, 2) + 0.0:.2f}"


def _where(lines: list[dict[str, Any]], letter: str) -> str:
    """The letter, and at what the others were held."""
    one = next(line for line in lines if letter in line["sweeps"])
    held = ", ".join(f"{other} = {one[other.lower()]}" for other in LETTERS if other != letter)
    return f"{letter}   ({held})"
