"""Which solver "auto" takes."""

from __future__ import annotations

import torch

from pca_torch.solvers.krylov import pays

__all__ = ["SMALL", "SQUARE_BYTES", "choose_solver", "square_fits"]

SMALL = 3e8  # N·D·min(N, D) up to which the SVD of the samples takes a fraction of a second
SQUARE_BYTES = 2**30  # of a float64 D×D; beyond it few directions are cheaper without one


def choose_solver(
    n: int,
    d: int,
    k: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    again: bool = True,
    sparse: bool = False,
) -> str:
    """The solver that `svd_solver="auto"` takes, without computing anything.

    The first row that fits decides; "few" is K ≤ a tenth of the smaller side, or a share below 1, and a
    side above 512.

    | data                                | K     | choice            | why                                  |
    |-------------------------------------|-------|-------------------|--------------------------------------|
    | sparse                              | any   | `krylov`          | never densified; small sides squared |
    | a statistic, a stream               | few   | `krylov`          | certified, a fraction of D³          |
    | (`again` = False)                   | other | `covariance_eigh` | the samples are gone; D³             |
    | N·D·min(N, D) ≤ 3e8                 | any   | `full`            | takes a moment, keeps every variance |
    | larger                              | few   | `krylov`          | N×N, D×D or, where neither fits in   |
    |                                     |       |                   | 1 GiB, products with the samples     |
    | N ≤ D                               | other | `full`            | D×D is never formed                  |
    | N > D, float64                      | all   | `tsqr`            | keeps σ to u·σ₁, up to twice the time|
    | N > D                               | other | `covariance_eigh` | one pass, then D³                    |

    A share that turns out to take more than D/8 directions is handed on to the dense solver. Where the data
    can be read again, `decompose` goes on to the next better route by itself if components below the floor
    of this one were asked for, and says so in the certificate. The device decides nothing here: `krylov`
    picks its own iteration by it.

    Args:
        n: samples.
        d: features.
        k: components, a share, or None for all.
        dtype: of the data.
        device: of the data; it decides nothing today.
        again: whether the samples can be read again: in memory or on disk, not a statistic.
        sparse: whether they are sparse.
    """
    del device
    smaller = min(n, d) if again else d
    if sparse:
        return "krylov"
    if again and n * d * min(n, d) <= SMALL:
        return "full"
    if pays(k, smaller):
        return "krylov"
    if again and n <= d:
        return "full"
    everything = k is None or (isinstance(k, float) and k == 1)
    return "tsqr" if again and dtype == torch.float64 and everything else "covariance_eigh"


def square_fits(d: int) -> bool:
    """Whether a float64 D×D is small enough to be formed for a few directions.

    Args:
        d: D.
    """
    return 8 * d * d <= SQUARE_BYTES
