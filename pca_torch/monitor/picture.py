"""The metrics of a run over its steps, in one picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pca_torch._files import replacing
from pca_torch._labels import short_names
from pca_torch.monitor.history import History, SiteHistory
from pca_torch.monitor.panels import (
    LARGEST,
    finish,
    label_decades,
    label_steps,
    make_panels,
    marked,
    plain,
    series,
)

__all__ = ["draw_metrics"]

ALARM = {"ls": "none", "marker": "v", "ms": 7, "mfc": "none", "mec": "#d1495b", "mew": 1.5, "label": "alarm"}
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))  # of the places in a layer
PANEL = (3.5, 2.5)  # inches
LEGEND_UP_TO = 8  # sites that are named in a legend instead of on a colour bar
FEW_STEPS = 40  # points that are marked
PALEST = 0.1  # of the scale of colours: its yellow end is lost on white
LONGEST_LABEL = 28  # characters
LONGEST_PLACE, LONGEST_TITLE = 56, 40
LOGARITHMIC = {"total_variance", "condition"}
LARGEST_LOGARITHM = 1e200  # on a logarithmic axis, whose margins must not overflow
SHARES = {"drift_start", "drift_gap", "alpha_req_r2"}  # from 0 to 1
UNITS = {"total_variance": "units²", "drift_last_angle": "radians", "drift_start_angle": "radians"}

Looks = Mapping[str, Mapping[str, Any]]  # of the line of each site, by name


def draw_metrics(history: History, path: str | os.PathLike[str]) -> None:
    """Draw each metric over the steps as a PNG; an existing file is replaced as a whole.

    A panel for each metric, a line for each site, coloured by its layer and dashed by its place in the
    layer. Of heads the mean is drawn, over those that have a value. Alarms are marked at their value.

    Args:
        history: what `arrange` made.
        path: the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, panels = make_panels(len(history.metrics), PANEL)
    looks, depth = _looks(history.sites)
    for axes, metric in zip(panels, history.metrics, strict=True):
        _draw_metric(axes, history, metric, looks)
    label_steps(panels, history.steps)
    if len(history.sites) > LEGEND_UP_TO:
        _draw_scale(figure, panels, history.sites, depth)
    finish(figure, history, "metrics", _key(history, looks))
    with replacing(path) as draft:
        figure.canvas.print_figure(draft, format="png", dpi=110)


def _looks(sites: Sequence[SiteHistory]) -> tuple[Looks, Any]:
    """Colour and dashes of each site, and the scale of the colours."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    depths = [site.layer for site in sites]
    places = list(dict.fromkeys(map(_place, sites)))
    if set(depths) == {None}:
        depths, places = list(range(len(sites))), []
    known = [depth for depth in depths if depth is not None]
    first, last = min(known), max(*known, min(known) + 1)
    scale = ScalarMappable(Normalize(first, last + PALEST * (last - first)), colormaps["viridis"])
    colours = scale.to_rgba(np.array([first if depth is None else depth for depth in depths]))
    looks = {
        site.name: {
            "color": "black" if depth is None else tuple(colour),
            "ls": DASHES[places.index(_place(site)) % len(DASHES)] if places else "-",
        }
        for site, depth, colour in zip(sites, depths, colours, strict=True)
    }
    return looks, scale


def _place(site: SiteHistory) -> str:
    """The name of a site with * for its layer."""
    path, colon, point = site.name.rpartition(":")
    parts = path.split(".")
    if site.layer is not None:
        parts[next(i for i, part in enumerate(parts) if part.isdigit())] = "*"
    return ".".join(parts) + colon + point


def _draw_metric(axes: Any, history: History, metric: str, looks: Looks) -> None:
    """One metric of all sites, with its alarms."""
    shown, few = False, len(history.sites) <= LEGEND_UP_TO
    for site in history.sites:
        values = series(site, metric, history.steps)
        shown |= bool(np.isfinite(values).any())
        style = {
            "lw": 1.3 if few else 0.9,
            "marker": ".",
            "ms": 6 if few else 4,
            "markevery": marked(values, FEW_STEPS),
            **looks[site.name],
        }
        axes.plot(history.steps, values, label=site.name, **style)
    alerts = [a for a in history.alerts if (a.metric, a.view) == (metric, history.view)]
    alerts = [a for a in alerts if abs(a.value) <= LARGEST]
    if alerts:
        axes.plot([a.step for a in alerts], [a.value for a in alerts], zorder=4, **ALARM)
    axes.set_title(plain(_title(metric, history), LONGEST_TITLE), fontsize=10)
    axes.grid(alpha=0.25)
    if not shown:
        defined = any(value is not None for site in history.sites for value in site.values(metric))
        said = "too large to be drawn" if defined else "not defined in this run"
        axes.text(0.5, 0.5, said, ha="center", va="center", transform=axes.transAxes)
        axes.set_yticks([])
    _set_range(axes, metric)


def _title(metric: str, history: History) -> str:
    if metric == "alpha_req":
        return f"alpha_req, fit over λ {history.fit_span}"
    return f"{metric}, {UNITS[metric]}" if metric in UNITS else metric


def _set_range(axes: Any, metric: str) -> None:
    """Shares from 0 to 1, sizes in logarithms, the rest from zero unless that flattens the curves."""
    low, high = axes.dataLim.intervaly
    if metric in SHARES:
        axes.set_ylim(-0.04, 1.04)
    elif metric in LOGARITHMIC and 1 / LARGEST_LOGARITHM < low < high < LARGEST_LOGARITHM:
        axes.set_yscale("log")
        label_decades(axes.yaxis, high / low)
    elif 0 <= low < high / 2:
        axes.set_ylim(-0.03 * high, None)


def _draw_scale(figure: Any, panels: Sequence[Any], sites: Sequence[SiteHistory], scale: Any) -> None:
    """What the colours of many sites mean."""
    from matplotlib.ticker import MaxNLocator

    by_layer = any(site.layer is not None for site in sites)
    label = "layer" if by_layer else "site, in the order of the log"
    bar = figure.colorbar(scale, ax=panels, pad=0.01, aspect=40, label=label)
    low, high = scale.norm.vmin, scale.norm.vmax
    bar.ax.set_ylim(low, low + (high - low) / (1 + PALEST))  # no site has the colours above
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar.ax.tick_params(labelsize=9)


def _key(history: History, looks: Looks) -> list[Any]:
    """Few sites by name; of many the places in a layer, where there are several; and the alarms."""
    from matplotlib.lines import Line2D

    sites, handles = history.sites, []
    if len(sites) <= LEGEND_UP_TO:
        names, _ = short_names([site.name for site in sites])
        for site, name in zip(sites, names, strict=True):
            handles.append(Line2D([], [], lw=1.8, label=plain(name, LONGEST_LABEL), **looks[site.name]))
    elif any(site.layer is not None for site in sites):
        places = {_place(site): looks[site.name]["ls"] for site in sites}
        for place, dashes in places.items() if len(places) > 1 else ():
            handles.append(
                Line2D([], [], lw=1.5, color="black", ls=dashes, label=plain(place, LONGEST_PLACE))
            )
    if any(a.metric in history.metrics and a.view == history.view for a in history.alerts):
        handles.append(Line2D([], [], **ALARM))
    return handles
