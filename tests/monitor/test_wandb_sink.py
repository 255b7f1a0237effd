"""What a W&B run, offline, has on the disk is what was measured; it reaches no network."""

import json
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pca_torch.monitor.alarms import sentence
from pca_torch.monitor.wandb_sink import ALARMS_SENT, WandbSink
from tests.monitor.dashboards import HEADED, RUN, alert, at_step, power_law, record

wandb = pytest.importorskip("wandb")

PLAIN_KEY, HEADED_KEY = "model_layers_3_output", "model_layers_3_self_attn_query"
BLOCK = 32768  # of the file of a run


def records_of(path):
    """The protobuf records in a `.wandb` file: a log of LevelDB's form, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = Path(path).read_bytes(), 7, b""
    found = []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of a block is filled up
            at += BLOCK - at % BLOCK
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + size > len(data):  # is being written
            break
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # a record is whole, or its last part came
            found.append(Record.FromString(whole))
            whole = b""
    return found


def joined(items):
    """A row: what is logged as a mapping comes as one item for each key in it."""
    row = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = row
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return row


class Logged:
    """What one finished run wrote; its last record may reach the disk a moment after `finish`."""

    def __init__(self, path):
        self.rows, self.alerts, self.metrics, self.config = [], [], {}, {}
        last = time.monotonic() + 30
        while (records := records_of(path)) == [] or records[-1].WhichOneof("record_type") != "exit":
            assert time.monotonic() < last, f"{path} has no end"
            time.sleep(0.02)
        for each in records:
            match each.WhichOneof("record_type"):
                case "history":
                    self.rows.append(joined(each.history.item))
                case "alert":
                    self.alerts.append(each.alert)
                case "metric":
                    self.metrics[each.metric.name or each.metric.glob_name] = each.metric
                case "config":
                    self.config |= {item.key: json.loads(item.value_json) for item in each.config.update}


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """One session of W&B for all tests here; its service process ends with it."""
    folder = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
            patch.setenv(f"WANDB_{name}", str(folder))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_CONSOLE", "off")
        yield folder
        assert services() == ["wandb-core"]
        wandb.teardown()
    assert services() == []


def services():
    """Processes of W&B that this one started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().partition("(")[2].rpartition(")")
        except OSError:  # it is gone
            continue
        if rest.split()[1] == str(Path("/proc/self").readlink()) and name.startswith("wandb"):
            found.append(name)
    return found


def start(folder):
    """A run of the user's own, without what costs time here."""
    settings = wandb.Settings(x_disable_stats=True, x_disable_machine_info=True, disable_git=True)
    return wandb.init(project="spectra", dir=folder, settings=settings)


@pytest.fixture(scope="module")
def logged(offline):
    """Three logged steps in a run that the training loop logs to as well, and what is on the disk."""
    run = start(offline)
    path = run.settings.sync_file
    sink = WandbSink(run)
    sink.begin(RUN, 0)
    for step in (10, 20, 30):
        run.log({"train/loss": 1 / step, "train/global_step": step})
        sink.write(at_step(step), [alert(20), alert(20, HEADED, head=1)] if step == 20 else [])
    sink.write([], [])
    sink.close()
    run.log({"train/loss": 0.0})  # the run is the user's, and is still open
    run.finish()
    return Logged(path)


def ours(logged):
    """The rows of the monitor."""
    rows = [row for row in logged.rows if "pca/table" in row]
    assert len(rows) == 3
    return rows


def test_each_step_is_one_row_with_every_defined_metric(logged):
    rows = ours(logged)
    assert [row["pca/step"] for row in rows] == [10, 20, 30]
    starts = [
        f"pca/{PLAIN_KEY}",
        f"pca_all/{PLAIN_KEY}",
        f"pca/{HEADED_KEY}/head0",
        f"pca/{HEADED_KEY}/head1",
    ]
    for row in rows:
        records = at_step(row["pca/step"])
        for start, one in zip(starts, records, strict=True):
            for name, value in one.metrics.items():
                assert row.get(f"{start}/{name}") == value
            assert row[f"{start}/n_samples"] == 500
            assert row[f"{start}/below_rounding"] == 0
        assert row[f"pca_all/{PLAIN_KEY}/extreme_share"] == records[1].extreme_share
        assert all(key.replace("/", "").replace("_", "a").isalnum() for key in row)
    assert f"pca/{PLAIN_KEY}/drift_last" not in rows[0]  # not defined yet


