"""The example of a monitored training run, as a process, and the measurement of what its monitor costs."""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import pca_torch as pt
from tests.support import HERE, bench_module

SCRIPT = HERE.parent / "scripts" / "train_monitored"
BATCH, LENGTH, WIDTH, LAYERS, STEPS, EVERY = 8, 16, 32, 2, 20, 5
SIZES = {"batch": BATCH, "length": LENGTH, "width": WIDTH, "layers": LAYERS, "heads": 2, "steps": STEPS}
SMALL = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
SMALL += ["--every", str(EVERY), "--rate", "0.01"]  # large, so that a few steps show a collapse

cost = bench_module("monitor_cost")


def run(*words):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *SMALL, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example():
    loader = importlib.machinery.SourceFileLoader("train_monitored", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def training(example, *words):
    return example.Training(example.parser().parse_args([*SMALL, *words]))


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory):
    """Folder and output of a run that collapses halfway."""
    folder = tmp_path_factory.mktemp("collapse")
    return folder, run("--collapse", "--out", folder)


def test_the_losses_are_those_of_the_run_without_a_monitor(collapsed, tmp_path):
    folder, _ = collapsed
    out = run("--collapse", "--no-monitor", "--out", tmp_path)
    assert "step 20: loss" in out
    assert [path.name for path in tmp_path.iterdir()] == ["losses.txt"]
    losses = (tmp_path / "losses.txt").read_text()
    assert losses == (folder / "losses.txt").read_text()
    assert len({*losses.split()}) == STEPS


def test_the_log_reads_and_is_drawn(collapsed):
    folder, out = collapsed
    log = pt.monitor.read_log(folder / "spectra.jsonl")
    assert sorted({record.step for record in log.records}) == [1, 5, 10, 15, 20]
    assert {record.site for record in log.records} == {f"layers.{i}:output" for i in range(LAYERS)}
    everything = [record for record in log.records if record.view == "all"]
    assert {record.n_samples for record in everything} == {BATCH * LENGTH}
    names = {"losses.txt", "spectra.jsonl", "spectra_metrics.png", "spectra_spectrum.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(name in out for name in names - {"losses.txt", "spectra.jsonl"})


def test_a_collapse_rings_where_it_begins(collapsed):
    folder, out = collapsed
    alerts = pt.monitor.read_log(folder / "spectra.jsonl").alerts
    assert {alert.rule for alert in alerts} == {"rank_95 < 8", "rank_95 drops 50% within 5 steps"}
    assert {alert.site for alert in alerts} == {f"layers.{i}:output" for i in range(LAYERS)}
    assert {alert.step for alert in alerts} == {STEPS // 2 + EVERY}  # the first spectrum after the jump
    for alert in alerts:
        told = f"ALARM at step {alert.step}: {alert.rule} at {alert.site}, it is {alert.value:g}"
        assert out.count(told) == 1


def test_what_is_logged_is_the_output_of_each_block_and_a_healthy_run_is_silent(example, tmp_path):
    watched, twin = training(example), training(example)
    rows = {}
    for name, block in twin.model.layers.named_children():
        site = f"layers.{name}:output"
        block.register_forward_hook(
            lambda _, __, out, site=site: rows.__setitem__(site, out.detach().flatten(0, 1).double())
        )
    alarms = [pt.monitor.Alarm(rule.format(every=EVERY), pytest.fail) for rule in example.RULES]
    options = {"path": tmp_path / "log.jsonl", "alarms": alarms}
    compared = 0
    with pt.SpectrumMonitor(watched.model, "layers.*", EVERY, **options) as monitor:
        for _ in range(STEPS):
            assert watched.step() == twin.step()
            for record in monitor.step():
                if record.view == "all":
                    assert is_spectrum_of(rows[record.site], record)
                    others = [x for site, x in rows.items() if site != record.site]
                    assert not any(is_spectrum_of(x, record) for x in others)
                    compared += 1
    assert compared == LAYERS * (1 + STEPS // EVERY)


def is_spectrum_of(x, record):
    """Whether a record holds the variances of the rows `x`, which are written to seven digits.

    A covariance of N products and D variances of it, in float64 on both sides, are each off by at most
    (N + D)·u of the trace.
    """
    want = torch.linalg.eigvalsh(torch.cov(x.mT)).flip(0)
    bound = sum(x.shape) * torch.finfo(torch.float64).eps * want.sum() + 5e-7 * want.abs()
    return bool(((torch.tensor(record.variance, dtype=torch.float64) - want).abs() <= bound).all())


def test_the_jump_comes_halfway(example):
    healthy, other = training(example), training(example, "--collapse")
    losses = [(healthy.step(), other.step()) for _ in range(STEPS // 2 + 2)]
    same = [a == b for a, b in losses]  # the loss of a step is that before it
    assert same == [True] * (STEPS // 2 + 1) + [False]


# --- bench/monitor_cost.py ---------------------------------------------------------------------------


def test_the_runs_are_measured_in_turn_and_have_the_same_losses():
    times = iter(range(10**6))  # each look at the clock is a second later, so every step takes one
    seconds, loss = cost.measure(cost.TINY, 1, lambda: next(times))
    assert seconds == dict.fromkeys(("plain", "every 50", "every 10"), [1] * cost.ROUND)
    assert 0 < loss < 6  # an even guess among 256 bytes costs ln 256 = 5.55


def test_another_loss_is_an_error(monkeypatch):
    monkeypatch.setattr(cost, "monitored", lambda step, monitor: lambda: step() * (1 + 1e-12))
    with pytest.raises(RuntimeError, match="step 1: the losses differ"):
        cost.measure(cost.TINY, 1, lambda: 0.0)


def test_the_cost_is_a_ratio_of_rounds(monkeypatch, tmp_path):
    steps = range(cost.WARMUP + 1, cost.WARMUP + 3 * cost.ROUND + 1)
    slow = {"plain": 2.0, "every 50": 2.0, "every 10": 2.0}
    seconds = {name: [each] * len(steps) for name, each in slow.items()}
    for every, sampled in ((50, 6.0), (10, 3.0)):
        name = f"every {every}"
        seconds[name] = [sampled if step % every == 0 else 2.0 for step in steps]
    facts = cost.facts_of(seconds, 1.5)
    # a round of 50 steps takes 100 s, with one sampled step 104 s, with five of them 105 s
    for name, ratio, sampled in (("every 50", 1.04, 6.0), ("every 10", 1.05, 3.0)):
        assert facts[name] == {
            "ratio": ratio,
            "ratio_min": ratio,
            "ratio_max": ratio,
            "sampled_step_seconds": sampled,
        }
    (tmp_path / "monitor_cost.jsonl").write_text(json.dumps(facts) + "\n")
    monkeypatch.setattr(cost, "RESULTS", tmp_path)
    rows = cost.table().splitlines()
    assert rows[2:] == [
        "| every 50 steps | 1.040 | 1.040 to 1.040, 3 rounds | 1.02 | 3.00 |",
        "| every 10 steps | 1.050 | 1.050 to 1.050, 3 rounds | 1.08 | 1.50 |",
    ]
