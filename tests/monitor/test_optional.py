"""What needs another package says which line installs it, and nothing else needs it."""

import subprocess
import sys

import pytest

from pca_torch import monitor

BLOCK = """
import sys
for name in {missing}:
    sys.modules[name] = None
import pca_torch
from pca_torch.monitor import *
print({call})
"""


@pytest.mark.parametrize(
    ("missing", "call", "line"),
    [
        (["transformers"], "pca_torch.monitor.TrainerSpectrumCallback", "hf"),
        (["lightning", "pytorch_lightning"], "pca_torch.monitor.LightningSpectrumCallback", "lightning"),
        (["tensorboard"], "TensorBoardSink('runs')", "tensorboard"),
        (["wandb"], "WandbSink()", "wandb"),
    ],
)
def test_each_missing_package_is_named_with_its_install_line(missing, call, line, tmp_path):
    code = BLOCK.format(missing=missing, call=call)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert last.endswith(f'pip install "pca-torch[{line}]"')


def test_names_that_are_none_are_said():
    with pytest.raises(AttributeError, match="has no attribute 'TrainerCallback'"):
        _ = monitor.TrainerCallback


@pytest.mark.parametrize("callback", ["TrainerSpectrumCallback", "LightningSpectrumCallback"])
def test_callbacks_take_monitors_alone(callback):
    assert callback in dir(monitor)
    with pytest.raises(TypeError, match="`monitor` must be a `SpectrumMonitor`, got None"):
        getattr(monitor, callback)(None)
