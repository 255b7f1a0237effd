"""Samples (N, D) in float32 whose population variances are known, cheap to make at any size."""

from collections.abc import Iterator

import torch
from torch import Tensor

SPECTRA = ("power", "flat", "massive", "offset")
DECAY = 1.4  # λ_i ~ i^-1.4: standard deviations fall as i^-0.7
LIFTED = 9  # massive directions of a spectrum that has them
LIFT = 1e7  # λ_1 / λ_K of a spectrum that has them
OFFSET = 300.0  # mean of the features that have one, in units of the largest standard deviation
OFFSET_FEATURES = 2
BLOCK_ROWS = 1024


def variances(spectrum: str, d: int, k: int) -> Tensor:
    """(D,) float64 population variances, descending.

    Args:
        spectrum: "power" falls as i^-1.4, "flat" is one variance, "massive" is the power law with the
            first nine directions lifted until λ_1 / λ_K is 1e7, "offset" is the power law, whose mean is not
            zero.
        d: D.
        k: K of that ratio; with K < 18 only K // 2 directions are lifted.
    """
    if spectrum == "flat":
        return torch.ones(d, dtype=torch.float64)
    values = torch.arange(1, d + 1, dtype=torch.float64) ** -DECAY
    if spectrum == "massive":
        values[: min(LIFTED, max(1, k // 2))] *= LIFT * values[k - 1] / values[0]
    return values


def rotate(y: Tensor, signs: Tensor) -> Tensor:
    """Rows (n, D) turned by an orthonormal Hartley transform and flips of sign.

    No D×D matrix is made, and every direction is spread over all D features.

    Args:
        y: (n, D).
        signs: (D,) of ±1.
    """
    wave = torch.fft.fft(y, norm="ortho")
    return (wave.real - wave.imag) * signs


def mean(spectrum: str, d: int) -> Tensor:
    """(D,) float64 population mean: zero, but in two features of "offset", as massive activations have it.

    Args:
        spectrum: one of `SPECTRA`.
        d: D.
    """
    values = torch.zeros(d, dtype=torch.float64)
    if spectrum == "offset":
        values[:OFFSET_FEATURES] = OFFSET  # the largest standard deviation is 1
    return values


def blocks(spectrum: str, n: int, d: int, k: int, seed: int = 0) -> Iterator[Tensor]:
    """The rows of `samples`, a thousand at a time: float32 blocks, rotated in float64.

    Args:
        spectrum: one of `SPECTRA`.
        n: N.
        d: D.
        k: K, see `variances`.
        seed: of the generator; the global one is left alone.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = 2.0 * torch.randint(0, 2, (d,), generator=generator) - 1
    spread, centre = variances(spectrum, d, k).sqrt(), mean(spectrum, d)
    for start in range(0, n, BLOCK_ROWS):
        shape = (min(BLOCK_ROWS, n - start), d)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        yield (rotate(normal * spread, signs) + centre).float()


def samples(spectrum: str, n: int, d: int, k: int, seed: int = 0) -> Tensor:
    """(N, D) float32 rows of a Gaussian with the variances of `variances` around the mean of `mean`.

    Args:
        spectrum: one of `SPECTRA`.
        n: N.
        d: D.
        k: K, see `variances`.
        seed: of the generator.
    """
    return torch.cat(list(blocks(spectrum, n, d, k, seed)))
