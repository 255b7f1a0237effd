"""What TensorBoard reads back is what was measured, also of a run that was killed."""

import errno
import html
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pca_torch._extras import require
from pca_torch.monitor.alarms import sentence
from pca_torch.monitor.histogram import MOST_BINS, log_histogram
from pca_torch.monitor.record import thinned
from pca_torch.monitor.tensorboard_sink import TensorBoardSink
from tests.monitor.dashboards import HEADED, PLAIN, RUN, alert, at_step, power_law, record

pytest.importorskip("tensorboard")


def read(folder):
    """Everything in a folder, as TensorBoard sees it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "tensors": 0}).Reload()


def points(folder, tag):
    """(step, value) of a curve."""
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def texts(folder, tag):
    """(step, text) of a text tag."""
    events = read(folder).Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


def write(folder, *steps, start=0, shift=0.0):
    """A finished run of one sink."""
    sink = TensorBoardSink(folder)
    sink.begin(RUN, start)
    for step in steps:
        sink.write(at_step(step, shift), [])
    sink.close()


def test_every_defined_metric_is_a_point_under_its_own_tag(tmp_path):
    write(tmp_path, 10, 20, 30)
    starts = {  # the path of each record, and which number of `at_step` it has
        f"pca/{PLAIN}": 0,
        f"pca_all/{PLAIN}": 1,
        f"pca/{HEADED}/head0": 2,
        f"pca/{HEADED}/head1": 3,
    }
    facts = {"n_samples", "below_rounding"}
    names = {start: {"rank_95", "drift_last"} | facts for start in starts}
    names[f"pca_all/{PLAIN}"].add("extreme_share")
    assert set(read(tmp_path).Tags()["scalars"]) == {f"{start}/{n}" for start in starts for n in names[start]}
    for start, number in starts.items():
        for name in ("rank_95", "drift_last"):
            measured = [(step, at_step(step)[number].metrics[name]) for step in (10, 20, 30)]
            want = [(step, float(np.float32(value))) for step, value in measured if value is not None]
            assert points(tmp_path, f"{start}/{name}") == want
    assert points(tmp_path, f"pca/{PLAIN}/drift_last")[0][0] == 20  # at 10 it was not defined
    assert points(tmp_path, f"pca_all/{PLAIN}/extreme_share")[0] == (10, 0.25)


def test_the_histogram_that_is_read_back_holds_every_variance_above_rounding(tmp_path):
    spectrum = power_law(1000)
    trusted = thinned(spectrum)[0][-4]  # a variance that is kept, so that the line reaches it
    floor = spectrum[trusted].item()  # of the next one; at the floor is not above it
    sink = TensorBoardSink(tmp_path)
    sink.begin(RUN, 0)
    sink.write([record(10, spectrum=spectrum, floor=floor)], [])
    sink.close()
    (event,) = read(tmp_path).Histograms(f"pca/{PLAIN}/spectrum_log10")
    found, logs = event.histogram_value, spectrum[:trusted].log10().numpy()
    assert event.step == 10
    assert found.num == sum(found.bucket) == trusted
    assert points(tmp_path, f"pca/{PLAIN}/below_rounding") == [(10, 1000.0 - trusted)]
    edges = np.array([found.bucket_limit[0] - 0.1, *found.bucket_limit])
    # seven digits of λ move log10 λ by 5e-7/ln 10 at most, so no variance changes its bin
    assert len(thinned(spectrum)[0]) == 128 < trusted
    assert np.abs(logs[:, None] - edges).min() > 5e-7
    np.testing.assert_array_equal(found.bucket, np.histogram(logs, edges)[0])
    assert (found.min, found.max) == pytest.approx((logs[-1], logs[0]), abs=0.1)
    assert found.sum == pytest.approx(logs.sum(), abs=5e-7 * trusted)
    assert found.sum_squares == pytest.approx((logs**2).sum(), abs=2 * 5e-7 * np.abs(logs).sum())


def test_between_kept_variances_a_histogram_errs_by_less_than_their_distance():
    spectrum = torch.exp(-torch.arange(2000, dtype=torch.float64) / 150)  # no power law: a line is not exact
    kept = record(1, spectrum=spectrum, floor=0.0)
    found = log_histogram(kept)
    logs = spectrum.log10().numpy()
    # a variance between two kept ones is read as a value between them: at an edge, only those can be amiss
    most = np.diff(kept.index).max()
    true = np.array([(logs < edge).sum() for edge in found.edges])
    below = np.append(0, found.counts.cumsum())
    assert below[-1] == 2000
    assert np.abs(below - true).max() <= most
    # control: the kept variances alone, each as often as the other, do exceed it
    alone = np.array([(np.log10(kept.variance) < edge).mean() * 2000 for edge in found.edges])
    assert np.abs(alone - true).max() > most


@pytest.mark.parametrize(
    ("values", "n"),
    [
        ([0.25] * 7, 7),
        ([10.0, 1.0, 0.1, 1e-9], 3),
        ([1e300, 1e100, 1.0, 1e-300], 4),
        ([3.0], 1),
        ([4.0, 2.0, 0.0], 2),
    ],
    ids=["constant", "on the edges", "wide", "one", "zeros"],
)
def test_odd_spectra_have_a_histogram(values, n):
    spectrum = torch.tensor(values, dtype=torch.float64)
    found = log_histogram(record(1, spectrum=spectrum, floor=0.0 if values[0] > 1e200 else 1e-6))
    assert found.counts.sum() == len(found.values) == n
    assert len(found.counts) <= MOST_BINS
    assert len(found.edges) == len(found.counts) + 1
    assert found.edges[0] <= found.values.min()
    assert found.edges[-1] >= found.values.max()


@pytest.mark.parametrize(
    "spectrum", [torch.zeros(4, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)]
)
def test_rounding_alone_has_no_histogram(tmp_path, spectrum):
    sink = TensorBoardSink(tmp_path)
    sink.begin(RUN, 0)
    sink.write([record(10, spectrum=spectrum)], [])
    sink.close()
    assert read(tmp_path).Tags()["histograms"] == []
    assert points(tmp_path, f"pca/{PLAIN}/below_rounding") == [(10, len(spectrum))]


def safe(markdown):
    """HTML as TensorBoard makes it."""
    from tensorboard.plugin_util import markdown_to_safe_html

    return markdown_to_safe_html(markdown)


def shown(page, element):
    """What a reader sees in each such element."""
    return [html.unescape(text) for text in re.findall(rf"<{element}[^>]*>(.*?)</{element}>", page)]


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")
def test_table_alarms_and_settings_are_texts(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.begin(RUN, 0)
    odd = record(10, "a|b*c:output", alpha_req=None, effective_rank=12.345678)
    sink.write([*at_step(10), odd], [alert(10), alert(10, HEADED, head=1)])
    sink.close()
    ((step, settings),) = texts(tmp_path, "pca/run")
    assert (step, json.loads(settings.removeprefix("```json").removesuffix("```"))) == (0, RUN)
    ((step, table),) = texts(tmp_path, "pca/table")
    cells = [shown(row, "t[hd]") for row in re.findall(r"<tr>.*?</tr>", safe(table), re.DOTALL)]
    assert step == 10
    facts = ["site", "tokens", "N", "D", "above rounding"]
    assert cells[0] == [*facts, "rank_95", "effective_rank", "alpha_req"]
    assert cells[1] == [PLAIN, "typical", "500", "40", "40", "3.333", "–", "–"]
    assert cells[3][0] == f"{HEADED}/head0"
    assert cells[5] == ["a|b*c:output", "typical", "500", "40", "40", "20", "12.35", "–"]
    ((step, told),) = texts(tmp_path, "pca/alarms")
    assert step == 10
    assert shown(safe(told), "li") == [sentence(one) for one in (alert(10), alert(10, HEADED, head=1))]


def test_one_chart_a_metric_has_a_line_for_each_site(tmp_path):
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    write(tmp_path, 10, 20)
    reader = read(tmp_path)
    (event,) = reader.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    tags = reader.Tags()["scalars"]
    shown = {
        (category.title, chart.title): [tag for tag in tags if re.match(chart.multiline.tag[0], tag)]
        for category in layout.category
        for chart in category.chart
    }
    assert shown == {  # no heads
        ("pca", "rank_95"): [f"pca/{PLAIN}/rank_95"],
        ("pca", "drift_last"): [f"pca/{PLAIN}/drift_last"],
        ("pca_all", "rank_95"): [f"pca_all/{PLAIN}/rank_95"],
        ("pca_all", "drift_last"): [f"pca_all/{PLAIN}/drift_last"],
    }


KILLED = """
import os, signal, sys
from pca_torch.monitor.record import thinned
from pca_torch.monitor.tensorboard_sink import TensorBoardSink
from tests.monitor.dashboards import RUN, at_step
sink = TensorBoardSink(sys.argv[1])
sink.begin(RUN, 0)
for step in (10, 20, 30, 40):
    sink.write(at_step(step), [])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_and_resumed_run_is_one_curve(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    root = Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=root, timeout=120)
    assert child.returncode == -signal.SIGKILL
    tag = f"pca/{PLAIN}/rank_95"
    assert [step for step, _ in points(tmp_path, tag)] == [10, 20, 30, 40]
    assert texts(tmp_path, "pca/table")[-1][0] == 40  # the last of all that was written is on the disk
    write(tmp_path, 30, 40, 50, start=20, shift=1.0)  # the checkpoint was of step 20
    want = [(step, float(np.float32(step / 3 + (step > 20)))) for step in (10, 20, 30, 40, 50)]
    assert points(tmp_path, tag) == want
    steps = [event.step for event in read(tmp_path).Histograms(f"pca/{PLAIN}/spectrum_log10")]
    assert steps == [10, 20, 30, 40, 50]
    # control: a writer that does not purge shows steps 30 and 40 twice
    sink = TensorBoardSink(SummaryWriter(tmp_path))
    sink.begin(RUN, 20)
    sink.write(at_step(30), [])
    sink.close()
    assert [step for step, _ in points(tmp_path, tag)] == [10, 20, 30, 40, 50, 30]


