"""How far the leading directions of one spectrum have turned while a model learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from pca_torch._checks import check_whole
from pca_torch._state import Saved, State
from pca_torch.result import PCAResult
from pca_torch.subspace.spans import angles_between, orthonormal_rows

__all__ = ["DRIFT", "Drift"]

DRIFT = ("drift_last", "drift_last_angle", "drift_start", "drift_start_angle", "drift_gap")
ORTHONORMAL = 1e-9  # what a saved basis may lack of it: far above D·eps, far below what would show


class Drift:
    """V_k of one spectrum, followed from update to update.

    Subspaces are compared, never vectors: where two variances are nearly equal their directions turn into
    each other at a breath of noise while the plane of both stays. V_k holds the first k components,
    k = min(`n_components`, those above the rounding floor); two that differ in k are compared over the
    smaller one. Where λ_k and λ_{k+1} are nearly equal, V_k itself is not well defined: `drift_gap` tells.

    Args:
        n_components: the largest k.

    Raises:
        ValueError: it is no positive integer.

    Memory: 16·D·k bytes. Time: O(D·k²).
    """

    def __init__(self, n_components: int) -> None:
        check_whole(n_components, "n_components", 1)
        self.n_components = int(n_components)
        self._start: Tensor | None = None  # (K, D) float64, orthonormal rows of the first update
        self._last: Tensor | None = None  # (K, D) likewise, of the one before

    def update(self, result: PCAResult) -> dict[str, float | None]:
        """What has turned, and from now on compare with `result`.

        Args:
            result: of the same features as before.

        Returns:
            `drift_last`, `drift_start`: mean sin² of the principal angles, 1 - mean cos², to the update
            before and to the first, in [0, 1]; `drift_last_angle`, `drift_start_angle`: the largest of these
            angles, radians in [0, π/2]; `drift_gap`: (λ_k - λ_{k+1})/λ_k now, in [0, 1]. The first update
            has turned by 0 since the start, which it is, and by None since the last. A result without a
            direction above the rounding floor is None throughout, and is not compared with later.

        Raises:
            ValueError: another number of features.
        """
        rows = orthonormal_rows(result, min(self.n_components, result.n_components)).contiguous()
        if not len(rows):
            return dict.fromkeys(DRIFT)
        if self._start is None:
            self._start = rows
        if self._start.shape[1] != rows.shape[1]:
            raise ValueError(f"`result` must have {self._start.shape[1]} features, got {rows.shape[1]}.")
        last, start = _turned(self._last, rows), _turned(self._start, rows)
        self._last = rows
        return dict(zip(DRIFT, (*last, *start, _gap(result, len(rows))), strict=True))

    def to_state(self) -> Saved:
        """Tensors and facts from which `from_state` goes on."""
        bases = {"start": self._start, "last": self._last}
        tensors = {name: basis for name, basis in bases.items() if basis is not None}
        return tensors, {"n_components": self.n_components}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], facts: Any) -> Self:
        """What `to_state` told of.

        Args:
            tensors: by name.
            facts: as JSON gave them.

        Raises:
            ValueError: they are no bases of that many components.
        """
        state = State(tensors, facts)
        drift = cls(state.count("n_components", 1))
        if state.has("start") or state.has("last"):
            drift._start = _basis(state, "start", None, drift.n_components)
            drift._last = _basis(state, "last", drift._start.shape[1], drift.n_components)
        state.done()
        return drift


def _turned(before: Tensor | None, rows: Tensor) -> tuple[float | None, float | None]:
    """Mean sin² of the principal angles between two orthonormal bases, and the largest angle."""
    if before is None:
        return None, None
    if before is rows:
        return 0.0, 0.0
    k = min(len(before), len(rows))  # the leading rows of a basis are themselves one, of V_k
    angles = angles_between(before[:k].to(rows.device), rows[:k])
    return angles.sin().square().mean().item(), angles[-1].item()


def _gap(result: PCAResult, k: int) -> float | None:
    """(λ_k - λ_{k+1})/λ_k; None where λ_{k+1} was not computed."""
    known, most = len(result.spectrum), min(result.n_samples, result.n_features)
    if k == known < most:
        return None
    value = result.spectrum[k - 1].item()
    following = result.spectrum[k].item() if k < known else 0.0
    return (value - following) / value


def _basis(state: State, name: str, d: int | None, most: int) -> Tensor:
    """Orthonormal rows of a state.

    Raises:
        ValueError: it is missing, of another shape, or not orthonormal.
    """
    rows = state.tensor(name, [None, d])
    if not 1 <= len(rows) <= min(most, rows.shape[1]):
        raise ValueError(f"`{name}` must have 1..{most} rows, D at most, got {tuple(rows.shape)}.")
    product = rows @ rows.mT
    off = (product - torch.eye(len(rows), dtype=product.dtype, device=product.device)).abs().max().item()
    if not off <= ORTHONORMAL:  # NaN fails too
        raise ValueError(f"`{name}` must have orthonormal rows, got products that are off by {off:.1g}.")
    return rows
