"""What the device can do at most: products in each dtype, and copying."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu.record import Recorder, Row, Verdict

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def run(recorder: Recorder, small: bool) -> None:
    """Measure every ceiling; rows that follow are shares of them."""
    recorder.measure_all("ceilings", rows(recorder, small))


def rows(recorder: Recorder, small: bool) -> Iterator[Row]:
    """Each product and the copy; what the one before reached is noted on the way.

    Yields:
        rows.
    """
    size, copied = (512, 2**24) if small else (8192, 2**32)
    for name, dtype in DTYPES.items():
        yield from _noted(recorder, product(size, name, dtype, recorder.device), name)
    yield from _noted(recorder, copy(copied, recorder.device), "copy")


def product(size: int, name: str, dtype: torch.dtype, device: torch.device) -> Row:
    """A square product C = AB; Cv has to be A(Bv) in float64 for a random v (Freivalds, 1979).

    An entry of C, a sum of n terms of random sign, is off by √n u of its size, here by eight of that; v adds
    up n of them.
    """
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    v = torch.randn(size, generator=generator, device=device, dtype=torch.float64)

    def judge(c: Tensor) -> Verdict:
        off = (c.double() @ v - a.double() @ (b.double() @ v)).abs().max().item() / size
        inner = torch.float32 if dtype == torch.bfloat16 else dtype
        rounding = 8 * size**0.5 * torch.finfo(inner).eps / 2
        return Verdict(off, rounding + 32 * torch.finfo(dtype).eps / 2)  # and that of C, maybe in parts

    facts = {"n": size, "d": size, "dtype": name}
    return Row("ceilings", "product", lambda: a @ b, judge, facts, 2.0 * size**3, model="2·n³")


def copy(size: int, device: torch.device) -> Row:
    """From the device to itself; what is read and what is written counts."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def judge(copied: Tensor) -> Verdict:
        return Verdict(float(not torch.equal(copied, source)), 0.0)

    facts = {"dtype": "uint8", "bytes": size}
    return Row("ceilings", "copy", lambda: target.copy_(source), judge, facts, 2.0 * size, model="2·bytes")


def _noted(recorder: Recorder, row: Row, name: str) -> Iterator[Row]:
    yield row
    seconds = recorder.pace(row)
    if seconds is not None:
        recorder.ceilings[name] = row.flops / seconds
