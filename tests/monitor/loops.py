"""A plain training loop; as a script, one that saves its state and is killed."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from pca_torch.monitor import SpectrumMonitor
from tests.monitor.net import PATHS, batches, loss_of, net

EVERY, WINDOW, STEPS = 4, 2, 8
WINDOWS = {2: [1, 2], 4: [3, 4], 8: [7, 8]}  # by the step at whose end they are logged
SAMPLED = sorted({step for steps in WINDOWS.values() for step in steps})
SAVED, KILLED, LAST = 7, 9, 12  # in the middle of a window; in the step behind it, which the log has already


def monitor_of(model, path, sites=PATHS, **settings):
    """A monitor of both sites, exact to float64."""
    return SpectrumMonitor(
        model, list(sites), EVERY, path=path, **{"window": WINDOW, "precision": "float64", **settings}
    )


def train(
    model,
    items,
    *,
    monitor=None,
    witness=None,
    accumulate=1,
    cast=nullcontext,
    scaler=None,
    before=None,
    during=None,
    after=None,
):
    """Losses of a training with one optimizer step for every `accumulate` batches.

    Args:
        model: in training mode.
        items: batches.
        monitor: of it, running.
        witness: of it, in a run without monitor.
        accumulate: batches to a step.
        cast: makes the context of a forward.
        scaler: of gradients; it skips steps whose gradients are not finite.
        before: called with each batch.
        during: called behind each forward, before the backward pass.
        after: called behind each step.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, batch in enumerate(items, 1):
        if witness is not None:
            witness.begin(batch)
        if before is not None:
            before(batch)
        with cast():
            loss = loss_of(model(**batch), batch)
        losses.append(loss.item())
        if during is not None:
            during()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if number % accumulate:
            continue
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        if after is not None:
            after()
    return losses


def saving_run(folder, *, kill=False, resume=False):
    """Twelve steps, with a checkpoint in the middle of a window.

    Args:
        folder: of the checkpoint and the log.
        kill: end the process as if by `kill -9`, in a forward of training.
        resume: go on from the checkpoint.
    """
    model, path = net(), folder / "state.pt"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    monitor = monitor_of(model, folder / "spectra.jsonl", decay=0.5)
    if resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        monitor.load_state_dict(saved["monitor"])
        torch.set_rng_state(saved["random"])
    losses = []
    with monitor:
        for batch in batches(LAST)[monitor.steps :]:
            loss = loss_of(model(**batch), batch)
            if kill and monitor.steps + 1 == KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            if monitor.steps == SAVED:
                parts = {"model": model, "optimizer": optimizer, "monitor": monitor}
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**state, "random": torch.get_rng_state()}, path)
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    saving_run(Path(sys.argv[1]), kill=True)
