"""Rows of a run: timed within their cap, judged, and on the disk before the next one starts."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.pairs import environment, timed, waiting_for

CAP = 20.0  # seconds of one row; a call on a GPU cannot be interrupted, so it is estimated before
ROW_SECONDS = 6.0  # of a row with its repeats; one that takes longer runs once
REPEATS = 3
SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Verdict:
    """How wrong an answer is, and how wrong it may be."""

    error: float
    bound: float | None  # None: this route promises nothing
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """NaN is not."""
        return math.isfinite(self.error) and (self.bound is None or self.error <= self.bound)


@dataclass(frozen=True)
class Row:
    """One thing to run."""

    part: str
    case: str
    run: Callable[[], Any]
    judge: Callable[[Any], Verdict]
    facts: Mapping[str, Any] = field(default_factory=dict)  # size, dtype, spectrum
    flops: float = 0.0  # of the algorithm, or bytes of a copy
    limit: str | None = None  # the ceiling that they run against
    model: str = ""  # the formula of `flops`
    repeats: int = REPEATS
    control: bool = False  # wrong on purpose: it must be called wrong

    @property
    def pace(self) -> tuple[str, ...]:
        """What the same code on other sizes and spectra is known by."""
        return self.part, self.case, str(self.facts.get("dtype"))


class Recorder:
    """Measures rows one after the other.

    Args:
        folder: where `gpu_check.jsonl` is appended to; None records nothing.
        device: what the rows run on.
        minutes: that the whole run may take.
        repeats: runs of a row at most, after the first.
    """

    def __init__(
        self, folder: Path | None, device: torch.device, minutes: float, repeats: int = REPEATS
    ) -> None:
        self.device = device
        self.wait = waiting_for(str(device))
        self.repeats = repeats
        self.deadline = time.monotonic() + 60 * minutes
        self.started = time.monotonic()
        self.ceilings: dict[str, float] = {}  # flops or bytes a second
        self.counts = {"rows": 0, "wrong": 0, "failed": 0, "skipped": 0, "unfinished": 0}
        self._run = datetime.now(UTC).isoformat(timespec="seconds")
        self._paces: dict[tuple[str, ...], tuple[float, float]] = {}
        self._path = None if folder is None else folder / "gpu_check.jsonl"
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        """Seconds to the end of the run."""
        return self.deadline - time.monotonic()

    def line(self, **facts: Any) -> None:
        """Append one line; it survives whatever happens next."""
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": self._run, **facts}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def measure(self, row: Row) -> Any:
        """Run, time, judge and record a row; its answer, or None where there is none."""
        facts = {"part": row.part, "case": row.case, **row.facts}
        estimate = self._estimate(row)
        if estimate > min(CAP, self.left):
            why = f"would take {estimate:.0f} s" if estimate > CAP else "the time is up"
            return self.skip(why, **facts)
        try:
            times, peak, answer = self._timed(row)
            verdict = row.judge(answer)
        except Exception as error:  # whatever it is, the next row runs
            return self.fault(error, **facts)
        finally:
            free(self.device)
        seconds = statistics.median(times)
        self._paces[row.pace] = seconds, row.flops
        ok = verdict.ok is not row.control
        self.counts["rows"] += 1
        self.counts["wrong"] += not ok
        share = self._share(row, seconds)
        self.line(
            **facts,
            **{"seconds": seconds, "times": times, "error": verdict.error, "bound": verdict.bound, "ok": ok},
            **{"control": row.control, "peak_bytes": peak, "flops": row.flops, "model": row.model},
            **{"limit": row.limit, "of_limit": share},
            **verdict.facts,
        )
        self._say(facts, f"{seconds:7.2g} s {verdict.error:.0e}{'' if ok else ' WRONG'}")
        return answer

    def pace(self, row: Row) -> float | None:
        """Seconds of a row that was measured."""
        return self._paces.get(row.pace, (None,))[0]

    def measure_all(self, part: str, rows: Iterable[Row]) -> None:
        """Measure rows as they are made; where making one fails, that is recorded and the others are lost.

        Args:
            part: what they belong to.
            rows: made one by one, with their data.
        """
        try:
            for row in rows:
                self.measure(row)
        except Exception as error:
            self.fault(error, part=part, case="data")
        finally:
            free(self.device)

    def skip(self, why: str, **facts: Any) -> None:
        """Record what is not even begun.

        Args:
            why: a clause.
            facts: what it would have been, `case` among them.
        """
        self._missing(facts, "skipped", why)

    def fault(self, error: BaseException, **facts: Any) -> None:
        """Record what failed.

        Args:
            error: how.
            facts: what it would have been, `case` among them.
        """
        self._missing(facts, "failed", f"{type(error).__name__}: {_first_line(error)}")

    def _timed(self, row: Row) -> tuple[list[float], int | None, Any]:
        """Seconds of each run, the peak of the memory, and the last answer; the first run is for warmth."""
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        first, answer = timed(row.run, self.wait)
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
        room = max(0.0, min(self.left, ROW_SECONDS - first))
        repeats = min(row.repeats, self.repeats, int(room / max(first, 1e-6)))
        times = []
        for _ in range(repeats):
            answer = None  # the last answer makes room for the next
            seconds, answer = timed(row.run, self.wait)
            times.append(seconds)
        return times or [first], peak, answer

    def _estimate(self, row: Row) -> float:
        """Seconds that the row will take, by what the same code took at another size."""
        seconds, flops = self._paces.get(row.pace, (0.0, 0.0))
        return seconds * max(1.0, row.flops / flops) if flops else seconds

    def _share(self, row: Row, seconds: float) -> float | None:
        """Part of the ceiling that was reached."""
        if row.limit not in self.ceilings or not row.flops:
            return None
        return row.flops / seconds / self.ceilings[row.limit]

    def _missing(self, facts: Mapping[str, Any], kind: str, why: str) -> None:
        """Record a row that has no answer; torch's own failures are findings, ours are faults."""
        fault = kind == "failed" and not str(facts["case"]).startswith("torch")
        self.counts[kind] += 1
        self.line(**facts, **{kind: why, "ok": not fault})
        self.counts["wrong"] += fault
        self._say(facts, f"{kind.removesuffix('ped').removesuffix('ed')}: {why}")

    def _say(self, facts: Mapping[str, Any], text: str) -> None:
        kind = SHORT.get(str(facts.get("dtype")), "")
        size = f"{facts['n']}×{facts['d']}" if "n" in facts else ""
        words = f"{facts['case']:26.26} {kind:4} {facts.get('spectrum', ''):7} {size:>11}"
        say(f"{time.monotonic() - self.started:3.0f} s {words} {text}")


def environment_of(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    known = {**environment(str(device)), "device_type": device.type}
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        known |= {
            "device": torch.cuda.get_device_name(device),
            "capability": f"{major}.{minor}",
            "cuda": torch.version.cuda,
            "driver": _driver(),
            "memory_bytes": torch.cuda.mem_get_info(device)[1],
        }
    return known


def free(device: torch.device) -> None:
    """Give cached memory back, so that no row has less than another; nothing where CUDA has broken down."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # after an illegal access every call fails, this one too
            torch.cuda.empty_cache()


def say(text: str) -> None:
    """One line of at most 80 columns, at once."""
    print(text if len(text) <= 80 else text[:79] + "…", flush=True)


def spectral_norm(symmetric: Tensor) -> float:
    """The 2-norm of a symmetric matrix; `matrix_norm` would take an SVD."""
    return torch.linalg.eigvalsh(symmetric).abs().max().item()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]


def _driver() -> str | None:
    """Version of the driver, from its own library."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    words = [word for word in text.split() if word[:1].isdigit() and "." in word]
    return words[0] if words else None
