"""One row for each method: compared with ours, printed, recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from judge import Tolerance, Verdict, as_right
from methods import Method
from pairs import append
from rounds import Runs
from workloads import Workload

FASTER = 0.995  # a ratio below this does not round to 1.00


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


def compare(rows: Sequence[Row], limit: Tolerance) -> None:
    """Note for each row the fastest of ours that is as right, and the ratios to it.

    Args:
        rows: of one workload and spectrum.
        limit: what counts as right.
    """
    answered = [row for row in rows if row.verdict and row.runs.failure is None]
    for row in answered:
        assert row.verdict
        allowed = limit.raised_to(row.verdict)
        able = [
            own
            for own in answered
            if own.method.ours and own.verdict and as_right(own.verdict.error, own.verdict.variance, allowed)
        ]
        if able:
            best = min(able, key=lambda own: own.runs.median)
            row.against, row.ratios = best.method.title, tuple(row.runs.ratios(best.runs))


def show(workload: Workload, spectrum: str, rows: Sequence[Row], limit: Tolerance) -> None:
    """Print the rows in lines of at most 80 columns.

    Args:
        workload: the question.
        spectrum: of the data.
        rows: fastest first.
        limit: what counts as right.
    """
    also = "" if limit.variance is None else f" where every variance is right to {limit.variance:.0%}"
    print(f"\n{workload.title}, {spectrum}\nerrors below {limit.error:.1g} are the same{also}")
    print(f"{'':32}seconds (range)    ratio  error variance")
    for row in rows:
        print(line(row, limit), flush=True)


def line(row: Row, limit: Tolerance) -> str:
    """One row as text.

    Args:
        row: of a method.
        limit: what counts as right.
    """
    head = f"  {row.method.title:29.29} "
    if row.runs.failure or not row.verdict:
        return f"{head}{row.runs.failure}"[:80]
    variance = "none" if row.verdict.variance is None else f"{row.verdict.variance:.0e}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    errors = f"{row.verdict.error:7.0e}{variance:>8}"
    return f"{head}{seconds(row.runs):18}{ratio:>6}{errors}  {verdict(row, limit)}".rstrip()


def seconds(runs: Runs) -> str:
    """Median and range.

    Args:
        runs: at least one.
    """
    low, high = (f"{s:.2f}" if s < 10 else f"{s:.1f}" for s in (min(runs.taken), max(runs.taken)))
    middle = f"{runs.median:.3f}" if runs.median < 10 else f"{runs.median:.1f}"
    return f"{middle} ({f'{low}-{high}' if len(runs.taken) > 1 else 'once'})"


def verdict(row: Row, limit: Tolerance) -> str:
    """A word on a peer that is faster than all of ours that are as right; nothing on others.

    Args:
        row: of a method.
        limit: what counts as right.
    """
    if row.method.ours or row.ratio is None or row.verdict is None or row.ratio >= FASTER:
        return ""
    return "ahead" if as_right(row.verdict.error, row.verdict.variance, limit) else "coarser"


def record(
    workload: Workload,
    spectrum: str,
    rows: Sequence[Row],
    limit: Tolerance,
    facts: dict[str, Any],
    out: Path,
) -> None:
    """Append one JSON line for each row to `out/peers.jsonl`.

    Args:
        workload: the question.
        spectrum: of the data.
        rows: of its methods.
        limit: what counts as right.
        facts: that hold for all lines.
        out: folder.
    """
    about = {
        "workload": workload.name,
        "title": workload.title,
        "shape": workload.shape,
        "k": workload.k,
        "spectrum": spectrum,
        "tolerance": limit.error,
        "tolerance_variance": limit.variance,
    }
    append(out, "peers", ({**about, **_said(row, limit), **facts} for row in rows))


def _said(row: Row, limit: Tolerance) -> dict[str, Any]:
    found = row.verdict if row.runs.failure is None else None
    return {
        "package": row.method.package,
        "method": row.method.name,
        "ours": row.method.ours,
        "status": row.runs.failure or "ok",
        "seconds": row.runs.seconds,
        "median": row.runs.median if found else None,
        "error": found.error if found else None,
        "variance": found.variance if found else None,
        "facts": found.facts if found else {},
        "against": row.against,
        "ratio": row.ratio,
        "ratios": row.ratios,
        "verdict": verdict(row, limit),
    }
