"""Trainings of a small network with Lightning; as a script, those that need processes of their own."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch
import torch

from pca_torch.monitor import LightningSpectrumCallback, SpectrumMonitor
from tests.monitor.net import PATHS, Witness, batches, loss_of, net

EVERY, WINDOW, STEPS = 4, 2, 8
WINDOWS = {2: [1, 2], 4: [3, 4], 8: [7, 8]}  # by the step at whose end they are logged
SAVED, KILLED = 7, 9  # in the middle of a window; in the step behind it, which the log has already


class Batches:
    """A loader that goes on in the middle of an epoch.

    Args:
        items: the batches.
    """

    def __init__(self, items):
        self.items, self.at, self.start = items, 0, 0

    def __iter__(self):
        start, self.start = self.start, 0  # the next epoch begins at the first
        for at in range(start, len(self.items)):
            self.at = at
            yield self.items[at]

    def __len__(self):
        return len(self.items)

    def state_dict(self):
        """Which was given out last."""
        return {"at": self.at}

    def load_state_dict(self, state):
        """Go on behind that."""
        self.start = state["at"] + 1


class Training:
    """What `training_step` of a module that holds `net` does: it keeps the labels to itself."""

    witness = None

    def __init__(self, model, items=None):
        super().__init__()
        self.net, self.items = model, items
        self.losses, self.validated = [], 0

    def on_train_batch_start(self, batch, batch_idx):
        """Dropout that does not depend on what came before, so that a resumed run can be compared."""
        torch.manual_seed(self.trainer.fit_loop.epoch_loop.total_batch_idx)

    def logits(self, batch):
        """Of a batch of training."""
        return self.net(batch["input_ids"], attention_mask=batch["attention_mask"])

    def training_step(self, batch, batch_idx):
        """The loss, kept."""
        if self.witness is not None:
            self.witness.begin(batch)
        loss = loss_of(self.logits(batch), batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        """Other tokens, which do not count."""
        self.validated += 1
        self.net(**batch)

    def train_dataloader(self):
        """The share of this rank."""
        return Batches(self.items[self.global_rank :: self.trainer.world_size])

    def configure_optimizers(self):
        """One for all."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Module(Training, lightning.pytorch.LightningModule):
    """Calls the network; it is never called itself."""


class Called(Module):
    """Calls itself."""

    def forward(self, input_ids, attention_mask=None):
        """Logits."""
        return self.net(input_ids, attention_mask)

    def logits(self, batch):
        """Of a batch of training."""
        return self(batch["input_ids"], attention_mask=batch["attention_mask"])


class Manual(Module):
    """Two optimizers, which both step in each second batch."""

    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        """The loss, and the steps it leads to."""
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        """One for the head alone."""
        blocks = [*self.net.embed.parameters(), *self.net.blocks.parameters()]
        return torch.optim.SGD(blocks, lr=0.1), torch.optim.SGD(self.net.head.parameters(), lr=0.1)


def trainer(*callbacks, of=lightning.pytorch, **settings):
    """A silent trainer on the CPU.

    Args:
        callbacks: for it.
        of: the package, of two that are the same.
        settings: more of them.
    """
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    options = {**quiet, "accelerator": "cpu", "devices": 1, "max_epochs": 1, **settings}
    return of.Trainer(callbacks=list(callbacks), **options)


def monitor_of(model, path, prefix="", **settings):
    """A monitor of both sites, exact to float64; `prefix` is the path of the network in the model."""
    settings = {"window": WINDOW, "precision": "float64", **settings}
    return SpectrumMonitor(model, [prefix + site for site in PATHS], EVERY, path=path, **settings)


def saving_run(folder, *callbacks, resume=False):
    """Two epochs of six batches, with a checkpoint in the middle of a window.

    Args:
        folder: of the checkpoint and the log.
        callbacks: besides.
        resume: go on from the checkpoint.
    """
    lit = Module(net(), batches(6))
    callback = LightningSpectrumCallback(monitor_of(lit.net, folder / "spectra.jsonl", decay=0.5))
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1
    )
    run = trainer(callback, saving, *callbacks, max_epochs=2, enable_checkpointing=True)
    path = folder / f"step={SAVED}.ckpt" if resume else None
    run.fit(lit, ckpt_path=path, weights_only=True if resume else None)
    return lit


class Killed(lightning.pytorch.Callback):
    """The process ends as if by `kill -9`, in a forward of training."""

    def on_before_backward(self, trainer, pl_module, loss):
        """Behind the forward."""
        if trainer.global_step + 1 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def ddp_runs(folder):
    """The same training on two ranks, watched by plain hooks and then monitored; each rank keeps its side."""
    kept = {}
    for monitored in (False, True):
        lit = Module(net(), batches(2 * STEPS))
        callbacks = []
        if monitored:
            callbacks = [LightningSpectrumCallback(monitor_of(lit.net, folder / "spectra.jsonl"))]
        else:
            lit.witness = Witness(lit.net)
        run = trainer(*callbacks, strategy="ddp", devices=2)
        run.fit(lit)
        kept["monitored" if monitored else "plain"] = lit.losses
        if not monitored:
            for path in PATHS:
                for step, steps in WINDOWS.items():
                    kept[f"{path}@{step}"] = lit.witness.rows(path, steps)
    torch.save(kept, folder / f"rank{run.global_rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    job, folder = sys.argv[1], Path(sys.argv[2])
    if job == "kill":
        saving_run(folder, Killed())
    else:
        ddp_runs(folder)
