"""Covariances of many sets of samples at once, such as one per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_ddof, check_flag, divisor_of
from pca_torch.linalg import COMMON
from pca_torch.precision import Precision, component_dtype, exact_products, product_dtype
from pca_torch.threads import side_by_side

__all__ = ["batch_covariance"]

GROUP_BYTES = 2**28  # of centred samples that a GPU multiplies at a time


def batch_covariance(
    x: Any, *, center: bool = True, ddof: float = 1, precision: Precision = "auto"
) -> Tensor:
    """The covariance of every set of samples, for `decompose_batch`.

    Each set is centred by its own float64 mean before it is multiplied; XᵀX - n·mean·meanᵀ, which is
    faster by that pass, loses the digits that the square of the mean takes.

    Args:
        x: (..., N, E), any real dtype: `...` sets of N samples with E features; not changed. Keys of a layer,
            (B, T, H, E), are `x.flatten(0, 1).movedim(-2, 0)`, one set per head.
        center: subtract the mean of each set; False gives second moments.
        ddof: delta degrees of freedom.
        precision: arithmetic of the products; "auto" is float64 where that is affordable.

    Returns:
        Covariances (..., E, E) in float64, exactly symmetric.

    Raises:
        ValueError: fewer than two dimensions, NaN or inf, or too few samples for `ddof`.

    Memory: the result, and a few sets in float64.
    """
    check_flag(center, "center")
    check_ddof(ddof)
    x = as_tensor(x).detach()
    if x.ndim < 2 or not x.shape[-1]:
        raise ValueError(f"`x` must have shape (..., N, E) with E ≥ 1, got {tuple(x.shape)}.")
    n, e = x.shape[-2:]
    divisor = divisor_of(n, float(n), float(n), ddof)
    work = product_dtype(x.dtype, x.device, precision)
    sets = x.reshape(-1, n, e)

    def products(part: Tensor) -> Tensor:
        with exact_products(x.device):
            groups = part.split(_at_once(n, e, x.device))
            return torch.cat([_products(group, center, work) for group in groups])

    with exact_products(x.device):
        found = torch.cat(side_by_side(products, sets)).div_(divisor) if len(sets) else x.new_empty(0, e, e)
        found = found.double().reshape(*x.shape[:-2], e, e)
        _check_finite(found, x.shape[:-2])
        return found


def _at_once(n: int, e: int, device: torch.device) -> int:
    """How many sets to multiply in one call: one stays in the cache of a CPU, many keep a GPU busy."""
    return 1 if device.type == "cpu" else max(1, GROUP_BYTES // (8 * n * e))


def _products(part: Tensor, center: bool, work: torch.dtype) -> Tensor:
    """(b, E, E) float64 sums of products of sets (b, N, E) around their mean, formed in `work`."""
    if work == torch.float64:
        return _gram(_centred(part.double(), center))
    part = part.to(component_dtype(part.dtype))  # half types in float32, integers in float64
    if part.dtype == torch.float32 and _common(part):
        return _gram(_centred(part, center)).double()
    size = part.abs().amax((-2, -1), keepdim=True).double()  # else by a power of two: squares leave float32
    unit = torch.where(size > 0, size.log2().floor().exp2(), 1.0)
    return _gram(_centred(part.double() / unit, center).to(work)).double() * unit.square()


def _common(part: Tensor) -> bool:
    """Whether the samples can be squared in float32 as they are; NaN cannot."""
    low, high = part.aminmax()
    size = torch.maximum(-low, high)
    return bool((size >= COMMON[0]) & (size <= COMMON[1]))


def _centred(z: Tensor, center: bool) -> Tensor:
    """Sets minus their mean, twice: the first shows its own last digit."""
    if not center:
        return z
    z = z - z.mean(-2, keepdim=True)
    return z.sub_(z.mean(-2, keepdim=True))


def _gram(z: Tensor) -> Tensor:
    """zᵀz (b, E, E) of z (b, N, E) by three quarters of its products: the rest is known by symmetry."""
    half = z.shape[-1] // 2
    left, right = z[..., :half], z[..., half:]
    upper = torch.cat([left.mT @ left, left.mT @ right], -1)
    lower = torch.cat([upper[..., half:].mT, right.mT @ right], -1)
    found = torch.cat([upper, lower], -2)
    return (found + found.mT) / 2  # a product with itself need not be symmetric to the last digit


def _check_finite(found: Tensor, shape: torch.Size) -> None:
    """Refuse sets with NaN or inf, which no covariance comes through.

    Raises:
        ValueError: with the first of them.
    """
    bad = ~found.isfinite().all(-1).all(-1)
    if bool(bad.any()):
        where = "; drop its bad samples."
        if shape:
            first = [int(i) for i in torch.unravel_index(bad.int().argmax(), shape)]
            where = f", set {first} of {tuple(shape)} is not; leave it out."
        raise ValueError(f"`x` must be finite, and its squares too{where}")
