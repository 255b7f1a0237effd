"""The monitor in plain training loops: the tokens that count, and the losses as they were."""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pca_torch.monitor import read_log
from pca_torch.selection import TokenSelection
from tests.hooks.models import hooks_on
from tests.monitor.loops import LAST, SAMPLED, SAVED, STEPS, WINDOWS, monitor_of, saving_run, train
from tests.monitor.net import NAMES, PATHS, Witness, batches, counting, error_bounds, net, says

ROOT = Path(__file__).parents[2]


def runs(path, make=net, monitored=None, n=STEPS, selection=None, **settings):
    """The same training twice: its losses and the witness, and its losses with the monitor on."""
    model = make()
    witness = Witness(model)
    plain = train(model, batches(n), witness=witness, **{k: v(model, None) for k, v in settings.items()})
    model = make()
    with monitor_of(model, path, selection=selection) as monitor:
        options = {key: value(model, monitor) for key, value in settings.items()}
        found = train(model, batches(n), monitor=monitor, **options)
    assert monitor.steps == STEPS
    assert hooks_on(model) == 0
    return plain, found, witness


def check(path, witness, accumulate=1, labels=False):
    """The log tells, of each window and site, of exactly the rows that the witness saw."""
    records = [record for record in read_log(path).records if record.view == "all"]
    assert [(r.step, r.site) for r in records] == [(step, NAMES[p]) for step in WINDOWS for p in PATHS]
    for record in records:
        rows = witness.rows(record.site.removesuffix(":output"), WINDOWS[record.step], accumulate, labels)
        assert says(record, rows)
        assert not says(record, rows[1:])
        assert record.tokens["kept"] == len(rows)


def fixed(value):
    """A setting of `train` that is the same for every model."""
    return lambda model, monitor: value


