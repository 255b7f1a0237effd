"""Spectra of a model while it learns: `SpectrumMonitor`, what it logs, where to, and alarms.

`TrainerSpectrumCallback` drives a monitor from transformers, `LightningSpectrumCallback` from Lightning.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pca_torch._extras import require
from pca_torch.monitor.alarms import Alarm
from pca_torch.monitor.core import SpectrumMonitor
from pca_torch.monitor.log_file import JsonlSink, Log, read_log
from pca_torch.monitor.metrics import METRICS
from pca_torch.monitor.record import Alert, Sink, SpectrumRecord
from pca_torch.monitor.tensorboard_sink import TensorBoardSink
from pca_torch.monitor.wandb_sink import WandbSink

if TYPE_CHECKING:
    from pca_torch.monitor.lightning_callback import LightningSpectrumCallback as LightningSpectrumCallback
    from pca_torch.monitor.trainer_callback import TrainerSpectrumCallback as TrainerSpectrumCallback

__all__ = [  # and the two callbacks, each of which needs the package it is for
    "METRICS",
    "Alarm",
    "Alert",
    "JsonlSink",
    "Log",
    "Sink",
    "SpectrumMonitor",
    "SpectrumRecord",
    "TensorBoardSink",
    "WandbSink",
    "read_log",
]


def __getattr__(name: str) -> Any:
    """The callbacks, whose classes are made of classes of a trainer, which is imported with them.

    Raises:
        ImportError: the trainer's package is not installed.
        AttributeError: there is no such name.
    """
    if name == "TrainerSpectrumCallback":
        require("transformers", "hf", name)
        return import_module("pca_torch.monitor.trainer_callback").TrainerSpectrumCallback
    if name == "LightningSpectrumCallback":
        if find_spec("pytorch_lightning") is None:  # it comes with lightning, or alone
            require("lightning", "lightning", name)
        return import_module("pca_torch.monitor.lightning_callback").LightningSpectrumCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "LightningSpectrumCallback", "TrainerSpectrumCallback"})
