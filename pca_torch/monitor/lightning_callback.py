"""The monitor in a training run of Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pca_torch.monitor.core import SpectrumMonitor, check_monitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # the same under its older name
        from pytorch_lightning import Callback

__all__ = ["LightningSpectrumCallback"]


class LightningSpectrumCallback(Callback):
    """Drives a `SpectrumMonitor` from Lightning: `Trainer(callbacks=[LightningSpectrumCallback(monitor)])`.

    The monitor runs during `fit` alone; sanity check and validation do not count. A step is a training batch
    after which `trainer.global_step` has grown: with `accumulate_grad_batches=4` every fourth batch; where
    manual optimization steps several optimizers in one batch, that is one step, as for Lightning's loggers.
    A second `fit` goes on counting.

    Give the monitor the module that `training_step` calls: `SpectrumMonitor(lit.net)` where that calls
    `self.net(...)`, `SpectrumMonitor(lit)` where it calls `self(...)`; only what is called can be told the
    padding. Where batches are mappings, what they say of each token (labels, roles, a token mask) reaches the
    monitor's `TokenSelection` though `training_step` passes it on to no module; it is taken to speak of the
    first forward of the batch.

    The state of the monitor is part of Lightning's checkpoints, and `fit(ckpt_path=...)` goes on with it. Of
    several ranks a checkpoint keeps that of the first: save between windows, not inside one, for the resumed
    run to log what this one does.

    Both `lightning.pytorch` and `pytorch_lightning` take this callback, whichever of them is installed.

    Args:
        monitor: of the model in training; its process group must be all ranks of the trainer.
        name: of its state in checkpoints; a second callback needs another one.

    Raises:
        TypeError: `monitor` is none.
    """

    def __init__(self, monitor: SpectrumMonitor, name: str = "spectrum_monitor") -> None:
        super().__init__()
        check_monitor(monitor)
        self.monitor = monitor
        self.name = name
        self._global_step = 0  # of the trainer, when it was last looked at

    @property
    def state_key(self) -> str:
        """By which checkpoints know its state."""
        return self.name

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; one that is read to validate or test leaves the monitor as it is.

        Args:
            trainer: Lightning's.
            pl_module: the module it trains.
            checkpoint: all of it.
        """
        state = checkpoint["callbacks"].get(self.state_key)
        if state and trainer.state.fn == "fit":
            self.monitor.load_state_dict(state)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start: the checkpoint has been read, the sanity check is over.

        Args:
            trainer: Lightning's.
            pl_module: the module it trains.
        """
        self._global_step = trainer.global_step
        if self._global_step and not self.monitor.steps:
            warnings.warn(
                f"training goes on at step {self._global_step} from a checkpoint without the state of the "
                "monitor, so drift and averages start anew; have the callback there when it is saved.",
                stacklevel=2,
            )
            self.monitor.reset(self._global_step)
        if getattr(pl_module, "_compiler_ctx", None) is not None:  # `fit` was given `torch.compile(lit)`
            self.monitor.compiled = True
        self.monitor.start()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Tell the selection what the batch says of its tokens.

        Args:
            trainer: Lightning's.
            pl_module: the module it trains.
            batch: what `training_step` will get.
            batch_idx: its number in this epoch.
        """
        if isinstance(batch, Mapping):
            told = {key: value for key, value in batch.items() if isinstance(value, Tensor)}
            self.monitor.selection.tell(told, self.monitor.model)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step, if an optimizer made one.

        Args:
            trainer: Lightning's.
            pl_module: the module it trains.
            outputs: of `training_step`.
            batch: what it got.
            batch_idx: its number in this epoch.
        """
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self.monitor.step()
            trainer.should_stop |= self.monitor.should_stop

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop.

        Args:
            trainer: Lightning's.
            pl_module: the module it trained.
        """
        self.monitor.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop, and take all hooks off the model.

        Args:
            trainer: Lightning's.
            pl_module: the module it trained.
            exception: that ended the run.
        """
        self.monitor.stop()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: tensors alone, so that `weights_only=True` reads it."""
        return self.monitor.state_dict()