CASES = {
    "plain": {},
    "accumulation": {"accumulate": fixed(4), "n": 4 * STEPS},
    "checkpointing": {"make": partial(net, reentrant=False)},
    "checkpointing_reentrant": {"make": partial(net, reentrant=True)},
    "autocast": {"cast": fixed(partial(torch.autocast, "cpu", torch.bfloat16))},
    "checkpointed_autocast": {
        "make": partial(net, reentrant=False),
        "cast": fixed(partial(torch.autocast, "cpu", torch.bfloat16)),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_tokens_of_training_count_and_losses_stay(name, tmp_path):
    plain, found, witness = runs(tmp_path / "log.jsonl", **CASES[name])
    assert found == plain
    check(tmp_path / "log.jsonl", witness, 4 if name == "accumulation" else 1)


def test_tokens_without_a_label_are_left_out_on_request(tmp_path):
    plain, found, witness = runs(tmp_path / "log.jsonl", selection=TokenSelection(labels=True))
    assert found == plain
    check(tmp_path / "log.jsonl", witness, labels=True)
    record = read_log(tmp_path / "log.jsonl").records[0]
    items = batches(STEPS)[:2]
    assert record.tokens == {
        "padding": sum(int((1 - batch["attention_mask"]).sum()) for batch in items),
        "label": sum(int((counting(batch) & (batch["labels"] == -100)).sum()) for batch in items),
        "kept": sum(int((batch["labels"] != -100).sum()) for batch in items),
    }


@contextmanager
def evaluating(model):
    """As one evaluates: dropout off, no autograd."""
    model.eval()
    with torch.no_grad():
        try:
            yield
        finally:
            model.train()


@contextmanager
def scoring(model):
    """Evaluation with autograd, as for gradients by the input."""
    model.eval()
    try:
        yield
    finally:
        model.train()


EVALUATIONS = {
    "evaluation": evaluating,
    "eval_with_autograd": scoring,
    "no_grad_in_training_mode": lambda model: torch.no_grad(),
    "inference_mode": lambda model: torch.inference_mode(),
}


@pytest.mark.parametrize("where", ["during", "after"])
@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluation_does_not_count_wherever_it_comes(kind, where, tmp_path):
    other = batches(1, seed=1)[0]

    def phase(model, monitor):
        def evaluate():
            with EVALUATIONS[kind](model):
                model(**other)

        return evaluate

    plain, found, witness = runs(tmp_path / "log.jsonl", **{where: phase})
    assert found == plain
    check(tmp_path / "log.jsonl", witness)


def test_what_runs_in_a_pause_does_not_count(tmp_path):
    other = batches(1, seed=1)[0]

    def phase(model, monitor):
        def score():
            if monitor is None:
                model(**other)
                return
            with monitor.pause():
                model(**other)

        return score

    plain, found, witness = runs(tmp_path / "log.jsonl", during=phase)
    assert found == plain
    check(tmp_path / "log.jsonl", witness)


def test_an_evaluation_alone_is_warned_of(tmp_path):
    model = net().eval()
    with monitor_of(model, tmp_path / "log.jsonl", window=1) as monitor:
        model(**batches(1)[0])
        with pytest.warns(UserWarning, match="all forwards ran in eval mode or without autograd"):
            assert monitor.step() == []


def test_no_module_has_a_hook_outside_sampled_steps(tmp_path):
    model, seen = net(), {}
    with monitor_of(model, tmp_path / "log.jsonl") as monitor:
        train(
            model,
            batches(STEPS),
            monitor=monitor,
            during=lambda: seen.setdefault(monitor.steps + 1, hooks_on(model)),
        )
    assert [step for step, hooks in seen.items() if hooks] == SAMPLED
    assert len(seen) == STEPS


class Poisoned:
    """Embeddings of one token overflow in one forward, as activations in float16 do.

    Args:
        model: whose token it is.
        at: which forward, from 1.
    """

    token = int(batches(STEPS)[2]["input_ids"][0, 1])  # from which the first label is predicted

    def __init__(self, model, at):
        self.at, self.forwards = at, 0
        model.embed.register_forward_hook(self)

    def __call__(self, module, args, output):
        self.forwards += 1
        bad = (args[0] == self.token)[..., None] & torch.tensor(self.forwards == self.at)
        return output.masked_fill(bad, torch.inf)


def test_rows_that_overflow_are_left_out_and_counted_and_training_goes_on(tmp_path):
    def make():
        model = net()
        Poisoned(model, at=3)
        return model

    items, path = batches(STEPS), tmp_path / "log.jsonl"
    bad = int((counting(items[2]) & (items[2]["input_ids"] == Poisoned.token)).sum())
    assert bad  # else nothing is tested
    model = make()
    witness = Witness(model)
    plain = train(model, items, witness=witness, scaler=torch.amp.GradScaler("cpu", 16.0))
    model = make()
    with monitor_of(model, path) as monitor:
        found = train(model, items, monitor=monitor, scaler=torch.amp.GradScaler("cpu", 16.0))
    np.testing.assert_array_equal(found, plain)
    assert [bool(np.isfinite(loss)) for loss in found] == [step != 3 for step in range(1, STEPS + 1)]
    for record in read_log(path).records:
        rows = witness.rows(record.site.removesuffix(":output"), WINDOWS[record.step])
        finite = rows.isfinite().all(1)
        assert record.nonfinite == int((~finite).sum()) == (bad if record.step == 4 else 0)
        if record.view == "all":
            assert says(record, rows[finite])


def test_older_windows_weigh_less_where_a_decay_is_set(tmp_path):
    decay, path, model = 0.25, tmp_path / "log.jsonl", net()
    witness = Witness(model)
    train(model, batches(STEPS), witness=witness)
    model = net()
    with monitor_of(model, path, decay=decay) as monitor:
        train(model, batches(STEPS), monitor=monitor)
    steps = list(WINDOWS)
    for record in read_log(path).records:
        if record.view == "typical":
            continue
        until = steps[: steps.index(record.step) + 1]
        parts = [witness.rows(record.site.removesuffix(":output"), WINDOWS[step]) for step in until]
        rows = torch.cat(parts)
        ages = torch.cat([torch.full((len(part),), age) for age, part in enumerate(reversed(parts))]).flip(0)
        weights = decay ** ages.double()
        want = torch.linalg.eigvalsh(torch.cov(rows.mT, aweights=weights)).flip(0).clamp_min(0)
        error = (torch.tensor(record.variance, dtype=torch.float64) - want).abs()
        assert record.n_samples == len(rows)
        assert record.n_effective == pytest.approx(
            (weights.sum() ** 2 / weights.square().sum()).item(), rel=1e-6
        )
        assert (error <= error_bounds(want, len(rows))).all()
        if record.step > 2:
            assert not says(record, rows)  # which weighs all alike


class Failed(Exception):
    """Raised on purpose."""


def test_a_forward_that_fails_leaves_no_hook_behind(tmp_path):
    model, items = net(), batches(3)
    monitor = monitor_of(model, tmp_path / "log.jsonl")

    def fail(module, args):
        if monitor.steps == 2:
            raise Failed("on purpose")

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(Failed, match="on purpose"), monitor:
        train(model, items, monitor=monitor)
    handle.remove()
    assert hooks_on(model) == 0
    assert not monitor.running
    assert {record.step for record in read_log(tmp_path / "log.jsonl").records} == {2}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("backend", "monitor_first"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_a_compiled_model_is_sampled_eagerly(backend, monitor_first, tmp_path):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    items, path = batches(STEPS), tmp_path / "log.jsonl"
    alone = train(torch.compile(net(dropout=0.0), backend=backend), items)
    model = net(dropout=0.0)  # with dropout inductor would draw other random numbers than eager steps
    compiled = torch.compile(model, backend=backend)
    twin = net(dropout=0.0)
    witness = Witness(twin)

    def before(batch):
        twin.load_state_dict(model.state_dict())
        witness.begin(batch)
        twin(**batch)

    with monitor_of(model if monitor_first else compiled, path) as monitor:
        found = train(compiled, items, monitor=monitor, before=before)
    assert hooks_on(model) == 0
    check(path, witness)
    if backend == "aot_eager":  # which computes what no compiler does
        assert found == alone
        return
    rounding = (
        torch.finfo(torch.float32).eps ** 0.5
    )  # eight steps that contract products leave half the digits
    assert max(abs(a - b) for a, b in zip(found, alone, strict=True)) < rounding
    assert abs(found[0] - found[1]) > rounding


def test_a_killed_and_resumed_run_logs_what_one_does_that_was_not_killed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    losses = saving_run(whole)
    command = [sys.executable, "-m", "tests.monitor.loops", str(broken)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {record.step for record in read_log(broken / "spectra.jsonl").records} == {2, 4, 8}
    assert saving_run(broken, resume=True) == losses[SAVED:]
    want, found = (read_log(folder / "spectra.jsonl") for folder in (whole, broken))
    assert {record.step for record in want.records} == {2, 4, 8, LAST}
    assert found.records == want.records
