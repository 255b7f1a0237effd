"""The table of a report for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pca_torch._labels import RANK_SHARES, clip, describe, excluded, printable, short_names
from pca_torch.head_table import head_tables

__all__ = ["render_table"]

NOISY = "*"  # after a rank that counts variances at or below the rounding floor
MOST_PLACES = 2  # positions that are listed
LONGEST_NAME = 24  # characters of a site
LONGEST_EMPTY = 40  # characters of a site without tokens
MOST_EMPTY = 4  # of them that are named
RIGHT = ("tokens", "D", "PR", "top")  # columns of single numbers
WRAPPED = ("site", "verdict")

View = Mapping[str, Any]


def render_table(report: Mapping[str, Any]) -> Group:
    """The report as tables for the terminal, with a heading and the notes they need.

    Ranks stand side by side for the typical tokens and for all tokens; the participation ratio and the
    share of the first direction are those of the typical tokens. Heads follow in tables of their own.

    Args:
        report: what `report_dict` made or `read_report` read.
    """
    sites, parts, common = list(report["sites"].values()), [], []
    if sites:
        names, pattern = short_names(list(report["sites"]))
        columns, common = _columns(names, sites)
        if pattern != "*":
            common.insert(0, f"sites: {pattern}")
        parts = [_site_table(columns), Text("\n".join(_notes(sites)), style="dim")]
    heading = "\n".join(filter(None, [*describe(report), excluded(report), ", ".join(common)]))
    for table in head_tables(report["heads"]):
        parts += [Text(), table]
    below = Text("\n".join(_without_numbers(report)), style="dim")
    return Group(Text(heading), *([] if sites else [Text()]), *parts, *([below] if below else []))


def _site_table(columns: Mapping[str, list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="bold")
    for header in columns:
        justify = "right" if header in RIGHT else "left"
        no_wrap = header not in WRAPPED
        text = Text(header if "\n" in header else f"\n{header}")
        table.add_column(text, justify=justify, no_wrap=no_wrap, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _without_numbers(report: Mapping[str, Any]) -> list[str]:
    """Sites that have no row of their own, or share one."""
    lines = []
    if empty := report["empty"]:
        listed = [clip(printable(name), LONGEST_EMPTY) for name in empty[:MOST_EMPTY]]
        more = f" and {len(empty) - MOST_EMPTY} more" if len(empty) > MOST_EMPTY else ""
        lines.append(f"no token, or a single one, reached {', '.join(listed)}{more}.")
    if shared := report["shared"]:
        follow, other = (
            ("1 site sees", "shares") if len(shared) == 1 else (f"{len(shared)} sites see", "share")
        )
        lines.append(f"{follow} the same tensor as another and {other} its numbers.")
    return lines


def _columns(names: list[str], sites: list[dict[str, Any]]) -> tuple[dict[str, list[str]], list[str]]:
    """Cells under each header, and phrases for what is the same at every site."""
    typical, every = [site["typical"] for site in sites], [site["all_tokens"] for site in sites]
    columns = {"site": [clip(name, LONGEST_NAME) for name in names]}
    common = []
    tokens, d = [view["n_samples"] for view in every], [site["n_features"] for site in sites]
    for header, values, phrase in (("tokens", tokens, "{:,} tokens each"), ("D", d, "D = {:,}")):
        if len(set(values)) > 1:
            columns[header] = [str(value) for value in values]
        else:
            common.append(phrase.format(values[0]))
    for gap, title, views in (("", "typical", typical), (" ", "all", every)):
        header, *cells = _side_by_side([["50", "90", "95", "99%"], *map(_ranks, views)])
        columns[f"{gap}rank, {title}\n{gap}{header}"] = [gap + cell for cell in cells]
    columns["PR"] = [_number_text(view["participation_ratio"]) for view in typical]
    columns["top"] = [f"{100 * view['top_share']:.0f}%" for view in typical]
    columns["extreme"] = [_extreme_text(site["extreme"]) for site in sites]
    columns["verdict"] = [printable(site["verdict"]) for site in sites]
    return columns, common


def _ranks(view: View) -> list[str]:
    """The rank for each share, marked where it counts noise or is beyond what was computed."""
    known, floor = view["explained_variance"], view["certificate"]["rounding_floor"]
    above = sum(value > (floor or 0) for value in known)
    ranks = [view["rank"][share] for share in RANK_SHARES]
    return [f">{len(known)}" if rank is None else f"{rank}{NOISY if rank > above else ''}" for rank in ranks]


def _side_by_side(rows: list[list[str]]) -> list[str]:
    """Rows of short texts as lines with aligned columns; the mark hangs to the right of its number."""
    columns = []
    for column in zip(*rows, strict=True):
        hang = any(text.endswith(NOISY) for text in column)
        texts = [text if text.endswith(NOISY) or not hang else text + " " for text in column]
        columns.append([text.rjust(max(map(len, texts))) for text in texts])
    return [" ".join(line) for line in zip(*columns, strict=True)]


def _number_text(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _extreme_text(extreme: Mapping[str, Any]) -> str:
    """How many, where if at one or two positions, and what share of the variance."""
    if not extreme["count"]:
        return "none"
    places = list(extreme["positions"])
    where = f"@{','.join(places)}" if 0 < len(places) <= MOST_PLACES else ""
    return f"{extreme['count']}{where}{'' if extreme['exact'] else '~'}, {100 * extreme['trace_share']:.0f}%"


def _notes(sites: list[dict[str, Any]]) -> list[str]:
    """What the signs in the table mean, where they occur."""
    views = [site[name] for site in sites for name in ("typical", "all_tokens")]
    text = [rank for view in views for rank in _ranks(view)]
    notes = [
        "rank: components for that share of the variance, without and with extreme rows.",
        "PR: participation ratio; top: share of the first component; both typical.",
        "extreme: rows of extreme norm @ position, their share of the variance.",
        "verdict: rank for 95% in percent of D, or what stands in its way.",
    ]
    if any(rank.endswith(NOISY) for rank in text):
        notes.append(f"{NOISY} counts variances at or below the rounding floor.")
    if any(rank.startswith(">") for rank in text):
        notes.append("> and ? need more variances than were computed.")
    if any(site["extreme"]["count"] and not site["extreme"]["exact"] for site in sites):
        notes.append("~ a few rows near the threshold may be on the wrong side of it.")
    return notes
