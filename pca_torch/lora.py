"""Which inputs a low-rank adapter listens to, where it writes, and how far two adapters share that.

ΔW = BA maps the inputs of a layer to its outputs: rows of A lie in the space of the inputs, columns of B in
that of the outputs. In a square layer the shapes do not give a mistake away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch import subspace
from pca_torch._checks import as_tensor, check_choice, check_flag
from pca_torch.precision import exact_products, unit_roundoff

__all__ = ["AdapterSpans", "adapter_spans", "input_basis", "output_basis", "overlap"]

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True, eq=False)  # comparing tensors has no single truth value
class AdapterSpans:
    """The singular directions of ΔW, as many as it has rank: none for an adapter whose B is still zero."""

    input: Tensor  # (R, in) float64, orthonormal rows
    output: Tensor  # (R, out) float64, orthonormal rows
    singular_values: Tensor  # (R,) of BA, descending, without the factor alpha/r of the adapter

    @property
    def rank(self) -> int:
        """R."""
        return len(self.singular_values)


def input_basis(a: Any) -> Tensor:
    """Orthonormal rows (R, in) that span the inputs which A (r, in) can see.

    Args:
        a: `lora_A.weight`; layers that store their own weight as (in, out) have it in the same shape.

    Raises:
        ValueError: not a matrix, NaN or inf.
    """
    return subspace.orthonormal_rows(_matrix(a, "a"), name="a")


def output_basis(b: Any) -> Tensor:
    """Orthonormal rows (R, out) that span the outputs which B (out, r) can reach; none for zeros.

    Args:
        b: `lora_B.weight`.

    Raises:
        ValueError: not a matrix, NaN or inf.
    """
    return subspace.orthonormal_rows(_matrix(b, "b").mT, name="b")


def adapter_spans(adapter: tuple[Any, Any] | Any, *, fan_in_fan_out: bool = False) -> AdapterSpans:
    """Input and output directions of what an adapter adds, in the order of their singular values.

    ΔW is not formed from A and B: a QR of both leaves an r × r matrix to decompose.

    Args:
        adapter: A (r, in) and B (out, r) as a pair, or ΔW.
        fan_in_fan_out: ΔW is (in, out), as layers like `Conv1D` store it, and not (out, in). A pair has the
            same shapes in every layer.

    Raises:
        ValueError: shapes that do not fit, NaN or inf.
    """
    check_flag(fan_in_fan_out, "fan_in_fan_out")
    if not isinstance(adapter, tuple | list):
        delta = _matrix(adapter, "adapter")
        return _of_delta(delta.mT if fan_in_fan_out else delta)
    if len(adapter) != 2:
        raise ValueError(f"`adapter` must be the pair (A, B) or ΔW, got {len(adapter)} tensors.")
    a, b = _matrix(adapter[0], "A"), _matrix(adapter[1], "B")
    if len(a) != b.shape[1]:
        raise ValueError(
            f"`adapter` must be A (r, in) and B (out, r) with one r, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}; is their order right?"
        )
    return _of_pair(a, b)


def overlap(
    first: tuple[Any, Any] | Any,
    second: tuple[Any, Any] | Any,
    side: Literal["input", "output"],
    normalise: Literal["min", "max"] = "min",
    *,
    fan_in_fan_out: bool = False,
) -> float:
    """How far two adapters see the same inputs, or write to the same outputs; see `subspace.overlap`.

    An adapter that adds nothing yet, such as one with B = 0, overlaps with nothing: 0.

    Args:
        first: A and B as a pair, or ΔW.
        second: the other.
        side: "input" or "output".
        normalise: over the smaller ("min") or the larger ("max") of the two ranks.
        fan_in_fan_out: where ΔW is given, it is (in, out).

    Raises:
        ValueError: adapters of layers with other sizes, NaN or inf, or another `side`.
    """
    check_choice(side, "side", ("input", "output"))
    spans = [adapter_spans(each, fan_in_fan_out=fan_in_fan_out) for each in (first, second)]
    return subspace.overlap(getattr(spans[0], side), getattr(spans[1], side), normalise)


def _matrix(x: Any, name: str) -> Tensor:
    """`x` as a finite matrix.

    Raises:
        ValueError: it is none.
    """
    x = as_tensor(x, name).detach()
    if x.ndim != 2 or not x.numel():
        raise ValueError(f"`{name}` must be a matrix, got shape {tuple(x.shape)}.")
    if not bool(x.isfinite().all()):
        raise ValueError(f"`{name}` must be finite, got NaN or inf.")
    return x


def _of_delta(delta: Tensor) -> AdapterSpans:
    """Singular directions of ΔW (out, in) above the rounding of its entries, ‖E‖_F ≤ u‖ΔW‖_F."""
    with exact_products(delta.device):
        scaled, unit = _scaled(delta)
        u, s, vh = torch.linalg.svd(scaled, full_matrices=False)
        noise = _roundoff(delta) * torch.linalg.vector_norm(scaled)
        return _above(s, 2 * noise + max(delta.shape) * EPS * s[0], vh.mT, u, unit)


def _of_pair(a: Tensor, b: Tensor) -> AdapterSpans:
    """Singular directions of BA above the rounding of A and B.

    With |E| ≤ u|A| and |E'| ≤ u|B| the product moves by at most ‖B‖₂‖E‖_F + ‖E'‖_F‖A‖₂.
    """
    with exact_products(a.device):
        (a_scaled, a_unit), (b_scaled, b_unit) = _scaled(a), _scaled(b.to(a.device))
        (q_in, r_in), (q_out, r_out) = torch.linalg.qr(a_scaled.mT), torch.linalg.qr(b_scaled)
        u, s, vh = torch.linalg.svd(r_out @ r_in.mT, full_matrices=False)
        a_size, b_size = torch.linalg.matrix_norm(r_in, 2), torch.linalg.matrix_norm(r_out, 2)
        noise = _roundoff(a) * torch.linalg.vector_norm(a_scaled) * b_size
        noise = noise + _roundoff(b) * torch.linalg.vector_norm(b_scaled) * a_size
        floor = 2 * noise + max(a.shape[1], len(b)) * EPS * a_size * b_size
        return _above(s, floor, q_in @ vh.mT, q_out @ u, a_unit * b_unit)


def _above(s: Tensor, floor: Tensor, right: Tensor, left: Tensor, unit: float) -> AdapterSpans:
    """What stands above the floor, of singular vectors as columns."""
    rank = int((s > floor).sum())
    return AdapterSpans(right[:, :rank].mT, left[:, :rank].mT, s[:rank] * unit)


def _scaled(x: Tensor) -> tuple[Tensor, float]:
    """`x` over its largest entry, in float64, and that entry: products could leave float64."""
    size = x.abs().amax().double().item() or 1.0
    return x.double() / size, size


def _roundoff(x: Tensor) -> float:
    return unit_roundoff(x.dtype) if x.is_floating_point() else 0.0
