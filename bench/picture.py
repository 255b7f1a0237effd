"""How right is each method, and what does that cost? One panel for each question and spectrum.

The stored results of peers.py as `peers.png`: seconds to the right, the error upwards, both logarithmic; the
lower left is where one wants to be. A colour is a package, a marker a kind of method. Hollow ones are not
right: above the dotted line, or where all components are asked for with a variance that is off by over 1 %.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from pairs import RESULTS
from peer_tables import Line, grouped, right, stored

COLUMNS = 4
SMALLEST = 1e-17  # an error of zero is drawn here
COLOURS = {
    "pca_torch": "#d62728",
    "torch": "#ff9d00",
    "sklearn": "#1f77b4",
    "torch_pca": "#2ca02c",
    "torchdr": "#9467bd",
    "fbpca": "#8c564b",
    "torch_incremental_pca": "#17becf",
    "peft": "#7f7f7f",
}
MARKERS = {  # the first word that a method's name has
    "covariance_eigh": ("o", "covariance"),
    "eigh": ("o", "covariance"),
    "pca_torch batch": ("o", "covariance"),
    "Exact": ("o", "covariance"),
    "lowrank": ("^", "random sketch"),
    "randomized": ("^", "random sketch"),
    "fbpca": ("^", "random sketch"),
    "krylov": ("D", "iteration"),
    "lobpcg": ("D", "iteration"),
    "arpack": ("D", "iteration"),
    "tsqr": ("s", "SVD"),
    "full": ("s", "SVD"),
    "svd": ("s", "SVD"),
    "torchdr PCA": ("s", "SVD"),
    "Incremental": ("v", "incremental SVD"),
    "auto": ("*", "automatic choice"),
    "partial_fit": ("*", "automatic choice"),
}


def marker(line: Line) -> tuple[str, str]:
    """Its sign and what that stands for.

    Args:
        line: of `peer_tables.stored`.
    """
    words = f"{line['package']} {line['method']}"
    if line["package"] in {"torch_incremental_pca", "peft"}:
        return "v", "incremental SVD"
    return next((found for word, found in MARKERS.items() if word in words), ("x", "other"))


def draw(lines: Sequence[Line]) -> Figure:
    """The picture.

    Args:
        lines: of `peer_tables.stored`.

    Raises:
        ValueError: no line has an answer.
    """
    answered = [line for line in lines if line["median"]]
    if not answered:
        raise ValueError("`bench/results/peers.jsonl` has no answers; run `bench/peers.py` first.")
    panels = grouped(answered, "title", "spectrum")
    columns = min(COLUMNS, len(panels))
    height = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.0 * height + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, columns, squeeze=False).ravel().tolist()
    for axis, ((title, spectrum), own) in zip(axes, panels.items(), strict=False):
        question = title.split(",")[0]  # without the rows of a batch: titles stand side by side
        panel(axis, f"{question}\n{spectrum}", own)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.supxlabel("seconds")
    figure.supylabel(
        "error: share of the variance missed; of all components the worst of variances and directions"
    )
    figure.legend(handles=legend(answered), loc="outside upper center", ncols=7, frameon=False, fontsize=9)
    return figure


def panel(axis: Axes, title: str, lines: Sequence[Line]) -> None:
    """One question and spectrum.

    Args:
        axis: where.
        title: above it.
        lines: with an answer.
    """
    for line in sorted(lines, key=lambda one: one["ours"]):  # ours on top
        (sign, _), colour = marker(line), COLOURS.get(line["package"], "black")
        axis.plot(
            line["median"],
            max(line["error"], SMALLEST),
            sign,
            color=colour if right(line) else "none",
            markersize=11 if sign == "*" else 7,
            markeredgecolor="white" if right(line) else colour,
            markeredgewidth=0.6 if right(line) else 1.2,
            zorder=3 if line["ours"] else 2,
        )
    axis.axhline(lines[0]["tolerance"], color="black", linewidth=0.8, linestyle=":")
    axis.set(xscale="log", yscale="log")
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.tick_params(labelsize=8)
    axis.margins(0.12)
    low, high = axis.get_xlim()
    steps = (1.0,) if high > 50 * low else (1.0, 2.0, 5.0)  # ticks whose labels do not meet
    axis.xaxis.set_major_locator(LogLocator(subs=steps))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def legend(lines: Sequence[Line]) -> list[Line2D]:
    """What the colours and the markers stand for.

    Args:
        lines: those drawn.
    """
    seen = dict.fromkeys(line["package"] for line in lines)
    packages = sorted(seen, key=[*COLOURS, *seen].index)
    kinds = dict.fromkeys(marker(line) for line in lines)
    return [
        *(
            Line2D([], [], color=COLOURS.get(package, "black"), marker="o", linestyle="", label=package)
            for package in packages
        ),
        *(Line2D([], [], color="black", marker=sign, linestyle="", label=kind) for sign, kind in kinds),
        Line2D([], [], color="none", markeredgecolor="black", marker="o", label="hollow: not right"),
        Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="its limit"),
    ]


def main() -> None:
    """Draw the stored results."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    given = options.parse_args()
    try:
        draw(stored(given.out)).savefig(given.out / "peers.png", dpi=110)
    except ValueError as error:
        options.error(str(error))


if __name__ == "__main__":
    main()
