"""Orthonormal rows, grown block by block, with their images under a symmetric operator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Basis", "orthonormalise"]

PASSES = 3  # "twice is enough" (Parlett, 1998), and once more where columns were dropped
DEPENDENT = 0.1  # a normalised row that loses nine tenths to the others is one of them
NEARLY = 0.7  # a normalised row that keeps this much beside the others is nearly orthogonal to them
CHOLESKY_FIRST = ("cuda",)
STEEPEST = 1e-6  # of the largest diagonal entry: a Cholesky factor is good for κ up to 1e8, with room


def orthonormalise(w: Tensor, basis: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that span what `w` adds to `basis`.

    Rows are dropped only where less than the absolute noise of `w` is left of them. Dropping relative to
    the largest would lose everything behind a massive direction.

    Args:
        w: (b, D) rows.
        basis: (m, D) orthonormal rows.
        noise: rounding of the entries of `w`, as a norm.

    Returns:
        Rows (b' ≤ b, D), and the coefficients basis wᵀ (m, b) of the first projection.
    """
    first = basis @ w.mT
    inside = first
    for attempt in range(PASSES):
        residual = w - inside.mT @ basis
        w, left = _normalised(residual, gently=attempt > 0)
        keep = left > (DEPENDENT if attempt else noise)
        # later rows were freed of the arbitrary direction of a dropped one: factor without it
        w = w if bool(keep.all()) else _normalised(residual[: len(keep)][keep], gently=False)[0]
        if not len(w) or (attempt and bool((left > NEARLY).all())):
            break
        inside = basis @ w.mT
    return w.contiguous(), first


def _normalised(w: Tensor, gently: bool) -> tuple[Tensor, Tensor]:
    """Orthonormal rows that span those of `w` (b, D), and what was left of each beside those before it.

    Cholesky's factor of wwᵀ is a sixth of the work of Householder's, but squares the condition of `w`: it
    will do for rows that are nearly orthonormal, and shows by its diagonal where they are not. On a GPU,
    whose Householder panels wait for each other, it is tried on any rows: those that come out are
    orthonormal to κ²u, mostly below 1e-4, and the next pass, which is gentle, checks them and does the rest
    (CholeskyQR2, Yamamoto et al., ETNA 44, 2015). That it is faster there is unmeasured.
    """
    if gently or w.device.type in CHOLESKY_FIRST:
        factor, failed = torch.linalg.cholesky_ex(w @ w.mT)
        left = factor.diagonal()
        least = NEARLY if gently else STEEPEST * left.amax() if len(left) else 0.0
        if bool(((failed == 0) & (left > least)).all()):
            return torch.linalg.solve_triangular(factor, w, upper=False), left
    q, r = torch.linalg.qr(w.mT)
    return q.mT, r.diagonal().abs()


class Basis:
    """Orthonormal rows B, their images BC, and T = BCBᵀ.

    Args:
        apply: (b, D) rows → their images under C.
        like: a tensor with the dtype, the device and D of the rows.
        room: rows to make room for at once; more is made when it is needed.
        keep_images: whether BC is kept; T alone does without.
    """

    def __init__(
        self, apply: Callable[[Tensor], Tensor], like: Tensor, *, room: int = 0, keep_images: bool = True
    ) -> None:
        self._apply = apply
        self._names = ("_rows", "_images") if keep_images else ("_rows",)
        self._rows = self._images = like.new_empty(0, like.shape[-1])
        self._projected = like.new_zeros(0, 0)
        self.size = 0
        self.products = 0  # rows that C was applied to
        self._reserve(room)

    @property
    def rows(self) -> Tensor:
        """(m, D) B."""
        return self._rows[: self.size]

    @property
    def images(self) -> Tensor:
        """(m, D) BC."""
        return self._images[: self.size]

    @property
    def projected(self) -> Tensor:
        """(m, m) T."""
        return self._projected[: self.size, : self.size]

    def restart(self, rows: Tensor, images: Tensor, values: Tensor) -> None:
        """Go on from Ritz vectors: T is diagonal.

        Args:
            rows: (p, D).
            images: (p, D).
            values: (p,).
        """
        self.size = len(rows)
        self._rows[: self.size] = rows
        self._images[: self.size] = images
        self._projected[: self.size, : self.size] = values.diag()

    def append(self, q: Tensor, noise: float) -> Tensor:
        """Add orthonormal rows; returns the orthonormal rows that their images add in turn.

        Args:
            q: (b, D) orthonormal rows, orthogonal to those here.
            noise: relative rounding of one product with C.
        """
        image = self._apply(q)
        self.products += len(q)
        start, stop = self.size, self.size + len(q)
        self._reserve(stop)
        self._rows[start:stop] = q
        if "_images" in self._names:
            self._images[start:stop] = image
        self.size = stop
        top = torch.linalg.vector_norm(image, dim=1).max()
        top = torch.maximum(top, self.projected.diagonal()[:start].amax()) if start else top
        following, inside = orthonormalise(image, self.rows, noise * top.item())
        # what a symmetric C makes of the new rows is known from both sides; no recurrence is trusted
        self._projected[:stop, start:stop] = inside
        self._projected[start:stop, :stop] = inside.mT
        self._projected[start:stop, start:stop] = (inside[start:] + inside[start:].mT) / 2
        return following

    def _reserve(self, size: int) -> None:
        """Room for `size` rows; grows by doubling, so that rows are copied once on average."""
        have = len(self._rows)
        if size <= have:
            return
        room = max(size, 2 * have)
        for name in self._names:
            old = getattr(self, name)
            new = old.new_empty(room, old.shape[1])
            new[: self.size] = old[: self.size]
            setattr(self, name, new)
        projected = self._projected.new_zeros(room, room)
        projected[: self.size, : self.size] = self.projected
        self._projected = projected
