"""The spectra of a run as heat maps: the index of a variance over the steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from pca_torch._files import replacing
from pca_torch._labels import short_names
from pca_torch.monitor.history import History, SiteHistory
from pca_torch.monitor.panels import finish, label_decades, label_steps, make_panels, marked, plain, series
from pca_torch.monitor.record import SpectrumRecord

__all__ = ["draw_spectra"]

MOST = 12  # maps
PANEL = (3.4, 2.7)  # inches
NOISE = "0.85"  # grey, of what is not above the rounding floor
LONGEST_TITLE = 40  # characters
RANK = "rank_95"  # that is drawn over the map
FARTHEST = 300  # decades from the unit that float64 holds
FEW_STEPS = 20  # ranks that are marked

Map = tuple[np.ndarray, np.ndarray]  # indices (M,), log₁₀ of the shares (M, S), NaN where noise


def draw_spectra(history: History, path: str | os.PathLike[str]) -> None:
    """Draw the spectra over the steps as a PNG; an existing file is replaced as a whole.

    A heat map for each site, at most twelve of them chosen evenly: log₁₀ of the share of the variance that
    each direction holds, of heads of their mean share. Grey is what no head has above its rounding floor.

    Args:
        history: what `arrange` made.
        path: the PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    chosen = [history.sites[i] for i in _evenly(len(history.sites))]
    names = dict(zip(history.sites, short_names([site.name for site in history.sites])[0], strict=True))
    unit = _unit(chosen)
    maps = [_shares(site, history.steps, unit) for site in chosen]
    figure, panels = make_panels(len(chosen), PANEL)
    limits, mesh = _limits(maps), None
    for axes, site, one in zip(panels, chosen, maps, strict=True):
        mesh = _draw_map(axes, history.steps, one, limits)
        _draw_rank(axes, site, history.steps)
        axes.set_title(plain(names[site], LONGEST_TITLE), fontsize=10)
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("index i of λᵢ", fontsize=9)
    label_steps(panels, history.steps)
    for axes in panels:
        axes.set_xlim(*_edges(np.array(history.steps, dtype=float))[[0, -1]])
    bar = figure.colorbar(mesh, ax=panels, pad=0.01, aspect=30, label=f"log₁₀ of λᵢ / {unit}")
    bar.ax.tick_params(labelsize=9)
    some = f" of {len(chosen)} of {len(history.sites)} sites" if len(chosen) < len(history.sites) else ""
    finish(figure, history, f"spectra{some}", _key(chosen, maps))
    with replacing(path) as draft:
        figure.canvas.print_figure(draft, format="png", dpi=110)


def _evenly(n: int) -> list[int]:
    """At most `MOST` of the indices 0..n-1, evenly spaced, both ends among them."""
    return list(range(n)) if n <= MOST else [round(i * (n - 1) / (MOST - 1)) for i in range(MOST)]


def _unit(sites: Sequence[SiteHistory]) -> str:
    """What variances are divided by: their sum, or the largest where a sum is not in the log."""
    records = (r for site in sites for heads in site.records.values() for r in heads)
    return "λ₁" if any(_total(record) is None for record in records) else "Σλ"


def _total(record: SpectrumRecord) -> float | None:
    """Σλ: as logged, or the sum of all variances; None where some of them are not in the log."""
    logged = record.metrics.get("total_variance")
    if logged is None and list(record.index) == list(range(1, record.n_features + 1)):
        return sum(record.variance)
    return logged


def _shares(site: SiteHistory, steps: Sequence[int], unit: str) -> Map:
    """The map of one site; a step without a record is empty.

    Records whose indices are not those of the longest are interpolated between their own, in logarithms.
    """
    each = [record.index for heads in site.records.values() for record in heads]
    index = np.array(max(each, key=lambda own: (own[-1:], len(own))), dtype=float)
    columns = [_column(site.records.get(step, ()), index, unit) for step in steps]
    return index, np.stack(columns, axis=1)


