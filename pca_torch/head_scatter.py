"""The sums behind per-head statistics: of one D×D scatter only the H diagonal blocks E×E, D = H·E."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch.centred_sums import PROBE_SAFETY, PROBES, CentredSums
from pca_torch.scatter import Scatter

__all__ = ["HeadScatter"]


class HeadScatter(CentredSums):
    """`Scatter` of every head at once: the same sums, formed by one batched product for all heads.

    Args:
        shape: (H, E).
        device: where the sums lie.
        dtype: arithmetic of the products, float32 or float64; the sums are float64.
    """

    _axes = 2
    _counts = ("n", "depth", "merges")  # the weights are n, unless rows were discounted

    @property
    def matrix(self) -> Tensor:
        """(H, E, E) scatter of each head."""
        return self._upper.triu() + self._upper.triu(1).mT

    def error(self) -> Tensor:
        """(H,) bounds on ‖computed - true‖₂ of each scatter; `Scatter.error` has the reasons."""
        bound = self._bound(*(part.sum(1) for part in (self.diagonal, self._between, self._slip)))
        if not self.measured:
            return bound
        seen = torch.linalg.matrix_norm(self._probe - self.matrix @ self._signs)
        return bound + PROBE_SAFETY * seen / math.sqrt(PROBES)

    def head(self, index: int) -> Scatter:
        """The sums of one head, a copy.

        Args:
            index: the head.
        """
        return Scatter.one_of(self, index)

    def check_possible(self) -> None:
        """Refuse sums that no rows have.

        Raises:
            ValueError: the first head that is impossible.
        """
        for index in range(len(self.mean)):
            try:
                self.head(index).check_possible()
            except ValueError as error:
                raise ValueError(f"head {index}: {error}") from error

    def _add_products(self, z: Tensor, dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            self._upper.baddbmm_(z.mT, z)
        else:
            self._upper.add_(_narrow_products(z, dtype))

    @staticmethod
    def _add_outer(target: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        target.baddbmm_(a[:, :, None], b[:, None, :], alpha=factor)

    def _packed(self) -> Tensor:
        row, column = torch.triu_indices(*self._upper.shape[1:], device=self._upper.device)
        return self._upper[:, row, column]

    def _unpack(self, packed: Tensor) -> None:
        row, column = torch.triu_indices(*self._upper.shape[1:], device=self._upper.device)
        self._upper[:, row, column] = packed


def _narrow_products(z: Tensor, dtype: torch.dtype) -> Tensor:
    """zᵀz (H, E, E) in float64 of z (H, n, E), formed in `dtype`.

    Each head is divided by a power of two first, which rounds nothing and keeps its squares in range.
    """
    size = z.abs().amax((1, 2), keepdim=True)
    unit = torch.where(size > 0, torch.exp2(size.log2().floor()), 1.0)
    narrow = (z / unit).to(dtype)
    return (narrow.mT @ narrow).double() * unit.square()
