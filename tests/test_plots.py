"""The picture of a report: what is drawn, that it is legible, and that the file is whole."""

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from pca_torch.plots import plot_spectra
from pca_torch.report import report_dict
from tests.head_reports import falling, head_layers, heads_site
from tests.reports import layers, sink, site

agg = pytest.importorskip("matplotlib.backends.backend_agg")


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """A function that plots a report and hands out the figure behind the PNG."""
    drawn = []
    save = agg.FigureCanvasAgg.print_figure

    def keep(canvas, *args, **kwargs):
        drawn.append(canvas.figure)
        return save(canvas, *args, **kwargs)

    monkeypatch.setattr(agg.FigureCanvasAgg, "print_figure", keep)

    def plot(report):
        plot_spectra(report, tmp_path / "spectra.png")
        return drawn[-1]

    return plot


def labelled(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def boxes(texts, figure):
    return [text.get_window_extent(figure.canvas.get_renderer()) for text in texts if text.get_text()]


def test_the_curves_are_the_cumulative_shares(figure):
    report = layers(count=5, d=40)
    left = labelled(figure(report).axes[0])
    for name, entry in report["sites"].items():
        values = np.array(entry["typical"]["explained_variance"])
        x, y = left[f"site {name.rsplit('.', 1)[1]}"].get_data()
        np.testing.assert_array_equal(x, np.arange(1, 41))
        np.testing.assert_allclose(y, np.cumsum(values) / values.sum(), rtol=1e-12)
    assert [0.95, 0.95] in [list(line.get_ydata()) for line in left.values()]


def test_the_ranks_of_both_views_are_drawn(figure):
    report = layers()
    right = labelled(figure(report).axes[1])
    for label, view in (("typical tokens", "typical"), ("all tokens", "all_tokens")):
        want = [entry[view]["rank"]["0.95"] for entry in report["sites"].values()]
        np.testing.assert_array_equal(right[label].get_ydata(), want)
        assert right[label].get_marker() not in {"", "None"}
    assert min(right["all tokens"].get_ydata()) == 1


@pytest.mark.parametrize("count", [1, 6, 30, 200])
def test_axes_are_labelled_and_labels_do_not_overlap(figure, count):
    drawn = figure(layers(count=count, d=24))
    left, right = drawn.axes[:2]
    assert drawn.get_suptitle() == "org/model-1b · tokens: 7,168 seen, 512 padding"
    assert (left.get_xlabel(), left.get_ylabel()) == ("number of components", "cumulative explained variance")
    assert right.get_ylabel() == "rank at 95 %"
    assert len(drawn.axes) == (3 if count > 6 else 2)  # the colour bar
    placed = boxes(right.get_xticklabels(), drawn)
    assert len(placed) == count if count <= 16 else 10 <= len(placed) <= 16
    assert all(a.x1 < b.x0 for a, b in itertools.pairwise(placed))


def test_long_names_stay_inside_the_picture(figure):
    """Also names that matplotlib would read as mathematics."""
    names = [f"{'encoder_' * i}block.{i}.$self$_attention_{'k_' * 20}projection" for i in range(1, 9)]
    report = report_dict({name: site(np.ones(8)) for name in names}, {"name": "long/" * 40}, {"seen": 5}, {})
    drawn = figure(report)
    box = drawn.get_tightbbox(drawn.canvas.get_renderer())  # inches, of all that is visible
    width, height = drawn.get_size_inches()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height


def test_sites_of_different_width_share_the_picture(figure):
    sites = {f"s.{d}": site(0.9 ** np.arange(d)) for d in (8, 64, 16)}
    drawn = figure(report_dict(sites, {}, {}, {}))
    assert [len(line.get_xdata()) for line in drawn.axes[0].get_lines()[:3]] == [8, 64, 16]
    np.testing.assert_array_equal(drawn.axes[1].patches[0].get_data().values, [8, 64, 16])


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_width_far_above_the_ranks_is_told_not_drawn(figure):
    assert "D = 64" in legend(figure(report_dict({"a": site(np.ones(64))}, {}, {}, {})).axes[1])
    low = site([1.0] * 4 + [0.0] * 60)
    drawn = figure(report_dict({"a": low}, {}, {}, {}))
    assert "D = 64 (off the scale)" in legend(drawn.axes[1])
    assert drawn.axes[1].get_ylim()[1] < 64


def test_ranks_that_are_not_known_are_left_out(figure):
    sites = {
        "a": site(np.zeros(8)),
        "b": site([5.0, 2.0], d=8, total=10.0),
        "c": site(np.ones(8), extreme=sink()),
    }
    drawn = figure(report_dict(sites, {}, {}, {}))
    assert not labelled(drawn.axes[0])["site a"].get_ydata().any()
    np.testing.assert_array_equal(labelled(drawn.axes[1])["typical tokens"].get_ydata(), [0, np.nan, 8])
    assert "no marker: beyond what was computed" in legend(drawn.axes[1])


@pytest.mark.parametrize("variances", [[0.0], [3.0]], ids=["constant", "one feature"])
def test_the_smallest_report_is_drawn_without_a_warning(figure, variances):
    drawn = figure(report_dict({"_orig_mod": site(variances)}, {}, {}, {}))
    assert legend(drawn.axes[0]) == ["site _orig_mod"]


def test_the_file_is_a_png_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "spectra.png"
    path.write_text("old")
    plot_spectra(layers(count=2, d=8), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert os.listdir(tmp_path) == ["spectra.png"]


def test_an_error_while_drawing_leaves_the_old_file(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    path = tmp_path / "spectra.png"
    path.write_text("old")
    monkeypatch.setattr(agg.FigureCanvasAgg, "print_figure", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_spectra(layers(count=2, d=8), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["spectra.png"]


def test_without_matplotlib_the_install_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "pca-torch\[plot\]"'):
        plot_spectra(layers(count=1, d=8), tmp_path / "spectra.png")


def test_plotting_leaves_no_global_state(tmp_path):
    """Importing the module imports no matplotlib, and drawing never imports pyplot."""
    code = """
import sys
import pca_torch.plots
assert not any(name.startswith("matplotlib") for name in sys.modules)
from tests.head_reports import falling, head_layers, heads_site
from tests.reports import layers
pca_torch.plots.plot_spectra(layers(2, 8), sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "spectra.png")], check=True)


# ---------------------------------------------------------------- heads


def maps(figure):
    """The drawn heat maps by their place: what the row is called, and the title of the column."""
    found = {}
    for axes in figure.subfigs[-1].axes:
        if axes.get_images():
            grid = axes.get_subplotspec()
            found[grid.rowspan.start, grid.colspan.start] = axes
    return found


def test_heads_are_drawn_as_maps_of_their_ranks(figure):
    report = head_layers(5, d=8, h=2)
    drawn = figure(report)
    found = maps(drawn)
    titles = ["keys, before RoPE", "keys, after RoPE", "values", "queries, before RoPE"]
    assert [found[0, i].get_title() for i in range(4)] == titles
    for column, kind in enumerate(("k", "k_rope", "v", "q")):
        for row, centring in enumerate(("centred", "uncentred")):
            shown = found[row, column].get_images()[0].get_array()
            sites = [report["heads"][f"model.layers.{i}.self_attn:{kind}"] for i in range(5)]
            want = [[rank / 8 for rank in site["typical"][centring]["rank"]["0.95"]] for site in sites]
            np.testing.assert_allclose(shown, 100 * np.array(want).T, rtol=1e-12)
    assert found[0, 0].get_ylabel() == "centred\nhead"
    assert found[1, 0].get_ylabel() == "uncentred\nhead"


def test_maps_have_gaps_where_a_layer_has_fewer_heads_or_none(figure):
    sites = {f"l.{i}.attn:k": heads_site(falling(h=1 + i), layer=i, rope="pre") for i in range(3)}
    sites["l.3.attn:k"] = heads_site(falling(h=2), layer=3)
    shown = maps(figure(report_dict(sites, {}, {}, {})))[0, 0].get_images()[0].get_array()
    assert np.ma.getmaskarray(shown).sum(0).tolist() == [2, 1, 0, 3]


def test_heads_and_layers_share_one_picture_in_which_nothing_overlaps(figure):
    report = layers(30)
    drawn = figure(report | {"heads": head_layers(30, d=8)["heads"]})
    drawn.canvas.draw()
    above, below = drawn.subfigs
    assert len(above.axes) == 3
    assert len(maps(drawn)) == 8
    for axes in maps(drawn).values():
        for left, right in itertools.pairwise(boxes(axes.get_xticklabels(), drawn)):
            assert left.x1 < right.x0
    bottom = min(axes.get_tightbbox().y0 for axes in above.axes)
    assert max(axes.get_tightbbox().y1 for axes in below.axes) <= bottom
