"""`krylov`: the leading directions by an iteration that stops when it has proved them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from pca_torch import spectrum as spectra
from pca_torch._checks import as_components, check_choice, check_number, free_memory
from pca_torch.basis import Basis, orthonormalise
from pca_torch.bounds import Solved, assemble, check_count, kept
from pca_torch.chebyshev import chebyshev
from pca_torch.complement import Bound
from pca_torch.eigen import eigenpairs
from pca_torch.lanczos import lanczos
from pca_torch.linalg import generator_from
from pca_torch.operators import Dense, OnDisk, Operator, Problem, Rows
from pca_torch.precision import component_dtype, exact_products
from pca_torch.prover import DIRECTIONS, Found, Prover
from pca_torch.result import PCAResult
from pca_torch.ritz import Ritz, finish, rayleigh_ritz, upper_values
from pca_torch.solvers import covariance

__all__ = ["Method", "pays", "solve"]

Method = Literal["auto", "lanczos", "chebyshev"]
TOL = 1e-6  # of the total variance; and thereby 1e-2 of the K-th
DENSE_UP_TO = 512  # dimensions that a dense eigenproblem takes a fraction of a second for
FEW = 10  # K up to a tenth of the dimensions is worth an iteration
SHARE_DIRECTIONS = 8  # a share that takes up to this part of the dimensions is worth one too
BLOCK = 32
GRAM_BYTES = 2**30  # of a float64 N×N; beyond it products with the samples are cheaper


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
    asked = "all" if n_components is None else n_components
    return f"krylov: an iteration does not pay for {asked} of {dimensions} directions"


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
            products of one shape, for a GPU), or "auto": by the device.
        tol: share of the total variance that a better K-subspace may capture beyond this one, None is 1e-6;
            the search goes on until that is at most 10⁴ tol of the K-th variance too.
        random_state: seed or generator of the starts; None is a fixed one.
        whiten: mark the result as whitening and drop directions that are null to rounding.

    Raises:
        ValueError: an argument is out of range, or a share takes too many directions of a covariance that
            was not formed.

    Accuracy: what the certificate says. Where C was formed the proof is a Cholesky factorisation, else a
        random one with the stated probability. Too many components for an iteration to pay, or one that
        does not converge, go to the dense solver where C was formed, and the certificate says so.
    """
    check_choice(method, "method", ("auto", "lanczos", "chebyshev"))
    check_number(tol, "tol", "a number > 0 or None", tol is None or tol > 0)
    problem, n_components = op.problem, as_components(n_components)
    check_count(n_components, problem.n_samples, len(problem.mean))
    with exact_products(problem.mean.device):
        if problem.constant or problem.total_variance <= 0:
            solved = _nothing(op, n_components)
        elif isinstance(op, Dense) and not pays(n_components, len(problem.mean)):
            solved = covariance.whole(op, n_components, (declined(n_components, len(problem.mean)),))
        else:
            solved = _iterate(op, n_components, method, TOL if tol is None else tol, random_state)
        k = len(solved.spectrum) if solved.rest is not None else n_components
        dtype = component_dtype(problem.dtype)
        return assemble(solved, k, dtype=dtype, centred=problem.centred, whiten=whiten)


def _iterate(
    op: Operator,
    n_components: float | None,
    method: Method,
    tol: float,
    random_state: int | torch.Generator | None,
) -> Solved:
    """Solve by iteration, for samples on their smaller side; densely where that fails and C was formed.

    Raises:
        ValueError: a share takes too many directions of a covariance that was not formed.
    """
    problem, generator = op.problem, generator_from(random_state)
    n = problem.n_samples
    wide = op if isinstance(op, Rows) and n < len(problem.mean) and 8 * n * n <= GRAM_BYTES else None
    inner = op if wide is None else _gram(wide)
    share = n_components if isinstance(n_components, float) else None
    found = None
    if share is None or not isinstance(inner, Dense) or _concentrated(inner, share):
        prover = Prover(inner, tol, share, generator)
        found = _search(inner, n_components, method, prover, generator)
    if found is None and wide is not None and isinstance(inner, Dense):
        found = _whole_gram(inner, n_components)
    if found is not None:
        upper = upper_values(found.ritz, found.bound.below, found.k + 1)
        ritz = found.ritz if wide is None else _lifted(wide, found.ritz.vectors[: found.k], generator)
        precision = f"{problem.products} products, float64 iteration"
        below = found.bound.below if wide is None else None
        names = {"solver": "krylov", "precision": precision, "bound_kind": found.bound.kind}
        solved = finish(op, ritz, found.k, upper, below, fallbacks=found.fallbacks, **names)
        return _limited(solved, found.k, tol)
    if isinstance(op, Dense):
        return covariance.whole(op, n_components, (f"krylov: {n_components} takes too many products",))
    raise ValueError(
        f"`n_components` = {n_components} takes more directions than an iteration finds among "
        f"{len(problem.mean)} features; ask for a smaller share or a count, or use `svd_solver='full'`."
    )


