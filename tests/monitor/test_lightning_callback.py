"""The monitor under Lightning: the tokens that count, the losses as they were, and checkpoints that go on."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import pca_torch.monitor
from pca_torch.monitor import LightningSpectrumCallback, read_log
from pca_torch.selection import TokenSelection
from tests.hooks.models import hooks_on
from tests.monitor.lightning_runs import (
    PATHS,
    STEPS,
    WINDOWS,
    Batches,
    Called,
    Manual,
    Module,
    Training,
    monitor_of,
    saving_run,
    trainer,
)
from tests.monitor.net import NAMES, Witness, batches, loss_of, net, says

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]
ROOT = Path(__file__).parents[2]


def plain_run(make=Module, model=net, n=STEPS, of=lightning.pytorch, **settings):
    """An unmonitored training, its module with a witness of it."""
    lit = make(model(), batches(n))
    lit.witness = Witness(lit.net)
    trainer(of=of, **settings).fit(lit, **validation(settings))
    return lit


def monitored_run(path, make=Module, model=net, n=STEPS, of=lightning.pytorch, **settings):
    """The same training with the monitor on: the module, and the monitor."""
    lit = make(model(), batches(n))
    monitor = monitor_of(lit.net, path)
    trainer(LightningSpectrumCallback(monitor), of=of, **settings).fit(lit, **validation(settings))
    return lit, monitor


def validation(settings):
    """Batches to validate on, where a run does so."""
    return {"val_dataloaders": Batches(batches(3, seed=1))} if "val_check_interval" in settings else {}


def check(path, witness, accumulate=1, labels=False, prefix=""):
    """The log tells, of each window and site, of exactly the rows that the witness saw."""
    records = [record for record in read_log(path).records if record.view == "all"]
    assert [(r.step, r.site) for r in records] == [(s, prefix + NAMES[p]) for s in WINDOWS for p in PATHS]
    for record in records:
        step, site = record.step, record.site.removeprefix(prefix).removesuffix(":output")
        rows = witness.rows(site, WINDOWS[step], accumulate, labels)
        assert says(record, rows)
        assert not says(record, rows[1:])
        assert record.tokens["kept"] == len(rows)
        span = slice((WINDOWS[step][0] - 1) * accumulate, WINDOWS[step][-1] * accumulate)
        seen = sum(batch["input_ids"].numel() for batch, _ in witness.batches[span])
        assert sum(record.tokens.values()) == seen  # each token counts, or has a reason not to


class Old(Training, pytorch_lightning.LightningModule):
    """Of the package with the older name."""


RUNS = {
    "plain": {},
    "mixed_precision": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2, "n": 2 * STEPS - 1},  # the last step is of one batch
    "validation": {"val_check_interval": 2, "num_sanity_val_steps": 2},
    "checkpointing": {"model": lambda: net(reentrant=False)},
    "checkpointing_reentrant": {"model": lambda: net(reentrant=True)},
    "manual": {"make": Manual, "n": 2 * STEPS},
    "pytorch_lightning": {"of": pytorch_lightning, "make": Old},
}


@pytest.mark.parametrize("name", RUNS)
def test_the_tokens_of_training_count_and_nothing_else_changes(name, tmp_path):
    settings = RUNS[name]
    plain = plain_run(**settings)
    lit, monitor = monitored_run(tmp_path / "log.jsonl", **settings)
    assert lit.losses == plain.losses
    assert lit.validated == plain.validated == (2 + 3 * STEPS // 2 if name == "validation" else 0)
    assert monitor.steps == STEPS
    assert hooks_on(lit) == 0
    check(tmp_path / "log.jsonl", plain.witness, 2 if name in {"accumulation", "manual"} else 1)


@pytest.mark.parametrize(("make", "prefix"), [(Module, ""), (Called, "net.")])
def test_labels_reach_the_selection_though_the_model_is_not_given_them(make, prefix, tmp_path):
    plain, path = plain_run(make), tmp_path / "log.jsonl"
    lit = make(net(), batches(STEPS))
    monitor = monitor_of(lit if prefix else lit.net, path, prefix, selection=TokenSelection(labels=True))
    trainer(LightningSpectrumCallback(monitor)).fit(lit)
    assert lit.losses == plain.losses
    check(path, plain.witness, labels=True, prefix=prefix)


def test_a_module_that_is_never_called_is_warned_of_since_it_is_told_no_mask(tmp_path):
    path, lit = tmp_path / "log.jsonl", Module(net(), batches(2))
    plain = plain_run(n=2)
    monitor = monitor_of(lit, path, "net.")
    with pytest.warns(UserWarning, match="give `SpectrumMonitor` the module that is called"):
        trainer(LightningSpectrumCallback(monitor)).fit(lit)
    records = [record for record in read_log(path).records if record.view == "all"]
    for record, site in zip(records, PATHS, strict=True):
        seen = [rows for _, kept in plain.witness.batches for rows in kept[site]]
        assert says(record, torch.cat(seen))  # padding among them


class Lean(Module):
    """Its step is one graph: losses are read behind it."""

    def training_step(self, batch, batch_idx):
        """The loss."""
        return loss_of(self.logits(batch), batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Keep the loss."""
        self.losses.append(outputs["loss"].item())


