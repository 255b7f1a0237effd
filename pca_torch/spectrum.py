"""Numbers read off a spectrum: shares, ranks and effective dimensions.

Everywhere `spectrum` is a `PCAResult`, or the variances λ₁ ≥ λ₂ ≥ … ≥ 0 alone (a tensor, an array
or a list). Shares are of the total variance of all D directions, also when only the first M
variances are known; `total` says what it is where that is not their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_number
from pca_torch.result import PCAResult

__all__ = [
    "cumulative",
    "effective_rank",
    "entropy_rank",
    "participation_ratio",
    "rank",
    "ratio",
    "stable_rank",
    "top_share",
]

SLACK = 1e-12  # float64 sums of a few thousand ratios stay within this
TOTAL_SLACK = 1e-6  # a total that was summed in float32 may fall short of the sum by this much
EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class _Known:
    """What is known of a spectrum, whatever it came as."""

    values: Tensor  # (M,) float64, descending
    total: float  # of all directions, the unknown ones included
    floor: float  # variances at or below this are rounding noise
    error: Tensor  # (M,) |computed - true| of each variance is at most this
    complete: bool  # what lies beyond the M values is rounding noise


def ratio(spectrum: Any, total: float | None = None) -> Tensor:
    """Share of the total variance of each direction, λ_i / Σλ, (M,) float64; zeros if the total is zero.

    Args:
        spectrum: a `PCAResult` or variances.
        total: total variance of all directions; None is the result's own, or the sum of the variances.
    """
    known = _known(spectrum, total)
    return known.values / known.total if known.total > 0 else torch.zeros_like(known.values)


def cumulative(spectrum: Any, total: float | None = None) -> Tensor:
    """Share of the total variance of the first k directions, k = 1..M, (M,) float64.

    Args:
        spectrum: a `PCAResult` or variances.
        total: total variance of all directions; None is the result's own, or the sum of the variances.
    """
    return ratio(spectrum, total).cumsum(0)


def rank(
    spectrum: Any,
    share: float,
    *,
    total: float | None = None,
    error: Tensor | float | None = None,
    floor: float | None = None,
) -> int:
    """How many leading directions hold `share` of the total variance.

    Below 1 it is the smallest k whose cumulative ratio reaches share - max(1e-12, error of that ratio).
    At 1 (or 1.0) it is the number of variances above the rounding floor. A total of zero has rank 0.

    Args:
        spectrum: a `PCAResult` or variances.
        share: in (0, 1].
        total: total variance of all directions; None is the result's own, or the sum of the variances.
        error: error of each variance, (M,) or one for all; None takes the certificate of a result, and
            0 for variances alone. It can lower the rank by one at most.
        floor: variances up to this are noise; None is the certificate's, or M·eps·λ₁ of float64.

    Raises:
        ValueError: `share` is out of range, or the variances that are known do not reach it.
    """
    check_number(share, "share", "in (0, 1]", 0 < share <= 1)
    known = _known(spectrum, total, floor, error)
    m = len(known.values)
    if known.total == 0:
        return 0
    if share == 1:
        above = int((known.values > known.floor).sum())
        if above == m and not known.complete:
            raise ValueError(_beyond(known, "all the variance"))
        return above
    shares = known.values / known.total
    reached = (shares.cumsum(0) + _slack(known, shares) >= share).nonzero()
    if len(reached):
        return int(reached[0]) + 1
    if not known.complete:
        raise ValueError(_beyond(known, f"a share of {share}"))
    return m


def participation_ratio(spectrum: Any, total: float | None = None) -> float:
    """(Σλ)² / Σλ² = tr(C)² / ‖C‖_F²: k equal variances give k; 0.0 if all are zero.

    Source: Gao et al., bioRxiv 214262, 2017, after the inverse participation ratio of physics.

    Args:
        spectrum: a `PCAResult` or variances, all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    p = _distribution(spectrum, total, "participation_ratio")
    return 1 / p.square().sum().item() if len(p) else 0.0


def effective_rank(spectrum: Any, total: float | None = None) -> float:
    """Exp of the entropy of σ/Σσ with the singular values σ = √λ; 0.0 if all are zero.

    `entropy_rank` is the same of the variances and a smaller number: name which one you report.
    Source: Roy & Vetterli, EUSIPCO 2007.

    Args:
        spectrum: a `PCAResult` or variances (not singular values), all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    sigma = _distribution(spectrum, total, "effective_rank").sqrt()
    return _exp_entropy(sigma / sigma.sum())


def entropy_rank(spectrum: Any, total: float | None = None) -> float:
    """Exp of the entropy of λ/Σλ (the von Neumann entropy of C / tr C); 0.0 if all are zero.

    Source: Giraldo, Rao & Príncipe, IEEE Trans. Inf. Theory 61(1), 2015, at order α → 1.

    Args:
        spectrum: a `PCAResult` or variances, all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    return _exp_entropy(_distribution(spectrum, total, "entropy_rank"))


