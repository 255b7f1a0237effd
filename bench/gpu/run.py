"""The whole check: parts in their order, and whether all of it was right."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch

from bench.gpu import blocks, capture, ceilings, solvers, suite
from bench.gpu.record import REPEATS, Recorder, environment_of, say

PARTS = ("ceilings", "tests", "bench", "capture")


def check(folder: Path | None, device: torch.device, minutes: float, only: tuple[str, ...] = PARTS) -> bool:
    """Run the parts and record every row as it ends, the largest last, and a summary whatever happens.

    Args:
        folder: of `gpu_check.jsonl`; None records nothing.
        device: a CPU runs the same code on small sizes.
        minutes: for all of it.
        only: some of `PARTS`.

    Returns:
        Whether no test failed and no answer was wrong; tests that the time was too short for are neither.
    """
    small = device.type == "cpu"
    gc.freeze()  # what was imported is not gone through before each timed run
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if small:  # on sizes like these threads wait for each other longer than they work
        torch.set_num_threads(1)
    scale = solvers.SMALL if small else solvers.FULL
    recorder = Recorder(folder, device, minutes, repeats=1 if small else REPEATS)
    recorder.line(part="environment", small=small, minutes=minutes, only=only, **environment_of(device))
    finished = False
    try:
        _run(recorder, scale, only, small)
        finished = True
    finally:
        seconds = time.monotonic() - recorder.started
        recorder.line(part="summary", seconds=seconds, finished=finished, **recorder.counts)
        counts = ", ".join(f"{count} {name}" for name, count in recorder.counts.items())
        say(f"{counts} in {seconds:.0f} s")
    return recorder.counts["wrong"] == 0


def _run(recorder: Recorder, scale: solvers.Scale, only: tuple[str, ...], small: bool) -> None:
    if "ceilings" in only:
        ceilings.run(recorder, small)
    if "tests" in only:
        suite.run(recorder)
    if "bench" in only:
        recorder.measure_all("truth", solvers.before(recorder.device, scale))
        blocks.run(recorder, small)
        solvers.run_first(recorder, scale)
    if "capture" in only:
        capture.run(recorder, small)
    if "bench" in only:
        solvers.run_larger(recorder, scale)
