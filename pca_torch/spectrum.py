"""Numbers read off a spectrum: shares, ranks and effective dimensions.

Everywhere `spectrum` is a `PCAResult`, or the variances λ₁ ≥ λ₂ ≥ … ≥ 0 alone (a tensor, an array
or a list). Shares are of the total variance of all D directions, also when only the first M
variances are known; `total` says what it is where that is not their sum.

Variances are the eigenvalues of the covariance, of the centred samples; those of the second moment, of the
samples as they are, come from `decompose(x, center=False)`. A function whose publication says which of the
two it is of refuses a result of the other kind; variances alone it takes as the right ones.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_number
from pca_torch.result import PCAResult

__all__ = [
    "PowerLaw",
    "alpha_req",
    "condition",
    "cumulative",
    "effective_rank",
    "entropy_rank",
    "nesum",
    "participation_ratio",
    "rank",
    "rankme",
    "ratio",
    "stable_rank",
    "top_share",
]

SLACK = 1e-12  # float64 sums of a few thousand ratios stay within this
TOTAL_SLACK = 1e-6  # a total that was summed in float32 may fall short of the sum by this much
EPS = torch.finfo(torch.float64).eps
FIT_RANGE = (6, 100)  # indices over which `alpha_req` fits unless told otherwise
FEWEST = 3  # a line through fewer points fits whatever they are


@dataclass(frozen=True)
class PowerLaw:
    """λ_j ∝ j^-alpha, as fitted to the variances `first` … `last`, both included; the largest is 1."""

    alpha: float | None  # None: fewer than three variances of the range are known above the rounding floor
    r2: float | None  # 1 - Σ(y - ŷ)² / Σ(y - ȳ)² of y = ln λ, without weights; None also where all are equal
    first: int
    last: int  # less than asked for where the rest is noise or unknown


@dataclass(frozen=True)
class _Known:
    """What is known of a spectrum, whatever it came as."""

    values: Tensor  # (M,) float64, descending
    total: float  # of all directions, the unknown ones included
    floor: float  # variances at or below this are rounding noise
    error: Tensor  # (M,) |computed - true| of each variance is at most this
    most: int  # how many there are, min(N, D); M where the variances came alone
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

    Published for the covariance, so of centred samples.
    Source: Gao et al., bioRxiv 214262, 2017, after the inverse participation ratio of physics.

    Args:
        spectrum: a `PCAResult` or variances, all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    p = _distribution(spectrum, total, "participation_ratio")
    return 1 / p.square().sum().item() if len(p) else 0.0


def effective_rank(spectrum: Any, total: float | None = None) -> float:
    """Exp of the entropy of σ/Σσ with the singular values σ = √λ; 0.0 if all are zero.

    `entropy_rank` is the same of the variances and a smaller number: name which one you report. Published for
    any matrix: of a centred result it is that of the centred samples; `rankme` is of the samples as they are.
    Source: Roy & Vetterli, EUSIPCO 2007.

    Args:
        spectrum: a `PCAResult` or variances (not singular values), all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    sigma = _distribution(spectrum, total, "effective_rank").sqrt()
    return _exp_entropy(sigma / sigma.sum())


def entropy_rank(spectrum: Any, total: float | None = None) -> float:
    """Exp of the entropy of λ/Σλ (the von Neumann entropy of C / tr C); 0.0 if all are zero.

    Of the variances, not of the singular values that `effective_rank` takes; of a centred result it is that
    of the covariance.
    Source: Giraldo, Rao & Príncipe, IEEE Trans. Inf. Theory 61(1), 2015, at order α → 1.

    Args:
        spectrum: a `PCAResult` or variances, all of them.
        total: total variance of all directions, to notice that some are missing.
    """
    return _exp_entropy(_distribution(spectrum, total, "entropy_rank"))


