"""The Trainer of transformers: which tokens count, and what a resumed training goes on with."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from pca_torch.monitor import SpectrumMonitor, TrainerSpectrumCallback, read_log
from tests.hooks.models import hooks_on
from tests.monitor.trainer_runs import (
    KILLED,
    SAVED,
    SITES,
    STEPS,
    WINDOWS,
    Witness,
    losses,
    monitored,
    saving,
    tiny_llama,
    trained,
    untrained,
)
from tests.support import truth

ROOT = Path(__file__).parents[2]
CHECKPOINTING = next(  # the newer name first
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
EVALUATED = {
    "eval_strategy": "steps",
    "eval_steps": 3,
}  # in the middle of a window, behind one, and elsewhere
WAYS = {
    "plain": {},
    "accumulated, evaluated": {"gradient_accumulation_steps": 2, "eval_on_start": True, **EVALUATED},
    "checkpointed": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}},
    "checkpointed, reentrant": {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}},
    "bfloat16": {"bf16": True},
    "the best kept": {
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        **EVALUATED,
    },
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 8}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_records(records, rows, last=STEPS):
    """Each record is of the rows of its window, no more and no fewer, and its spectrum is theirs."""
    assert [(r.step, r.site) for r in records if r.view == "all"] == [
        (step, site) for step in WINDOWS if step <= last for site in SITES.values()
    ]
    for record in records:
        if record.view == "all":
            x = torch.cat([part for step in WINDOWS[record.step] for part in rows[step][record.site]])
            assert record.n_samples == record.tokens["kept"] == len(x)
            assert excess(record, x) <= 0
            assert excess(record, x[1:]) > 0  # control: a row less


def excess(record, x):
    """How far the worst variance of a record is beyond what it may be off from float64; negative if none is.

    It may be off by what the record calls noise, and by half a unit in the seventh digit, which is the last.
    """
    _, want, _ = truth(x)
    want = want[torch.tensor(record.index) - 1]
    got = torch.tensor(record.variance, dtype=torch.float64)
    return float(((got - want).abs() - record.rounding_floor - 5.1e-7 * want).max())


def check_the_same(trainer, other):
    assert losses(trainer) == losses(other)
    for one, two in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore:mtime may not be reliable:UserWarning")  # of transformers 5.0
@pytest.mark.parametrize("way", WAYS)
def test_each_token_of_a_window_counts_once_and_training_is_untouched(way, tmp_path):
    witness = trained(Witness, tmp_path / "witness", tiny_llama(), **WAYS[way])
    model, path = tiny_llama(), tmp_path / "spectra.jsonl"
    trainer = trained(Trainer, tmp_path / "monitored", model, monitored(model, path), **WAYS[way])
    check_records(read_log(path).records, witness.rows)
    check_the_same(trainer, witness)
    assert hooks_on(model) == hooks_on(witness.model)
    saved = {file.parent.name for file in tmp_path.rglob("spectrum_monitor.safetensors")}
    assert saved == {folder.name for folder in tmp_path.glob("monitored/checkpoint-*")}


def test_a_compiled_model(tmp_path):
    witness = trained(Witness, tmp_path, tiny_llama(), max_steps=8)
    torch.compiler.reset()
    plain = trained(Trainer, tmp_path, tiny_llama(), **COMPILED)
    torch.compiler.reset()
    model, path = tiny_llama(), tmp_path / "spectra.jsonl"
    trainer = trained(Trainer, tmp_path, model, monitored(model, path), **COMPILED)
    torch.compiler.reset()
    assert trainer.model_wrapped is not model  # a compiled one was called
    check_records(read_log(path).records, witness.rows, last=8)
    check_the_same(trainer, plain)


def start(*words):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env=env, cwd=ROOT, timeout=120
    )


def records_of(folder, log="spectra.jsonl"):
    return read_log(folder / log).records


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of a training that nothing ended."""
    folder = tmp_path_factory.mktemp("trainer") / "whole"
    return folder, losses(saving(folder))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folder of one that ended by a signal, behind its checkpoint and after one more record."""
    folder = tmp_path_factory.mktemp("trainer") / "killed"
    ended = start("-m", "tests.monitor.trainer_runs", "killed", folder)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return folder


def test_a_killed_training_that_is_resumed_logs_the_same_curve(whole, killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "resumed")
    assert records_of(folder) == [record for record in records_of(whole[0]) if record.step < KILLED]
    resumed = saving(folder, resume=True)
    assert losses(resumed) == whole[1]
    assert records_of(folder) == records_of(whole[0])


def test_a_checkpoint_elsewhere_is_named_in_the_arguments(whole, killed, tmp_path):
    checkpoint = str(killed / f"checkpoint-{SAVED}")
    other = str(whole[0] / f"checkpoint-{STEPS}")

    def resumed(named):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        shutil.copy(killed / "spectra.jsonl", folder)
        saving(folder, resume=checkpoint, resume_from_checkpoint=named)
        return records_of(folder)

    want = records_of(whole[0])
    assert min(r.metrics["drift_start"] for r in want if r.step == 8) > 0
    assert resumed(checkpoint) == want
    for named in (None, other):  # that of another step is not taken for it
        with (
            pytest.warns(UserWarning, match=r"step 7 holds no spectrum_monitor\.safetensors, so drift and"),
            pytest.warns(UserWarning, match="held the log of another run, which is now"),
        ):
            got = resumed(named)
        assert [r.step for r in got] == [r.step for r in want if r.step > SAVED]
        assert [r.n_samples for r in got if r.step > SAVED] < [r.n_samples for r in want if r.step > SAVED]
        assert {r.metrics["drift_start"] for r in got if r.step == 8} == {0}  # this is the start


def test_a_state_that_cannot_be_read_is_named(killed, tmp_path):
    folder = shutil.copytree(killed, tmp_path / "damaged")
    state = folder / f"checkpoint-{SAVED}" / "spectrum_monitor.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"spectrum_monitor\.safetensors: "):
        saving(folder, resume=True)


class Failing(TrainerCallback):
    """Ends the first training in the middle of a step."""

    failed = False

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 0 and not self.failed:
            self.failed = True
            raise ArithmeticError("the loss is no number")


def test_training_that_failed_begins_anew(tmp_path):
    model = tiny_llama()
    callback = monitored(model, tmp_path / "spectra.jsonl")
    failing = Failing()
    trainer = untrained(Witness, tmp_path, model, callback, failing)
    with pytest.raises(ArithmeticError, match="no number"):
        trainer.train()
    assert hooks_on(model) > 0
    callback.monitor.stop()
    assert hooks_on(model) == 0

    failing.failed = False
    with pytest.raises(ArithmeticError, match="no number"):
        trainer.train()
    trainer.rows.clear()
    trainer.train()  # with what the one before has left behind
    check_records(records_of(tmp_path), trainer.rows)
    trainer.rows.clear()
    with pytest.warns(UserWarning, match="held the log of an earlier run"):  # its records are kept
        trainer.train()
    check_records(records_of(tmp_path), trainer.rows)


def test_a_model_that_is_not_trained_is_refused(tmp_path):
    callback = monitored(tiny_llama(), tmp_path / "spectra.jsonl")
    with pytest.raises(
        ValueError, match=r"got another LlamaForCausalLM; hand over `model`, since `model_init`"
    ):
        trained(Trainer, tmp_path, tiny_llama(), callback)
    model = tiny_llama()
    part = TrainerSpectrumCallback(SpectrumMonitor(model.model, "layers.0", path=tmp_path / "part.jsonl"))
    trained(Trainer, tmp_path, model, part)
    assert records_of(tmp_path, "part.jsonl")


def test_steps_that_someone_else_counts_are_refused(tmp_path):
    model = tiny_llama()
    callback = monitored(model, tmp_path / "spectra.jsonl")
    with pytest.raises(ValueError, match=r"steps of the Trainer, 1, got 2; leave `monitor\.step\(\)` to one"):
        trained(Trainer, tmp_path, model, callback, TrainerSpectrumCallback(callback.monitor))


def test_labels_that_the_trainer_keeps_back_are_missed(tmp_path):
    model = tiny_llama()
    callback = monitored(model, tmp_path / "spectra.jsonl")
    with pytest.raises(ValueError, match=r"keeps labels from the model, got `label_smoothing_factor` 0.1;"):
        trained(Trainer, tmp_path, model, callback, label_smoothing_factor=0.1)


def test_two_ranks_and_their_resume(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = start(*launch, "-m", "tests.monitor.trainer_runs", "ranks", tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    records = records_of(tmp_path, "whole.jsonl")
    kept = {r.step: r.tokens["kept"] for r in records}
    assert kept == {
        step: sum(rank["rows"][n - 1] for rank in told for n in steps) for step, steps in WINDOWS.items()
    }
    files = {file.name for file in (tmp_path / f"checkpoint-{SAVED}").glob("spectrum_monitor*")}
    assert files == {"spectrum_monitor.safetensors", "spectrum_monitor_1.safetensors"}
    for rank in told:
        first, again = rank["losses"]
        assert first == again
    assert records_of(tmp_path, "resumed.jsonl") == [record for record in records if record.step > SAVED]
