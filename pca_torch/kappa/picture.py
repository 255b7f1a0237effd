"""The picture of a study: variances by route beside the truth, and what offsets do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from pca_torch._figures import new_figure
from pca_torch._files import replacing
from pca_torch._labels import clip, printable
from pca_torch.kappa.routes import METHODS, PRECISIONS, Route, Study
from pca_torch.kappa.shifts import DTYPES
from pca_torch.precision import unit_roundoff

__all__ = ["plot"]

COLOURS = {"covariance": "#d1495b", "krylov": "#e69f00", "SVD": "#1f6fb4", "TSQR": "#2a9d6f"}
TITLE = 40  # characters of the name
MOST_TICKS = 8
WIDTH = 0.18  # of the place of one route beside the others


def plot(study: Study, path: str | os.PathLike[str]) -> None:
    """Draw a study as a PNG; an existing file is replaced as a whole.

    Left and middle: |variance| by route in float32 and in float64, beside the truth; hollow where the
    certificate does not trust it, a triangle where the number is negative, at the bottom where it is
    zero. Right: the error of the uncentred formula and of centred sums against the offset.

    Args:
        study: what `study` made.
        path: the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure((14, 5.6))
    panels = figure.subplots(1, 3, width_ratios=[1, 1, 1.05])
    bottom, top = _limits(study)
    for axes, precision in zip(panels, PRECISIONS, strict=False):
        _draw_routes(axes, study, precision, bottom)
        axes.set_ylim(bottom, top)
    panels[1].tick_params(labelleft=False)
    panels[0].set_ylabel("|variance|, before any clamp at zero")
    _draw_shifts(panels[2], study)
    figure.suptitle(_title(study), fontsize=14)
    with replacing(path) as draft:
        figure.canvas.print_figure(draft, format="png", dpi=110)


def _title(study: Study) -> str:
    name = clip(printable(study.name), TITLE).replace("$", r"\$")
    size = f"{study.n_samples:,} × {study.n_features:,}"
    return f"{name}, {size}: {study.condition}"


def _limits(study: Study) -> tuple[float, float]:
    """Of the axis of variances: everything that is not zero, with room for the key."""
    sizes = [*study.truth, *(abs(value) for route in study.routes for value in route.variances)]
    sizes += [route.rounding_floor for route in study.routes if route.method == "covariance"]
    logs = np.log10([size for size in sizes if size > 0])
    room = max(1.0, 0.06 * np.ptp(logs))
    return 10 ** (logs.min() - room), 10 ** (logs.max() + 5 * room)


def _draw_routes(axes: Any, study: Study, precision: str, bottom: float) -> None:
    """The routes of one arithmetic, side by side at the index of each variance."""
    indices = np.arange(study.first, study.last + 1)
    routes = {route.method: route for route in study.routes if route.precision == precision}
    axes.hlines(study.truth, indices - 0.45, indices + 0.45, color="black", lw=1.6, label="truth", zorder=1)
    for place, method in enumerate(METHODS):
        where = indices + WIDTH * (place - (len(METHODS) - 1) / 2)
        for i, x, value in zip(indices, where, routes[method].variances, strict=True):
            trusted = i <= routes[method].trusted
            axes.plot(
                x,
                max(abs(value), bottom),
                marker="v" if value < 0 else "o",
                ms=9 if value < 0 else 7,
                mfc=COLOURS[method] if trusted else "white",
                mec=COLOURS[method],
                mew=1.8,
                ls="none",
                zorder=3,
                clip_on=False,
                label=f"{method} λ{i}",
            )
    _draw_floor(axes, routes["covariance"], indices[0] - 0.45)
    labels = {method: f"{method}: {routes[method].trusted} of {study.last} trusted" for method in METHODS}
    _draw_key(axes, labels)
    axes.set(title=f"{precision}: variances as computed", yscale="log")
    axes.set_xlim(indices[0] - 0.6, indices[-1] + 0.6)
    shown = indices[:: -(-len(indices) // MOST_TICKS)]
    axes.set_xticks(shown, [f"λ{i}" for i in shown])
    axes.grid(axis="y", alpha=0.25)


def _draw_floor(axes: Any, route: Route, left: float) -> None:
    axes.axhline(route.rounding_floor, color=COLOURS["covariance"], ls="--", lw=1.1, zorder=0)
    axes.annotate(
        f"rounding floor of the covariance route, {route.rounding_floor:.0e}",
        (left, route.rounding_floor),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=9,
        color=COLOURS["covariance"],
    )


def _draw_key(axes: Any, labels: dict[str, str]) -> None:
    """What the colours and the shapes mean, and how many variances each certificate trusts."""
    from matplotlib.lines import Line2D

    shape = {"ls": "none", "ms": 7, "mew": 1.8}
    grey = {"color": "0.35", "mfc": "white", **shape}
    handles = [
        Line2D([], [], color="black", lw=1.6, label="truth"),
        Line2D([], [], marker="o", label="not trusted", **grey),
        Line2D([], [], marker="v", label="negative", **grey),
        Line2D([], [], ls="none", label=" "),
    ]
    for method, label in labels.items():
        handles.append(Line2D([], [], color=COLOURS[method], marker="o", label=label, **shape))
    axes.legend(handles=handles, loc="upper right", ncols=2, fontsize=8, framealpha=0.9, columnspacing=1)


def _draw_shifts(axes: Any, study: Study) -> None:
    """Error over λ₁ against the offset, by formula and arithmetic."""
    offsets = sorted({shift.offset for shift in study.shifts})
    place = np.arange(len(offsets))
    for precision, dtype in DTYPES.items():
        shifts = [shift for shift in study.shifts if shift.precision == precision]
        u, style = unit_roundoff(dtype), "-" if precision == "float64" else "--"
        for formula, colour in (("uncentred", "#d1495b"), ("centred", "#1f6fb4")):
            errors = [max(getattr(shift, formula), u / 8) for shift in shifts]
            words = "XᵀX - nmmᵀ" if formula == "uncentred" else "centred first"
            axes.plot(place, errors, style, color=colour, marker="o", ms=5, label=f"{words}, {precision}")
    axes.axhline(1, color="black", lw=0.9)
    axes.annotate(
        "all of λ₁", (place[0], 1), xytext=(0, -4), textcoords="offset points", va="top", fontsize=9
    )
    axes.set_xticks(place, [f"{offset:,.0f}" for offset in offsets])
    axes.set(
        yscale="log", title="The same samples around an offset", ylabel="largest error of a variance, over λ₁"
    )
    axes.set_xlabel("offset, in standard deviations")
    axes.grid(axis="y", alpha=0.25)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.25)  # room for the key
    axes.legend(loc="upper left", ncols=2, fontsize=8.5)
