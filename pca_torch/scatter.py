"""The sums behind a statistic: count, mean and centred scatter of one group of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pca_torch._checks import LARGEST
from pca_torch.centred_sums import PROBE_SAFETY, PROBES, CentredSums
from pca_torch.linalg import add_gram, mirror

__all__ = ["Scatter"]

SLACK = 1e-3  # far more than rounding, float32 included, adds to an entry of S over its largest variance


class Scatter(CentredSums):
    """Sums of rows with D features; `add` is the merge of one chunk.

    Args:
        shape: (D,).
        device: where the sums lie.
        dtype: arithmetic of the products, float32 or float64; the sums are float64.
    """

    _axes = 1
    _counts = ("n", "weight", "weight_sq", "depth", "merges")

    @classmethod
    def one_of(cls, sums: CentredSums, index: int) -> Scatter:
        """One matrix of sums of several, a copy.

        Args:
            sums: of rows (n, H, D).
            index: 0 … H - 1.
        """
        one = cls(sums.mean.shape[1:], sums.mean.device, sums.dtype)
        one.n, one.weight, one.weight_sq = sums.n, sums.weight, sums.weight_sq
        one.depth, one.merges = sums.depth, sums.merges
        one.mean = sums.mean[index].clone()
        one._between, one._slip = sums._between[index].clone(), sums._slip[index].clone()
        one._upper = sums._upper[index].clone()
        one._signs, one._probe = sums._signs.clone(), sums._probe[index].clone()
        return one

    @property
    def matrix(self) -> Tensor:
        """(D, D) S = Σ w (x - mean)(x - mean)ᵀ."""
        return mirror(self._upper)

    def error(self, scale: Tensor | None = None) -> float:
        """Bound on ‖computed - true‖₂ of S, or of S_ij / (scale_i scale_j).

        A sum of float64 products obeys |E| ≤ γ |X|ᵀ|X| entrywise, and ‖|X|ᵀ|X|‖₂ ≤ tr S. γ is depth·u at
        worst (Higham 2002, §3.1) and 8√depth·u but with probability 1e-13 (Higham & Mary, SIAM J. Sci.
        Comput. 41(5), 2019); four more roundings come from centring.
        A mean is off by t, a few u·|mean|, and thus a shift f δδᵀ by f (δtᵀ + tδᵀ + ttᵀ): the larger
        part after a large offset. Over all shifts that is at most 2 √(Σf‖δ‖² Σf‖t‖²) + Σf‖t‖².
        For float32 products γ is six orders too large, so E is measured: P = Σ (x - m)((x - m)ᵀZ) was
        summed in float64 beside S for eight columns Z of random signs, and the mean of
        ‖P - SZ‖_F² is 8‖E‖_F² (Hutchinson, 1990).

        Args:
            scale: (D,) by which rows and columns are divided; None is 1.
        """
        if scale is None:
            scale = torch.ones_like(self.mean)
        squares = torch.stack([self.diagonal, self._between, self._slip]) / scale.square()
        bound = self._bound(*squares.sum(1)).item()
        if not self.measured:
            return bound
        seen = torch.linalg.matrix_norm((self._probe - self.matrix @ self._signs) / scale[:, None])
        return bound + PROBE_SAFETY * seen.item() / scale.min().item() / math.sqrt(PROBES)

    def check_possible(self) -> None:
        """Refuse sums that no rows have.

        Raises:
            ValueError: the first thing that is impossible.
        """
        n, weight, square = self.n, self.weight, self.weight**2
        enough = self.weight_sq <= square * (1 + 1e-9) and square <= n * self.weight_sq * (1 + 1e-9)
        if not enough or (n > 0) != (weight > 0):
            raise ValueError(
                f"`weight` and `weight_sq` must be those of {n} rows, got {weight}, {self.weight_sq}."
            )
        largest = self.diagonal.max().item()
        if self.diagonal.min() < 0 or self._upper.abs().max() > largest * (1 + SLACK):
            raise ValueError("`scatter` must have no entry above its largest variance, and none below 0.")
        if self.mean.abs().max() > (LARGEST if n else 0) or largest > 4 * LARGEST**2 * weight:
            raise ValueError(f"`mean` and `scatter` must be those of {n} rows of values up to {LARGEST:g}.")
        if not bool((self._signs.abs() == 1).all()):
            raise ValueError("`signs` must be 1 and -1.")

    def _add_products(self, z: Tensor, dtype: torch.dtype) -> None:
        add_gram(self._upper, z, dtype)

    @staticmethod
    def _add_outer(target: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        target.addr_(a, b, alpha=factor)

    def _packed(self) -> Tensor:
        return torch.cat([row[i:] for i, row in enumerate(self._upper)])

    def _unpack(self, packed: Tensor) -> None:
        d = len(self._upper)
        for i, row in enumerate(packed.split([*range(d, 0, -1)])):
            self._upper[i, i:] = row
