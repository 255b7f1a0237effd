"""The picture of the metrics: every line is the record, and all of it is legible."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pca_torch.monitor.history import arrange
from pca_torch.monitor.log_file import Log
from pca_torch.monitor.picture import draw_metrics
from pca_torch.monitor.record import Alert
from tests.monitor import logs
from tests.monitor.drawn import assert_legible, figure, panels

__all__ = ["figure"]  # the fixture


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


def keys(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def title_of(metric):
    said = {"alpha_req": "alpha_req, fit over λ 6 to 100", "total_variance": "total_variance, units²"}
    return said.get(metric, f"{metric}, radians" if metric.endswith("_angle") else metric)


def test_every_line_is_what_was_logged(figure):
    log = logs.log(3, 6, 32)
    found = panels(figure(draw_metrics, log))
    metrics = [name for name in log.records[0].metrics if name not in {"alpha_req_from", "alpha_req_to"}]
    assert list(found) == [title_of(metric) for metric in metrics]
    for metric in metrics:
        for site in log.run["sites"]:
            x, y = lines(found[title_of(metric)])[site].get_data()
            mine = [r for r in log.records if (r.site, r.view) == (site, "typical")]
            np.testing.assert_array_equal(x, [r.step for r in mine])
            want = [np.nan if r.metrics[metric] is None else r.metrics[metric] for r in mine]
            np.testing.assert_array_equal(y, want)
    assert np.isnan(lines(found["drift_last"])[site].get_ydata()[0])


def test_the_other_view_is_drawn_on_request(figure):
    log = logs.log(1, 3, 32)
    found = panels(figure(draw_metrics, log, view="all", metrics=["nesum"]))
    want = [r.metrics["nesum"] for r in log.records if r.view == "all"]
    np.testing.assert_array_equal(lines(found["nesum"])["model.layers.0:output"].get_ydata(), want)


def test_heads_are_drawn_as_their_mean(figure):
    log = logs.log(2, 3, 16, heads=3, pattern="model.layers.{}.self_attn:k")
    axes = panels(figure(draw_metrics, log, metrics=["nesum"]))["nesum"]
    for site in log.run["sites"]:
        each = [
            [r.metrics["nesum"] for r in log.records if (r.site, r.view, r.head) == (site, "typical", h)]
            for h in range(3)
        ]
        np.testing.assert_allclose(lines(axes)[site].get_ydata(), np.mean(each, axis=0), rtol=1e-14)
        assert np.ptp(each, axis=0).min() > 0.01  # the mean is not that of any one


def test_alarms_stand_at_their_value_in_their_panel(figure):
    log = logs.log(6, 20, 64, collapse=True)
    other = replace(log.alerts[0], view="all", value=1.0)
    drawn = figure(draw_metrics, replace(log, alerts=[*log.alerts, other]), metrics=["rank_95", "nesum"])
    alarm = lines(panels(drawn)["rank_95"])["alarm"]
    assert [tuple(point) for point in alarm.get_xydata()] == [(a.step, a.value) for a in log.alerts]
    assert alarm.get_marker() == "v"
    assert "alarm" not in lines(panels(drawn)["nesum"])
    assert keys(drawn) == [*"012345", "alarm"]


def test_axes_are_labelled(figure):
    drawn = figure(draw_metrics, logs.log(2, 3, 16))
    assert (
        drawn.get_suptitle()
        == "LlamaForCausalLM · 1 of every 10 steps · typical tokens\nmetrics, sites model.layers.*:output"
    )
    lowest = [axes.get_xlabel() for axes in drawn.axes[-4:]]
    assert lowest == ["optimizer step"] * 4
    assert {axes.get_xlabel() for axes in drawn.axes[:-4]} == {""}
    assert panels(drawn)["condition"].get_yscale() == "log"
    assert panels(drawn)["rank_95"].get_yscale() == "linear"
    low, high = panels(drawn)["drift_start"].get_ylim()
    assert low < 0 < 1 < high


def test_layers_have_their_colour_and_places_their_dashes(figure):
    k = logs.log(4, 2, 16, heads=2, pattern="model.layers.{}.self_attn:k")
    final = logs.log(1, 2, 16, pattern="model.norm:output")
    log = logs.both(logs.both(logs.log(5, 2, 16), k), final)
    drawn = figure(draw_metrics, log, metrics=["rank_95"])
    found = lines(panels(drawn)["rank_95"])
    colours = [found[f"model.layers.{i}:output"].get_color() for i in range(5)]
    assert len(set(colours)) == 5
    assert [found[f"model.layers.{i}.self_attn:k"].get_color() for i in range(4)] == colours[:4]
    assert {found[name].get_linestyle() for name in log.run["sites"][:5]} == {"-"}
    assert {found[name].get_linestyle() for name in log.run["sites"][5:9]} == {"--"}
    assert found["model.norm:output"].get_color() == "black"
    assert keys(drawn) == ["model.layers.*:output", "model.layers.*.self_attn:k", "model.norm:output"]
    bar = drawn.axes[-1]
    assert bar.get_ylabel() == "layer"
    np.testing.assert_allclose(bar.get_ylim(), (0, 4), atol=1e-12)


@pytest.mark.parametrize(("layers", "named"), [(1, True), (8, True), (9, False), (30, False)])
def test_few_sites_are_named_and_many_have_a_colour_bar(figure, layers, named):
    drawn = figure(draw_metrics, logs.log(layers, 2, 16, views=("typical",)), metrics=["rank_95"])
    assert len(drawn.axes) == (1 if named else 2)
    assert len(keys(drawn)) == (layers if named else 0)


def test_sites_without_a_layer_are_coloured_in_their_order(figure):
    log = logs.log(9, 2, 16, pattern="stage{}x:output")
    drawn = figure(draw_metrics, log, metrics=["rank_95"])
    assert len({line.get_color() for line in drawn.axes[0].get_lines()}) == 9
    assert drawn.axes[1].get_ylabel() == "site, in the order of the log"


def with_values(values, name="own"):
    records = [
        replace(logs.record(10 * i, "a", logs.spectrum(8, 1.0)), metrics={name: value})
        for i, value in enumerate(values, 1)
    ]
    return Log(run=logs.run(["a"]), records=records, alerts=[], resumed=[])


def test_a_value_between_gaps_is_marked(figure):
    """No line joins it to others, and with many steps the others have no marker."""
    values = [1.0] * 50 + [None, 2.0, None] + [3.0] * 50
    line = lines(figure(draw_metrics, with_values(values)).axes[0])["a"]
    assert list(line.get_markevery()) == [51]


def test_a_line_breaks_where_the_site_has_no_record(figure):
    log = logs.log(2, 4, 16, views=("typical",))
    site = log.run["sites"][0]
    gone = [r for r in log.records if (r.site, r.step) != (site, 10)]
    line = lines(panels(figure(draw_metrics, replace(log, records=gone), metrics=["nesum"]))["nesum"])[site]
    kept = {r.step: r.metrics["nesum"] for r in gone if r.site == site}
    np.testing.assert_array_equal(line.get_xdata(), [1, 10, 20, 30])
    np.testing.assert_array_equal(line.get_ydata(), [kept.get(step, np.nan) for step in (1, 10, 20, 30)])


SAID = {"none": "not defined in this run", "large": "too large to be drawn"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([None, None], ["none"]),
        ([0, 0], []),
        ([0.0], []),
        ([1e-300, 1e300], []),
        ([-1e300, 1e300], []),
        ([-1.0, 2.0], []),
        ([5, None], []),
        ([1e-320, 5e-324], []),
        ([1.7e308, 1.0, -1.7e308], []),
        ([1.7e308, None], ["large"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["own", "total_variance", "drift_start"])
def test_any_values_are_drawn_without_a_warning(figure, values, said, name):
    log = with_values(values, name)
    alarms = [
        Alert(step=10, site="a", view="typical", head=None, metric=name, value=value, rule=f"{name} > 0")
        for value in values
        if value is not None
    ]
    drawn = figure(draw_metrics, replace(log, alerts=alarms))
    drawn.canvas.draw()  # ticks are computed here
    assert [t.get_text() for t in drawn.axes[0].texts] == [SAID[one] for one in said]


def test_names_are_no_mathematics(figure):
    log = logs.log(2, 2, 8, pattern="a.$x$.{}:output")
    drawn = figure(draw_metrics, replace(log, run=log.run | {"model": "$M$"}), metrics=["nesum"])
    assert drawn.get_suptitle().count(r"\$") == drawn.get_suptitle().count("$") == 4


def many():
    k = logs.log(12, 6, 16, heads=2, pattern="model.layers.{}.self_attn:k", views=("typical",))
    yield "two sites, three steps", logs.log(2, 3, 16), None
    yield "collapse", logs.log(8, 20, 64, collapse=True), ["rank", "condition", "total_variance"]
    yield "heads and more", logs.both(logs.log(12, 6, 16), k), ["rank_95", "drift", "alpha_req"]
    yield "300 steps", logs.log(2, 300, 16, views=("typical",)), ["drift_start"]
    long = "encoder." + "block_" * 30 + "$a$.{}." + "very_long_name_" * 10 + "$:output"
    yield "long names", logs.log(4, 1, 16, pattern=long), ["nesum", "condition"]


@pytest.mark.parametrize(("log", "metrics"), [case[1:] for case in many()], ids=[case[0] for case in many()])
def test_everything_is_legible(figure, log, metrics):
    assert_legible(figure(draw_metrics, log, metrics=metrics))


def test_what_is_not_legible_is_found(figure):
    drawn = figure(draw_metrics, logs.log(1, 3, 8), metrics=["nesum", "rank"])
    drawn.axes[0].set_xticks([10, 11], ["step ten", "step eleven"])
    with pytest.raises(AssertionError, match="texts lie over each other"):
        assert_legible(drawn)


def test_the_file_is_a_png_and_replaces_the_old_one(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run_metrics.png"
    path.write_text("old")
    draw_metrics(arrange(logs.log(1, 2, 8), metrics=["nesum"]), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert os.listdir(tmp_path) == ["run_metrics.png"]


def test_an_error_while_drawing_leaves_the_old_file(tmp_path, monkeypatch):
    agg = pytest.importorskip("matplotlib.backends.backend_agg")

    def fail(*args, **kwargs):
        raise OSError("disk full")

    path = tmp_path / "run_metrics.png"
    path.write_text("old")
    monkeypatch.setattr(agg.FigureCanvasAgg, "print_figure", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_metrics(arrange(logs.log(1, 2, 8), metrics=["nesum"]), path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run_metrics.png"]


def test_without_matplotlib_the_install_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "pca-torch\[plot\]"'):
        draw_metrics(arrange(logs.log(1, 2, 8)), tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []


def test_drawing_leaves_no_global_state(tmp_path):
    """Importing the modules imports no matplotlib, and drawing never imports pyplot."""
    code = """
import sys
import pca_torch.monitor.heat_map, pca_torch.monitor.picture
assert not any(name.startswith("matplotlib") for name in sys.modules)
from pca_torch.monitor.history import arrange
from tests.monitor import logs
history = arrange(logs.log(2, 2, 8), metrics=["nesum"])
pca_torch.monitor.picture.draw_metrics(history, sys.argv[1])
pca_torch.monitor.heat_map.draw_spectra(history, sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.png")], check=True)
