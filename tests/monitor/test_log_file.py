"""A log holds what was logged, whatever happens to the run, and nothing else is believed."""

import copy
import json
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pca_torch.monitor.log_file import JsonlSink, Log, read_log
from pca_torch.monitor.record import VIEWS, Alert, SpectrumRecord

ROOT = Path(__file__).parents[2]
RUN = {"model": "Änet", "every_n_steps": 50, "fit_range": (6, 100), "selection": None}


def records_of(step, sites=2):
    """What a run logs at one step, the same each time."""
    rng = random.Random(step)
    return [
        SpectrumRecord(
            step=step,
            site=f"layers.{i}:output",
            view=view,
            head=None if i else 3,
            n_samples=64,
            n_effective=64.0,
            n_features=16,
            metrics={"rank_95": 7, "alpha_req": None, "total_variance": rng.random()},
            index=[1, 2, 4],
            variance=[rng.random(), 1e-300, 0.0],
            rounding_floor=5e-324,
            trusted=2,
            extreme=1,
            extreme_share=0.1,
            heavy_tailed=False,
            nonfinite=0,
            tokens={"kept": 64, "padding": 3},
        )
        for i in range(sites)
        for view in VIEWS
    ]


def alerts_of(step):
    """An alarm at every tenth window, about a change or a bound."""
    place = {"step": step, "site": "layers.0:output", "view": "all", "head": 3, "metric": "rank_95"}
    if step % 1000 == 0:
        return [
            Alert(rule="rank_95 drops 50% within 50", value=1.0, before=2.5, before_step=step - 50, **place)
        ]
    return [Alert(rule="rank_95 < 8", value=7.0, **place)] if step % 500 == 0 else []


def write_until(sink, step, last):
    """The run, from behind `step` to `last`; the records and the alerts."""
    for now in range(step + 50, last + 1, 50):
        sink.write(records_of(now), alerts_of(now))
    steps = range(50, last + 1, 50)
    return [r for s in steps for r in records_of(s)], [a for s in steps for a in alerts_of(s)]


@pytest.fixture
def log(tmp_path):
    """A closed log of 1000 steps."""
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    write_until(sink, 0, 1000)
    sink.close()
    return sink.path


def test_a_log_gives_back_what_was_logged(tmp_path):
    sink = JsonlSink(tmp_path / "new" / "folder" / "spectra.jsonl")
    sink.begin(RUN, 0)
    records, alerts = write_until(sink, 0, 1000)
    sink.write([], [])
    run = {**RUN, "fit_range": [6, 100]}  # as JSON has it
    assert read_log(sink.path) == Log(run=run, records=records, alerts=alerts, resumed=[])  # while it is open
    assert len(alerts) == 2
    sink.close()
    sink.close()
    lines = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert lines[0] == {"format": "pca_torch.monitor", "version": 1, "kind": "run", **run}
    assert lines[1] == {"kind": "spectrum", **records_of(50)[0].to_dict()}
    assert lines[-1] == {"kind": "alarm", **alerts_of(1000)[0].to_dict()}
    assert len(lines) == 1 + len(records) + len(alerts)


def test_each_step_is_one_write_that_reaches_the_disk(tmp_path, monkeypatch):
    done = []
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda d, data: (done.append("write"), write(d, data))[1])
    monkeypatch.setattr(os, "fsync", lambda d: (done.append("fsync"), fsync(d))[1])
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    sink.write(records_of(500), alerts_of(500))
    assert done == ["write", "fsync"] * 2
    monkeypatch.setattr(os, "write", lambda d, data: write(d, data[:100]))  # as the kernel may
    sink.write(records_of(550), [])
    sink.close()
    assert read_log(sink.path).records == records_of(500) + records_of(550)


# --- a run begins, or goes on --------------------------------------------------------------------------


