"""Figures of matplotlib that no window and no global state know of."""

from __future__ import annotations

from typing import Any

from pca_torch._extras import require

__all__ = ["new_figure"]


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure, to be drawn by `figure.canvas.print_figure`.

    Args:
        size: width and height in inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    matplotlib, canvas = (
        require(f"matplotlib.{name}", "plot", "a picture") for name in ("figure", "backends.backend_agg")
    )
    figure = matplotlib.Figure(figsize=size, layout="constrained")
    canvas.FigureCanvasAgg(figure)
    return figure
