"""Small dense algebra on the device: orthonormal columns, and one covariance per head."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import pca_torch as pt
from bench.gpu.record import Recorder, Row, Verdict
from pca_torch.jacobi import jacobi_eigh
from pca_torch.precision import factor_noise, unit_roundoff


def run(recorder: Recorder, small: bool) -> None:
    """Columns first, then the heads."""
    d, widths = (640, (16, 48)) if small else (4096, (64, 192, 512))
    recorder.measure_all("blocks", columns(d, widths, recorder.device))
    count, e = (16, 32) if small else (256, 128)
    recorder.measure_all("heads", heads(count, e, recorder.device))


# ---------------------------------------------------------------- columns
def columns(d: int, widths: tuple[int, ...], device: torch.device) -> Iterator[Row]:
    """Householder's QR against Cholesky's, of Gaussian columns (D, b) in float64.

    Yields:
        rows, a pair for each width.
    """
    generator = torch.Generator(device).manual_seed(0)
    for b in widths:
        a = torch.randn(d, b, generator=generator, dtype=torch.float64, device=device)
        bound = 10 * factor_noise(d, b, torch.float64)

        def judge(q: Tensor, a: Tensor = a, bound: float = bound) -> Verdict:
            gram = q.mT @ q
            gram.diagonal().sub_(1)
            lost = torch.linalg.matrix_norm(a - q @ (q.mT @ a)) / torch.linalg.matrix_norm(a)
            return Verdict(max(gram.abs().max().item(), lost.item()), bound, {"kind": "orthonormality, span"})

        facts = {"n": d, "d": b, "dtype": "float64"}
        for case, work in (
            ("torch Householder QR", lambda a=a: torch.linalg.qr(a).Q),
            ("Cholesky QR twice", lambda a=a: cholesky_qr2(a)),
        ):
            yield Row("blocks", case, work, judge, facts, 4.0 * d * b**2, "float64", "4·D·b²")


def cholesky_qr2(a: Tensor) -> Tensor:
    """Orthonormal columns by two Cholesky factorisations; for columns of condition below 10⁷."""
    for _ in range(2):
        factor, _ = torch.linalg.cholesky_ex(a.mT @ a)
        a = torch.linalg.solve_triangular(factor.mT, a, upper=True, left=False)
    return a


# ---------------------------------------------------------------- heads
def heads(count: int, e: int, device: torch.device) -> Iterator[Row]:
    """One covariance (E, E) per head: the batched solver of torch against its alternatives.

    Yields:
        rows, the CPU last.
    """
    generator = torch.Generator(device).manual_seed(0)
    spread = torch.arange(1, e + 1, dtype=torch.float64, device=device) ** -0.7
    x = torch.randn(count, 4 * e, e, generator=generator, dtype=torch.float64, device=device) * spread
    c = x.mT @ x / (4 * e - 1)
    want = torch.linalg.eigvalsh(c.cpu()).flip(-1)
    size = torch.linalg.matrix_norm(c).max().item()

    def judge(values: Tensor, dtype: torch.dtype = torch.float64) -> Verdict:
        off = (values.double().cpu() - want).abs().max().item() / size
        return Verdict(
            off, (10 * math.sqrt(e) + 40) * unit_roundoff(dtype), {"kind": "variance over the norm"}
        )

    facts = {"n": count, "d": e, "dtype": "float64"}
    single, driver = c.float(), "gesvdj" if c.is_cuda else None
    routes = {
        "torch eigh": lambda: torch.linalg.eigh(c)[0].flip(-1),
        f"torch svd {driver or 'of LAPACK'}": lambda: torch.linalg.svd(c, driver=driver)[1],
        "jacobi": lambda: jacobi_eigh(c)[0],
        "decompose_batch": lambda: pt.decompose_batch(c).spectrum,
        "torch eigh on the CPU and back": lambda: torch.linalg.eigh(c.cpu())[0].flip(-1).to(device),
    }
    flops = 9.0 * count * e**3
    for case, work in routes.items():
        yield Row("heads", case, work, judge, facts, flops, "float64", "9·H·E³", repeats=3)
    yield Row(
        "heads",
        "torch eigh",
        lambda: torch.linalg.eigh(single)[0].flip(-1),
        lambda values: judge(values, torch.float32),
        {**facts, "dtype": "float32"},
        flops,
        "float32",
        "9·H·E³",
        repeats=3,
    )