def test_an_earlier_log_moves_aside(tmp_path):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    for i in range(3):
        told = pytest.warns(UserWarning, match=rf"earlier run, which is now .*spectra.{i}.jsonl$")
        if i:
            with told:
                sink.begin({"run": i}, 0)
        else:
            sink.begin({"run": i}, 0)
        sink.write(records_of(50 * i), [])
    sink.close()
    found = {path.name: read_log(path) for path in tmp_path.iterdir()}
    assert {name: log.run for name, log in found.items()} == {
        "spectra.jsonl": {"run": 2},
        "spectra.1.jsonl": {"run": 0},
        "spectra.2.jsonl": {"run": 1},
    }
    assert found["spectra.2.jsonl"].records == records_of(50)


@pytest.mark.parametrize("left", [b"", b'{"form', b'{"format": "pca_torch.monitor", "vers', "header"])
@pytest.mark.parametrize("step", [0, 50])
def test_a_run_that_failed_at_once_left_nothing_to_keep(tmp_path, left, step):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    if left == "header":
        sink.begin(RUN, 0)
    else:
        sink.path.write_bytes(left)
    if step and left != "header":
        with pytest.warns(UserWarning, match="holds no log to go on with at step 50; a new one begins there"):
            sink.begin(RUN, step)
    else:
        sink.begin(RUN, step)
    sink.write(records_of(100), [])
    assert read_log(sink.path).records == records_of(100)
    assert read_log(sink.path).run["model"] == "Änet"
    assert os.listdir(tmp_path) == ["spectra.jsonl"]


def test_a_resumed_run_without_a_log_says_so(tmp_path):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    with pytest.warns(UserWarning, match=r"spectra.jsonl holds no log to go on with at step 50"):
        sink.begin(RUN, 50)
    sink.close()
    assert read_log(sink.path).records == []


@pytest.mark.parametrize("step", [1, 49, 50, 499, 500, 501, 975, 1000, 2000])
@pytest.mark.parametrize(
    "torn", [b"", b'{"kind": "spectrum", "st', b"\0\0\0"], ids=["whole", "torn", "zeros"]
)
def test_a_resumed_run_writes_later_steps_again(log, step, torn):
    expected = log.read_bytes()
    log.write_bytes(expected + torn)
    sink = JsonlSink(log)
    sink.begin(RUN, step)
    done = min(step // 50 * 50, 1000)
    assert [r.step for r in read_log(log).records] == [s for s in range(50, done + 1, 50) for _ in range(4)]
    write_until(sink, done, 1000)
    sink.close()
    assert log.read_bytes() == expected


def test_settings_that_change_are_noted(log):
    sink = JsonlSink(log)
    sink.begin({**RUN, "every_n_steps": 25}, 500)
    sink.begin({**RUN, "every_n_steps": 25}, 500)  # the same again: nothing to note
    sink.write(records_of(550), [])
    sink.begin({"model": "Änet", "every_n_steps": 25, "fit_range": [6, 100], "window": 4}, 550)
    sink.write(records_of(600), [])
    found = read_log(log)
    assert [(r.step, r.changed) for r in found.resumed] == [
        (500, {"every_n_steps": 25}),
        (550, {"window": 4}),  # `selection` was None, and no longer there is the same
    ]
    assert [r.step for r in found.records][-8:] == [550] * 4 + [600] * 4
    sink.begin(RUN, 500)  # from before those notes
    assert [(r.step, r.changed) for r in read_log(log).resumed] == [
        (500, {"every_n_steps": 25}),
        (500, {"every_n_steps": 50}),
    ]


@pytest.mark.parametrize(
    "content", ["hello", "hello\n", '{"a": 1}\n', "[1]\n", '{"format": "other", "kind": "run"}\n']
)
@pytest.mark.parametrize("step", [0, 50])
def test_other_files_stay_as_they_are(tmp_path, content, step):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes.txt: is no log of a monitor; give another path"):
        JsonlSink(path).begin(RUN, step)
    assert path.read_text() == content
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, "/dev/full"):
        with pytest.raises(ValueError, match=r"`path` must be a file, got .*, which is none"):
            JsonlSink(path).begin(RUN, 0)