def test_a_writer_that_was_passed_in_stays_open_and_keeps_its_charts(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        sink = TensorBoardSink(writer)
        sink.begin(RUN, 0)
        sink.write(at_step(10), [])
        sink.close()
        assert len(points(tmp_path, f"pca/{PLAIN}/rank_95")) == 1  # flushed
        writer.add_scalar("loss", 0.5, 11)
    assert points(tmp_path, "loss") == [(11, 0.5)]
    assert "custom_scalars__config__" not in read(tmp_path).Tags()["tensors"]


def test_a_step_without_records_writes_nothing(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.write([], [])
    sink.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Exception in thread:pytest.PytestUnhandledThreadExceptionWarning")
def test_after_the_disk_failed_the_same_step_can_be_written_again(tmp_path, monkeypatch):
    from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem

    sink = TensorBoardSink(tmp_path)
    sink.begin(RUN, 0)
    sink.write(at_step(10), [])

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(LocalFileSystem, "append", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write(at_step(20), [])
    sink.write(at_step(20), [])
    sink.write(at_step(30), [])
    sink.close()
    want = [(step, float(np.float32(step / 3))) for step in (10, 20, 30)]
    assert points(tmp_path, f"pca/{PLAIN}/rank_95") == want


def test_a_missing_package_is_named_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    needs = r'^`TensorBoardSink` needs tensorboard: pip install "pca-torch\[tensorboard\]"$'
    with pytest.raises(ImportError, match=needs):
        TensorBoardSink(tmp_path)
    with pytest.raises(ImportError, match=r'^plotting needs no_such: pip install "pca-torch\[plot\]"$'):
        require("no_such", "plot", "plotting")


def test_a_place_that_is_no_folder_is_refused():
    with pytest.raises(TypeError, match="`log_dir` must be a folder or a SummaryWriter, got int"):
        TensorBoardSink(3)
