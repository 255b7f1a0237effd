"""The table of solvers, the choice between them, and `decompose`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import (
    as_components,
    as_mask,
    as_rows,
    as_weights,
    check_choice,
    check_ddof,
    check_flag,
    check_positive,
    check_seed,
    check_whole,
    select_rows,
)
from pca_torch.moments import Moments
from pca_torch.operators import OnDisk, Rows, Sparse, from_moments, is_sparse
from pca_torch.precision import Precision
from pca_torch.result import PCAResult
from pca_torch.rfactor import RFactor
from pca_torch.solvers import covariance, full, krylov, randomized, tsqr
from pca_torch.solvers.batched import BatchedResult, decompose_batch
from pca_torch.solvers.choice import choose_solver, square_fits
from pca_torch.sources import Source, check_same_width

__all__ = ["SOLVERS", "STREAMING", "BatchedResult", "choose_solver", "decompose", "decompose_batch"]

SOLVERS: dict[str, Callable[..., PCAResult]] = {
    "full": full.solve,
    "covariance_eigh": covariance.solve,
    "tsqr": tsqr.solve,
    "randomized": randomized.solve,
    "krylov": krylov.solve,
}
STREAMING = ("auto", "covariance_eigh", "krylov", "tsqr")  # those that a statistic is enough for


@dataclass(frozen=True)
class _Task:
    """What is asked for, whatever the data are."""

    n_components: int | float | None
    solver: str
    precision: Precision
    nonfinite: Literal["raise", "drop"]
    matrix: dict[str, Any]  # center, standardize, ddof: what is decomposed
    whiten: bool
    iteration: dict[str, Any]  # tol, random_state
    sketch: dict[str, Any]  # n_oversamples, n_iter, random_state

    def choose(self, n: int, d: int, dtype: torch.dtype, device: torch.device, **data: bool) -> str:
        """The solver to run."""
        if self.solver != "auto":
            return self.solver
        return choose_solver(n, d, self.n_components, dtype, device, **data)


def decompose(
    data: Tensor | Moments | RFactor | Source | Sequence[Source] | Any,
    n_components: float | None = None,
    svd_solver: str = "auto",
    *,
    mask: Any = None,
    weights: Any = None,
    center: bool = True,
    standardize: bool = False,
    whiten: bool = False,
    ddof: float = 1,
    tol: float | None = None,
    n_oversamples: int = 10,
    n_iter: int = 4,
    precision: Precision = "auto",
    random_state: int | torch.Generator | None = None,
    nonfinite: Literal["raise", "drop"] = "raise",
) -> PCAResult:
    """Principal directions of data in memory, sparse or on disk, or of a statistic.

    Args:
        data: samples (..., D); a sparse matrix (N, D) of torch or SciPy; a `Moments` or `RFactor`; one or
            several sources of `open_sources`.
        n_components: K, a share of the variance in (0, 1], or None for min(N, D).
        svd_solver: "auto" or one of `SOLVERS`.
        mask: 0/1 with the leading shape of the samples.
        weights: importance ≥ 0 of each sample, same shape.
        center: subtract the mean.
        standardize: divide each column by its standard deviation, or root mean square if not centred.
        whiten: scores of `transform` have unit variance; null directions are dropped.
        ddof: delta degrees of freedom.
        tol: share of the total variance that `krylov` may miss; None is 1e-6.
        n_oversamples: columns of the sketch of `randomized` beyond K.
        n_iter: its power iterations.
        precision: arithmetic of the products; sparse samples, files that are read in passes, wide samples
            of `krylov` and all of `randomized` are always multiplied in float64.
        random_state: seed or generator of `randomized` and `krylov`; None is a fixed seed.
        nonfinite: "raise" or "drop" samples with NaN or inf.

    Raises:
        ValueError: bad data or arguments, each with what is allowed.
        TypeError: data that are no real numbers, or integers that float64 cannot hold.
    """
    check_choice(svd_solver, "svd_solver", ("auto", *SOLVERS))
    check_choice(nonfinite, "nonfinite", ("raise", "drop"))
    check_choice(precision, "precision", ("auto", "float32", "float64"))
    for name, flag in (("center", center), ("standardize", standardize), ("whiten", whiten)):
        check_flag(flag, name)
    check_ddof(ddof)
    check_positive(tol, "tol")
    check_whole(n_oversamples, "n_oversamples", 0)
    check_whole(n_iter, "n_iter", 0)
    check_seed(random_state)
    task = _Task(
        as_components(n_components),
        svd_solver,
        precision,
        nonfinite,
        {"center": center, "standardize": standardize, "ddof": ddof},
        whiten,
        {"tol": tol, "random_state": random_state},
        {"n_oversamples": n_oversamples, "n_iter": n_iter, "random_state": random_state},
    )
    with torch.no_grad():
        if isinstance(data, Source):
            data = [data]
        if isinstance(data, (list, tuple)) and data and all(isinstance(part, Source) for part in data):
            _refuse_rows(mask, weights, "a file")
            return _of_sources(data, task)
        if isinstance(data, (Moments, RFactor)):
            _refuse_rows(mask, weights, f"a `{type(data).__name__}`")
            return _of_statistic(data, task)
        if is_sparse(data):
            return _of_sparse(data, mask, weights, task)
        rows, shape = as_rows(data)
        where = as_mask(mask, shape, rows.device), as_weights(weights, shape, rows.device)
        rows, w, _ = select_rows(rows.detach(), *where, nonfinite)
        return _of_samples(rows, w, task)


def _refuse_rows(mask: Any, weights: Any, what: str) -> None:
    """A choice of rows belongs where rows are.

    Raises:
        ValueError: a mask or weights came with data whose rows are not at hand.
    """
    if mask is not None or weights is not None:
        raise ValueError(
            f"`mask` and `weights` are for samples in memory, got {what}; give them to `Moments.update`."
        )


def _of_samples(rows: Tensor, w: Tensor | None, task: _Task) -> PCAResult:
    """Solve samples in memory; "auto" looks again where its first route did not reach."""
    n, d = rows.shape
    chosen = task.choose(n, d, rows.dtype, rows.device)
    result = _by(chosen, rows, w, task)
    if task.solver != "auto" or chosen in {"full", "tsqr"}:
        return _hinted(result, task)
    better = {"svd_solver": "full"} if n <= d else {"svd_solver": "tsqr"}
    for route in ({"precision": "float64"}, better):
        if not _below_the_floor(result, task, **route):
            continue
        again = replace(task, solver=route.get("svd_solver", chosen), precision="float64")
        result = _noted(_by(again.solver, rows, w, again), result)
    return _hinted(result, task)


def _by(solver: str, rows: Tensor, w: Tensor | None, task: _Task) -> PCAResult:
    """Samples in memory by one solver.

    Raises:
        ValueError: bad data.
    """
    (n, d), k = rows.shape, task.n_components
    small_side = min(n, d)
    note = None
    if solver == "krylov" and not krylov.pays(k, small_side):
        note = krylov.declined(k, small_side)
        solver = "full" if n <= d else "covariance_eigh"
    if solver == "full":
        result = full.solve(rows, k, weights=w, precision=task.precision, whiten=task.whiten, **task.matrix)
    elif solver == "tsqr":
        result = _of_statistic(RFactor(d, precision=task.precision).update(rows, weights=w), task, "tsqr")
    elif solver == "randomized":
        op = Rows(rows, w, **task.matrix)
        result = randomized.solve(op, k, whiten=task.whiten, **task.sketch)
    elif solver == "krylov" and (n < d or not square_fits(d)):
        op = Rows(rows, w, **task.matrix)
        result = krylov.solve(op, k, whiten=task.whiten, **task.iteration)
    else:
        result = _of_statistic(Moments(d, precision=task.precision).update(rows, weights=w), task, solver)
    return result if note is None else _with_notes(result, before=(note,))


def _of_statistic(statistic: Moments | RFactor, task: _Task, solver: str | None = None) -> PCAResult:
    """Solve a statistic, whose samples are gone.

    Raises:
        ValueError: the solver needs the samples, or another statistic.
    """
    if solver is None:
        solver = task.solver
        if solver == "auto" and isinstance(statistic, RFactor):
            solver = "tsqr"
        if solver == "auto":
            dtype = statistic.input_dtype or torch.float64
            n, d, where = statistic.n_samples, statistic.n_features, statistic.mean.device
            solver = task.choose(n, d, dtype, where, again=False)
        return _hinted(_of_statistic(statistic, task, solver), task)
    if isinstance(statistic, RFactor) and solver == "tsqr":
        return tsqr.solve(statistic, task.n_components, whiten=task.whiten, **task.matrix)
    if isinstance(statistic, Moments) and solver == "covariance_eigh":
        return covariance.solve(statistic, task.n_components, whiten=task.whiten, **task.matrix)
    if isinstance(statistic, Moments) and solver == "krylov":
        op = from_moments(statistic, **task.matrix)
        return krylov.solve(op, task.n_components, whiten=task.whiten, **task.iteration)
    allowed = "'tsqr'" if isinstance(statistic, RFactor) else "'covariance_eigh' or 'krylov'"
    raise ValueError(
        f"`svd_solver` = {solver!r} needs the samples, or another statistic than "
        f"`{type(statistic).__name__}`; use {allowed}, or 'auto'."
    )


def _of_sources(sources: Sequence[Source], task: _Task) -> PCAResult:
    """Solve arrays on disk: one pass into a statistic, or a few passes where D×D is too large.

    Raises:
        ValueError: a solver that needs the samples in memory, sources of different D, or bad data.
    """
    if task.solver in {"full", "randomized"}:
        raise ValueError(
            f"`svd_solver` = {task.solver!r} needs the samples in memory; use 'covariance_eigh', 'krylov' or "
            "'tsqr' for files, or load them."
        )
    check_same_width(sources)
    d, n = sources[0].n_features, sum(source.n_rows for source in sources)
    few = krylov.pays(task.n_components, min(n, d))
    if task.solver in {"auto", "krylov"} and few and not square_fits(d):
        op = OnDisk(sources, nonfinite=task.nonfinite, **task.matrix)
        return krylov.solve(op, task.n_components, whiten=task.whiten, **task.iteration)
    solver = task.solver if task.solver != "auto" else "krylov" if few else "covariance_eigh"
    kind = RFactor if solver == "tsqr" else Moments
    result = _of_statistic(_summed(sources, kind, task), task, solver)
    if task.solver != "auto":
        return _hinted(result, task)
    if _below_the_floor(result, task, precision="float64"):
        better = replace(task, precision="float64")
        result = _noted(_of_statistic(_summed(sources, Moments, better), better, solver), result)
    if _below_the_floor(result, task, svd_solver="tsqr"):
        better = replace(task, precision="float64")
        result = _noted(_of_statistic(_summed(sources, RFactor, better), better, "tsqr"), result)
    return _hinted(result, task)


def _summed(sources: Sequence[Source], kind: type[Moments | RFactor], task: _Task) -> Moments | RFactor:
    """One pass over arrays on disk.

    Raises:
        ValueError: a file has NaN or inf, integers that float64 cannot hold, or another D.
    """
    statistic = kind(sources[0].n_features, precision=task.precision, nonfinite=task.nonfinite)
    for source in sources:
        for block in source:
            try:
                statistic.update(block)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source.path}: {error}") from error
    return statistic


def _of_sparse(x: Any, mask: Any, weights: Any, task: _Task) -> PCAResult:
    """Solve sparse samples, which stay sparse.

    Raises:
        ValueError: a solver that would make them dense, or bad data.
    """
    if task.solver not in {"auto", "krylov", "randomized"}:
        raise ValueError(
            f"`svd_solver` = {task.solver!r} would make sparse samples dense; use 'krylov' or "
            "'randomized', or pass `x.to_dense()`."
        )
    shape, device = (x.shape[0],), x.device if isinstance(x, Tensor) else torch.device("cpu")
    keep, w = as_mask(mask, shape, device), as_weights(weights, shape, device)
    if keep is not None:
        w = keep.double() if w is None else w * keep
    op = Sparse(x, w, nonfinite=task.nonfinite, **task.matrix)
    if task.solver == "randomized":
        return randomized.solve(op, task.n_components, whiten=task.whiten, **task.sketch)
    return krylov.solve(op, task.n_components, whiten=task.whiten, **task.iteration)


def _asked(result: PCAResult, task: _Task) -> int:
    """How many components were asked for; whitening may have cut them."""
    if isinstance(task.n_components, int):
        return task.n_components
    most = min(result.n_samples, result.n_features)
    return most if task.n_components is None else result.n_components


def _below_the_floor(
    result: PCAResult, task: _Task, *, precision: str | None = None, svd_solver: str | None = None
) -> bool:
    """Whether components below the floor were asked for that another route would lift above its own."""
    certificate = result.certificate
    if _asked(result, task) <= certificate.trusted or result.total_variance == 0:
        return False
    if precision is not None:  # float32 products, unless they were asked for
        return certificate.precision.startswith("float32") and task.precision == "auto"
    return svd_solver is not None and result.components.dtype == torch.float64


def _noted(better: PCAResult, before: PCAResult) -> PCAResult:
    """The better result, with what was tried before it."""
    tried = before.certificate
    note = (
        f"{tried.solver}: components below its floor {tried.rounding_floor:.3g} were asked for, "
        f"{tried.trusted} stand above it"
    )
    return _with_notes(better, before=(*tried.fallbacks, note))


def _hinted(result: PCAResult, task: _Task) -> PCAResult:
    """The result, with the option that would lower a floor that bites, where there is one."""
    certificate = result.certificate
    if _asked(result, task) <= certificate.trusted or result.total_variance == 0:
        return result
    option = None
    if certificate.precision.startswith("float32"):
        option = "precision='float64'"
    elif certificate.solver in {"covariance_eigh", "krylov"} and result.components.dtype == torch.float64:
        option = "svd_solver='tsqr'"
    if option is None:
        return result
    asked = _asked(result, task)
    hint = (
        f"{certificate.solver}: {certificate.trusted} of {asked} components are trusted; rerun with {option}"
    )
    return _with_notes(result, after=(hint,))


def _with_notes(result: PCAResult, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> PCAResult:
    fallbacks = (*before, *result.certificate.fallbacks, *after)
    return replace(result, certificate=replace(result.certificate, fallbacks=fallbacks))
