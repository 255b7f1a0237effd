"""When an iteration may stop: the Ritz pairs it has prove what was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pca_torch.complement import Bound, cholesky_proves, probe, trace_bound
from pca_torch.problem import Operator
from pca_torch.ritz import Ritz, reach, room

__all__ = ["DIRECTIONS", "Found", "Prover"]

DIRECTIONS = 1e4  # `tol` 1e-6 of the total is 1e-2 of the K-th variance: a share alone says little of it
PROBES = 3  # refused by chance or by a flat spectrum this often, the bound that was reached is handed out


@dataclass(frozen=True)
class Found:
    """Ritz pairs that hold the K leading ones, and what is proved of the rest."""

    ritz: Ritz
    k: int
    bound: Bound
    fallbacks: tuple[str, ...] = ()
    arithmetic: str = "float64 iteration"


class Prover:
    """Asks Ritz pairs whether a better K-subspace could capture more than `tol` allows.

    Args:
        op: C.
        tol: share of the total variance that may be missed; at most 10⁴ tol of the K-th variance too.
        share: the share that K was chosen for, if any: then K - 1 must be proved too few.
        generator: for random proofs.
    """

    def __init__(
        self, op: Operator, tol: float, share: float | None, generator: torch.Generator | None
    ) -> None:
        self._op, self._tol, self._share, self._generator = op, tol, share, generator
        self._total = op.problem.total_variance
        self._probes = 0
        self.refused = False  # the last proof was tried and failed: something is overlooked

    def allowed(self, ritz: Ritz, k: int) -> float:
        """β, the variance that may be missed; never below what rounding hides.

        Args:
            ritz: pairs so far.
            k: K.
        """
        theta, top = ritz.values[:k], max(ritz.values[0].item(), 0.0)
        beta = min(self._tol * self._total, DIRECTIONS * self._tol * max(theta[-1].item(), 0.0))
        if self._share is not None:
            beta = min(beta, self._share * self._total - theta[:-1].sum().item())
        return max(beta, k * self._op.noise * top)

    def __call__(self, ritz: Ritz, k: int, block: int) -> Found | None:
        """The proof, or None where it is too early for one, or where it failed.

        Args:
            ritz: m ≥ K pairs, all that the iteration has.
            k: K.
            block: rows of the last product, a distance at which the next Ritz value is worth a try.
        """
        self.refused = False
        m, d = ritz.vectors.shape
        if m == d or k == 0:
            return Found(ritz, k, Bound(self._total if k == 0 else 0.0))
        by_trace = trace_bound(ritz, self._total, self._op.noise)
        if by_trace.below <= 2 * trace_bound(ritz, 0.0, self._op.noise).below:  # rank exhausted
            return Found(ritz, k, by_trace)
        beta = self.allowed(ritz, k)
        sizes = {k, k + 8, k + block, k + k // 2, 2 * k}
        fit = {p: reach(ritz, p, k, beta) for p in sizes if p < m}
        fit = {p: margin for p, margin in fit.items() if margin is not None}
        if not fit:
            return None
        p = max(fit, key=lambda size: fit[size])
        leading = ritz.first(p)
        s = room(leading, k, beta)
        if s is None or s <= 0:
            return None
        likely = (ritz.values[p] + ritz.gram[p, p].clamp_min(0).sqrt()).item()  # below it, as far as seen
        return self._prove(leading, k, s if likely <= 0 else min(s, math.sqrt(likely * s)))

    def best(self, ritz: Ritz, k: int) -> Found:
        """What can be proved of the pairs there are, however little.

        Args:
            ritz: m ≥ K pairs.
            k: K.
        """
        bound = probe(self._op, ritz, self._generator)
        return Found(ritz, k, bound, ("krylov: the accuracy asked for was not reached; raise `tol`",))

    def _prove(self, ritz: Ritz, k: int, s: float) -> Found | None:
        if self._op.matrix is not None:
            below = cholesky_proves(self._op.matrix, ritz, s, self._op.noise)
            self.refused = below is None
            return None if below is None else Found(ritz, k, Bound(below))
        bound = probe(self._op, ritz, self._generator, enough=s)
        if bound.below <= s:
            return Found(ritz, k, bound)
        self.refused = True
        self._probes += 1
        if self._probes < PROBES:
            return None
        note = f"krylov: {PROBES} probes did not prove the accuracy asked for; the bound is what they reached"
        return Found(ritz, k, bound, (note,))