def _search(
    op: Operator, n_components: float | None, method: Method, prover: Prover, generator: torch.Generator
) -> Found | None:
    """Lanczos or Chebyshev with the block, the memory and the effort that fit the operator."""
    d = len(op.problem.mean)
    if isinstance(n_components, float):
        most = min(d, 3 * d // SHARE_DIRECTIONS + 2 * BLOCK)  # K converge in a space of some 3 K
        if op.matrix is None:  # two bases in a quarter of the memory
            free = free_memory(op.problem.mean.device) or 2**32
            most = min(d, max(2 * BLOCK, min(most, free // 4 // (16 * d))))
        count = partial(_reached, op.problem, n_components)
        return lanczos(op, count, prover, block=BLOCK, most=None, effort=most, generator=generator)
    k = d if n_components is None else int(n_components)
    on_gpu = op.problem.mean.device.type == "cuda"
    if op.matrix is not None and (method == "chebyshev" or (method == "auto" and on_gpu)):
        return chebyshev(op, k, prover, generator=generator)
    # a pass over a disk costs the same for one row as for many
    block = k + BLOCK if isinstance(op, OnDisk) else max(BLOCK, k // 4)
    _check_memory(op, 4 * max(k, block))
    effort = 3 * d // 2 if op.matrix is not None else 20 * k + 40 * block
    return lanczos(
        op, lambda _: k, prover, block=block, most=4 * max(k, block), effort=effort, generator=generator
    )


def _check_memory(op: Operator, rows: int) -> None:
    """Refuse a basis that will not fit, before it grows.

    Raises:
        ValueError: with what it would take.
    """
    d = len(op.problem.mean)
    need, free = 16 * min(rows, d) * d, free_memory(op.problem.mean.device)
    if free is not None and need > free:
        raise ValueError(
            f"`n_components` takes a basis of {min(rows, d)} rows of {d} features, which needs "
            f"{need / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB is free; ask for fewer."
        )


def _reached(problem: Problem, share: float, basis: Basis) -> int | None:
    """K of a share, given the Ritz values so far: by interlacing it can only come out too large."""
    values = torch.linalg.eigvalsh(basis.projected).flip(0).clamp_min(0)
    try:
        return spectra.rank(values, share, total=problem.total_variance, floor=0.0, error=problem.error)
    except ValueError:  # these do not hold the share yet
        return None


def _concentrated(op: Dense, share: float) -> bool:
    """Whether the share may be reached by few directions; by Cauchy-Schwarz it takes (p tr C / ‖C‖_F)²."""
    at_least = (share * op.problem.total_variance / torch.linalg.matrix_norm(op.matrix).item()) ** 2
    return at_least <= len(op.matrix) / SHARE_DIRECTIONS


def _gram(rows: Rows) -> Dense:
    """XXᵀ over the divisor, whose non-zero eigenvalues are those of the covariance."""
    gram = rows.gram()
    facts = replace(rows.problem, mean=gram.new_zeros(len(gram)), variance=gram.diagonal().clone())
    return Dense(facts, gram)


def _lifted(op: Rows, left: Tensor, generator: torch.Generator) -> Ritz:
    """Ritz pairs of the covariance from eigenvectors (K, N) of the Gram matrix: v = Xᵀu, made orthonormal."""
    k, d = len(left), len(op.problem.mean)
    vectors, _ = orthonormalise(op.gather(left.mT), left.new_empty(0, d))
    if len(vectors) < k:  # K beyond the rank: Xᵀu is zero, and any other direction does as well
        start = torch.randn(
            k - len(vectors), d, generator=generator, dtype=left.dtype, device=generator.device
        )
        vectors = torch.cat([vectors, orthonormalise(start.to(left.device), vectors)[0]])
    return rayleigh_ritz(vectors, op.apply(vectors))


def _whole_gram(op: Dense, n_components: float | None) -> Found:
    """All eigenvalues of a Gram matrix, and the K leading eigenvectors."""
    total, off = op.problem.total_variance, op.problem.error

    def wanted(values: Tensor) -> int:
        values = values.clamp_min(0)
        return kept(n_components, values, total, off, torch.full_like(values, off))

    values, vectors = eigenpairs(op.matrix, wanted)
    k = wanted(values)
    leading = Ritz(values[:k], vectors[:k], op.apply(vectors[:k]))
    below = max(0.0, values[k].item()) if k < len(values) else 0.0
    return Found(leading, k, Bound(below), (f"krylov: {n_components} takes too many products",))


def _limited(solved: Solved, k: int, tol: float) -> Solved:
    """Says so where rounding of λ₁, not the search, decides how much may be missed."""
    total, last = solved.total_variance.item(), max(0.0, solved.spectrum[-1].item()) if k else 0.0
    asked = min(tol * total, DIRECTIONS * tol * last)
    least = 2 * k * solved.floor
    if least <= asked:
        return solved
    note = (
        f"krylov: rounding beside λ₁ keeps `missed_ratio_bound` above {least / total:.1e}, "
        f"{asked / total:.1e} was asked for"
    )
    return replace(solved, fallbacks=(*solved.fallbacks, note))


def _nothing(op: Operator, n_components: float | None) -> Solved:
    """K directions of data that do not vary: any will do."""
    problem = op.problem
    d = len(problem.mean)
    k = n_components if isinstance(n_components, int) else 0 if n_components else min(problem.n_samples, d)
    eye = torch.eye(k, d, dtype=torch.float64, device=problem.mean.device)
    nothing = Ritz(eye.new_zeros(k), eye, torch.zeros_like(eye))
    upper = eye.new_full((k + 1,), problem.total_variance)
    return finish(op, nothing, k, upper, None, solver="krylov", precision=f"{problem.products} products")