def stable_rank(spectrum: Any, total: float | None = None) -> float:
    """Σλ / λ₁ = ‖X‖_F² / ‖X‖₂², the numerical rank; 0.0 if all are zero.

    X are the samples as they are where `spectrum` is that of their second moment (`center=False`), which is
    how it was published for a matrix; the centred ones where it is that of the covariance, see `nesum`.
    Source: Rudelson & Vershynin, J. ACM 54(4), 2007.

    Args:
        spectrum: a `PCAResult` or variances, the first at least.
        total: total variance of all directions; None is the result's own, or the sum of the variances.
    """
    top = top_share(spectrum, total)
    return 1 / top if top > 0 else 0.0


def nesum(spectrum: Any, total: float | None = None) -> float:
    """Σ λ_i/λ₁ of the covariance, the normalised sum of eigenvalues; 0.0 if all are zero.

    Of centred samples: the `stable_rank` of these, by the name of another field.
    Source: He & Ozay, ICML 2022, Definition 4.1.

    Args:
        spectrum: a `PCAResult` of centred samples, or variances, the first at least.
        total: total variance of all directions; None is the result's own, or the sum of the variances.

    Raises:
        ValueError: a result without centring.
    """
    _check_centring(spectrum, True, "nesum")
    return stable_rank(spectrum, total)


def rankme(spectrum: Any, eps: float = 1e-7) -> float:
    """exp(-Σ p ln p) with p_k = σ_k/Σσ + eps of all min(N, D) singular values; 0.0 if all are zero.

    Of the samples as they are, not centred: σ = √λ of their second moment. Without eps it would be their
    `effective_rank`; p adds up to 1 + min(N, D)·eps. Some code under this name takes the variances of centred
    samples, which is `entropy_rank`. Comparable between runs of one method only, as its authors say.
    Source: Garrido et al., ICML 2023 (arXiv 2210.02885).

    Args:
        spectrum: a `PCAResult` of samples that were not centred (`center=False`), or all min(N, D)
            eigenvalues of the second moment.
        eps: added to each share.

    Raises:
        ValueError: a centred result, some variances are missing, or `eps` is out of range.
    """
    check_number(eps, "eps", "a number in [0, 1)", 0 <= eps < 1)
    _check_centring(spectrum, False, "rankme")
    known = _complete(spectrum, None, "rankme")
    sigma = known.values.sqrt()
    if known.total == 0:
        return 0.0
    unseen = sigma.new_zeros(known.most - len(sigma))  # zero to rounding, and still counted with eps
    return _exp_entropy(torch.cat([sigma, unseen]) / sigma.sum() + eps)


def condition(spectrum: Any, floor: float | None = None) -> float:
    """σ₁/σ_m = √(λ₁/λ_m), m the last variance above the rounding floor; 0.0 if all are zero.

    The condition number of the samples, centred or not as the result is, where all min(N - 1, D) variances
    (min(N, D) without centring) stand above the floor. Where some lie below it, or were not computed, it is
    a lower bound: the number itself is larger, or infinite.

    Args:
        spectrum: a `PCAResult` or variances.
        floor: variances up to this are noise; None is the certificate's, or M·eps·λ₁ of float64.
    """
    known = _known(spectrum, None, floor)
    above = known.values[known.values > known.floor]
    return (above[0] / above[-1]).sqrt().item() if len(above) else 0.0


def alpha_req(
    spectrum: Any, fit_range: tuple[int, int] = FIT_RANGE, *, floor: float | None = None
) -> PowerLaw:
    """Exponent of the power law λ_j ∝ j^-alpha, by a line through ln λ_j over ln j with weights 1/j.

    Of the covariance, so of centred samples. The answer depends on the range: report it too. The fit is that
    of the authors' package reptrix, whose range is 11 … 100 in its release 0.1.0 and was 6 … 100 before (its
    R² leaves out the first point of the range). A line over the index itself instead of its logarithm, as
    other code under this name fits, is another quantity.
    Source: Agrawal et al., NeurIPS 2022; the weights are those of Stringer et al., Nature 571, 2019.

    Args:
        spectrum: a `PCAResult` of centred samples, or variances.
        fit_range: first and last index, both included, counted from 1; cut to the variances that are known
            and stand above the floor.
        floor: variances up to this are noise; None is the certificate's, or M·eps·λ₁ of float64.

    Raises:
        ValueError: a result without centring, or no range of three indices.
    """
    first, last = check_fit_range(fit_range)
    _check_centring(spectrum, True, "alpha_req")
    known = _known(spectrum, None, floor)
    last = min(last, int((known.values > known.floor).sum()))
    if last - first + 1 < FEWEST:
        return PowerLaw(None, None, first, last)
    index = torch.arange(first, last + 1, dtype=known.values.dtype, device=known.values.device)
    alpha, r2 = _line(index.log(), known.values[first - 1 : last].log(), 1 / index)
    return PowerLaw(-alpha, r2, first, last)