@pytest.mark.parametrize("whole", [False, True], ids=["the_network", "the_module"])
def test_compiled_training_is_sampled_eagerly(whole, tmp_path):
    torch.compiler.reset()
    plain, path = plain_run(), tmp_path / "log.jsonl"
    model = net()
    lit = Lean(model if whole else torch.compile(model, backend="aot_eager"), batches(STEPS))
    monitor = monitor_of(lit.net, path)
    trainer(LightningSpectrumCallback(monitor)).fit(torch.compile(lit, backend="aot_eager") if whole else lit)
    assert lit.losses == plain.losses  # this backend computes what no compiler does
    assert monitor.compiled is whole
    assert hooks_on(lit) == 0
    check(path, plain.witness)


class Failing(Module):
    """Fails behind the forward of its third batch, which is sampled."""

    def training_step(self, batch, batch_idx):
        """The loss, unless it fails."""
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise OverflowError("on purpose")
        return loss


def test_a_run_that_fails_leaves_no_hook_behind_and_a_log_that_reads(tmp_path):
    lit = Failing(net(), batches(STEPS))
    monitor = monitor_of(lit.net, tmp_path / "log.jsonl")
    with pytest.raises(OverflowError, match="on purpose"):
        trainer(LightningSpectrumCallback(monitor)).fit(lit)
    assert hooks_on(lit) == 0
    assert not monitor.running
    assert {record.step for record in read_log(tmp_path / "log.jsonl").records} == {2}


def test_it_runs_in_fit_alone(tmp_path):
    lit = Module(net(), batches(STEPS))
    monitor = monitor_of(lit.net, tmp_path / "log.jsonl")
    run = trainer(LightningSpectrumCallback(monitor))
    run.validate(lit, Batches(batches(3)), verbose=False)
    assert lit.validated == 3
    assert monitor.steps == 0
    assert not list(tmp_path.iterdir())


class Pairs(Module):
    """Gets its batches as tuples."""

    def training_step(self, batch, batch_idx):
        """The loss."""
        names = ("input_ids", "attention_mask", "labels")
        return super().training_step(dict(zip(names, batch, strict=True)), batch_idx)


class Listed(Module):
    """Gets labels that are no tensor, as those of boxes in pictures are."""

    def training_step(self, batch, batch_idx):
        """The loss."""
        return super().training_step({**batch, "labels": torch.stack(batch["labels"])}, batch_idx)


@pytest.mark.parametrize(
    ("make", "shaped"),
    [
        (Pairs, lambda batch: tuple(batch.values())),
        (Listed, lambda batch: {**batch, "labels": list(batch["labels"])}),
    ],
)
def test_batches_that_say_nothing_of_tokens_are_left_alone(make, shaped, tmp_path):
    plain = plain_run()
    lit = make(net(), [shaped(batch) for batch in batches(STEPS)])
    trainer(LightningSpectrumCallback(monitor_of(lit.net, tmp_path / "log.jsonl"))).fit(lit)
    assert lit.losses == plain.losses
    check(tmp_path / "log.jsonl", plain.witness)