def stable_rank(spectrum: Any, total: float | None = None) -> float:
    """Σλ / λ₁ = ‖X‖_F² / ‖X‖₂² of the centred data, the numerical rank; 0.0 if all are zero.

    Source: Rudelson & Vershynin, J. ACM 54(4), 2007.

    Args:
        spectrum: a `PCAResult` or variances, the first at least.
        total: total variance of all directions; None is the result's own, or the sum of the variances.
    """
    top = top_share(spectrum, total)
    return 1 / top if top > 0 else 0.0


def top_share(spectrum: Any, total: float | None = None) -> float:
    """λ₁ / Σλ, the share of the first direction; 0.0 if all variances are zero.

    Args:
        spectrum: a `PCAResult` or variances, the first at least.
        total: total variance of all directions; None is the result's own, or the sum of the variances.
    """
    shares = ratio(spectrum, total)
    return shares[0].item() if len(shares) else 0.0


def _known(
    spectrum: Any, total: float | None, floor: float | None = None, error: Tensor | float | None = None
) -> _Known:
    """One form for both kinds of `spectrum`, checked."""
    if isinstance(spectrum, PCAResult):
        values = spectrum.spectrum
        most = min(spectrum.n_samples, spectrum.n_features)
        total = spectrum.total_variance.item() if total is None else total
        noise = spectrum.certificate.rounding_floor if floor is None else floor
        error = _errors(spectrum) if error is None else error
    else:
        values, most = _variances(spectrum), None
        error = 0.0 if error is None else error
        total = values.sum().item() if total is None else float(total)
        noise = len(values) * EPS * (values[0].item() if len(values) else 0.0) if floor is None else floor
    held = values.sum().item()
    error = torch.as_tensor(error).to(values).expand(len(values))
    # noise that was clamped at zero can lift the sum above the trace, by no more than its error
    possible = math.isfinite(total) and total - held >= -(TOTAL_SLACK * held + error.sum().item())
    check_number(total, "total", f"finite and at least {held:g}, the sum of the variances", possible)
    m = len(values)
    complete = most == m or total - held <= max(SLACK * total, (most or m) * noise)
    return _Known(values, total, noise, error, complete)


def _variances(spectrum: Any) -> Tensor:
    """`spectrum` as float64 (M,).

    Raises:
        ValueError: not one-dimensional, not finite, negative, or not descending.
    """
    values = as_tensor(spectrum, "spectrum").double()
    if values.ndim != 1:
        raise ValueError(
            f"`spectrum` must be one-dimensional, got shape {tuple(values.shape)}; pass one site at a time."
        )
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError("`spectrum` must hold finite variances ≥ 0, got others; clamp rounding noise at 0.")
    if bool((values.diff() > 0).any()):
        raise ValueError(
            "`spectrum` must be in descending order, got a rise; sort it with `descending=True`."
        )
    return values


def _errors(result: PCAResult) -> Tensor:
    """(M,) error of each variance; beyond the K that are certified, that of the last one."""
    known = result.certificate.variance_error or (result.certificate.rounding_floor,)
    m = len(result.spectrum)
    return torch.tensor((*known, *[known[-1]] * m)[:m], dtype=torch.float64, device=result.spectrum.device)


def _slack(known: _Known, shares: Tensor) -> Tensor:
    """(M,) by how much each cumulative share may be too small.

    The errors add up to more than is plausible when K is large. Half of the next ratio caps them:
    k is then accepted early only where k is nearer to the share than k + 1, which does reach it.
    """
    following = torch.cat([shares[1:], shares.new_zeros(1)])
    return torch.minimum(known.error.cumsum(0) / known.total, following / 2).clamp_min(SLACK)


def _distribution(spectrum: Any, total: float | None, name: str) -> Tensor:
    """λ / Σλ of a spectrum that is known in full; empty if all variances are zero.

    Raises:
        ValueError: some variances are missing.
    """
    known = _known(spectrum, total)
    if not known.complete:
        raise ValueError(f"`{name}` needs every variance: {_beyond(known, 'the total')}")
    return known.values / known.values.sum() if known.total > 0 else known.values[:0]


def _exp_entropy(p: Tensor) -> float:
    return torch.special.entr(p).sum().exp().item() if len(p) else 0.0


def _beyond(known: _Known, what: str) -> str:
    m, held = len(known.values), (known.values.sum() / known.total).item()
    return f"{what} takes more than {m} directions, the {m} computed hold {held:.7g} of it; compute more."
