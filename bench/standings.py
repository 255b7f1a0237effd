"""The stored results of peers.py, and their tables in Markdown."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
MEANING = {  # by what is asked: the error by which methods are compared
    "few": "share of the variance that the best directions hold and these do not",
    "all": "largest |λ - true| / λ₁",
}


def stored(folder: Path) -> list[Line]:
    """The last line of each question, spectrum and method, in the order of the first.

    Args:
        folder: of `peers.jsonl`.
    """
    path = folder / "peers.jsonl"
    if not path.exists():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return list({(line["title"], line["spectrum"], name(line)): line for line in lines}.values())


def name(line: Line) -> str:
    """Package and method."""
    return f"{line['package']} {line['method']}"


def grouped(lines: Iterable[Line], *keys: str) -> dict[tuple, list[Line]]:
    """Lines by some of their values, in their order.

    Args:
        lines: of `stored`.
        keys: of a line.
    """
    found: dict[tuple, list[Line]] = {}
    for line in lines:
        found.setdefault(tuple(line[key] for key in keys), []).append(line)
    return found


def right(line: Line) -> bool:
    """Whether there is an answer whose error is within the tolerance."""
    return line["error"] is not None and line["error"] <= line["tolerance"]


def seconds(line: Line) -> str:
    """The median, with a mark where it is of one run."""
    value = line["median"]
    once = "†" if sum(s is not None for s in line["seconds"]) == 1 else ""
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f} s{once}"


def meaning(line: Line) -> str:
    """What the error of a line is."""
    return MEANING["all" if line["k"] is None else "few"]


# ---------------------------------------------------------------- every method
def peers(folder: Path) -> list[str]:
    """One table for each question: the methods, fastest first, against the spectra.

    Args:
        folder: of `peers.jsonl`.
    """
    found = []
    for (title,), lines in grouped(stored(folder), "title").items():
        spectra = list(grouped(lines, "spectrum"))
        limits = " and ".join(dict.fromkeys(f"{line['tolerance']:.0e}" for line in lines))
        head = f"**{title[0].upper()}{title[1:]}**: {meaning(lines[0])}, the same below {limits}."
        names = [spectrum for (spectrum,) in spectra]
        found += ["", head, "", f"| | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
        found += [row(method, own, names) for (_, method), own in ranked(lines)]
        found += ["", *silent(lines)]
    return found[1:]


def ranked(lines: Sequence[Line]) -> list[tuple[tuple, list[Line]]]:
    """Methods that answered anywhere, by their geometric mean of seconds.

    Args:
        lines: of one question.
    """
    answered = grouped((line for line in lines if line["median"]), "package", "method")

    def speed(item: tuple[tuple, list[Line]]) -> float:
        return sum(math.log(line["median"]) for line in item[1]) / len(item[1])

    return sorted(answered.items(), key=speed)


def row(method: str, lines: Sequence[Line], spectra: Sequence[str]) -> str:
    """One method.

    Args:
        method: its name within the package.
        lines: where it answered.
        spectra: the columns.
    """
    by_spectrum = {line["spectrum"]: cell(line) for line in lines}
    label = f"{lines[0]['package']} {method}"
    label = f"**{label}**" if lines[0]["ours"] else label
    return f"| {label} | {' | '.join(by_spectrum.get(spectrum, 'no answer') for spectrum in spectra)} |"


def cell(line: Line) -> str:
    """Seconds, ratio, the error, and that of the variances."""
    ratio = "" if line["ratio"] is None else f", {times(line['ratio'])}"
    ahead = ", **ahead**" if line["verdict"] == "ahead" else ""
    variance = "" if line["variance"] is None else f" ({line['variance']:.0e})"
    return f"{seconds(line)}{ratio}{ahead}; {line['error']:.0e}{variance}"


def times(ratio: float) -> str:
    """A ratio with two digits."""
    return f"{ratio:.2f}×" if ratio < 0.995 else f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def silent(lines: Sequence[Line]) -> list[str]:
    """A sentence on the methods that have no answer at all, by what they say instead.

    Args:
        lines: of one question.
    """
    answered = {name(line) for line in lines if line["median"]}
    without = {name(line): line["status"] for line in lines if name(line) not in answered}
    by_reason: dict[str, list[str]] = {}
    for method, reason in without.items():
        by_reason.setdefault(reason, []).append(method)
    said = [f"{', '.join(methods)} ({reason})" for reason, methods in by_reason.items()]
    return [f"No answer: {'; '.join(said)}."] if said else []


# ---------------------------------------------------------------- in short
def summary(folder: Path) -> list[str]:
    """One line for each question and spectrum: our fastest right route against the fastest right peer.

    Args:
        folder: of `peers.jsonl`.
    """
    found = [
        "| job | data | here | error | fastest peer as right | its time | its error | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (title, spectrum), lines in grouped(stored(folder), "title", "spectrum").items():
        able = sorted((line for line in lines if right(line)), key=lambda line: line["median"])
        ours = next((line for line in able if line["ours"]), None)
        rival = next((line for line in able if not line["ours"]), None)
        here = ["none is right", ""] if ours is None else [f"{ours['method']}, {seconds(ours)}", error(ours)]
        there = ["none is right", "", "", ""]
        if rival:
            ratio = "" if rival["ratio"] is None else times(rival["ratio"])
            ahead = " **ahead**" if rival["verdict"] == "ahead" else ""
            there = [name(rival), seconds(rival), error(rival), f"{ratio}{ahead}"]
        found.append(f"| {' | '.join([title, spectrum, *here, *there])} |")
    return found


def error(line: Line) -> str:
    """One digit."""
    return f"{line['error']:.0e}"
