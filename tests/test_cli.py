"""The command line as a user meets it: real processes, real files, exit codes, one line per error."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import cli
from pca_torch.cli import _spread
from tests.support import reported_case, truth

COMMAND = [sys.executable, "-m", "pca_torch"]


def run(*arguments, cwd=None, **environment):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "80"} | environment,
    )


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """Two shards of float32 rows, and all rows."""
    folder = tmp_path_factory.mktemp("data")
    x = (
        np.random.default_rng(0).standard_normal((600, 8)).astype("f4")
        * np.geomspace(1, 0.01, 8).astype("f4")
        + 3
    )
    np.save(folder / "shard_2.npy", x[:200])
    np.save(folder / "shard_10.npy", x[200:].reshape(4, 100, 8))
    return folder, x


def test_fit_reports_and_writes(samples, tmp_path):
    folder, x = samples
    done = run("fit", folder / "shard_10.npy", folder / "shard_2.npy", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.split("wrote ")[0].splitlines())) <= 80
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    view = report["sites"]["data"]["all_tokens"]
    assert view["n_samples"] == 600
    np.testing.assert_allclose(view["explained_variance"], truth(torch.from_numpy(x))[1].numpy(), rtol=1e-9)
    basis = pt.load(tmp_path / "out" / "basis.safetensors")["data"]
    assert basis.n_components == view["rank"]["0.95"]
    assert (tmp_path / "out" / "spectra.png").read_bytes().startswith(b"\x89PNG")
    again = run("report", tmp_path / "out")
    assert done.stdout.startswith(again.stdout)


def test_fit_prints_json_alone(samples, tmp_path):
    done = run("fit", samples[0] / "shard_2.npy", "--json", "--n-components", "3", "--out", tmp_path)
    report = json.loads(done.stdout)
    assert list(report["sites"]) == ["data"]
    assert pt.load(tmp_path / "basis.safetensors")["data"].n_components == 3
    assert json.loads(run("report", tmp_path, "--json").stdout) == report


def test_kappa_shows_and_writes(tmp_path):
    out = tmp_path / "new" / "kappa"
    done = run("kappa", "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    table, written = done.stdout.split("wrote ")
    assert max(map(len, table.splitlines())) <= 80
    assert "".join(written.split()) == f"{out / 'kappa.json'},{out / 'kappa.png'}"
    assert sorted(path.name for path in out.iterdir()) == ["kappa.json", "kappa.png"]
    study = json.loads((out / "kappa.json").read_text())
    assert json.loads(run("kappa", "--json").stdout) == study
    routes = {(route["precision"], route["method"]): route for route in study["routes"]}
    assert len(routes) == 8
    assert routes["float64", "covariance"]["trusted"] == 4
    assert routes["float64", "SVD"]["trusted"] == 5


def test_kappa_takes_samples_of_a_file(samples, tmp_path):
    done = run("kappa", samples[0] / "shard_10.npy", "--json", "--count", "3", cwd=tmp_path)
    study = json.loads(done.stdout)
    assert (study["name"], study["n_samples"], study["n_features"]) == ("shard_10.npy", 400, 8)
    want = truth(torch.from_numpy(samples[1][200:]), ddof=0)[1][-3:]
    np.testing.assert_allclose(study["truth"], want.numpy(), rtol=1e-9)
    assert list(tmp_path.iterdir()) == []


def test_kappa_of_integers_that_float64_cannot_hold(tmp_path):
    np.save(tmp_path / "big.npy", np.arange(20).reshape(10, 2) + 2**60)
    done = run("kappa", tmp_path / "big.npy")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "big.npy: `x` holds integers beyond 2^53" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_kappa_without_matplotlib_writes_the_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.raises(SystemExit) as stopped:
            cli.main(["kappa", "--out", str(tmp_path)])
    assert not stopped.value.code
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith("kappa.json")
    assert "kappa.png is not written: a picture needs matplotlib" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["kappa.json"]


def test_run_on_a_local_model(local_model, tmp_path):
    done = run(
        "run", local_model, "--text", local_model / "text.txt", local_model / "docs.jsonl", "--seq-len", 32,
        "--max-tokens", 640, "--sites", "model.layers.*", "model.norm", "--out", tmp_path / "o", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["sites"]) == [*(f"model.layers.{i}:output" for i in range(3)), "model.norm:output"]
    assert report["tokens"]["seen"] == 640
    assert done.stderr == ""  # no bar and no advice in a pipe
    assert report == json.loads((tmp_path / "o" / "report.json").read_text())
    metadata = pt.load(tmp_path / "o" / "basis.safetensors").metadata
    assert metadata["view"] == "typical"
    assert metadata["model"]["n_layers"] == 3


def test_run_takes_token_ids_with_padding(local_model, tmp_path):
    ids = np.random.default_rng(1).integers(0, 42, (10, 24))
    ids[:, 20:] = -1
    np.save(tmp_path / "ids.npy", ids)
    done = run(
        "run",
        local_model,
        "--tokens",
        tmp_path / "ids.npy",
        "--json",
        "--out",
        tmp_path / "o",
        "--drop-first",
        2,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["tokens"]["seen"], report["tokens"]["padding"]) == (200, 40)
    assert report["sites"]["model.layers.0:output"]["all_tokens"]["n_samples"] == 180


def errors(local_model, tmp_path):
    """Commands that must fail, and a word of what they say."""
    short, ids = tmp_path / "short.txt", tmp_path / "ids.npy"
    short.write_text("w1 w2 w3")
    np.save(ids, np.full((4, 8), 99))
    np.save(tmp_path / "one.npy", np.ones((1, 4)))
    np.save(tmp_path / "nan.npy", np.full((9, 4), np.nan))
    np.save(tmp_path / "other.npy", np.ones((9, 5)))
    np.save(tmp_path / "ok.npy", np.random.default_rng(0).standard_normal((9, 4)))
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{"txt": 1}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    model = ["run", local_model]
    return {
        "few tokens": ([*model, "--text", short], "gave 3 tokens"),
        "no file": ([*model, "--text", tmp_path / "none.txt"], "none.txt"),
        "empty": ([*model, "--text", tmp_path / "empty.txt"], "empty.txt"),
        "not utf-8": ([*model, "--text", tmp_path / "latin.txt"], "UTF-8"),
        "jsonl": ([*model, "--text", tmp_path / "bad.jsonl", "--seq-len", "4"], "line 2"),
        "ids": ([*model, "--tokens", ids], "99"),
        "both": ([*model, "--tokens", ids, "--text", short], "`text` and `tokens`"),
        "sites": ([*model, "--sites", "model.layer.*"], "model.layers"),
        "k": ([*model, "--n-components", "17", "--seq-len", "16"], "17"),
        "share": ([*model, "--n-components", "1.5"], "n_components"),
        "drop": ([*model, "--drop-first", "512"], "drop_first"),
        "max": ([*model, "--max-tokens", "100"], "max_tokens"),
        "device": ([*model, "--device", "nowhere"], "device"),
        "dtype": ([*model, "--dtype", "int8"], "dtype"),
        "no model": (["run", tmp_path / "nowhere"], "nowhere"),
        "no config": (["run", tmp_path], "config.json"),
        "not gguf": (["run", tmp_path / "x.gguf"], "x.gguf"),
        "out is a file": ([*model, "--out", short], "--out"),
        "one row": (["fit", tmp_path / "one.npy"], "ddof"),
        "nan": (["fit", tmp_path / "nan.npy"], "9 of 9 samples"),
        "widths": (["fit", tmp_path / "ok.npy", tmp_path / "other.npy"], "other.npy"),
        "no report": (["report", tmp_path / "none"], "none"),
        "not a report": (["report", tmp_path / "bad.jsonl"], "bad.jsonl"),
        "kappa of nothing": (["kappa", tmp_path / "none.npy"], "none.npy"),
        "kappa of text": (["kappa", short], "short.txt"),
        "kappa of one row": (["kappa", tmp_path / "one.npy"], "at least 2 samples"),
        "kappa of nan": (["kappa", tmp_path / "nan.npy", "--out", tmp_path / "o"], "9 of 9 samples"),
        "kappa into a file": (["kappa", "--out", short], "--out"),
    }


NAMES = """few tokens,no file,empty,not utf-8,jsonl,ids,both,sites,k,share,drop,max,device,dtype,no model,
no config,not gguf,out is a file,one row,nan,widths,no report,not a report,kappa of nothing,kappa of text,
kappa of one row,kappa of nan,kappa into a file"""


@pytest.mark.parametrize("name", [name.strip() for name in NAMES.split(",")])
def test_errors_are_one_line(name, local_model, tmp_path, capsys, monkeypatch):
    """In this process, for speed; exit code 1, nothing on standard output, nothing written."""
    monkeypatch.chdir(tmp_path)
    cases = errors(local_model, tmp_path)
    arguments, words = cases[name]
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit) as stopped:
        cli.main([str(word) for word in arguments])
    out, err = capsys.readouterr()
    assert stopped.value.code == 1
    assert out == ""
    *before_it, last = err.splitlines()
    assert all(line.startswith("statistics of ") for line in before_it)  # the plan, told when work begins
    assert last.startswith("error: ")
    assert words in last
    assert sorted(tmp_path.iterdir()) == before


def test_every_error_is_tried(local_model, tmp_path):
    assert list(errors(local_model, tmp_path)) == [name.strip() for name in NAMES.split(",")]


def test_reported_bad_files_end_in_one_line(tmp_path):
    found = reported_case("cli_bad_files")
    failed = []
    for name, content in found["x"]["files"].items():
        (tmp_path / name).write_bytes(content)
        done = run("fit", tmp_path / name, "--out", tmp_path / "out")
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
        assert done.returncode == 1
        failed.append(name)
    assert sorted(failed) == found["expect"]["exit_code_nonzero"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [["walk"], ["run", "--seq-len", "many"], ["fit"], ["run", "--view", "none"], ["kappa", "--count", "0"]],
)
def test_usage_errors_exit_with_two(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["run", "--help"], ["fit", "--help"], ["report", "--help"], ["kappa", "--help"]]
)
def test_help_fits_the_terminal(arguments):
    done = run(*arguments)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_options_spread_over_the_words_that_follow():
    assert _spread(["run", "m", "--text", "a", "b", "--seq-len", "4"]) == [
        "run", "m", "--text", "a", "--text", "b", "--seq-len", "4",
    ]  # fmt: skip
    assert _spread(["--sites", "x", "--text", "y"]) == ["--sites", "x", "--text", "y"]
    assert _spread(["run", "--json", "m"]) == ["run", "--json", "m"]


def test_an_option_without_its_word_is_a_usage_error():
    assert run("run", "--text").returncode == 2


def test_a_terminal_gets_a_progress_bar(local_model, tmp_path):
    """Under a pseudo terminal the bar is drawn on standard error."""
    master, slave = pty.openpty()
    arguments = [
        "run",
        local_model,
        "--text",
        local_model / "text.txt",
        "--seq-len",
        "16",
        "--out",
        tmp_path / "o",
    ]
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(slave)
    seen = b""
    while process.poll() is None or select.select([master], [], [], 0)[0]:
        if select.select([master], [], [], 0.1)[0]:
            try:
                seen += os.read(master, 4096)
            except OSError:  # the other end is closed
                break
    os.close(master)
    assert process.wait() == 0
    assert re.search(rb"capturing.*2992/2992|capturing", seen)


def test_interrupting_leaves_what_was_there(local_model, tmp_path):
    out = tmp_path / "out"
    assert (
        run(
            "run", local_model, "--text", local_model / "text.txt", "--seq-len", "16", "--out", out
        ).returncode
        == 0
    )
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    long = tmp_path / "long.txt"  # more than a few seconds of work on any machine
    long.write_text((local_model / "text.txt").read_text() * 500)
    endless = ["--text", str(long), "--seq-len", "16", "--max-tokens", "100000000"]
    process = subprocess.Popen(
        [*COMMAND, "run", str(local_model), "--out", str(out), *endless],
        stderr=subprocess.PIPE,
        text=True,
        # a shell has what it starts in the background ignore interrupts, and so do the tests' own children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr.readline().startswith("statistics of ")  # the model begins to run
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "--resume goes on from the last checkpoint" in stderr
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


MEMORY = """
import resource, sys
from pca_torch.cli import main
try:
    main(["run", "--seq-len", "256", "--json", "--max-tokens", sys.argv[1], "--out", sys.argv[2]])
except SystemExit as done:
    assert not done.code
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.model
def test_memory_of_run_does_not_grow_with_the_tokens(tmp_path):
    """The real model, twice the tokens in a second process: 3,072 tokens at 30 sites would be 202 MiB."""
    peaks = []
    for tokens in (3072, 6144):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(tokens), str(tmp_path / str(tokens))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert json.loads(done.stdout)["tokens"]["seen"] == tokens
        assert "dequantised from Q4_1" in done.stdout
        peaks.append(int(done.stderr.split()[-1]) / 1024)
    kept = 3072 * 30 * 576 * 4 / 2**20
    held = 256 * 30 * 576 * 4 / 2**20  # rows held aside, which the shorter run need not have filled
    assert peaks[1] - peaks[0] < held + 0.4 * kept  # peaks of one and the same run differ by up to 40 MiB
