"""From what a solver computed to a result that says how right it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pca_torch import spectrum as spectra
from pca_torch._checks import check_number
from pca_torch.linalg import fix_signs
from pca_torch.precision import unit_roundoff
from pca_torch.problem import product_noise
from pca_torch.result import Certificate, PCAResult
from pca_torch.span import Span

__all__ = [
    "Rest",
    "Solved",
    "assemble",
    "check_count",
    "check_total",
    "constant_columns",
    "factor_errors",
    "kept",
    "sine_bound",
    "standard_deviations",
]

CONSTANT = 32 * unit_roundoff(torch.float64)  # a column that varies less, relative to its mean, is constant
UNIQUE_BELOW = 0.5  # radians: beyond this the subspace is not told apart from its neighbours
QUANTISATION = {torch.bfloat16: 2.8e-6, torch.float16: 4.3e-8}  # noise variance over E[x²], measured


@dataclass(frozen=True)
class Solved:
    """Everything a solver found: M variances, all min(N, D) or the leading ones, and their errors."""

    mean: Tensor  # (D,)
    scale: Tensor | None  # (D,)
    spectrum: Tensor  # (M,) descending, raw: rounding may have pushed some below zero
    directions: Tensor  # (K or more, D) rows
    total_variance: Tensor  # ()
    second_moment: Tensor  # (D,) E[x²] per column, uncentred
    error: Tensor  # (M,) |computed - true| of each variance is at most this
    floor: float  # variances at or below it are noise
    perturbation: float  # ‖E‖₂ of what was decomposed, in its units
    apply: Callable[[Tensor], Tensor]  # (K, D) float64 rows V → V C
    n_samples: int
    divisor: float
    dtype: torch.dtype  # of the data
    constant: bool  # no column varies by more than the rounding of its mean
    solver: str
    precision: str
    values: Tensor | None = None  # (M,) what was decomposed: variances, or singular values of the samples
    rest: Rest | None = None  # what is proved of the directions that were not computed
    applied_error: float | None = None  # |vᵀĈv - vᵀCv| of `apply`; None is `error`
    bound_kind: str = "deterministic"
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rest:
    """What a solver of K directions proves of the others."""

    below: float  # λ_{M+1} is at most this, M the variances that are known
    outside: float  # C outside of the directions that were computed is at most this
    residual: float  # ‖CV - VΘ‖₂ of them, rounding of C included


def constant_columns(variance: Tensor, mean: Tensor) -> Tensor:
    """(D,) which columns do not vary by more than the rounding of their own mean."""
    return variance <= (CONSTANT * mean).square()


def check_total(total: Tensor) -> None:
    """Refuse data whose squares overflowed, before an eigensolver sees them.

    Raises:
        ValueError: the total variance is not finite.
    """
    if not bool(total.isfinite()):
        raise ValueError("`x` has values whose squares leave float64; divide it by its largest value.")


def standard_deviations(variance: Tensor, mean: Tensor) -> Tensor:
    """(D,) scale of a standardised decomposition; constant columns keep 1, with a warning."""
    constant = constant_columns(variance, mean)
    if bool(constant.any()):
        warnings.warn(
            f"{int(constant.sum())} of {len(constant)} columns are constant; their scale stays 1.",
            stacklevel=4,
        )
    return torch.where(constant, 1.0, variance.clamp_min(0).sqrt())


def factor_errors(variance: Tensor, relative: float) -> tuple[Tensor, float]:
    """Errors (M,) and floor of variances that come from singular values of the samples.

    Each σ is off by at most s·σ₁ (Weyl), so λ is by 2s√(λλ₁) + s²λ₁, and equals that error at
    λ = (1 + √2)² s² λ₁.

    Args:
        variance: (M,) descending.
        relative: s, the backward error of the factorisation over σ₁.
    """
    top = variance[0] if len(variance) else variance.new_zeros(())
    error = 2 * relative * (variance.clamp_min(0) * top).sqrt() + relative**2 * top
    return error, (1 + math.sqrt(2)) ** 2 * relative**2 * top.item()


def sine_bound(perturbation: float, gap: float) -> float:
    """Radians by which a perturbation can turn an invariant subspace across a gap; π/2 is no bound.

    sin θ ≤ ‖E‖ / (gap - ‖E‖), Davis & Kahan, SIAM J. Numer. Anal. 7(1), 1970; Wedin, BIT 12, 1972.
    """
    room = gap - perturbation
    return math.asin(min(1.0, perturbation / room)) if room > 0 else math.pi / 2


def assemble(
    solved: Solved, n_components: float | None, *, dtype: torch.dtype, centred: bool, whiten: bool
) -> PCAResult:
    """Keep K directions of what was solved, fix their signs, and certify them as they are stored.

    Args:
        solved: the whole decomposition.
        n_components: K, a share in (0, 1], or None for all M.
        dtype: of the stored components.
        centred: whether a mean was subtracted.
        whiten: directions that are null to rounding are dropped.

    Raises:
        ValueError: `n_components` is out of range.
    """
    spectrum = solved.spectrum.clamp_min(0)
    total = solved.total_variance
    check_total(total)
    if solved.constant:
        warnings.warn("total variance is zero: every ratio and every rank is 0.", stacklevel=5)
        solved = replace(solved, error=solved.error + spectrum)  # calling it zero is an error too
        spectrum, total = torch.zeros_like(spectrum), torch.zeros_like(total)
    trusted = int((spectrum > solved.floor).sum())
    check_count(n_components, solved.n_samples, len(solved.mean))
    k = kept(n_components, spectrum, total.item(), solved.floor, solved.error)
    if whiten:  # stored to `dtype`, a component holds that much of the first one
        stored = unit_roundoff(dtype) ** 2 * len(solved.mean) * spectrum[0].item() if len(spectrum) else 0.0
        k = min(k, trusted, int((spectrum > stored).sum()))
    unit = torch.nn.functional.normalize(solved.directions[:k].double())  # LAPACK's are off by some 40 u
    components = fix_signs(unit.to(dtype)).contiguous()
    return PCAResult(
        mean=solved.mean.clone(),
        components=components,
        spectrum=spectrum.clone(),
        total_variance=total.clone(),
        n_samples=solved.n_samples,
        divisor=solved.divisor,
        certificate=_certify(solved, spectrum, total.item(), components, trusted),
        scale=None if solved.scale is None else solved.scale.clone(),
        centred=centred,
        whiten=whiten,
    )


def check_count(n_components: float | None, n: int, d: int) -> None:
    """Refuse more components than there are.

    Raises:
        ValueError: an int outside 0..min(N, D).
    """
    if isinstance(n_components, int) and not 0 <= n_components <= min(n, d):
        raise ValueError(
            f"`n_components` must be in 0..{min(n, d)}, the smaller of {n} samples and {d} features, "
            f"got {n_components}."
        )


def kept(n_components: float | None, spectrum: Tensor, total: float, floor: float, error: Tensor) -> int:
    """K of an int, a share or None.

    Args:
        n_components: K, a share in (0, 1], or None for all M.
        spectrum: (M,) variances, descending, not negative.
        total: variance of all directions.
        floor: variances at or below it are noise.
        error: (M,) error of each variance.

    Raises:
        ValueError: a share out of range, or beyond the M variances that are known.
    """
    if isinstance(n_components, int):
        return n_components
    if n_components is None:
        return len(spectrum)
    check_number(n_components, "n_components", "a share in (0, 1] when it is a float", 0 < n_components <= 1)
    return spectra.rank(spectrum, n_components, total=total, floor=floor, error=error)


def _certify(solved: Solved, spectrum: Tensor, total: float, components: Tensor, trusted: int) -> Certificate:
    """Measure the stored components against what was decomposed."""
    k, d = components.shape
    v = components.double()
    applied = solved.apply(v)
    variance, error = spectrum[:k], solved.error[:k]
    # every direction is kept: all is captured, and nothing can be missed
    span = Span(total, 0.0, 0.0) if k == d else Span.of(v, applied)
    missed = _missed(solved, spectrum, span, components)
    turned, gap = _separation(solved, spectrum, k, missed)
    angle = min(math.pi / 2, turned + unit_roundoff(components.dtype) * math.sqrt(d))
    return Certificate(
        captured_ratio=min(1.0, span.captured / total) if total > 0 else 0.0,
        missed_ratio_bound=missed / total if total > 0 else 0.0,
        bound_kind=solved.bound_kind,
        variance_error=tuple(error.tolist()),
        rounding_floor=solved.floor,
        trusted=trusted,
        quantisation_floor=_quantisation(solved, v),
        residual_norms=tuple(torch.linalg.vector_norm(applied - variance[:, None] * v, dim=1).tolist()),
        gap=gap,
        angle_bound=angle,
        unique=angle < UNIQUE_BELOW,
        solver=solved.solver,
        precision=solved.precision,
        fallbacks=solved.fallbacks,
    )


def _separation(solved: Solved, spectrum: Tensor, k: int, missed: float) -> tuple[float, float]:
    """Radians by which the K-subspace may be turned, and its distance to the next variance.

    Where the others are not known, the gap is θ_K less what is proved of λ_{K+1}, never the distance of
    two computed values. Then sin θ ≤ ‖CV - VΘ‖ / gap (Davis & Kahan, 1970), and sin² θ ≤ missed / gap:
    whatever is left out of the K leading directions holds λ_K at least, what stands in for it λ_{K+1}.
    """
    if k in {0, len(solved.mean)}:
        return 0.0, max(0.0, _gap(spectrum, k) - (0.0 if solved.rest is None else solved.perturbation))
    if solved.constant:
        return math.pi / 2, 0.0
    if solved.rest is None:
        values = spectrum if solved.values is None else solved.values
        return sine_bound(solved.perturbation, _gap(values, k)), _gap(spectrum, k)
    known = k < len(spectrum)
    following = (spectrum[k] + solved.error[k]).item() if known else solved.rest.below
    gap = spectrum[k - 1].item() - solved.perturbation - following
    if gap <= 0:
        return math.pi / 2, 0.0
    return math.asin(min(1.0, solved.rest.residual / gap, math.sqrt(missed / gap))), gap


def _gap(values: Tensor, k: int) -> float:
    """Distance of the last kept value to the next; below the last one known there is zero."""
    if k == 0:
        return 0.0
    return (values[k - 1] - (values[k] if k < len(values) else 0)).item()


def _missed(solved: Solved, spectrum: Tensor, span: Span, components: Tensor) -> float:
    """Variance that a better K-subspace could still capture, the smaller of two bounds.

    The K largest true variances sum to at most Σ(λ̂ + e), and the span truly captures what was measured,
    less an error e' for each direction. That is of first order in the errors.
    Of second order: if θ is the least variance within the span, R its residual, and μ < θ bounds C outside
    of it, then C ≼ diag(Θ + RRᵀ/δ, (μ + δ)I) with δ = θ - μ, whose K largest eigenvalues sum to
    tr Θ + ‖R‖_F²/δ (see `ritz`).
    """
    k, d = components.shape
    if k == d:
        return 0.0
    error = solved.error[:k].sum().item()
    each = solved.applied_error if solved.applied_error is not None else solved.error.max().item()
    doubt = error if solved.applied_error is None else k * each
    first = max(0.0, spectrum[:k].sum().item() + error - span.captured + doubt)
    gap = span.least - each - _outside(solved, spectrum, components)
    if gap <= 0:
        return first
    measured = product_noise(d) * solved.total_variance.item()  # what is captured is known to that itself
    return min(first, (span.residual + math.sqrt(k) * each) ** 2 / gap + measured)


def _outside(solved: Solved, spectrum: Tensor, components: Tensor) -> float:
    """Bound on C outside of the span of the stored components.

    Rows that are off by ‖Δ‖_F ≤ u√K let x = aV + bW with |a| ≤ u√K out, where xᵀCx is at most
    a²λ₁ + 2ab‖CV - VΘ‖ more than for W alone.
    """
    k, top = len(components), spectrum[0].item() if len(spectrum) else 0.0
    bent = math.sqrt(k) * unit_roundoff(components.dtype)
    leaked = bent**2 * top
    if solved.rest is not None:
        leaked += 2 * bent * solved.rest.residual
        return solved.rest.outside + leaked if k == len(spectrum) else math.inf
    following = spectrum[k].item() if k < len(spectrum) else 0.0
    return following + solved.error.max().item() + leaked


def _quantisation(solved: Solved, v: Tensor) -> tuple[float, ...] | None:
    """Noise of 16-bit storage along each component: the format's share of Σ v_j² E[x_j²]."""
    share = QUANTISATION.get(solved.dtype)
    return None if share is None else tuple((share * (v.square() @ solved.second_moment)).tolist())
