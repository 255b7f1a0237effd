"""Samples of known spectra, made where they are used, and their truth in float64 by plain products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.record import Verdict
from bench.spectra import mean, rotate, variances

BLOCK_ROWS = 4096
U64 = torch.finfo(torch.float64).eps / 2


def samples(
    spectrum: str, n: int, d: int, k: int, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Tensor:
    """(N, D) rows of a Gaussian with the variances and the mean of `bench/spectra.py`, made on the device.

    Args:
        spectrum: one of those of `bench/spectra.py`.
        n: N.
        d: D.
        k: K, see `variances`.
        dtype: what the rows are rounded to.
        device: where they are made; a block of them in float64 is all that is needed beside.
        seed: of a generator there.
    """
    generator = torch.Generator(device).manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (d,), generator=generator, device=device) - 1
    spread, centre = variances(spectrum, d, k).sqrt().to(device), mean(spectrum, d).to(device)
    x = torch.empty(n, d, dtype=dtype, device=device)
    for part in x.split(BLOCK_ROWS):
        normal = torch.randn(part.shape, generator=generator, dtype=torch.float64, device=device)
        part.copy_(rotate(normal * spread, signs.double()) + centre)
    return x


@dataclass(frozen=True, eq=False)
class Truth:
    """The covariance of the rows as they are stored."""

    covariance: Tensor  # (D, D) float64
    values: Tensor  # (D,) descending
    slack: float  # what a variance is off by: see `truth_of`

    @property
    def total(self) -> float:
        """Tr C."""
        return self.covariance.trace().item()

    def of_directions(self, components: Tensor, bound: float | None) -> Verdict:
        """What the span of rows (K, D) misses, as a share of the total, against the bound on it."""
        k = len(components)
        q = torch.linalg.qr(components.double().mT).Q
        captured = ((self.covariance @ q) * q).sum().item()
        missed = (self.values[:k].sum().item() - captured) / self.total
        allowance = 2 * k * self.slack / self.total
        last = self.values[k - 1].item() / self.total
        facts = {"missed_of_last": missed / last, "claimed": bound, "kind": "missed share"}
        return Verdict(max(0.0, missed), None if bound is None else bound + allowance, facts)

    def of_values(self, values: Tensor, bound: float | None) -> Verdict:
        """The largest error of variances (M,), in units of the first, against the bound on it."""
        top = self.values[0].item()
        off = (values.double() - self.values[: len(values)]).abs().max().item() / top
        facts = {"claimed": None if bound is None else bound / top, "kind": "variance over the first"}
        return Verdict(off, None if bound is None else (bound + self.slack) / top, facts)


def truth_of(x: Tensor) -> Truth:
    """Centred twice, multiplied plainly in float64, and its eigenvalues.

    A sum of N products obeys |E| ≤ γ|X|ᵀ|X| with γ = 8√N u (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019),
    so a variance is off by at most (8√N + 4) u tr C, and by (D + 8) u λ₁ from the eigensolver.
    """
    n, d = x.shape
    middle = torch.zeros(d, dtype=torch.float64, device=x.device)
    for _ in range(2):
        middle = middle + sum((part - middle).sum(0) for part in _parts(x)) / n
    c = torch.zeros(d, d, dtype=torch.float64, device=x.device)
    for part in _parts(x):
        z = part - middle
        c.addmm_(z.mT, z)
    c = (c + c.mT) / (2 * (n - 1))
    values = torch.linalg.eigvalsh(c).flip(0)
    slack = (8 * math.sqrt(n) + 4) * U64 * c.trace().item() + (d + 8) * U64 * values[0].item()
    return Truth(c, values, slack)


def _parts(x: Tensor) -> Iterator[Tensor]:
    return (part.double() for part in x.split(BLOCK_ROWS))
