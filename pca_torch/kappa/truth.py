"""The variances of a few columns to as many digits as it takes: exact sums, then mpmath."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np
from torch import Tensor

__all__ = ["exact_variances"]

MOST_FEATURES = 16
MOST_PRODUCTS = 4_000_000  # of Python integers, about a second of them
DIGITS = 60  # of the first try
GUARD = 20  # digits kept in hand: a variance so far above the last digit is right as a float64


def exact_variances(rows: Tensor) -> tuple[tuple[float, ...], int] | None:
    """Variances (D,) of the samples as they are stored, divisor N, descending, right to the last digit.

    Floats are integers times a power of two, so A = N XᵀX - (Σx)(Σx)ᵀ is formed exactly, and a variance is
    an eigenvalue of A over N². Its non-zero eigenvalues multiply to an integer, a sum of principal minors:
    none lies below tr(A)^(1 - D), which says how many digits decide whether one is zero.

    Args:
        rows: finite float64 samples (N, D).

    Returns:
        The variances and the decimal digits of the arithmetic; None where there are more than 16 features
        or four million products, or without mpmath.
    """
    n, d = rows.shape
    if d > MOST_FEATURES or n * d * (d + 1) // 2 > MOST_PRODUCTS:
        return None
    try:
        import mpmath  # optional: it comes with torch, by way of sympy
    except ImportError:
        return None
    columns, exponent = _integers(rows.numpy())
    scatter = [[n * sum(map(mul, a, b)) - sum(a) * sum(b) for b in columns] for a in columns]
    decisive = GUARD + int(d * sum(scatter[i][i] for i in range(d)).bit_length() * 0.302) + 1
    values, digits, scale = [], 0, mpmath.mpf(1)
    for digits in sorted({min(DIGITS, decisive), decisive}):
        with mpmath.workdps(digits):
            values = sorted(mpmath.eigsy(mpmath.matrix(scatter), eigvals_only=True), reverse=True)
            noise = values[0] * mpmath.mpf(10) ** (GUARD - digits)
            values = [value if value > noise else mpmath.mpf(0) for value in values]
            scale = mpmath.mpf(2) ** (2 * exponent) / n**2
            if values[-1] > 0:
                break
    return tuple(float(value * scale) for value in values), digits


def _integers(x: np.ndarray) -> tuple[Sequence[Sequence[int]], int]:
    """The columns of `x` over 2^e as integers, and e."""
    mantissa, exponent = np.frexp(x)
    whole = (mantissa * 2.0**53).astype(np.int64)
    exponent = exponent - 53
    used = whole != 0
    low = int(exponent[used].min()) if used.any() else 0
    shift = np.where(used, exponent - low, 0)
    columns = zip(whole.T.tolist(), shift.T.tolist(), strict=True)
    return [[number << by for number, by in zip(*column, strict=True)] for column in columns], low