def check_fit_range(fit_range: Any) -> tuple[int, int]:
    """First and last index of a fit.

    Args:
        fit_range: what should be two integers.

    Raises:
        ValueError: they are no range of three indices from 1 on.
    """
    pair: tuple[Any, ...] = tuple(fit_range) if isinstance(fit_range, tuple | list) else ()
    whole = len(pair) == 2 and all(isinstance(i, numbers.Integral) and type(i) is not bool for i in pair)
    allowed = f"two indices from 1 on that span {FEWEST} or more"
    check_number(fit_range, "fit_range", allowed, whole and 1 <= pair[0] <= pair[1] - (FEWEST - 1))
    return int(pair[0]), int(pair[1])


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
        values = _variances(spectrum)
        most = len(values)
        error = 0.0 if error is None else error
        total = values.sum().item() if total is None else float(total)
        noise = len(values) * EPS * (values[0].item() if len(values) else 0.0) if floor is None else floor
    held = values.sum().item()
    error = torch.as_tensor(error, dtype=values.dtype, device=values.device).expand(len(values))
    # noise that was clamped at zero can lift the sum above the trace, by no more than its error
    possible = math.isfinite(total) and total - held >= -(TOTAL_SLACK * held + error.sum().item())
    check_number(total, "total", f"finite and at least {held:g}, the sum of the variances", possible)
    whole = isinstance(spectrum, PCAResult) and most == len(values)
    complete = whole or total - held <= max(SLACK * total, most * noise)
    return _Known(values, total, noise, error, most, complete)


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
    known = _complete(spectrum, total, name)
    return known.values / known.values.sum() if known.total > 0 else known.values[:0]


def _complete(spectrum: Any, total: float | None, name: str) -> _Known:
    """A spectrum that is known in full.

    Raises:
        ValueError: some variances are missing.
    """
    known = _known(spectrum, total)
    if not known.complete:
        raise ValueError(f"`{name}` needs every variance: {_beyond(known, 'the total')}")
    return known


def _check_centring(spectrum: Any, centred: bool, name: str) -> None:
    """Refuse a result of the other kind than `name` is defined for.

    Raises:
        ValueError: it is of that kind.
    """
    if isinstance(spectrum, PCAResult) and spectrum.centred != centred:
        kinds = {True: "centred samples", False: "samples that are not centred"}
        raise ValueError(
            f"`{name}` is defined for {kinds[centred]}, got a result of {kinds[not centred]}; decompose with "
            f"`center={centred}`, or pass the result's `spectrum` where its own number is meant."
        )


def _line(x: Tensor, y: Tensor, weights: Tensor) -> tuple[float, float | None]:
    """Slope of the weighted least-squares line, and its R² without weights; None where all y are equal."""
    w = weights / weights.sum()
    x, middle = x - (w * x).sum(), (w * y).sum()
    slope = (w * x * (y - middle)).sum() / (w * x.square()).sum()
    spread = y - y.mean()
    if spread.abs().max() <= 4 * EPS * y.abs().max().clamp_min(1):  # logarithms of equal variances
        return slope.item(), None
    missed = y - middle - slope * x
    return slope.item(), 1 - (missed.square().sum() / spread.square().sum()).item()


def _exp_entropy(p: Tensor) -> float:
    return torch.special.entr(p).sum().exp().item() if len(p) else 0.0


def _beyond(known: _Known, what: str) -> str:
    m, held = len(known.values), (known.values.sum() / known.total).item()
    return f"{what} takes more than {m} directions, the {m} computed hold {held:.7g} of it; compute more."