def test_a_damaged_log_is_not_resumed(log):
    lines = log.read_bytes().splitlines(keepends=True)
    damaged = b"".join([*lines[:5], b"{}\n", *lines[5:]])
    log.write_bytes(damaged)
    with pytest.raises(
        ValueError, match=r"spectra.jsonl: line 6: `kind` must be 'spectrum', 'alarm' or 'resumed'"
    ):
        JsonlSink(log).begin(RUN, 1000)
    assert log.read_bytes() == damaged


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1 + 2j, "\ud800"])
def test_what_json_has_not_is_refused(tmp_path, value):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    with pytest.raises(ValueError, match="`run` must hold finite numbers and JSON types alone"):
        sink.begin({"a": value}, 0)
    assert os.listdir(tmp_path) == []
    sink.begin(RUN, 0)
    before = sink.path.read_bytes()
    bad = SpectrumRecord(**{**records_of(50)[0].to_dict(), "metrics": {"mine": value}})
    with pytest.raises(
        ValueError, match=r"of layers.0:output at step 50 must hold finite numbers and JSON types"
    ):
        sink.write([*records_of(50), bad], [])
    assert sink.path.read_bytes() == before
    with pytest.raises(ValueError, match=r"`run` has \['kind', 'version'\], which the header uses itself"):
        sink.begin({"version": 1, "kind": 1}, 0)


def test_a_log_must_be_open(tmp_path):
    with pytest.raises(RuntimeError, match="the log is not open; `begin` opens it"):
        JsonlSink(tmp_path / "spectra.jsonl").write([], [])


