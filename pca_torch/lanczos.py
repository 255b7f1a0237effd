"""Thick-restart block Lanczos with full reorthogonalisation, stopped by a proof.

Sources: thick restart, Wu & Simon, SIAM J. Matrix Anal. Appl. 22(2), 2000; blocks, Golub & Underwood, in
Mathematical Software III, 1977. The images of the basis are kept, so no three-term recurrence is trusted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pca_torch.basis import Basis, orthonormalise
from pca_torch.linalg import gaussian
from pca_torch.problem import Operator
from pca_torch.prover import Found, Prover
from pca_torch.ritz import rayleigh_ritz

__all__ = ["lanczos"]

GROWTH = 1.2  # of the basis between one Rayleigh-Ritz step and the next


def lanczos(
    op: Operator,
    count: Callable[[Basis], int | None],
    prover: Prover,
    *,
    block: int,
    most: int | None,
    effort: int,
    generator: torch.Generator,
) -> Found | None:
    """Grow a Krylov space until its Ritz pairs prove what was asked for.

    Args:
        op: C.
        count: K, given the space so far; None where it does not reach what is wanted.
        prover: the stopping rule.
        block: b, rows per product.
        most: basis rows at which it restarts from the leading Ritz vectors; None never restarts.
        effort: rows multiplied by C after which it gives up.
        generator: where starts are drawn.

    Returns:
        What was found. Where the effort was spent: None if C is a matrix, which others can decompose; else
        the best that can be proved, or None if the wanted share was not reached.
    """
    like = op.problem.mean
    d = len(like)
    basis = Basis(op.apply, like, room=0 if most is None else min(d, most + block))

    def fresh(*others: Tensor) -> Tensor:
        """Random rows apart from all there are: for copies of a tie, or when the space is exhausted."""
        apart = torch.cat([basis.rows, *others]) if others else basis.rows
        return orthonormalise(gaussian(block, d, generator, like.device), apart)[0]

    following, due, k = fresh(), 0, None
    while basis.products < effort:
        following = basis.append(following[: d - basis.size], op.noise)
        whole, exhausted = basis.size == d, not len(following)
        if basis.size >= due or whole or exhausted:
            k = count(basis)
            early = k is None or basis.size < (k if exhausted else min(d, k + 2 * block))
            due = max(basis.size + 1, int(GROWTH * basis.size), 0 if k is None else k + 2 * block)
            if not early and k is not None:
                keep = None if whole or exhausted else 2 * k + block + 1
                ritz = rayleigh_ritz(basis.rows, basis.images, basis.projected, keep)
                found = prover(ritz, k, block)
                if found is not None:
                    return found
                if prover.refused and not exhausted:
                    following = torch.cat([following, fresh(following)])
                if most is not None and int(GROWTH * basis.size) > most:
                    leading = ritz.first(2 * k + 16)
                    basis.restart(leading.vectors, leading.images, leading.values)
                    due = int(GROWTH * basis.size)
        if whole:
            return None
        if not len(following):
            following = fresh()
    if op.matrix is not None or k is None or basis.size < k:
        return None
    return prover.best(rayleigh_ritz(basis.rows, basis.images, basis.projected, 2 * k), k)
