"""The tables of a report that are about heads: one for keys, one for values, and so on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, pstdev
from typing import Any

from rich.text import Text

from pca_torch._labels import CENTRINGS, printable
from pca_torch.head_rows import KINDS, STATES, Row, Site, by_kind, rows_of

__all__ = ["head_tables"]

WIDTH = 80  # columns of the terminal
SHARES = ("0.9", "0.95", "0.99")
NOISY = "*"  # after a rank that counts variances at or below the rounding floor


@dataclass(frozen=True)
class _Block:
    """Columns under one title, all of one decomposition of one state."""

    rope: str | None
    centring: str

    def spectra(self, row: Row, view: str) -> Mapping[str, Any] | None:
        """What one row has to say here, if anything."""
        site = row.get(self.rope)
        return None if site is None else site[view][self.centring]


def head_tables(heads: Mapping[str, Site]) -> list[Text]:
    """A table for each kind of heads: a row per layer, the rank for 90, 95 and 99 % as mean ± std over heads.

    Centred and uncentred stand side by side, and so do keys before and after RoPE; where that takes more
    than 80 columns, in whole numbers, and where it still does, one table below the other.

    Args:
        heads: the entries under `heads` of a report.
    """
    return [_table(kind, sites) for kind, sites in by_kind(heads).items()]


def _table(kind: str, sites: Mapping[str, Site]) -> Text:
    """One kind of heads."""
    rows, labels = rows_of(sites)
    states = [state for state in STATES if any(state in row for row in rows)]
    blocks = [_Block(state, centring) for state, centring in product(states, CENTRINGS)]
    by_centring = [[block for block in blocks if block.centring == centring] for centring in CENTRINGS]
    layouts = [([blocks], 1), ([blocks], 0), (by_centring, 1), (by_centring, 0)]
    lines: list[str] = []
    for parts, digits in layouts:
        lines = [line for part in parts for line in _lines(rows, labels, part, digits)]
        if max(map(len, lines)) <= WIDTH:
            break
    place = "layer" if labels[0].isdecimal() else "module"
    text = Text(
        f"{KINDS.get(kind, printable(kind))} by {place}: {_title(list(sites.values()))}\n", style="bold"
    )
    text.append("\n".join(lines), style="not bold")
    text.append("\n" + "\n".join(_notes(rows, blocks, lines)), style="not bold dim")
    return text


def _title(sites: Sequence[Site]) -> str:
    heads, widths = ({site[key] for site in sites} for key in ("heads", "width"))
    count = " or ".join(map(str, sorted(heads)))
    width = " or ".join(map(str, sorted(widths)))
    return f"rank of each of {count} {'head' if heads == {1} else 'heads'}, E = {width}"


def _lines(rows: Sequence[Row], labels: Sequence[str], blocks: Sequence[_Block], digits: int) -> list[str]:
    """Header, a line per layer, and the mean over layers of typical and of all tokens."""
    labels, views = list(labels), [([row], "typical") for row in rows]
    if len(rows) > 1:
        labels, views = [*labels, "mean"], [*views, (rows, "typical")]
    if any(site["extreme"]["count"] for row in rows for site in row.values()):
        labels, views = [*labels, "all"], [*views, (rows, "all_tokens")]
    columns = [_column(["", "", "", *labels], str.rjust)]
    for before, block in zip([None, *blocks], blocks, strict=False):
        cells = [
            _column(
                [
                    f"{100 * float(share):.0f}%",
                    *(_cell(some, block, view, share, digits) for some, view in views),
                ],
                str.rjust,
            )
            for share in SHARES
        ]
        body = [" ".join(line) for line in zip(*cells, strict=True)]
        state = STATES[block.rope] if before is None or block.rope != before.rope else ""
        columns.append(_column([state, block.centring, *body], str.ljust))
    lines = ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
    return lines if any(block.rope for block in blocks) else lines[1:]


def _column(texts: Sequence[str], justify: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, texts))
    return [justify(text, width) for text in texts]


def _cell(rows: Sequence[Row], block: _Block, view: str, share: str, digits: int) -> str:
    """Mean ± std over the heads of some rows, marked where a rank counts noise."""
    found = [spectra for row in rows if (spectra := block.spectra(row, view)) is not None]
    ranks = [rank for spectra in found for rank in spectra["rank"][share]]
    if not ranks:
        return "-"
    trusted = [count for spectra in found for count in spectra["certificate"]["trusted"]]
    noisy = any(rank > above for rank, above in zip(ranks, trusted, strict=True))
    return _mean_and_std(ranks, digits) + (NOISY if noisy else "")


def _mean_and_std(values: Sequence[float], digits: int) -> str:
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean}±{pstdev(values):.{digits}f}"


def _notes(rows: Sequence[Row], blocks: Sequence[_Block], lines: Sequence[str]) -> list[str]:
    """What the signs mean, and the participation ratio over all layers."""
    notes = ["mean ± std over heads, typical tokens; mean: over all layers and heads."]
    if any(line.lstrip().startswith("all ") for line in lines):
        notes.append("all: the same with extreme rows.")
    states = list(dict.fromkeys(block.rope for block in blocks))
    for state in states:
        ratios = {
            centring: [
                ratio
                for row in rows
                if state in row
                for ratio in row[state]["typical"][centring]["participation_ratio"]
            ]
            for centring in CENTRINGS
        }
        found = ", ".join(f"{_mean_and_std(values, 1)} {centring}" for centring, values in ratios.items())
        where = "" if states == [None] else f" {STATES[state]}"
        notes.append(f"participation ratio{where}: {found}.")
    sites = [site for row in rows for site in row.values()]
    if any(site["typical"]["n_samples"] < 2 * site["width"] for site in sites):
        notes.append("fewer than 2E tokens: the ranks would grow with more.")
    if any(NOISY in line for line in lines):
        notes.append(f"{NOISY} counts variances at or below the rounding floor.")
    return notes
