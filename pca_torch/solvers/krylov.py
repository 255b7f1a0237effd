"""`krylov`: the leading directions by an iteration that stops when it has proved them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pca_torch import spectrum as spectra
from pca_torch._checks import as_components, check_choice, check_positive, free_memory
from pca_torch.basis import Basis
from pca_torch.bounds import Solved, assemble, check_count, kept
from pca_torch.chebyshev import chebyshev
from pca_torch.complement import Bound
from pca_torch.eigen import eigenpairs, small_eigvalsh
from pca_torch.formed import covariance_of, gram_of, lifted
from pca_torch.lanczos import lanczos
from pca_torch.linalg import generator_from
from pca_torch.narrow import narrow
from pca_torch.operators import Dense, OnDisk, Operator, Rows, Sparse
from pca_torch.precision import component_dtype, exact_products
from pca_torch.prover import DIRECTIONS, Found, Prover
from pca_torch.result import PCAResult
from pca_torch.ritz import Ritz, finish, upper_values
from pca_torch.solvers import covariance

__all__ = ["Method", "pays", "solve"]

Method = Literal["auto", "lanczos", "chebyshev", "narrow"]
TOL = 1e-6  # of the total variance; and thereby 1e-2 of the K-th
DENSE_UP_TO = 512  # dimensions that a dense eigenproblem takes a fraction of a second for
FEW = 10  # K up to a tenth of the dimensions is worth an iteration
SHARE_DIRECTIONS = 8  # a share that takes up to this part of the dimensions is worth one too
NARROW_UP_TO = 2048  # dimensions up to which a float32 eigenproblem finds a share sooner than an iteration
BLOCK = 32
WIDER = 2  # blocks on a GPU, where reading C takes as long for 64 rows as for 32 (on paper; unmeasured)
GRAM_BYTES = 2**30  # of a float64 N×N or D×D; beyond it products with the samples are cheaper


def pays(n_components: float | None, dimensions: int) -> bool:
    """Whether an iteration is faster than a dense solver for K of so many dimensions.

    Args:
        n_components: K, a share or None.
        dimensions: min(N, D) or D, of the matrix that would be decomposed.
    """
    if dimensions <= DENSE_UP_TO or n_components is None:
        return False
    return n_components < 1 if isinstance(n_components, float) else n_components <= dimensions // FEW


def declined(n_components: float | None, dimensions: int) -> str:
    """What the certificate says where a dense solver did it.

    Args:
        n_components: K, a share or None.
        dimensions: of the matrix that was decomposed.
    """
    return f"krylov: an iteration does not pay for n_components={n_components} of {dimensions} dimensions"


def solve(
    op: Operator,
    n_components: float | None = None,
    *,
    method: Method = "auto",
    tol: float | None = None,
    random_state: int | torch.Generator | None = None,
    whiten: bool = False,
) -> PCAResult:
    """The K leading directions of a covariance, each variance and the share that is missed with a proof.

    Args:
        op: the covariance, formed or not.
        n_components: K, a share in (0, 1], or None for min(N, D).
        method: "lanczos" (block Krylov space; fewest products), "chebyshev" (filtered subspace iteration;
            products of one shape, for a GPU; for a count of a covariance that was formed), "narrow" (a
            float32 eigenproblem, refined and proved in float64; for one that was formed, on a CPU with
            SciPy), or "auto": by the device, the size and how flat the spectrum is. Where "chebyshev" does
            not apply, "lanczos" does it; where "narrow" does not, a dense solver in float64.
        tol: share of the total variance that a better K-subspace may capture beyond this one, None is 1e-6;
            the search goes on until that is at most 10⁴ tol of the K-th variance too.
        random_state: seed or generator of the starts; None is a fixed one.
        whiten: mark the result as whitening and drop directions that are null to rounding.

    Raises:
        ValueError: an argument is out of range, or a share takes too many directions of a covariance that
            was not formed.

    Accuracy: what the certificate says. Where C was formed the proof is a Cholesky factorisation, else a
        random one with the stated probability. Too many components for an iteration to pay, or one that
        does not converge, go to a dense solver where N×N or D×D fits, and the certificate says so.
    """
    check_choice(method, "method", ("auto", "lanczos", "chebyshev", "narrow"))
    check_positive(tol, "tol")
    problem, n_components = op.problem, as_components(n_components)
    n, d = problem.n_samples, len(problem.mean)
    check_count(n_components, n, d)
    run = _Run(n_components, method, TOL if tol is None else tol, generator_from(random_state))
    dimensions = d if isinstance(op, Dense) else min(n, d)
    with exact_products(problem.mean.device):
        if problem.constant or problem.total_variance <= 0:
            solved = _nothing(op, n_components)
        elif pays(n_components, dimensions):
            solved = _iterate(op, run) or _dense(op, run, f"krylov: {n_components} takes too many directions")
        else:
            solved = _dense(op, run, declined(n_components, dimensions)) or _iterate(op, run)
        if solved is None:
            raise ValueError(
                f"`n_components` = {n_components} takes more directions than an iteration finds among {d} "
                "features; ask for a smaller share, or for a count."
            )
        k = len(solved.spectrum) if solved.rest is not None else n_components
        dtype = component_dtype(problem.dtype)
        result = assemble(solved, k, dtype=dtype, centred=problem.centred, whiten=whiten)
        return result if solved.rest is None else _said(result, run.tol)


@dataclass(frozen=True)
class _Run:
    """What is asked for, and how."""

    n_components: int | float | None
    method: Method
    tol: float
    generator: torch.Generator

    @property
    def share(self) -> float | None:
        return self.n_components if isinstance(self.n_components, float) else None


def _iterate(op: Operator, run: _Run) -> Solved | None:
    """Solve by iteration, for wide samples in memory on their Gram matrix; None where that gives up."""
    n = op.problem.n_samples
    wide = isinstance(op, Rows) and n < len(op.problem.mean) and _fits(n)
    inner = gram_of(op) if wide and isinstance(op, Rows) else op
    for attempt in _attempts(inner, run):
        found = attempt(inner, run)
        if found is not None:
            return _finished(op, inner, found, run)
    return None


def _attempts(op: Operator, run: _Run) -> list[Callable[[Operator, _Run], Found | None]]:
    """What may find few directions, the fastest first, by measurements on two cores."""
    if run.method == "narrow":
        return [_narrow]
    if run.method != "auto" or not isinstance(op, Dense):
        return [_search]
    if not _concentrated(op, run.share or 1.0):  # flat: slow for an iteration, hopeless for a share
        return [_narrow, _search] if run.share is None else [_narrow]
    share_of_few = run.share is not None and len(op.matrix) <= NARROW_UP_TO
    return [_narrow, _search] if share_of_few else [_search, _narrow]


def _narrow(op: Operator, run: _Run) -> Found | None:
    """A float32 eigenproblem made right, of a covariance that was formed."""
    if not isinstance(op, Dense):
        return None
    k = None if run.share is not None else _count(op, run)
    reached = partial(_reached, op, run.share or 1.0)
    prover = Prover(op, run.tol, run.share, run.generator)
    return narrow(op, k, reached, prover)


def _dense(op: Operator, run: _Run, note: str) -> Solved | None:
    """Solve by a dense eigenproblem on the smaller side; None where neither side fits."""
    n, d = op.problem.n_samples, len(op.problem.mean)
    if isinstance(op, Dense):
        return covariance.whole(op, run.n_components, (note,))
    if isinstance(op, (Rows, Sparse)) and n < d and _fits(op.n_rows):
        inner = gram_of(op)
        return _finished(op, inner, _whole_gram(inner, run.n_components, min(n, d), note), run)
    return covariance.whole(covariance_of(op), run.n_components, (note,)) if _fits(d) else None


def _finished(op: Operator, inner: Operator, found: Found, run: _Run) -> Solved:
    """What was found of C, or of the Gram matrix of the same samples, as what `assemble` takes."""
    upper = upper_values(found.ritz, found.bound.below, found.k + 1)
    ritz, below = found.ritz, found.bound.below
    if inner is not op and isinstance(op, (Rows, Sparse)):
        ritz, below = lifted(op, ritz.vectors[: found.k], run.generator), None
        upper = upper + inner.problem.error
    precision = f"{op.problem.products} products, {found.arithmetic}"
    names = {"solver": "krylov", "precision": precision, "bound_kind": found.bound.kind}
    return finish(op, ritz, found.k, upper, below, fallbacks=found.fallbacks, **names)


def _fits(side: int) -> bool:
    """Whether a float64 square of that side is small enough to be formed."""
    return 8 * side * side <= GRAM_BYTES


def _search(op: Operator, run: _Run) -> Found | None:
    """Lanczos or Chebyshev with the block, the memory and the effort that fit the operator."""
    d, generator = len(op.problem.mean), run.generator
    prover = Prover(op, run.tol, run.share, generator)
    on_gpu = _on_gpu(op)
    wider = WIDER if on_gpu else 1
    if (share := run.share) is not None:
        block = BLOCK * wider
        most = min(d, 3 * d // SHARE_DIRECTIONS + 2 * block)  # K converge in a space of some 3 K
        if op.matrix is None:  # two bases in a quarter of the memory
            free = free_memory(op.problem.mean.device) or 2**32
            most = min(d, max(2 * block, min(most, free // 4 // (16 * d))))

        def count(basis: Basis) -> int | None:
            return _reached(op, share, small_eigvalsh(basis.projected).flip(0))

        return lanczos(op, count, prover, block=block, most=None, effort=most, generator=generator)
    k = _count(op, run)
    if op.matrix is not None and (run.method == "chebyshev" or (run.method == "auto" and on_gpu)):
        return chebyshev(op, k, prover, generator=generator)
    # a pass over a disk costs the same for one row as for many
    block = k + BLOCK if isinstance(op, OnDisk) else wider * max(BLOCK, k // 4)
    _check_memory(op, 4 * max(k, block))
    effort = 3 * d // 2 if op.matrix is not None else 20 * k + 40 * block
    return lanczos(
        op, lambda _: k, prover, block=block, most=4 * max(k, block), effort=effort, generator=generator
    )


def _count(op: Operator, run: _Run) -> int:
    """K, where no share was asked for."""
    if run.n_components is None:
        return min(op.problem.n_samples, len(op.problem.mean))
    return int(run.n_components)


def _on_gpu(op: Operator) -> bool:
    return op.problem.mean.device.type == "cuda"


def _check_memory(op: Operator, rows: int) -> None:
    """Refuse a basis that will not fit, before it grows.

    Raises:
        ValueError: with what it would take.
    """
    d = len(op.problem.mean)
    need, free = 24 * min(rows, d) * d, free_memory(op.problem.mean.device)  # rows, images, Ritz vectors
    if free is not None and need > free:
        raise ValueError(
            f"`n_components` takes a basis of {min(rows, d)} rows of {d} features, which needs "
            f"{need / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB is free; ask for fewer."
        )


def _reached(op: Operator, share: float, values: Tensor) -> int | None:
    """K of a share, given the Ritz values so far: by interlacing it can only come out too large."""
    problem, values = op.problem, values.clamp_min(0)
    off = problem.error + op.noise * values[0].item()
    try:
        k = spectra.rank(values, share, total=problem.total_variance, floor=off, error=off)
    except ValueError:  # these do not hold the share yet
        return None
    return min(k, problem.n_samples)


def _concentrated(op: Dense, share: float) -> bool:
    """Whether few directions may hold the share: by Cauchy-Schwarz it takes at least (p tr C / ‖C‖_F)²."""
    at_least = (share * op.problem.total_variance / torch.linalg.matrix_norm(op.matrix).item()) ** 2
    return at_least <= len(op.matrix) / SHARE_DIRECTIONS


def _whole_gram(op: Dense, n_components: float | None, most: int, note: str) -> Found:
    """All eigenvalues of a Gram matrix, and the K leading eigenvectors."""
    total = op.problem.total_variance

    def wanted(values: Tensor) -> int:
        values = values[:most].clamp_min(0)
        off = op.problem.error + op.noise * values[0].item()
        return kept(n_components, values, total, off, torch.full_like(values, off))

    values, vectors = eigenpairs(op.matrix, wanted)
    k = wanted(values)
    leading = Ritz(values[:k], vectors[:k], op.apply(vectors[:k]))
    below = max(0.0, values[k].item()) if k < len(values) else 0.0
    return Found(leading, k, Bound(below), (note,))


def _said(result: PCAResult, tol: float) -> PCAResult:
    """Says so where less was proved than was asked for: rounding of λ₁ hides it, not the search."""
    certificate, k = result.certificate, result.n_components
    total = result.total_variance.item()
    last = result.spectrum[k - 1].item() if k else 0.0
    asked = tol  # beyond the rank there is no variance to be exact about
    if last > certificate.rounding_floor:
        asked = min(asked, DIRECTIONS * tol * last / total)
    if total == 0 or certificate.missed_ratio_bound <= asked:
        return result
    why = "rounding beside λ₁ hides more"
    if certificate.bound_kind.startswith("probability"):
        why = "the probes did not prove more"
    bound = certificate.missed_ratio_bound
    note = f"krylov: `missed_ratio_bound` is {bound:.1e}, {asked:.1e} was asked for; {why}"
    notes = (*certificate.fallbacks, note)
    return replace(result, certificate=replace(certificate, fallbacks=notes))


def _nothing(op: Operator, n_components: float | None) -> Solved:
    """K directions of data that do not vary: any will do."""
    problem = op.problem
    d = len(problem.mean)
    k = n_components if isinstance(n_components, int) else 0 if n_components else min(problem.n_samples, d)
    eye = torch.eye(k, d, dtype=torch.float64, device=problem.mean.device)
    nothing = Ritz(eye.new_zeros(k), eye, torch.zeros_like(eye))
    upper = eye.new_full((k + 1,), problem.total_variance)
    return finish(op, nothing, k, upper, None, solver="krylov", precision=f"{problem.products} products")
