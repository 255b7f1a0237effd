"""What callers leave switched on around a fit: TF32 by either switch, and autocast."""

import warnings
from contextlib import contextmanager, nullcontext

import torch


def backends():
    """Those with a switch for float32 products."""
    found = (getattr(backend, "matmul", None) for backend in (torch.backends.cuda, torch.backends.mkldnn))
    return [matmul for matmul in found if hasattr(matmul, "fp32_precision")]


def settings():
    """What is switched on now."""
    return [backend.fp32_precision for backend in backends()] or [torch.get_float32_matmul_precision()]


@contextmanager
def _restored():
    before = [backend.fp32_precision for backend in backends()]
    legacy = torch.get_float32_matmul_precision()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings")
            yield
    finally:
        torch.set_float32_matmul_precision(legacy)
        for backend, value in zip(backends(), before, strict=True):
            backend.fp32_precision = value


@contextmanager
def tf32(device):
    """By the switch of torch 2.9 and later, where there is one."""
    with _restored():
        if not backends():
            torch.set_float32_matmul_precision("high")
        for backend in backends():
            backend.fp32_precision = "tf32"
        yield


@contextmanager
def high(device):
    """By the switch that most programs use."""
    with _restored():
        torch.set_float32_matmul_precision("high")
        yield


def autocast(device):
    """Products in bfloat16 unless told otherwise."""
    return torch.autocast(device.type, dtype=torch.bfloat16)


def plain(device):
    return nullcontext()


CALLERS = {"tf32": tf32, "high": high, "autocast": autocast}
