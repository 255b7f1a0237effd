"""`pca-torch monitor` as a user meets it: real processes, real files, exit codes, one line per error."""

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest

from pca_torch import cli
from tests.monitor import logs

COMMAND = [sys.executable, "-m", "pca_torch", "monitor"]
PICTURES = ["spectra_metrics.png", "spectra_spectrum.png"]


def run(*arguments, cwd=None, width=80):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": str(width)},
    )


def called(capsys, *arguments):
    """Exit code, standard output and standard error of the command in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as stopped:
            cli.main(["monitor", *map(str, arguments)])
    shown = capsys.readouterr()
    return stopped.value.code or 0, shown.out, shown.err


@pytest.fixture
def file(tmp_path):
    return logs.write(tmp_path / "spectra.jsonl", logs.log(3, 4, 24, collapse=True))


def test_the_table_is_shown_and_the_pictures_lie_beside_the_log(file):
    pytest.importorskip("matplotlib")
    done = run(file)
    assert (done.returncode, done.stderr) == (0, "")
    table, written = done.stdout.split("wrote ")
    assert max(map(len, table.splitlines())) <= 80
    assert table.startswith("LlamaForCausalLM, steps 1 to 30, 4 logged, typical tokens")
    assert written == ", ".join(str(file.parent / name) for name in PICTURES) + "\n"
    for name in PICTURES:
        assert (file.parent / name).read_bytes().startswith(b"\x89PNG")


def test_names_of_files_are_whole_where_the_terminal_is_narrow(file):
    pytest.importorskip("matplotlib")
    written = run(file, width=40).stdout.splitlines()[-1]
    assert written == "wrote " + ", ".join(str(file.parent / name) for name in PICTURES)
    assert len(written) > 40


def test_a_summary_is_printed_as_json_alone(file, tmp_path, capsys):
    """With options that take several words; files go where they are told to."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "folder"
    chosen = ["--sites", "**.0", "**.2", "--metrics", "nesum", "drift", "--view", "all", "--out", out]
    code, text, complaints = called(capsys, file, *chosen, "--json")
    assert (code, complaints) == (0, "")
    summary = json.loads(text)
    assert list(summary["sites"]) == ["model.layers.0:output", "model.layers.2:output"]
    metrics = list(summary["sites"]["model.layers.0:output"]["metrics"])
    assert metrics == [
        "nesum",
        "drift_last",
        "drift_last_angle",
        "drift_start",
        "drift_start_angle",
        "drift_gap",
    ]
    assert (summary["view"], summary["file"]) == ("all", str(file))
    assert summary["written"] == [str(out / name) for name in PICTURES]
    assert sorted(path.name for path in out.iterdir()) == PICTURES
    assert [path.name for path in file.parent.iterdir() if path.suffix == ".png"] == []


def test_without_matplotlib_the_table_is_shown(file, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, text, complaints = called(capsys, file)
    assert code == 0
    assert text.startswith("LlamaForCausalLM")
    assert "wrote" not in text
    assert "spectra_metrics.png and " in complaints
    assert 'are not written: a picture needs matplotlib: pip install "pca-torch[plot]"' in complaints
    assert len(complaints.splitlines()) == 1
    assert [path.name for path in file.parent.iterdir()] == ["spectra.jsonl"]


def test_a_log_that_is_being_written_is_read_as_far_as_it_goes(file, capsys):
    words = (file, "--json", "--metrics", "nesum")
    whole = called(capsys, *words)[1]
    with file.open("a") as log:
        log.write('{"kind": "spectrum", "step": 4')
    assert called(capsys, *words) == (0, whole, "")


def errors(folder):
    """Arguments by name, and what the one line says."""
    log = logs.write(folder / "spectra.jsonl", logs.log(1, 2, 8, views=("typical",)))
    header = folder / "header.jsonl"
    header.write_text(log.read_text().splitlines()[0] + "\n")
    bare = logs.log(1, 2, 8)
    bare = replace(bare, records=[replace(record, metrics={}) for record in bare.records])
    bare = logs.write(folder / "bare.jsonl", bare)
    text = folder / "text.jsonl"
    text.write_text("step 1\n")
    return {
        "a header alone": ([header], "header.jsonl: the log has a header alone"),
        "no metric": ([bare], "bare.jsonl: the log has no metric"),
        "no log": ([text], "text.jsonl: is no log of a monitor"),
        "no file": ([folder / "none.jsonl"], "none.jsonl"),
        "a folder": ([folder], str(folder)),
        "no such site": ([log, "--sites", "**.7"], "`--sites` has '**.7'"),
        "no such metric": ([log, "--metrics", "rank_1"], "`--metrics` has 'rank_1'"),
        "no such view": ([log, "--view", "all"], "`--view` must be one that was logged, 'typical'"),
        "out is a file": ([log, "--out", text], "`--out` must be a folder"),
    }


def test_errors_are_one_line(tmp_path, capsys):
    for name, (arguments, message) in errors(tmp_path).items():
        code, text, complaints = called(capsys, *arguments)
        assert (name, code, text) == (name, 1, "")
        assert complaints.startswith("error: ")
        assert message in complaints
        assert len(complaints.splitlines()) == 1
    assert list(tmp_path.glob("*.png")) == []


def test_usage_errors_exit_with_two(file, capsys):
    assert called(capsys)[0] == 2
    assert called(capsys, file, "--view", "both")[0] == 2