def _column(heads: Sequence[SpectrumRecord], index: np.ndarray, unit: str) -> np.ndarray:
    """log₁₀ of the mean share over the heads of one step (M,)."""
    if not heads:
        return np.full(len(index), np.nan)
    logs = np.stack([_log_share(record, index, unit) for record in heads])
    shares = np.power(10.0, logs, out=np.zeros_like(logs), where=np.abs(logs) < FARTHEST)
    mean = shares.sum(0) / np.maximum((~np.isnan(logs)).sum(0), 1)  # NaN is a head where nothing varies
    trusted = (shares > 0) & (index <= np.array([[record.trusted] for record in heads]))
    return np.log10(mean, out=np.full(len(index), np.nan), where=trusted.any(0))


def _log_share(record: SpectrumRecord, index: np.ndarray, unit: str) -> np.ndarray:
    """log₁₀ of λᵢ over its unit (M,); NaN beyond what was kept and where nothing varies."""
    own, variance = np.array(record.index, dtype=float), np.array(record.variance, dtype=float)
    whole = (_total(record) if unit == "Σλ" else variance[:1].sum()) or 0.0
    if not len(own) or whole <= 0:
        return np.full(len(index), np.nan)
    logs = np.log10(variance, out=np.full(len(own), -np.inf), where=variance > 0) - np.log10(whole)
    if np.array_equal(own, index):
        return logs
    return np.interp(np.log(index), np.log(own), np.maximum(logs, -FARTHEST), right=np.nan)


def _limits(maps: Sequence[Map]) -> tuple[float, float]:
    """Of the colours, the same in all maps."""
    known = np.concatenate([values[np.isfinite(values)] for _, values in maps])
    low, high = (known.min(), known.max()) if len(known) else (-1.0, 0.0)
    return low, max(high, low + 0.1)


def _draw_map(axes: Any, steps: Sequence[int], one: Map, limits: tuple[float, float]) -> Any:
    """The spectra of one site as coloured cells, whose bounds lie half way to the next step and index."""
    index, values = one
    if not len(index):
        index, values = np.ones(1), np.full((1, len(steps)), np.nan)
    columns, rows = _edges(np.array(steps, dtype=float)), np.exp(_edges(np.log(index)))
    axes.set_facecolor(NOISE)
    scale = {"cmap": "viridis", "vmin": limits[0], "vmax": limits[1], "rasterized": True}
    mesh = axes.pcolormesh(columns, rows, np.ma.masked_invalid(values), **scale)
    axes.set_yscale("log")
    axes.set_ylim(rows[0], rows[-1])
    label_decades(axes.yaxis, rows[-1] / rows[0])
    return mesh


def _draw_rank(axes: Any, site: SiteHistory, steps: Sequence[int]) -> None:
    """The rank at 95 % over the map, where that is logged."""
    ranks = series(site, RANK, steps)
    ranks[ranks <= 0] = np.nan
    axes.plot(steps, ranks, marker=".", ms=4, markevery=marked(ranks, FEW_STEPS), **_rank_line())


def _rank_line() -> dict[str, Any]:
    """How the rank is drawn: legible on every colour."""
    from matplotlib.patheffects import withStroke

    return {
        "color": "white",
        "lw": 1.3,
        "path_effects": [withStroke(linewidth=2.8, foreground="black")],
        "label": RANK,
    }


def _edges(places: np.ndarray) -> np.ndarray:
    """Bounds of cells around ascending places (S,): half way to the next one (S + 1,)."""
    if len(places) == 1:
        return places[0] + np.array([-0.5, 0.5])
    middle = (places[:-1] + places[1:]) / 2
    return np.concatenate([[2 * places[0] - middle[0]], middle, [2 * places[-1] - middle[-1]]])


def _key(sites: Sequence[SiteHistory], maps: Sequence[Map]) -> list[Any]:
    """The line of ranks and the grey, where they occur."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    if any(rank for site in sites for rank in site.values(RANK)):
        handles.append(Line2D([], [], **_rank_line()))
    if any(np.isnan(values).any() for _, values in maps):
        handles.append(Patch(color=NOISE, label="at or below the rounding floor"))
    return handles
