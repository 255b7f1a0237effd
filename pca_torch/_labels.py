"""What the table and the plot of a report call things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["RANK_SHARES", "clip", "describe", "printable", "short_names"]

RANK_SHARES = ("0.5", "0.9", "0.95", "0.99")  # keys of `rank` in a report


def short_names(names: Sequence[str]) -> tuple[list[str], str]:
    """Site names without the dotted parts that all share, and the pattern that restores them.

    `model.layers.0`, `model.layers.1` are `0`, `1` in `model.layers.*`; a single name stays whole.

    Args:
        names: names of sites, at least one.
    """
    parts = [printable(name).split(".") for name in names]
    room = min(map(len, parts)) - 1 if len(parts) > 1 else 0  # at least one part stays
    head = _shared(parts, room)
    tail = _shared([part[::-1] for part in parts], room - head)
    middle = [".".join(part[head : len(part) - tail]) for part in parts]
    return middle, ".".join([*parts[0][:head], "*", *parts[0][len(parts[0]) - tail :]])


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


def _shared(parts: list[list[str]], most: int) -> int:
    """How many leading parts, `most` at most, all have in common."""
    for i in range(most):
        if len({part[i] for part in parts}) > 1:
            return i
    return most
