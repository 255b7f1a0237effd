"""The figure behind a picture, and where its texts lie."""

import pytest

from pca_torch.monitor.history import arrange


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """A function that hands out the figure of a log, as it is before it is rendered."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    found = []

    def keep(canvas, path, **_):
        found.append(canvas.figure)
        path.write_bytes(b"")

    monkeypatch.setattr(agg.FigureCanvasAgg, "print_figure", keep)

    def draw(function, log, **chosen):
        function(arrange(log, **chosen), tmp_path / "run.png")
        return found[-1]

    return draw


def panels(figure):
    """The axes of the panels by title."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def assert_legible(figure):
    """Rendered, nothing reaches out of the picture, and no tick, title, label or key lies over another."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    box = figure.get_tightbbox(renderer)  # inches, of all that is visible
    width, height = figure.get_size_inches()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height
    around = [part.get_window_extent(renderer) for part in (figure._suptitle, *figure.legends)]
    for axes in figure.axes:
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
            texts += [label for label in labels if label.get_visible()]
        around += [text.get_window_extent(renderer) for text in texts if text.get_text()]
    covered = any(a.overlaps(b) for i, a in enumerate(around) for b in around[i + 1 :])
    assert not covered, "texts lie over each other"