def test_the_step_of_the_training_loop_is_left_alone(logged):
    # one row of W&B's own step for each call, in the order of the calls
    assert [row["_step"] for row in logged.rows] == list(range(7))
    assert [row["train/loss"] for row in logged.rows if "train/loss" in row] == [1 / 10, 1 / 20, 1 / 30, 0.0]
    assert not any("train/loss" in row for row in ours(logged))
    for group in ("pca/*", "pca_all/*"):
        assert logged.metrics[group].step_metric == "pca/step"


def test_histograms_hold_every_variance(logged):
    for row in ours(logged):
        found = row[f"pca/{HEADED_KEY}/head1/spectrum_log10"]
        assert found["_type"] == "histogram"
        want = np.histogram(power_law(40).log10(), found["bins"])[0]
        np.testing.assert_array_equal(found["values"], want)
        assert sum(found["values"]) == 40


def test_the_table_has_names_as_they_are_and_what_is_not_defined(logged, offline):
    files = {path.name: path for path in offline.rglob("*.table.json")}
    for row in ours(logged):
        about = row["pca/table"]
        table = json.loads(files[Path(about["path"]).name].read_text())
        facts = ["step", "site", "view", "head", "n_samples", "n_effective", "n_features", "trusted"]
        assert table["columns"] == [*facts, "rank_95", "drift_last"]
        want = [
            [r.step, r.site, r.view, r.head, 500, 500, 40, 40, r.metrics["rank_95"], r.metrics["drift_last"]]
            for r in at_step(row["pca/step"])
        ]
        assert table["data"] == want


def test_alarms_of_a_step_are_one_message(logged):
    wanted = "\n".join(sentence(one) for one in (alert(20), alert(20, HEADED, head=1)))
    assert [row.get("pca/alarms") for row in ours(logged)] == [None, wanted, None]
    (sent,) = logged.alerts
    assert (sent.title, sent.text, sent.level) == ("pca_torch: 2 alarms at step 20", wanted, "WARN")
    assert len(f"pca_torch: {10**6} alarms at step {10**12}") < 64  # what W&B allows


def test_the_settings_are_in_the_config(logged):
    assert logged.config["pca_monitor"] == RUN


def test_the_active_run_is_used_and_left_open(offline):
    with start(offline) as run:
        sink = WandbSink(project="not used")
        sink.begin(RUN, 0)
        twins = [record(10, site, rank_95=value) for site, value in (("a.b:c", 1.0), ("a_b:c", 2.0))]
        many = [alert(10, f"site{i}:output") for i in range(ALARMS_SENT + 3)]
        sink.write(twins, many)
        sink.close()
        assert wandb.run is run
        path = run.settings.sync_file
    found = Logged(path)
    # sites whose names W&B cannot tell apart stay two curves
    assert found.rows[0]["pca/a_b_c/rank_95"] == 1
    assert found.rows[0]["pca/a_b_c_/rank_95"] == 2
    assert found.alerts[0].text.splitlines()[ALARMS_SENT:] == ["and 3 more"]


def test_a_run_started_by_the_sink_is_finished_by_it(offline):
    sink = WandbSink(project="mine", dir=offline, settings=wandb.Settings(x_disable_machine_info=True))
    assert wandb.run is None  # on the ranks that do not log, none is started
    sink.begin(RUN, 0)
    run = wandb.run
    assert run.project == "mine"
    sink.write(at_step(10), [])
    sink.close()
    assert wandb.run is None
    assert [row["pca/step"] for row in Logged(run.settings.sync_file).rows] == [10]
    sink.close()  # twice does no harm


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r'^`WandbSink` needs wandb: pip install "pca-torch\[wandb\]"$'):
        WandbSink()


def test_a_disabled_run_takes_everything():
    with wandb.init(mode="disabled") as run:
        sink = WandbSink(run)
        sink.begin(RUN, 0)
        sink.write(at_step(10), [alert(10)])
        sink.close()


def test_what_is_no_run_is_refused():
    with pytest.raises(TypeError, match="`run` must be a W&B run, got str"):
        WandbSink("my-project")
    with pytest.raises(ValueError, match=r"`run` is started already, so \['project'\] cannot apply"):
        WandbSink(SimpleNamespace(define_metric=None), project="x")
