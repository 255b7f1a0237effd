"""What is right, in float64 and by plain formulas that share no code with what is timed."""

import torch
from torch import Tensor


def centred(x: Tensor) -> Tensor:
    """(N, D) float64 rows minus their mean, twice: the second pass takes what rounding left."""
    z = x.double()
    z = z - z.mean(0)
    return z - z.mean(0)


def covariance(x: Tensor) -> Tensor:
    """(D, D) float64 with divisor N - 1."""
    z = centred(x)
    return z.mT @ z / (len(x) - 1)


def eigenvalues(matrix: Tensor) -> Tensor:
    """(D,) of a symmetric matrix, descending."""
    return torch.linalg.eigvalsh(matrix).flip(0)


def captured(matrix: Tensor, components: Tensor) -> float:
    """Share of tr C that the span of the rows (K, D) captures; their lengths and angles do not count."""
    q = torch.linalg.qr(components.to(matrix).mT).Q
    return ((matrix @ q * q).sum() / matrix.trace()).item()


def missed(matrix: Tensor, variances: Tensor, components: Tensor) -> float:
    """Share of the variance that the best K directions capture and the rows (K, D) do not.

    Args:
        matrix: (D, D) covariance.
        variances: (D,) its eigenvalues, descending.
        components: (K, D).
    """
    best = variances[: len(components)].sum() / variances.sum()
    return best.item() - captured(matrix, components)


def rank(spectrum: Tensor, share: float) -> int:
    """Smallest K whose variances, of all those given, reach a share of their sum."""
    reached = spectrum.double().cumsum(0) / spectrum.double().sum()
    return int((reached < share).sum()) + 1
