"""The shared copies of the worked examples and of the reported cases, and spectra we choose."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.cases import reported

HERE = Path(__file__).parent
BENCH = HERE.parent / "bench"
GOLDEN = json.loads((HERE / "golden" / "worked_examples.json").read_text())


def bench_module(name: str) -> ModuleType:
    """A module of bench/, which is no package, under its own name: a child imports it again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        return importlib.import_module(name)


def bench_script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """A script of bench/ in a process of its own, on one thread."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(BENCH.parent)}
    command = [sys.executable, BENCH / f"{name}.py", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)


def reported_case(name: str) -> dict:
    """One case of tests/cases/reported.py, built."""
    return reported.CASES[name]()


def samples(
    n: int, d: int, *, decay: float = 0.9, offset: float = 0.0, seed: int = 0, dtype=torch.float64
) -> Tensor:
    """(n, d) rows whose standard deviations fall by `decay`, turned by a random rotation, around `offset`."""
    g = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=g, dtype=torch.float64)).Q
    spread = decay ** torch.arange(d, dtype=torch.float64)
    return (torch.randn(n, d, generator=g, dtype=torch.float64) * spread @ rotation + offset).to(dtype)


def truth(x: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variances (descending) and components of `x` by a float64 SVD of the centred rows."""
    x = x.double()
    mean = x.mean(0)
    _, s, vh = torch.linalg.svd(x - mean, full_matrices=False)
    return mean, s**2 / (len(x) - ddof), vh
