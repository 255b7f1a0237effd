"""What the monitor reads off a spectrum: the metrics by name, and functions of a user's own."""

from __future__ import annotations

import difflib
import math
import numbers
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from pca_torch import spectrum
from pca_torch.monitor.drift import DRIFT
from pca_torch.result import PCAResult

__all__ = ["METRICS", "Metric", "check_metrics", "logged_names", "measure", "needs_uncentred"]

Metric = str | Callable[[PCAResult], float | None]

METRICS = (
    "rank_50",
    "rank_90",
    "rank_95",
    "rank_99",
    "participation_ratio",
    "effective_rank",
    "rankme",
    "entropy_rank",
    "stable_rank",
    "nesum",
    "alpha_req",
    "total_variance",
    "condition",
    "drift",
)
ALPHA = ("alpha_req", "alpha_req_r2", "alpha_req_from", "alpha_req_to")
SEVERAL = {"alpha_req": ALPHA, "drift": DRIFT}  # metrics of several numbers, and what these are called
RANK = re.compile(r"rank_(\d+(?:\.\d+)?)", re.ASCII)  # of a share in percent

CENTRED: dict[str, Callable[[PCAResult], float | None]] = {
    "participation_ratio": spectrum.participation_ratio,
    "effective_rank": spectrum.effective_rank,
    "entropy_rank": spectrum.entropy_rank,
    "nesum": spectrum.nesum,
    "total_variance": lambda result: result.total_variance.item(),
    "condition": lambda result: spectrum.condition(result) or None,  # nothing varies: no condition
}
UNCENTRED: dict[str, Callable[[Tensor], float]] = {
    "rankme": spectrum.rankme,
    "stable_rank": spectrum.stable_rank,
}


