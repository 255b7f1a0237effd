"""One picture of a report: how variance adds up in each layer, the rank of each layer, and of each head."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pca_torch._figures import new_figure
from pca_torch._files import replacing
from pca_torch._labels import CENTRINGS, clip, describe, short_names
from pca_torch.head_rows import KINDS, STATES, by_kind, rows_of

__all__ = ["plot_spectra"]

SHARE = "0.95"  # the rank that is drawn
TYPICAL, EVERY, LIMIT = "#1f6fb4", "#d1495b", "#777777"  # told apart by the colour-blind, and by marker
LONGEST_LABEL = 20  # characters of a tick label
MOST_TICKS = 16
ROOM = 60  # characters of tick labels that fit side by side
LONGEST_TITLE = 56  # characters of the model, and of the tokens
LEGEND_UP_TO = 6  # sites that are named in a legend instead of on a colour bar
SITE_ROW, HEAD_ROW = 5.2, 2.6  # inches
MOST_HEAD_TICKS = 8  # of an axis of a map
SHORTEST_LABEL = 8  # characters under a map
OFF_SCALE = 4  # D is left out of the rank panel when it is this many times the largest rank


def plot_spectra(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Draw the spectra of a report as a PNG; an existing file is replaced as a whole.

    Left: cumulative explained variance against the number of components, typical tokens. Right: the
    rank at 95 % of the variance, typical tokens and all tokens. Below, where there are heads, the same
    rank as maps of heads against layers: centred and uncentred, keys before and after RoPE.

    Args:
        report: what `report_dict` makes or `read_report` reads.
        path: the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    sites, heads = report["sites"], report["heads"]
    tall = len(CENTRINGS) * HEAD_ROW if heads else 0.0
    figure = new_figure((13, (SITE_ROW if sites else 0.6) + tall))
    heights = [height for height, shown in ((SITE_ROW, sites), (tall, heads)) if shown]
    parts: Any = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    if sites:
        _draw_sites(parts[0], sites)
    if heads:
        _draw_heads(parts[-1], heads)
    figure.suptitle(" · ".join(_label(phrase, LONGEST_TITLE) for phrase in describe(report)), fontsize=13)
    with replacing(path) as draft:
        figure.canvas.print_figure(draft, format="png", dpi=150)


def _draw_sites(figure: Any, sites: Mapping[str, Any]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1])
    names, pattern = short_names(list(sites))
    labels = [_label(name, LONGEST_LABEL) for name in names]
    _draw_cumulative(figure, left, labels, list(sites.values()))
    _draw_ranks(right, labels, list(sites.values()))
    right.set_xlabel(_label(pattern, LONGEST_TITLE) if pattern != "*" else "site")


def _draw_heads(figure: Any, heads: Mapping[str, Any]) -> None:
    """A map of heads against layers for each kind and state: centred above, uncentred below."""
    panels = []
    for kind, sites in by_kind(heads).items():
        rows, labels = rows_of(sites)
        states = [state for state in STATES if any(state in row for row in rows)]
        for state in states:
            where = "" if states == [None] else f", {STATES[state]}"
            panels.append((f"{_label(KINDS.get(kind, kind), LONGEST_LABEL)}{where}", rows, labels, state))
    grid = figure.subplots(len(CENTRINGS), len(panels), squeeze=False)
    image = None
    for centring, line in zip(CENTRINGS, grid, strict=True):
        for axes, (title, rows, labels, state) in zip(line, panels, strict=True):
            image = _draw_map(axes, [row.get(state) for row in rows], labels, centring)
            axes.set_title(title if centring == CENTRINGS[0] else "", fontsize=10)
        line[0].set_ylabel(f"{centring}\nhead")
    bar = figure.colorbar(image, ax=grid, pad=0.01, label="rank at 95 %, in percent of E, typical tokens")
    bar.ax.tick_params(labelsize=9)


def _draw_map(axes: Any, sites: list[Any], labels: list[str], centring: str) -> Any:
    """The rank at 95 % of every head of one kind, in percent of E; white where there is no such head."""
    shares = np.full((max(site["heads"] for site in sites if site is not None), len(sites)), np.nan)
    for i, site in enumerate(sites):
        if site is not None:
            ranks = site["typical"][centring]["rank"][SHARE]
            shares[: len(ranks), i] = 100 * np.array(ranks) / site["width"]
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    ticks = _thin(len(labels), MOST_HEAD_TICKS)
    axes.set_xticks(ticks, [_label(labels[i], SHORTEST_LABEL) for i in ticks], fontsize=8)
    axes.set_yticks(_thin(len(shares), MOST_HEAD_TICKS))
    axes.tick_params(axis="y", labelsize=8)
    if centring == CENTRINGS[-1]:
        axes.set_xlabel("layer", fontsize=9)
    return image


def _draw_cumulative(figure: Any, axes: Any, labels: list[str], sites: list[dict[str, Any]]) -> None:
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    depth = ScalarMappable(Normalize(0, max(1, len(sites) - 1)), colormaps["viridis"])
    colours = depth.to_rgba(np.arange(len(sites)))
    for colour, label, site in zip(colours, labels, sites, strict=True):
        view = site["typical"]
        share = np.cumsum(view["explained_variance"]) / (view["total_variance"] or 1)  # 0 of 0 is 0
        axes.plot(np.arange(1, len(share) + 1), share, color=colour, lw=1.3, label=f"site {label}")
    axes.axhline(float(SHARE), color="black", ls="--", lw=0.9)
    axes.annotate("95 %", (0.01, float(SHARE)), xycoords=("axes fraction", "data"), va="bottom", fontsize=9)
    axes.set(
        title="Variance held by the first components, typical tokens",
        xlabel="number of components",
        ylabel="cumulative explained variance",
        xscale="log",
        ylim=(0, 1.02),
    )
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())  # short axes would label 2, 3, 4 as powers
    axes.grid(alpha=0.25)
    if len(sites) <= LEGEND_UP_TO:
        axes.legend(loc="lower right", fontsize=9)
    else:
        ticks = _thin(len(sites), 7)
        bar = figure.colorbar(depth, ax=axes, ticks=ticks, label="site, in order of depth", pad=0.02)
        bar.ax.set_yticklabels([labels[i] for i in ticks], fontsize=9)


def _draw_ranks(axes: Any, labels: list[str], sites: list[dict[str, Any]]) -> None:
    place = np.arange(len(sites))
    typical = {"color": TYPICAL, "marker": "o", "ms": 4, "label": "typical tokens", "zorder": 3}
    every = {"color": EVERY, "marker": "s", "ms": 7, "mfc": "none", "label": "all tokens"}
    largest, unknown = 1, False
    for view, style in (("typical", typical), ("all_tokens", every)):
        ranks = [site[view]["rank"][SHARE] for site in sites]
        unknown |= None in ranks
        largest = max(largest, *(rank or 0 for rank in ranks))
        axes.plot(place, [np.nan if rank is None else rank for rank in ranks], lw=1.5, **style)
    largest = _draw_limit(axes, np.array([site["n_features"] for site in sites], dtype=float), largest)
    if unknown:
        axes.plot([], [], " ", label="no marker: beyond what was computed")
    axes.set(title="Components for 95 % of the variance", ylabel="rank at 95 %")
    axes.set(xlim=(-0.6, len(sites) - 0.4), ylim=(-0.03 * largest, 1.2 * largest))  # room for the legend
    axes.grid(alpha=0.25)
    axes.legend(loc="upper center", ncols=2 if unknown else 3, fontsize=9)
    ticks = _thin(len(sites), MOST_TICKS)
    shown = [labels[i] for i in ticks]
    slant = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len("".join(shown)) > ROOM else {}
    axes.set_xticks(ticks, shown, fontsize=9, **slant)


def _draw_limit(axes: Any, widths: np.ndarray, largest: float) -> float:
    """Draw D as a thin line, unless that would flatten the ranks; the height that must be seen."""
    note = f"D = {widths[0]:g}" if widths.min() == widths.max() else "D"
    if widths.max() > OFF_SCALE * largest:
        axes.plot([], [], color=LIMIT, lw=0.9, label=f"{note} (off the scale)")
        return largest
    edges = np.arange(len(widths) + 1) - 0.5
    axes.stairs(widths, edges, baseline=None, color=LIMIT, lw=0.9, label=note)
    return widths.max()


def _thin(n: int, most: int) -> list[int]:
    """At most `most` of the indices 0..n-1, evenly spaced from the first."""
    return list(range(0, n, -(-n // most)))


def _label(text: str, longest: int) -> str:
    return clip(text, longest).replace("$", r"\$")  # matplotlib would read mathematics between two of them
