"""The shared copies of the worked examples and of the reported cases, and spectra we choose."""

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.cases import reported

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "worked_examples.json").read_text())


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
