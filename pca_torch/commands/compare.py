"""`pca-torch compare`: do the layers of two runs use the same directions?"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pca_torch._labels import clip, printable, short_names
from pca_torch.commands.common import AsJson, View, progress_bar, show

if TYPE_CHECKING:
    from pca_torch.comparison import Comparison, SiteComparison
    from pca_torch.subspace import CapturedShare

__all__ = ["compare", "comparison_table"]

LONGEST_NAME = 13  # characters of a site
MOST_SIGMAS = 999
WIDE = 0.01  # a captured share is shown as a range when its ends are further apart
HEADERS = (
    *("site", "k", "over-\nlap", "chance", "σ", "angle°\nmean", "max"),
    *("A in\nB", "B in\nA", "rank 95%\nA → B"),
)
LEFT = ("site", "rank 95%\nA → B")
LISTED = 4  # sites of one file alone that are named


def compare(
    a: Annotated[Path, typer.Argument(help="A folder that `run` wrote, a basis file, or a statistic file.")],
    b: Annotated[Path, typer.Argument(help="The other one.")],
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Directions compared; none is the smaller rank for 95%.")
    ] = None,
    view: Annotated[View, typer.Option(help="Tokens of a statistic file: typical or all.")] = "typical",
    as_json: AsJson = False,
) -> None:
    """Compare the principal directions of two runs, site by site."""
    from pca_torch import comparison

    sides = [comparison.open_side(path, view) for path in (a, b)]
    with progress_bar() as progress:
        common = set(sides[0].names) & set(sides[1].names)
        found = comparison.compare(*sides, k=k, progress=progress("comparing", len(common)))
    for difference in found.differences:
        warnings.warn(f"{difference}: what differs below may come from that.", stacklevel=2)
    show(found.to_dict(), as_json, [], comparison_table(found))


def comparison_table(found: Comparison) -> Group:
    """A comparison as a table for the terminal, 80 columns wide.

    Args:
        found: what `comparison.compare` made.
    """
    names, pattern = short_names([site.name for site in found.sites])
    heading = [f"{letter}: {_side(about)}" for letter, about in (("A", found.a), ("B", found.b))]
    heading += [f"sites: {pattern}"] if pattern != "*" else []
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header in HEADERS:
        text = Text(header if "\n" in header else f"\n{header}")
        justify = "left" if header in LEFT else "right"
        table.add_column(text, justify=justify, no_wrap=header != "site", overflow="fold")
    for name, site in zip(names, found.sites, strict=True):
        table.add_row(*map(Text, [clip(name, LONGEST_NAME), *_cells(site)]))
    return Group(Text("\n".join(heading)), table, Text("\n".join(_notes(found)), style="dim"))


def _cells(site: SiteComparison) -> list[str]:
    """The numbers of one row; of several heads the mean, with the spread below."""
    degrees = 180 / math.pi
    columns = (
        _over(site, lambda group: group.k, ".0f"),
        _over(site, lambda group: group.overlap, ".3f"),
        f"{sum(group.chance.mean for group in site.groups) / len(site.groups):.3f}",
        _sigmas(site.sigmas),
        _over(site, lambda group: None if group.mean_angle is None else group.mean_angle * degrees, ".1f"),
        _over(
            site, lambda group: None if group.largest_angle is None else group.largest_angle * degrees, ".1f"
        ),
        _retained([group.a_in_b for group in site.groups], [group.a_in_a for group in site.groups]),
        _retained([group.b_in_a for group in site.groups], [group.b_in_b for group in site.groups]),
        f"{_rank(site, 'rank_a')} → {_rank(site, 'rank_b')}",
    )
    return list(columns)


def _over(site: SiteComparison, value, form: str) -> str:
    found = site.over_groups(value)
    if found is None:
        return "–"
    mean, spread = found
    return f"{mean:{form}}" + (f"\n±{spread:{form}}" if len(site.groups) > 1 else "")


def _sigmas(sigmas: float | None) -> str:
    if sigmas is None:
        return "–"
    return (
        f">{MOST_SIGMAS}"
        if sigmas > MOST_SIGMAS
        else f"{sigmas:.0f}"
        if abs(sigmas) >= 10
        else f"{sigmas:.1f}"
    )


def _retained(inside: list[CapturedShare], own: list[float]) -> str:
    """Percent of what the own directions hold that those of the other file hold too."""
    whole = sum(own)
    if whole <= 0:
        return "–"
    low, high = sum(share.low for share in inside) / whole, sum(share.high for share in inside) / whole
    return f"{100 * low:.0f}–{100 * high:.0f}%" if high - low > WIDE else f"{50 * (low + high):.1f}%"


def _rank(site: SiteComparison, which: str) -> str:
    found = site.over_groups(lambda group: getattr(group, which))
    return "?" if found is None else f"{found[0]:.0f}"


def _side(about) -> str:
    model = f", {about['model']}" if about["model"] else ""
    view = f", {about['view']} tokens" if about["view"] else ""
    return printable(f"{about['path']}{model}{view}")


def _notes(found: Comparison) -> list[str]:
    notes = [
        "overlap: mean squared cosine of the angles between k directions of A and of B.",
        "chance: overlap of random directions; σ: standard deviations above that.",
        "A in B: variance of A within the k directions of B, of that within its own k.",
    ]
    if any(len(site.groups) > 1 for site in found.sites):
        notes.append("± spread over the heads of a site.")
    for letter, names in (("A", found.only_in_a), ("B", found.only_in_b)):
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            notes.append(printable(f"only in {letter}: {', '.join(names[:LISTED])}{more}"))
    return notes
