"""Which arithmetic a product runs in, and keeping the caller's shortcuts out of it."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import torch

from pca_torch._checks import check_choice

__all__ = [
    "Precision",
    "component_dtype",
    "exact_arithmetic",
    "exact_products",
    "factor_noise",
    "product_dtype",
    "unit_roundoff",
]

Precision = Literal["auto", "float32", "float64"]
PRECISE = "ieee"  # the switch of a backend that takes no shortcut
FAST_FLOAT64 = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}  # compute capabilities with half-rate float64


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`: half its machine epsilon."""
    return torch.finfo(dtype).eps / 2


def factor_noise(m: int, n: int, dtype: torch.dtype) -> float:
    """Backward error of a QR or SVD of an (m, n) matrix over σ₁: u(64 + 4√k + l/w), k ≤ l its sides.

    Roundings of unlike numbers add like a random walk (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019),
    those of like ones do not: where all features drift together, every addition to a dot product is off to
    the same side, in a chain of l/w where registers of 32 bytes hold w numbers. On 3 × 3 matrices whose
    columns differ by 10⁵ LAPACK is off by 50 u.

    Args:
        m: rows.
        n: columns.
        dtype: arithmetic of the factorisation.
    """
    return unit_roundoff(dtype) * (64 + 4 * min(m, n) ** 0.5 + max(m, n) * dtype.itemsize / 32)


def component_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the components of data in `dtype`: float64 stays, half types work in float32."""
    return torch.float32 if dtype in {torch.float32, torch.float16, torch.bfloat16} else torch.float64


def product_dtype(dtype: torch.dtype, device: torch.device, precision: Precision = "auto") -> torch.dtype:
    """Dtype in which products over data of `dtype` are formed.

    "auto" takes float64 wherever it costs about twice float32 or less (CPUs, data-centre GPUs),
    and always for float64 data and integers; float32 elsewhere.

    Args:
        dtype: dtype of the data.
        device: where the products run.
        precision: "auto", "float32" or "float64".

    Raises:
        ValueError: another `precision`.
    """
    check_choice(precision, "precision", ("auto", "float32", "float64"))
    if precision != "auto":
        return torch.float64 if precision == "float64" else torch.float32
    if component_dtype(dtype) == torch.float64 or device.type == "cpu":
        return torch.float64
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) in FAST_FLOAT64
    return torch.float64 if fast else torch.float32


@contextmanager
def exact_products(device: torch.device) -> Generator[None]:
    """`exact_arithmetic` without autograd, for state that outlives the block.

    State made inside a caller's `inference_mode` stays ordinary, so that it can be updated later.

    Args:
        device: where the products run.
    """
    with exact_arithmetic(device), torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def exact_arithmetic(device: torch.device) -> Generator[None]:
    """Products inside run without TF32, bfloat16 shortcuts or autocast; all are restored.

    The switches are the process's, not the thread's: the first to enter keeps what they were, and the last to
    leave gives it back.

    Args:
        device: where the products run.
    """
    _enter_exact()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        _leave_exact()


class _Exact:
    """Who computes exactly now, and the switches before the first of them."""

    lock = threading.Lock()
    inside = 0
    before: tuple[str, ...] = ()


def _enter_exact() -> None:
    with _Exact.lock:
        if not _Exact.inside:
            _Exact.before = _read_switches()
        _Exact.inside += 1
        _set_switches(tuple(PRECISE for _ in _Exact.before))


def _leave_exact() -> None:
    with _Exact.lock:
        _Exact.inside -= 1
        if not _Exact.inside:
            _set_switches(_Exact.before)


def _matmul_backends() -> list:
    found = (getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn))
    return [matmul for matmul in found if hasattr(matmul, "fp32_precision")]


def _read_switches() -> tuple[str, ...]:
    """How float32 products are formed, by backend; torch before 2.9 has one global switch."""
    backends = _matmul_backends()
    return tuple(b.fp32_precision for b in backends) or (torch.get_float32_matmul_precision(),)


def _set_switches(values: tuple[str, ...]) -> None:
    backends = _matmul_backends()
    for backend, value in zip(backends, values, strict=False):
        backend.fp32_precision = value
    if not backends:
        torch.set_float32_matmul_precision("highest" if values[0] == PRECISE else values[0])
