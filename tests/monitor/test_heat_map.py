"""The heat maps: every cell is the logarithm of a share that was logged, at its index and step."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from pca_torch.monitor.heat_map import draw_spectra
from pca_torch.monitor.history import arrange
from pca_torch.monitor.log_file import Log
from tests.monitor import logs
from tests.monitor.drawn import assert_legible, figure, panels

__all__ = ["figure"]  # the fixture


def mesh(axes):
    """Bounds of the columns, bounds of the rows, and the values of the cells."""
    drawn = axes.collections[0]
    corners = drawn.get_coordinates()
    return corners[0, :, 0], corners[:, 0, 1], drawn.get_array().reshape(len(corners) - 1, -1)


def of(records):
    records = list(records)
    return Log(
        run=logs.run(list(dict.fromkeys(r.site for r in records))), records=records, alerts=[], resumed=[]
    )


@pytest.mark.parametrize("d", [24, 300], ids=["all kept", "thinned"])
def test_the_cells_are_the_shares_at_their_index(figure, d):
    log = logs.log(2, 4, d)
    found = panels(figure(draw_spectra, log))
    assert list(found) == ["0", "1"]
    for layer, axes in found.items():
        mine = [r for r in log.records if (r.site, r.view) == (f"model.layers.{layer}:output", "typical")]
        columns, rows, values = mesh(axes)
        want = [np.log10(np.array(r.variance) / r.metrics["total_variance"]) for r in mine]
        np.testing.assert_allclose(values.T, want, rtol=1e-12)
        index = np.array(mine[0].index)
        assert len(index) == len(values)
        assert (rows[:-1] < index).all()
        assert (index < rows[1:]).all()
        np.testing.assert_allclose(rows[1:-1], np.sqrt(index[:-1] * index[1:]), rtol=1e-12)
        np.testing.assert_array_equal(columns, [-3.5, 5.5, 15.0, 25.0, 35.0])
        assert axes.get_xlim() == (-3.5, 35.0)
        assert axes.get_yscale() == "log"
        assert axes.get_ylim() == (rows[0], rows[-1])


def test_the_scale_is_that_of_all_maps(figure):
    log = logs.log(3, 4, 32)
    drawn = figure(draw_spectra, log)
    shares = np.concatenate([
        np.log10(np.array(r.variance) / r.metrics["total_variance"])
        for r in log.records
        if r.view == "typical"
    ])
    for axes in panels(drawn).values():
        np.testing.assert_allclose(axes.collections[0].get_clim(), (shares.min(), shares.max()), rtol=1e-12)
    bar = drawn.axes[-1]
    assert bar.get_ylabel() == "log₁₀ of λᵢ / Σλ"
    assert [axes.get_ylabel() for axes in panels(drawn).values()] == ["index i of λᵢ", "", ""]


def test_noise_is_grey(figure):
    record = logs.record(10, "a", np.array([1.0, 0.1, 1e-9, 1e-10, 0.0]))
    assert record.trusted == 2
    drawn = figure(draw_spectra, of([record]))
    values = mesh(drawn.axes[0])[2][:, 0]
    np.testing.assert_array_equal(np.ma.getmaskarray(values), [False, False, True, True, True])
    assert drawn.axes[0].get_facecolor()[:3] == (0.85, 0.85, 0.85)
    assert "at or below the rounding floor" in [t.get_text() for t in drawn.legends[0].get_texts()]
    clean = figure(draw_spectra, of([logs.record(10, "a", np.ones(4))]))
    assert [t.get_text() for t in clean.legends[0].get_texts()] == ["rank_95"]


def test_heads_are_drawn_as_their_mean_share(figure):
    """Of shares, not of variances: a loud head counts no more. What one head alone trusts is shown.

    A head that does not vary in a direction has no share of it; one that does not vary at all is left out.
    """
    loud, quiet = 1000 * np.array([4.0, 1.0, 1e-12, 0.0]), np.array([1.0, 0.6, 0.2, 0.2])
    records = [logs.record(10, "a", values, head=h) for h, values in enumerate((loud, quiet, np.zeros(4)))]
    values = mesh(figure(draw_spectra, of(records)).axes[0])[2][:, 0].filled(np.nan)
    np.testing.assert_allclose(10**values, [(0.8 + 0.5) / 2, (0.2 + 0.3) / 2, 0.05, 0.05], rtol=1e-6)


def test_a_step_without_tokens_is_a_gap(figure):
    """As of an expert; the cells of its neighbours do not grow."""
    record = logs.record(10, "a", np.ones(3))
    records = [
        replace(record, site=site, step=step)
        for step in (10, 20, 30)
        for site in "ab"
        if (site, step) != ("a", 20)
    ]
    axes = panels(figure(draw_spectra, of(records)))["a"]
    columns, _, values = mesh(axes)
    np.testing.assert_array_equal(columns, [5, 15, 25, 35])
    np.testing.assert_array_equal(np.ma.getmaskarray(values)[0], [False, True, False])
    np.testing.assert_array_equal(axes.get_lines()[0].get_ydata(), [3, np.nan, 3])  # of 3 equal variances


def test_other_indices_are_interpolated(figure):
    """λ = i⁻² is a straight line in logarithms; beyond what a record has there is a gap."""
    i = np.arange(1, 301)
    long = logs.record(10, "a", i**-2.0)
    short = replace(logs.record(20, "a", i[:200] ** -2.0), metrics=long.metrics)
    values = mesh(figure(draw_spectra, of([long, short])).axes[0])[2]
    index = np.array(long.index)
    assert short.index != long.index
    np.testing.assert_allclose(values[:, 0], np.log10(index**-2.0 / (i**-2.0).sum()), atol=1e-6)
    inside = index <= 200
    np.testing.assert_allclose(values[inside, 1], values[inside, 0], atol=1e-6)
    assert np.ma.getmaskarray(values)[~inside, 1].all()


def test_without_their_sum_variances_are_over_the_largest(figure):
    """A thinned spectrum does not tell its sum; a whole one does."""
    record = logs.record(10, "a", logs.spectrum(300, 1.0))
    drawn = figure(draw_spectra, of([replace(record, metrics={"nesum": 3.0})]))
    assert drawn.axes[-1].get_ylabel() == "log₁₀ of λᵢ / λ₁"
    assert mesh(drawn.axes[0])[2][0, 0] == 0
    record = logs.record(10, "a", logs.spectrum(30, 1.0))
    drawn = figure(draw_spectra, of([replace(record, metrics={"nesum": 3.0})]))
    assert drawn.axes[-1].get_ylabel() == "log₁₀ of λᵢ / Σλ"
    np.testing.assert_allclose((10 ** mesh(drawn.axes[0])[2]).sum(), 1, rtol=1e-6)


def test_the_rank_lies_over_the_map(figure):
    log = logs.log(1, 5, 32)
    ranks = [r.metrics["rank_95"] for r in log.records if r.view == "typical"]
    line = figure(draw_spectra, log, metrics=["nesum"]).axes[0].get_lines()[0]
    np.testing.assert_array_equal(line.get_ydata(), ranks)
    np.testing.assert_array_equal(line.get_xdata(), [1, 10, 20, 30, 40])


@pytest.mark.parametrize(
    ("layers", "shown"), [(12, list(range(12))), (30, [0, 3, 5, 8, 11, 13, 16, 18, 21, 24, 26, 29])]
)
def test_of_many_sites_twelve_are_drawn(figure, layers, shown):
    """Evenly: the nearest whole numbers to 29·i/11."""
    drawn = figure(draw_spectra, logs.log(layers, 2, 8, views=("typical",)))
    assert list(panels(drawn)) == list(map(str, shown))
    title = "spectra of 12 of 30 sites, sites" if layers == 30 else "spectra, sites"
    assert f"\n{title} model.layers.*:output" in drawn.get_suptitle()


@pytest.mark.parametrize(
    "values",
    [np.zeros(4), np.array([2.0]), np.array([1e300, 1e-300]), np.array([1e-310, 0.0])],
    ids=["nothing", "one", "far", "tiny"],
)
def test_any_spectrum_is_drawn_without_a_warning(figure, values):
    record = logs.record(10, "a", np.ones(len(values)))
    metrics = {"total_variance": float(values.sum()), "rank_95": None}
    drawn = figure(draw_spectra, of([replace(record, variance=values.tolist(), metrics=metrics)]))
    assert np.ma.getmaskarray(mesh(drawn.axes[0])[2])[:, 0].tolist() == [
        bool(v < 1e-300) for v in values / values.max(initial=1e-300)
    ]


def test_a_record_without_variances_is_empty(figure):
    record = replace(logs.record(10, "a", np.ones(3)), index=[], variance=[], trusted=0)
    assert np.ma.getmaskarray(mesh(figure(draw_spectra, of([record])).axes[0])[2]).all()


def many():
    yield "two sites, three steps", logs.log(2, 3, 48)
    yield "one step", logs.log(1, 1, 8)
    yield "collapse", logs.log(7, 20, 64, collapse=True)
    yield "thirty sites", logs.log(30, 3, 300, views=("typical",))
    yield (
        "long names",
        logs.log(4, 3, 16, pattern="encoder." + "block_" * 30 + "$a$.{}." + "long_" * 30 + "$:output"),
    )


@pytest.mark.parametrize("log", [case[1] for case in many()], ids=[case[0] for case in many()])
def test_everything_is_legible(figure, log):
    assert_legible(figure(draw_spectra, log))


def test_without_matplotlib_the_install_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "pca-torch\[plot\]"'):
        draw_spectra(arrange(logs.log(1, 2, 8)), tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
