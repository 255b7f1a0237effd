"""The stored results of peers.py, and their tables in Markdown."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import suites
from judge import Tolerance, as_right
from pairs import lines_of
from rows import FASTER

Line = dict[str, Any]
MEANING = {  # by what is asked: the error by which methods are compared
    "few": "share of the variance that the best directions hold and these do not",
    "all": "largest of |λ - true| / λ₁, ‖Cv - true·v‖ / λ₁ and |VVᵀ - I|",
}
AIMS = {"stream": 10.0, "loop": 10.0, "import": 0.3}  # times, times, seconds
MISSES = (1e-4, 2e-2)  # share of the variance that an incremental SVD of a stream misses


def stored(folder: Path) -> list[Line]:
    """The lines of the last run of each question and spectrum, in the order of the first.

    Args:
        folder: of `peers.jsonl`.
    """
    lines = lines_of(folder, "peers")
    last = {(line["title"], line["spectrum"]): line["run"] for line in lines}
    return [line for line in lines if line["run"] == last[line["title"], line["spectrum"]]]


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
    """Whether there is an answer that is right."""
    limit = Tolerance(line["tolerance"], line["tolerance_variance"])
    return line["error"] is not None and as_right(line["error"], line["variance"], limit)


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
        spectra = grouped(lines, "spectrum")
        names = [spectrum for (spectrum,) in spectra]
        heads = [f"{spectrum}, right below {tolerance(own[0])}" for (spectrum,), own in spectra.items()]
        found += ["", f"**{title[0].upper()}{title[1:]}**; error: {meaning(lines[0])}.", ""]
        found += [f"| | {' | '.join(heads)} |", "|---|" + "---|" * len(names)]
        found += [row(method, own, names) for (_, method), own in ranked(lines)]
        found += ["", *silent(lines)]
    return found[1:]


def tolerance(line: Line) -> str:
    """What counts as right."""
    also = "" if line["tolerance_variance"] is None else f" (and {line['tolerance_variance']:.0e})"
    return f"{line['tolerance']:.0e}{also}"


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
    return f"{ratio:.2f}×" if ratio < FASTER else f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


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
    """One line for each question and spectrum: our fastest right route against the right peer that is best.

    Args:
        folder: of `peers.jsonl`.
    """
    found = [
        "| job | data | here | error | best peer as right | its time | its error | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (title, spectrum), lines in grouped(stored(folder), "title", "spectrum").items():
        ours = min((line for line in lines if line["ours"] and right(line)), key=_median, default=None)
        peer = best_peer(lines)
        here = ["none is right", ""] if ours is None else [f"{ours['method']}, {seconds(ours)}", error(ours)]
        there = ["none is right", "", "", ""]
        if peer:
            ratio = "" if peer["ratio"] is None else times(peer["ratio"])
            ahead = " **ahead**" if peer["verdict"] == "ahead" else ""
            there = [name(peer), seconds(peer), error(peer), f"{ratio}{ahead}"]
        found.append(f"| {' | '.join([title, spectrum, *here, *there])} |")
    return found


def best_peer(lines: Sequence[Line]) -> Line | None:
    """The right peer with the smallest ratio to ours; where nothing of ours is right, the fastest.

    Args:
        lines: of one question and spectrum.
    """
    able = [line for line in lines if right(line) and not line["ours"]]
    compared = [line for line in able if line["ratio"] is not None]
    return min(compared, key=lambda line: line["ratio"]) if compared else min(able, key=_median, default=None)


def _median(line: Line) -> float:
    return line["median"]


def error(line: Line) -> str:
    """One digit."""
    return f"{line['error']:.0e}"


# ---------------------------------------------------------------- what is aimed at
def claims(folder: Path) -> list[str]:
    """What is aimed at, what was measured, and whether that is so.

    Args:
        folder: of `peers.jsonl` and `suites.jsonl`.
    """
    found = [*_streams(folder), *_ahead(folder), *_heads(folder), *_import(folder)]
    rows = (f"| {claim} | {figure} | {'yes' if met else '**no**'} |" for claim, figure, met in found)
    return ["| aim | measured | met |", "|---|---|---|", *rows]


Claim = tuple[str, str, bool]


def _lines(folder: Path, workload: str) -> dict[tuple, list[Line]]:
    lines = (line for line in stored(folder) if line["workload"] == workload)
    return grouped(lines, "title", "spectrum")


def _found(lines: Sequence[Line], method: str) -> Line | None:
    """The line of a method that was compared with ours."""
    return next((line for line in lines if name(line) == method and line["ratio"] is not None), None)


def _streams(folder: Path) -> list[Claim]:
    found = []
    for (title, spectrum), lines in _lines(folder, "streaming").items():
        peer = _found(lines, "sklearn IncrementalPCA")
        ours = None if peer is None else _found(lines, peer["against"])
        if peer and ours:
            met = peer["ratio"] >= AIMS["stream"] and right(ours) and MISSES[0] <= peer["error"] <= MISSES[1]
            figure = f"{times(peer['ratio'])}; it misses {error(peer)}, here {error(ours)}"
            claim = f"{title}, {spectrum}: {AIMS['stream']:.0f}× faster than scikit-learn's `IncrementalPCA`"
            found.append((f"{claim}, and right where that is not", figure, met))
    return found


def _ahead(folder: Path) -> list[Claim]:
    found = []
    for workload in ("top", "share"):
        for (title, spectrum), lines in _lines(folder, workload).items():
            peer = best_peer(lines)
            if peer and peer["ratio"] is not None:
                figure = f"the best of them, {name(peer)}, takes {times(peer['ratio'])} the time"
                claim = f"{title}, {spectrum}: no peer that is as right is faster"
                found.append((claim, figure, peer["ratio"] >= FASTER))
    return found


def _heads(folder: Path) -> list[Claim]:
    found = []
    for (title, _), lines in _lines(folder, "heads").items():
        for method in ("loop over full", "loop over auto"):
            peer = _found(lines, f"sklearn {method}")
            if peer:
                claim = f"{title}: 1/{AIMS['loop']:.0f} of the time of scikit-learn's {method}"
                figure = f"1/{peer['ratio']:.1f}; its error {error(peer)}, {error_of_ours(lines, peer)} here"
                found.append((claim, figure, peer["ratio"] >= AIMS["loop"]))
    return found


def error_of_ours(lines: Sequence[Line], peer: Line) -> str:
    """Of the route that a peer was compared with.

    Args:
        lines: of one question and spectrum.
        peer: one of them.
    """
    ours = _found(lines, peer["against"])
    return "-" if ours is None else error(ours)


def _import(folder: Path) -> list[Claim]:
    found = []
    for line in suites.stored(folder):
        if line["suite"] == "import":
            added = line["beside"]["added_seconds"]
            claim = f"`import pca_torch` adds at most {AIMS['import']} s to `import torch`"
            found.append((claim, f"{added:.2f} s", added <= AIMS["import"]))
    return found