def check_metrics(metrics: Sequence[Metric]) -> tuple[Metric, ...]:
    """`metrics` as a tuple, each known and named once.

    Args:
        metrics: names of `METRICS`, "rank_P" for a share of P percent ("rank_80", "rank_99.5"), or functions
            of a `PCAResult` that give a finite number, or None where it is not defined; they are logged by
            their `__name__`.

    Raises:
        TypeError: no sequence, or what is neither a name nor a function.
        ValueError: an unknown name, a function without one, or a name that is taken.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise TypeError(f"`metrics` must be a sequence of names and functions, got {metrics!r}.")
    if not metrics:
        raise ValueError("`metrics` is empty; give at least one, or leave it out for all.")
    taken: set[str] = set()
    for metric in metrics:
        _check_metric(metric)
        for name in _names(metric):
            if name in taken or (callable(metric) and _is_ours(name)):
                raise ValueError(f"`metrics` must name each metric once, got {name!r} again; rename it.")
            taken.add(name)
    return tuple(metrics)


def needs_uncentred(metrics: Sequence[Metric]) -> bool:
    """Whether one of `metrics` is, by its publication, of the samples as they are.

    Args:
        metrics: as `check_metrics` gives them.
    """
    return any(metric in UNCENTRED for metric in metrics if isinstance(metric, str))


def logged_names(metrics: Sequence[Metric]) -> tuple[str, ...]:
    """What the numbers of `metrics` are called in a record, in their order.

    Args:
        metrics: as `check_metrics` gives them.
    """
    return tuple(name for metric in metrics for name in _names(metric))


def measure(
    metrics: Sequence[Metric],
    result: PCAResult,
    uncentred: Tensor | None = None,
    fit_range: tuple[int, int] = spectrum.FIT_RANGE,
) -> dict[str, float | None]:
    """The numbers of one spectrum, by name; those of "drift" are not among them, see `Drift`.

    Where all variances are zero, ranks and dimensions are 0, so that a total collapse is seen as one.

    Args:
        metrics: as `check_metrics` gives them.
        result: of the centred samples, with every variance.
        uncentred: (D,) eigenvalues of the second moment, descending, where `needs_uncentred` says so;
            rounding may have pushed the last ones below zero.
        fit_range: indices of the fit of "alpha_req".

    Returns:
        Floats by name; None where a metric is not defined: a condition where nothing varies, an exponent
        where fewer than three variances of the range stand above the rounding floor.

    Raises:
        ValueError: `uncentred` is missing.
    """
    near = replace(  # one copy from the accelerator, not one for every number
        result, spectrum=result.spectrum.cpu(), total_variance=result.total_variance.cpu()
    )
    second = None if uncentred is None else _second_moment(uncentred, result)
    found: dict[str, float | None] = {}
    for metric in metrics:
        if callable(metric):
            found[metric.__name__] = _tried(metric, result)
        elif metric == "alpha_req":
            found |= _alpha(near, fit_range)
        elif metric in UNCENTRED:
            if second is None:
                raise ValueError(f"`uncentred` must be given for {metric!r}, got None.")
            found[metric] = UNCENTRED[metric](second)
        elif metric in CENTRED:
            found[metric] = CENTRED[metric](near)
        elif metric != "drift":
            found[metric] = float(spectrum.rank(near, _share(metric)))
    return found


def _names(metric: Metric) -> tuple[str, ...]:
    if not isinstance(metric, str):
        return (metric.__name__,)
    return SEVERAL.get(metric, (metric,))


def _is_ours(name: str) -> bool:
    """Whether a metric of this package is logged by this name."""
    return name in METRICS or name in ALPHA or name in DRIFT or bool(RANK.fullmatch(name))


def _check_metric(metric: Any) -> None:
    """Refuse what is neither a known name nor a function with one.

    Raises:
        TypeError: it is neither a string nor a function.
        ValueError: an unknown name, or a function whose name is none.
    """
    if callable(metric):
        name = getattr(metric, "__name__", "")
        if not name.isidentifier():
            raise ValueError(
                f"`metrics` must hold functions that have a name, got {metric!r}; "
                "define it with `def`: its name is what it is logged by."
            )
        return
    if not isinstance(metric, str):
        raise TypeError(f"`metrics` must hold names and functions of a `PCAResult`, got {metric!r}.")
    if metric in METRICS or (RANK.fullmatch(metric) and 0 < _share(metric) <= 1):
        return
    if metric.startswith("rank_"):
        raise ValueError(f'`metrics` takes "rank_P" for a share of P percent, 0 < P ≤ 100, got {metric!r}.')
    if several := next((name for name, parts in SEVERAL.items() if metric in parts), None):
        raise ValueError(f"`metrics` takes {several!r} for {metric!r} and its like, got {metric!r}.")
    near = difflib.get_close_matches(metric, METRICS, n=1, cutoff=0)[0]
    raise ValueError(
        f'`metrics` must be among {", ".join(METRICS)}, any "rank_P" or functions, got {metric!r}; '
        f"the nearest is {near!r}."
    )


def _share(name: str) -> float:
    return float(name.removeprefix("rank_")) / 100


def _second_moment(uncentred: Tensor, result: PCAResult) -> Tensor:
    """The min(N, D) eigenvalues that are not zero by the number of samples, without negative rounding."""
    most = min(result.n_samples, result.n_features)
    return uncentred.detach().double().cpu().clamp_min(0)[:most]


def _alpha(result: PCAResult, fit_range: tuple[int, int]) -> dict[str, float | None]:
    fit = spectrum.alpha_req(result, fit_range)
    if fit.alpha is None:
        return dict.fromkeys(ALPHA)
    return dict(zip(ALPHA, (fit.alpha, fit.r2, float(fit.first), float(fit.last)), strict=True))


def _tried(function: Callable[[PCAResult], Any], result: PCAResult) -> float | None:
    """What a function of the user's says, None with a warning where it fails: training goes on without it."""
    try:
        return _own(function, result)
    except Exception as error:
        warnings.warn(f"the metric `{function.__name__}` is not logged: {error}", stacklevel=4)
        return None


def _own(function: Callable[[PCAResult], Any], result: PCAResult) -> float | None:
    """What a function of the user's says.

    Raises:
        TypeError: no number.
        ValueError: NaN or inf.
    """
    value = function(result)
    if value is None:
        return None
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        value = value.item()
    want = "it must return a finite number, or None where it is not defined"
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{want}, got {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"{want}, got {float(value)}.")
    return float(value)