# --- a disk that fails --------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_steps(tmp_path):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    sink.write(records_of(50), [])
    before = sink.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = len(before) + 1500  # more than one line of the next step, and less than all
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        with pytest.raises(OSError, match=r"the log could not be written: File too large: '.*spectra.jsonl'"):
            sink.write(records_of(100), [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sink.path.read_bytes() == before
    sink.write(records_of(150), [])
    sink.close()
    assert read_log(sink.path).records == records_of(50) + records_of(150)


@pytest.mark.parametrize("failing", ["write", "fsync", "ftruncate"])
def test_what_a_failing_disk_took_is_taken_back(tmp_path, monkeypatch, failing):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    sink.write(records_of(50), [])
    write = os.write

    def fail(*args):
        raise OSError(5, "Input/output error")

    def half(descriptor, data):
        return write(descriptor, data[: len(data) // 2]) if len(data) > 1000 else fail()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync" if failing == "fsync" else "write", fail if failing == "fsync" else half)
        if failing == "ftruncate":  # the half that was taken stays, until the next write
            patch.setattr(os, "ftruncate", fail)
        with pytest.raises(
            OSError, match=r"\[Errno 5\] the log could not be written: Input/output error: '/"
        ):
            sink.write(records_of(100), [])
    left = read_log(sink.path).records
    assert left[:4] == records_of(50)
    assert (len(left) > 4) == (failing == "ftruncate")
    sink.write(records_of(150), [])
    sink.close()
    assert read_log(sink.path).records == records_of(50) + records_of(150)


def test_an_interrupt_leaves_whole_steps(tmp_path, monkeypatch):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    write = os.write

    def interrupted(descriptor, data):
        write(descriptor, data[:700])
        raise KeyboardInterrupt("by the user")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt, match="by the user"):
            sink.write(records_of(50), [])
    assert read_log(sink.path).records == []


def test_a_log_that_is_removed_is_missed(tmp_path):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    sink.path.unlink()
    with pytest.raises(FileNotFoundError, match="could not be written: it was removed or moved away"):
        sink.write(records_of(50), [])


# --- two runs -----------------------------------------------------------------------------------------


def test_two_runs_cannot_write_one_log(log):
    sink = JsonlSink(log)
    sink.begin(RUN, 1000)
    before = log.read_bytes()
    for step in (0, 1000):
        with pytest.raises(
            BlockingIOError, match="another run writes this log, give each a `path` of its own: '/"
        ):
            JsonlSink(log).begin(RUN, step)
    assert log.read_bytes() == before
    assert os.listdir(log.parent) == ["spectra.jsonl"]
    del sink  # without a close
    JsonlSink(log).begin(RUN, 1000)


def test_a_copy_is_not_open(log):
    sink = JsonlSink(log)
    sink.begin(RUN, 1000)
    twin = copy.deepcopy(sink)
    assert twin.path == sink.path
    with pytest.raises(RuntimeError, match="not open"):
        twin.write([], [])
    twin.close()
    sink.write(records_of(1050), [])
    sink.close()


# --- kills --------------------------------------------------------------------------------------------

KILLED = """
import os, pathlib, random, signal, sys, time, warnings
from pca_torch.monitor.log_file import JsonlSink
from tests.monitor.test_log_file import RUN, alerts_of, records_of

log, checkpoint, kills, last = *map(pathlib.Path, sys.argv[1:3]), *map(int, sys.argv[3:])
alive, end = os.pipe()
rng = random.Random(0)

def rival():
    try:
        JsonlSink(log).begin(RUN, 0)
    except BlockingIOError:
        return
    os._exit(1)

def worker():  # of a data loader: it outlives its run
    for pipe in (end, told, heard):  # else nobody learns that the run has ended
        os.close(pipe)
    os.read(alive, 1)  # until the process is gone from which all descend

def run(step):
    sink = JsonlSink(log)
    sink.begin(RUN, step)
    assert os.waitpid(forked(rival), 0)[1] == 0
    forked(worker)
    for now in range(step + 50, last + 1, 50):
        sink.write(records_of(now), alerts_of(now))
        if now % 200 == 0:
            checkpoint.with_suffix(".new").write_text(str(now))
            checkpoint.with_suffix(".new").replace(checkpoint)
        os.write(told, b".")
    sink.close()

def forked(function, *args):
    child = os.fork()
    if child == 0:
        try:
            function(*args)
            os._exit(0)
        finally:
            os._exit(1)
    return child

warnings.simplefilter("ignore")  # until there is a checkpoint, the log moves aside
for i in range(kills + 1):
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    print(step, flush=True)
    heard, told = os.pipe()
    child = forked(run, step)
    os.close(told)
    if i < kills:
        for _ in range(rng.randrange(1, 40)):
            assert os.read(heard, 1)
        time.sleep(rng.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == (signal.SIGKILL if i < kills else 0)
"""


def test_a_run_that_is_killed_again_and_again_logs_what_an_unbroken_one_logs(tmp_path):
    path, last, kills = (
        tmp_path / "spectra.jsonl",
        20_000,
        5,
    )  # 400 windows; at most 39 and a few to each kill
    run = [sys.executable, "-W", "error", "-c", KILLED, path, tmp_path / "checkpoint", str(kills), str(last)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    begun = list(map(int, done.stdout.split()))
    assert len(begun) == kills + 1
    assert len(set(begun)) > kills / 2  # kills came in the middle of the run
    whole = JsonlSink(tmp_path / "whole.jsonl")
    whole.begin(RUN, 0)
    records, alerts = write_until(whole, 0, last)
    assert path.read_bytes() == whole.path.read_bytes()
    assert read_log(path) == Log(run=read_log(path).run, records=records, alerts=alerts, resumed=[])


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_log_reads_wherever_a_kill_cuts_it(log, cut):
    content = log.read_bytes()
    first = content.index(b"\n") + 1
    size = first + (len(content) - first) * cut // 12
    log.write_bytes(content[:size])
    found = read_log(log)
    assert len(found.records) + len(found.alerts) == content[first:size].count(b"\n")
    sink = JsonlSink(log)
    sink.begin(RUN, found.records[-1].step - 50)  # what the last checkpoint of such a run can know at most
    write_until(sink, found.records[-1].step - 50, 1000)
    sink.close()
    assert log.read_bytes() == content


# --- a log that lies ----------------------------------------------------------------------------------

RECORD = records_of(50)[0].to_dict() | {"kind": "spectrum"}
ALERT = alerts_of(500)[0].to_dict() | {"kind": "alarm"}


def without(line, name):
    return {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("", "line 3: is not JSON at column 1: Expecting value"),
        ("{1}", "line 3: is not JSON at column 2: Expecting property name"),
        ("[]", r"line 3: must be a JSON object, got \[\]"),
        (RECORD | {"kind": "run"}, "line 3: `kind` must be 'spectrum', 'alarm' or 'resumed', got 'run'"),
        (without(RECORD, "kind"), "line 3: `kind` must be .* got None"),
        (without(RECORD, "trusted"), "line 3: lacks `trusted`"),
        (without(ALERT, "before"), "line 3: lacks `before`"),
        (RECORD | {"more": 1}, "line 3: has 'more', which is no field of this kind of line"),
        (RECORD | {"step": 49}, "line 3: `step` is 49, after step 50 in the line before"),
        (RECORD | {"step": 50.0}, "line 3: `step` must be a count, got 50.0"),
        (RECORD | {"step": True}, "line 3: `step` must be a count, got True"),
        (RECORD | {"n_samples": 2**53 + 1}, "line 3: `n_samples` must be a count, got 9007199254740993"),
        (RECORD | {"head": -1}, "line 3: `head` must be a count or null, got -1"),
        (RECORD | {"site": None}, "line 3: `site` must be text, got None"),
        (RECORD | {"view": "both"}, "line 3: `view` must be 'typical' or 'all', got 'both'"),
        (RECORD | {"view": []}, r"line 3: `view` must be 'typical' or 'all', got \[\]"),
        (RECORD | {"metrics": {"a": "1"}}, "line 3: `metrics` must be an object of finite numbers and nulls"),
        (RECORD | {"metrics": []}, "line 3: `metrics` must be an object of finite numbers and nulls"),
        (RECORD | {"index": [0, 1, 2]}, "line 3: `index` must be an ascending list of counts from 1"),
        (RECORD | {"index": [1, 3, 3]}, "line 3: `index` must be an ascending list of counts from 1"),
        (RECORD | {"index": [1, 2]}, "line 3: `index` and `variance` must be equally long, got 2 and 3"),
        (RECORD | {"variance": [1.0, None, 0.0]}, "line 3: `variance` must be a list of finite numbers"),
        (RECORD | {"heavy_tailed": 1}, "line 3: `heavy_tailed` must be true or false, got 1"),
        (RECORD | {"tokens": {"kept": 1.5}}, "line 3: `tokens` must be an object of counts"),
        (ALERT | {"rule": 1}, "line 3: `rule` must be text, got 1"),
        (ALERT | {"before": "x"}, "line 3: `before` must be a finite number or null, got 'x'"),
        ({"kind": "resumed", "step": 50, "changed": [1]}, "line 3: `changed` must be an object, got"),
        (json.dumps(RECORD).replace("0.1", "NaN"), "line 3: NaN is not JSON"),
        (
            json.dumps(RECORD).replace("0.1", "1e999"),
            "line 3: `extreme_share` must be a finite number, got inf",
        ),
        (json.dumps(RECORD).replace("0.1", "9" * 5000), "line 3: Exceeds the limit"),
        (
            json.dumps(RECORD).replace('"head"', '"view": "all", "head"'),
            "line 3: a JSON object has the same key",
        ),
        (
            json.dumps(RECORD).replace("layers", "\\ud800"),
            "line 3: is not text in UTF-8: surrogates not allowed",
        ),
        ("[" * 100_000, "line 3: JSON is nested too deeply"),
        (b"\xff", "line 3: is not text in UTF-8: invalid start byte"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, match):
    sink = JsonlSink(tmp_path / "spectra.jsonl")
    sink.begin(RUN, 0)
    sink.write(records_of(50)[:1], [])
    sink.close()
    text = json.dumps(line) if isinstance(line, dict) else line
    with sink.path.open("ab") as file:
        file.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
    with pytest.raises(ValueError, match=f"^{sink.path}: {match}"):
        read_log(sink.path)


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"", "holds no whole line of a log"),
        (b'{"format": "pca_torch.monitor", "version": 1, "kind": "run"}', "holds no whole line of a log"),
        (
            b'{"format": "pca_torch.monitor", "version": 2, "kind": "run"}\n',
            "format version 2, only 1 can be read",
        ),
        (b'{"format": "pca_torch.monitor", "version": true, "kind": "run"}\n', "format version True, only 1"),
        (b'{"format": "pca_torch.monitor", "version": 1, "kind": "spectrum"}\n', "is no log of a monitor"),
        (b'{"format": "pca_torch.monitor", "version": 1, "kind": \n', "is no log of a monitor"),
        (b"\x89PNG\r\n", "is no log of a monitor"),
    ],
)
def test_a_header_that_is_wrong_is_named(tmp_path, header, match):
    (tmp_path / "a").write_bytes(header)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'a'}: .*{match}"):
        read_log(tmp_path / "a")


def test_a_line_that_never_ends_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("pca_torch.monitor.log_lines.MOST_BYTES", 1000)
    (tmp_path / "a").write_bytes(
        b'{"format": "pca_torch.monitor", "version": 1, "kind": "run"}\n' + b" " * 5000
    )
    with pytest.raises(ValueError, match="line 2 is longer than 1000 bytes"):
        read_log(tmp_path / "a")


def test_rewritten_json_is_the_same_log(log):
    """As another tool writes it: no blanks, keys sorted, line ends of Windows, text escaped."""
    before = read_log(log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\r\n" for line in lines)
    log.write_bytes(text.encode())
    assert b"\\u00c4net" in log.read_bytes()
    assert read_log(log) == before


def mutated(content, rng):
    """A log with one thing changed: bits, bytes, a part gone or doubled, or two lines exchanged."""
    data, at = bytearray(content), rng.randrange(len(content))
    span = slice(at, at + rng.choice([1, 2, 10, 300, 3000]))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.randrange(256)
        case 2:
            del data[span]
        case 3:
            data[at:at] = data[span]
        case 4:
            data[at:at] = rng.choice([
                b"\n",
                b"}",
                b"{",
                b'"',
                b"NaN",
                b"-1",
                b"null",
                b"\0",
                b"1e400",
                b"[[",
                b"\\ud9",
            ])
        case 5:
            del data[at:]
        case 6:
            lines = data.splitlines(keepends=True)
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
            data = bytearray(b"".join(lines))
    return bytes(data)


def outcome(path):
    """Whether a log is read, and then sound, or refused in one line that names it."""
    try:
        found = read_log(path)
    except ValueError as error:
        text = str(error)
    else:
        entries = [entry.to_dict() for entry in (*found.records, *found.alerts)]
        json.dumps(entries, allow_nan=False, ensure_ascii=False).encode()
        assert found.records == sorted(found.records, key=lambda record: record.step)
        return "read"
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return "refused"


def test_mutated_logs_are_refused_or_sound(log):
    rng = random.Random(0)
    content = b"".join(log.read_bytes().splitlines(keepends=True)[:20])
    outcomes = Counter()
    for _ in range(600):
        log.write_bytes(mutated(content, rng))
        outcomes[outcome(log)] += 1
    assert min(outcomes["read"], outcomes["refused"]) > 60  # digits of a number cannot be told from others
