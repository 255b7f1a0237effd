"""The monitor in a training run of transformers' Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pca_torch._files import replacing
from pca_torch._safetensors import naming
from pca_torch.monitor.core import SpectrumMonitor, check_monitor

__all__ = ["TrainerSpectrumCallback"]

STEPS = "steps"  # in the header of a file of state


class TrainerSpectrumCallback(TrainerCallback):
    """Drives a `SpectrumMonitor` from transformers: `Trainer(callbacks=[TrainerSpectrumCallback(monitor)])`.

    A step is an optimizer step, whatever `gradient_accumulation_steps` is, and has the number that the
    Trainer gives it. Evaluation does not count. Records go to the sinks of the monitor, never to the
    Trainer's own logs. A selection sees the labels that reach the model: with label smoothing or a
    `compute_loss_func` the Trainer keeps them back.

    Each checkpoint holds the state of the monitor, in one file per process, and a resumed `train` goes on
    with that of the checkpoint in `args.output_dir`; for one that is elsewhere, name its folder in
    `args.resume_from_checkpoint` too. A `train` that is not resumed begins at step 0 anew, and so does the
    monitor; the log of the one before is put aside.

    The Trainer tells its callbacks nothing of an exception. Hooks that one leaves behind are removed by
    `monitor.stop()`, best in a `finally` after `train`, and by the next `train`.

    Args:
        monitor: of the model that the Trainer trains, or of a part of it; its process group must be all
            ranks of the Trainer.
        name: begins the names of its files in checkpoints; a second callback needs another one.

    Raises:
        TypeError: `monitor` is none.
    """

    def __init__(self, monitor: SpectrumMonitor, name: str = "spectrum_monitor") -> None:
        check_monitor(monitor)
        self.monitor = monitor
        self.name = name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start where the Trainer does.

        Args:
            args: of the Trainer.
            state: where it is.
            control: left as it is.
            kwargs: among them the model.

        Raises:
            ValueError: the monitor is of another model, or would not see its labels, or the checkpoint holds
                no state that can be read.
        """
        _check_trained(self.monitor.model, kwargs["model"])
        if self.monitor.selection.labels and args.label_smoothing_factor:
            raise ValueError(
                "`selection` leaves out tokens without a label, but the Trainer keeps labels from the model, "
                f"got `label_smoothing_factor` {args.label_smoothing_factor:g}; give up one of the two."
            )
        step = state.global_step
        known = self.monitor.steps == step and not self.monitor.running  # else a `train` failed within a step
        self.monitor.stop()
        found = self._find(args, step) if step else None
        if found is not None:
            self.monitor.load_state_dict(found)
        elif not step:
            self.monitor.reset()
        elif not known:
            self.monitor.reset(step)
            warnings.warn(
                f"the checkpoint of step {step} holds no {self._file(args.process_index)}, so drift and "
                "averages start anew; if another folder does, name it in `args.resume_from_checkpoint`.",
                stacklevel=2,
            )
        self.monitor.compiled |= args.torch_compile  # the model does not show it: a wrapper is called
        self.monitor.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count a step; evaluation and checkpoint come after it.

        Args:
            args: of the Trainer.
            state: where it is.
            control: told to stop if an alarm says so.
            kwargs: unused.

        Raises:
            ValueError: the monitor counts other steps than the Trainer.
        """
        self.monitor.step()
        control.should_training_stop |= self.monitor.should_stop
        if self.monitor.steps != state.global_step:
            raise ValueError(
                f"`monitor` must count the steps of the Trainer, {state.global_step}, got "
                f"{self.monitor.steps}; leave `monitor.step()` to one callback."
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the state of the monitor into the checkpoint.

        Args:
            args: of the Trainer.
            state: where it is.
            control: left as it is.
            kwargs: unused.
        """
        folder = _checkpoint(args, state.global_step)
        if folder.is_dir():  # not made here: without the Trainer's files it would pass for a checkpoint
            with replacing(folder / self._file(args.process_index)) as draft:
                save_file(self.monitor.state_dict(), draft, {STEPS: str(self.monitor.steps)})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop.

        Args:
            args: of the Trainer.
            state: where it is.
            control: left as it is.
            kwargs: unused.
        """
        self.monitor.stop()

    def _file(self, rank: int) -> str:
        """The name of the file of one process."""
        return f"{self.name}_{rank}.safetensors" if rank else f"{self.name}.safetensors"

    def _find(self, args: TrainingArguments, step: int) -> dict[str, Tensor] | None:
        """The state that a checkpoint of that step holds.

        A process that was not there when it was written takes that of the first: what outlasts a window.
        """
        named = args.resume_from_checkpoint
        folders = [Path(named)] if isinstance(named, str) else []
        folders.append(_checkpoint(args, step))
        files = dict.fromkeys([self._file(args.process_index), self._file(0)])
        for path in (folder / file for folder in folders for file in files):
            if path.is_file():
                with naming(str(path)):
                    with safe_open(path, "pt") as opened:
                        about = opened.metadata() or {}
                    if about.get(STEPS) == str(step):
                        return load_file(path)
        return None


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    """Where the Trainer keeps what it saved at a step."""
    return Path(args.output_dir or "") / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _check_trained(watched: nn.Module, model: nn.Module) -> None:
    """Refuse a monitor that would see nothing.

    Raises:
        ValueError: neither module holds the other.
    """
    is_part = any(part is watched for part in model.modules())
    if not is_part and not any(part is model for part in watched.modules()):
        raise ValueError(
            "`monitor` must be of the model that the Trainer trains, got another "
            f"{type(watched).__name__}; hand over `model`, since `model_init` makes a new one in `train`."
        )
