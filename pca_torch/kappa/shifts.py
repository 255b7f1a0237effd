"""What an offset does to XᵀX - n·mean·meanᵀ, and to sums that are centred first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pca_torch import spectrum
from pca_torch.moments import Moments
from pca_torch.precision import Precision, exact_products
from pca_torch.solvers import full

__all__ = ["OFFSETS", "SHARE", "Shift", "shifted", "uncentred_covariance"]

OFFSETS = (0.0, 1.0, 10.0, 1e2, 1e3, 1e4)  # in units of the largest standard deviation of a column
SHARE = 0.95
DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Shift:
    """One offset in one arithmetic. Errors are the largest of any variance, over λ₁."""

    offset: float  # in units of the largest standard deviation of a column
    precision: str  # of the samples and of the products
    uncentred: float  # error of XᵀX - n·mean·meanᵀ
    centred: float  # error of sums that were centred first
    judge: float  # what the judge of both may be off by
    uncentred_rank: int  # components for 95 % of the variance, as that formula would report them
    centred_rank: int
    true_rank: int


def uncentred_covariance(x: Tensor) -> Tensor:
    """(D, D) XᵀX / n - mean·meanᵀ in the arithmetic of `x`: the formula that cancels.

    Args:
        x: samples (N, D).
    """
    mean = x.mean(0)
    return (x.mT @ x - len(x) * torch.outer(mean, mean)) / len(x)


def shifted(rows: Tensor, progress: Callable[[int], object]) -> tuple[Shift, ...]:
    """Both formulas for each offset in each arithmetic.

    Args:
        rows: float64 samples (N, D); their own mean is replaced by the offset.
        progress: told of each of them.
    """
    z = rows - rows.mean(0)
    z -= z.mean(0)
    z /= 2.0 ** math.frexp(z.abs().max().item())[1]  # all of this is relative; squares stay in float32
    unit = z.square().mean(0).max().sqrt().item()
    found = []
    for precision, dtype in DTYPES.items():
        for offset in OFFSETS:
            found.append(_shift((z + offset * unit).to(dtype), offset, precision))
            progress(1)
    return tuple(found)


def _shift(x: Tensor, offset: float, precision: Precision) -> Shift:
    """Both formulas for the samples as they are in `precision`; their float64 SVD is the judge."""
    d = x.shape[1]
    true = full.solve(x.double(), 0, precision="float64", ddof=0)
    truth = torch.zeros(d, dtype=torch.float64, device=x.device)
    truth[: len(true.spectrum)] = true.spectrum
    top = truth[0].item()
    sums = Moments(d, precision=precision).update(x).covariance(0)
    with exact_products(x.device):
        plain = torch.linalg.eigvalsh(uncentred_covariance(x)).double().flip(0)
    centred = torch.linalg.eigvalsh(sums).flip(0)
    return Shift(
        offset=offset,
        precision=precision,
        uncentred=(plain - truth).abs().max().item() / top,
        centred=(centred - truth).abs().max().item() / top,
        judge=_judged(true.certificate.rounding_floor, top),
        uncentred_rank=spectrum.rank(plain.clamp_min(0), SHARE),
        centred_rank=spectrum.rank(centred.clamp_min(0), SHARE),
        true_rank=spectrum.rank(truth, SHARE),
    )


def _judged(floor: float, top: float) -> float:
    """Largest error over λ₁ of variances s² whose floor is (1 + √2)² s² λ₁: 2s + s²."""
    relative = (floor / top) ** 0.5 / (1 + 2**0.5)
    return 2 * relative + relative**2
