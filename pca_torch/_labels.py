"""What the table and the plot of a report call things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "CENTRINGS",
    "CERTIFIED",
    "RANK_SHARES",
    "clip",
    "describe",
    "excluded",
    "printable",
    "short_names",
]

RANK_SHARES = ("0.5", "0.9", "0.95", "0.99")  # keys of `rank` in a report
CENTRINGS = ("centred", "uncentred")  # of heads
ROOM = 12  # characters of a single name, which has no others to share its parts with
CERTIFIED = ("captured_ratio", "missed_ratio_bound", "rounding_floor", "trusted")  # of each head


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Site names without the dotted parts and the point that all share, and the pattern that restores them.

    `model.layers.0:output`, `model.layers.1:output` are `0`, `1` in `model.layers.*:output`. A single name
    keeps the last parts that fit a narrow column, as `layers.10` in `model.*:output`.

    Args:
        names: names of sites, at least one.
    """
    if len(names) == 1:
        short, pattern = _last_parts(printable(names[0]))
        return [short], pattern
    paths, points = zip(*[_split_point(printable(name)) for name in names], strict=True)
    point = points[0] if len(set(points)) == 1 else ""
    if not point:
        paths = [path + own for path, own in zip(paths, points, strict=True)]
    parts = [path.split(".") for path in paths]
    room = min(map(len, parts)) - 1  # at least one part stays
    head = _shared(parts, room)
    tail = _shared([part[::-1] for part in parts], room - head)
    middle = [".".join(part[head : len(part) - tail]) for part in parts]
    return middle, ".".join([*parts[0][:head], "*", *parts[0][len(parts[0]) - tail :]]) + point


def describe(report: Mapping[str, Any]) -> tuple[str, str]:
    """The model and the token counts of a report as two short phrases.

    Args:
        report: what `report_dict` makes; `model` is called by its `name` or `id`.
    """
    model, tokens = report["model"], report["tokens"]
    name = model.get("name") or model.get("id") or "unnamed model"
    if model.get("quantisation"):
        name = f"{name}, {model['quantisation']}"
    counts = [
        f"{n:,} {what.removeprefix('n_').replace('_', ' ')}"
        for what, n in tokens.items()
        if isinstance(n, int) and n and n is not True
    ]
    return printable(str(name)), printable(f"tokens: {', '.join(counts) or 'not counted'}")


def excluded(report: Mapping[str, Any]) -> str:
    """Why tokens were left out, and how many for each reason, as a short phrase; empty if none were.

    Args:
        report: what `report_dict` makes; `tokens` may hold counts by reason as `excluded`.
    """
    reasons = report["tokens"].get("excluded")
    if not isinstance(reasons, Mapping):
        return ""
    counts = [f"{n:,} {what}" for what, n in reasons.items() if isinstance(n, int) and n and n is not True]
    return printable(f"excluded: {', '.join(counts)}") if counts else ""


def printable(text: str) -> str:
    """`text` with � for characters that would move the cursor or colour the terminal.

    Args:
        text: anything that was read from a file.
    """
    return "".join(c if c.isprintable() else "�" for c in text)


def clip(text: str, longest: int) -> str:
    """`text` with … for its middle where it is too long: names differ at either end.

    Args:
        text: a name.
        longest: characters that are left at most.
    """
    head = longest // 2
    return text if len(text) <= longest else f"{text[:head]}…{text[head + 1 - longest :]}"


def _last_parts(name: str) -> tuple[str, str]:
    """As many of the last parts of one name as fit, at least one, and the pattern that restores it."""
    if len(name) <= ROOM:
        return name, "*"
    path, point = _split_point(name)
    parts = path.split(".")
    head = len(parts) - 1
    while head and len(".".join(parts[head - 1 :])) <= ROOM:
        head -= 1
    return ".".join(parts[head:]), ".".join([*parts[:head], "*"]) + point


def _shared(parts: list[list[str]], most: int) -> int:
    """How many leading parts, `most` at most, all have in common."""
    for i in range(most):
        if len({part[i] for part in parts}) > 1:
            return i
    return most


def _split_point(name: str) -> tuple[str, str]:
    """The path of a site, and its point with the colon, or nothing."""
    path, colon, point = name.rpartition(":")
    return (path, colon + point) if colon else (name, "")
