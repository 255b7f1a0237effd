"""One row for each method: compared with ours, printed, recorded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from judge import Verdict
from rivals import Method
from rounds import Runs
from workloads import Workload


@dataclass
class Row:
    """One method on one workload and spectrum."""

    method: Method
    runs: Runs
    verdict: Verdict | None = None  # None where there is no answer
    against: str | None = None  # the fastest route of ours that is as right
    ratios: tuple[float, ...] = ()  # to it, within each round

    @property
    def ratio(self) -> float | None:
        """Median of `ratios`."""
        return float(np.median(self.ratios)) if self.ratios else None


def compare(rows: Sequence[Row], limit: float) -> None:
    """Note for each row the fastest of ours that is as right, and the ratios to it.

    Args:
        rows: of one workload and spectrum.
        limit: errors below it are the same.
    """
    answered = [row for row in rows if row.verdict and row.runs.failure is None]
    for row in answered:
        assert row.verdict
        allowed = max(row.verdict.error, limit)
        able = [o for o in answered if o.method.ours and o.verdict and o.verdict.error <= allowed]
        if able:
            best = min(able, key=lambda own: own.runs.median)
            row.against, row.ratios = best.method.title, tuple(row.runs.ratios(best.runs))


def show(workload: Workload, spectrum: str, rows: Sequence[Row], limit: float) -> None:
    """Print the rows in lines of at most 80 columns.

    Args:
        workload: the question.
        spectrum: of the data.
        rows: fastest first.
        limit: errors below it are the same.
    """
    print(f"\n{workload.title}, {spectrum}\nerrors below {limit:.1g} are the same")
    print(f"{'':31}seconds (range)     ratio  error variance")
    for row in rows:
        print(line(row, limit), flush=True)


def line(row: Row, limit: float) -> str:
    """One row as text.

    Args:
        row: of a method.
        limit: errors below it are the same.
    """
    head = f"  {row.method.title:29.29}"
    if row.runs.failure or not row.verdict:
        return f"{head}{row.runs.failure}"[:80]
    variance = "none" if row.verdict.variance is None else f"{row.verdict.variance:.0e}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    errors = f"{row.verdict.error:7.0e}{variance:>8}"
    return f"{head}{seconds(row.runs):19}{ratio:>6}{errors}  {verdict(row, limit)}".rstrip()


def seconds(runs: Runs) -> str:
    """Median and range.

    Args:
        runs: at least one.
    """
    low, high = (f"{s:.2f}" if s < 10 else f"{s:.1f}" for s in (min(runs.taken), max(runs.taken)))
    middle = f"{runs.median:.3f}" if runs.median < 10 else f"{runs.median:.1f}"
    return f"{middle} ({f'{low}-{high}' if len(runs.taken) > 1 else 'once'})"


def verdict(row: Row, limit: float) -> str:
    """A word on a peer that is faster than all of ours that are as right; nothing on others.

    Args:
        row: of a method.
        limit: errors below it are the same.
    """
    if row.method.ours or row.ratio is None or row.verdict is None or row.ratio >= 1:
        return ""
    return "ahead" if row.verdict.error <= limit else "coarser"


def record(
    workload: Workload, spectrum: str, rows: Sequence[Row], limit: float, facts: dict[str, Any], out: Path
) -> None:
    """Append one JSON line for each row to `out/peers.jsonl`.

    Args:
        workload: the question.
        spectrum: of the data.
        rows: of its methods.
        limit: errors below it are the same.
        facts: that hold for all lines.
        out: folder.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "peers.jsonl").open("a", encoding="utf-8") as file:
        for row in rows:
            answered = row.verdict is not None and row.runs.failure is None
            said = {
                "workload": workload.name,
                "title": workload.title,
                "shape": workload.shape,
                "k": workload.k,
                "spectrum": spectrum,
                "package": row.method.package,
                "method": row.method.name,
                "ours": row.method.ours,
                "status": row.runs.failure or "ok",
                "seconds": row.runs.seconds,
                "median": row.runs.median if answered else None,
                "error": row.verdict.error if answered else None,
                "variance": row.verdict.variance if answered else None,
                "facts": row.verdict.facts if answered else {},
                "tolerance": limit,
                "against": row.against,
                "ratio": row.ratio,
                "ratios": row.ratios,
                "verdict": verdict(row, limit),
            }
            file.write(json.dumps({**said, **facts}) + "\n")