def test_two_monitors_keep_their_states_apart(tmp_path):
    lit = Module(net(), batches(STEPS))
    every = [
        monitor_of(lit.net, tmp_path / f"{name}.jsonl", decay=decay)
        for name, decay in (("a", None), ("b", 0.5))
    ]
    run = trainer(
        *(LightningSpectrumCallback(monitor, name) for monitor, name in zip(every, "ab", strict=True))
    )
    run.fit(lit)
    run.save_checkpoint(tmp_path / "both.ckpt")
    states = torch.load(tmp_path / "both.ckpt", weights_only=True)["callbacks"]
    assert states["a"].keys() == every[0].state_dict().keys()
    assert states["b"].keys() == every[1].state_dict().keys() != states["a"].keys()


def script(job, folder):
    """`lightning_runs` in processes of its own."""
    command = [sys.executable, "-m", "tests.monitor.lightning_runs", job, str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_killed_and_resumed_run_logs_what_one_does_that_was_not_killed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    losses = saving_run(whole).losses
    done = script("kill", broken)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {record.step for record in read_log(broken / "spectra.jsonl").records} == {2, 4, 8}
    assert saving_run(broken, resume=True).losses == losses[7:]
    want, found = (read_log(folder / "spectra.jsonl") for folder in (whole, broken))
    assert {record.step for record in want.records} == {2, 4, 8, 12}
    assert found.records == want.records


def test_a_checkpoint_without_the_state_of_the_monitor_is_warned_of(tmp_path):
    lit = Module(net(), batches(STEPS))
    first = trainer()
    first.fit(lit)
    first.save_checkpoint(tmp_path / "a.ckpt")
    monitor = monitor_of(lit.net, tmp_path / "log.jsonl")
    run = trainer(LightningSpectrumCallback(monitor), max_epochs=2)
    told = f"goes on at step {STEPS} from a checkpoint without the state"
    with pytest.warns(UserWarning, match=told), pytest.warns(UserWarning, match="no log to go on with"):
        run.fit(lit, ckpt_path=tmp_path / "a.ckpt")
    assert monitor.steps == 2 * STEPS
    assert {record.step for record in read_log(tmp_path / "log.jsonl").records} == {STEPS + 4, STEPS + 8}


def test_a_checkpoint_that_is_read_to_validate_does_not_set_the_monitor_back(tmp_path):
    lit = Module(net(), batches(STEPS))
    monitor = monitor_of(lit.net, tmp_path / "log.jsonl")
    saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5)
    run = trainer(LightningSpectrumCallback(monitor), saving, enable_checkpointing=True)
    run.fit(lit)
    run.validate(lit, Batches(batches(1)), ckpt_path=tmp_path / "step=5.ckpt", verbose=False)
    assert monitor.steps == STEPS


def test_two_ranks_count_the_tokens_of_both(tmp_path):
    done = script("ddp", tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.pt", "rank1.pt", "spectra.jsonl"]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(rank["monitored"] == rank["plain"] for rank in ranks)
    assert ranks[0]["plain"] != ranks[1]["plain"]
    log = read_log(tmp_path / "spectra.jsonl")
    records = [record for record in log.records if record.view == "all"]
    assert [record.step for record in records] == [step for step in WINDOWS for _ in PATHS]
    for record in records:
        parts = [rank[f"{record.site.removesuffix(':output')}@{record.step}"] for rank in ranks]
        assert says(record, torch.cat(parts))
        assert not says(record, parts[0])
        assert record.tokens["kept"] == sum(map(len, parts))


def test_either_package_will_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # as if it were not installed
    path = Path(pca_torch.monitor.__file__).with_name("lightning_callback.py")
    spec = importlib.util.spec_from_file_location("without_lightning", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert issubclass(module.LightningSpectrumCallback, pytorch_lightning.Callback)
    assert not issubclass(LightningSpectrumCallback, pytorch_lightning.Callback)
