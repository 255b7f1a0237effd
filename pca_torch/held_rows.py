"""Rows that wait for the end of a stream to be judged, and the places of rows in their sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_tensor
from pca_torch._dtypes import FLOATING
from pca_torch._state import State

__all__ = ["HeldRows", "places_of"]

NORM_SLACK = 1e-5  # what norms summed in another order, or in float32, may differ by


@dataclass(frozen=True, eq=False)
class HeldRows:
    """H rows with what decides and describes them; never written to, so copies may share it."""

    values: Tensor  # (H, D) dtype and device of the data
    norms: Tensor  # (H,)   float64, CPU
    positions: Tensor  # (H,)   int64, device of the data, negative = unknown

    def __len__(self) -> int:
        return len(self.norms)

    def select(self, keep: Tensor) -> HeldRows:
        """Copies of some of the rows.

        Args:
            keep: booleans (H,) on the CPU.
        """
        at = keep.nonzero()[:, 0]  # indices from the CPU: a device mask would have to be counted there
        on_device = at.to(self.values.device)
        return HeldRows(self.values[on_device], self.norms[at], self.positions[on_device])

    def join(self, other: HeldRows) -> HeldRows:
        """These rows, then those of `other`.

        Args:
            other: rows of as many features.
        """
        if not len(self) or not len(other):  # an empty one must not decide dtype and device
            return self if len(self) else other
        device = self.values.device
        return HeldRows(
            torch.cat([self.values, other.values.to(device)]),
            torch.cat([self.norms, other.norms]),
            torch.cat([self.positions, other.positions.to(device)]),
        )

    @classmethod
    def none(cls, d: int) -> HeldRows:
        """No rows.

        Args:
            d: D.
        """
        norms = torch.empty(0, dtype=torch.float64, device="cpu")
        return cls(norms.new_empty(0, d), norms, norms.long())

    @classmethod
    def from_state(cls, state: State, d: int, most: int) -> HeldRows:
        """Rows of a saved state, whose tensors are `held.` and the name of the field.

        Args:
            state: that holds them.
            d: D.
            most: how many there may be.

        Raises:
            ValueError: no rows can be like that.
        """
        values = state.tensor("held.values", [None, d], [*FLOATING.values()])
        norms = state.tensor("held.norms", [len(values)], least=0).cpu()
        positions = state.tensor("held.positions", [len(values)], [torch.int64])
        off = (torch.linalg.vector_norm(values.double(), dim=1).cpu() - norms).abs()
        if not 0 < len(values) <= most or bool((off > NORM_SLACK * norms).any()):
            raise ValueError(f"`held` must be 1 to {most} rows and their norms.")
        return cls(values, norms, positions)


def places_of(positions: Any, keep: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(N,) place of each row in its sequence, -1 where unknown.

    Args:
        positions: integers in the leading shape, or None to count along the second dimension.
        keep: (N,) the rows that are counted, None for all.
        shape: the leading dimensions of the data.
        device: where the data are.

    Raises:
        ValueError: `positions` are not integers in the leading shape of `x`.
    """
    if positions is not None:
        positions = as_tensor(positions, "positions").to(device)
        if tuple(positions.shape) != shape or positions.is_floating_point() or positions.dtype == torch.bool:
            raise ValueError(
                f"`positions` must be integers in the leading shape of `x`, {shape}, "
                f"got {positions.dtype} in {tuple(positions.shape)}."
            )
        return positions.reshape(-1).long()
    if len(shape) < 2:
        return torch.full((math.prod(shape),), -1, device=device)
    counted = torch.ones(shape, dtype=torch.bool, device=device) if keep is None else keep.reshape(shape)
    place = counted.flatten(2).any(2).cumsum(1) - 1 if counted.ndim > 2 else counted.cumsum(1) - 1
    return place.reshape(place.shape + (1,) * (counted.ndim - 2)).expand(shape).reshape(-1)
