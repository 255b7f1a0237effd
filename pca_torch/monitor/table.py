"""The table of a run for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pca_torch._labels import clip, printable, short_names
from pca_torch.monitor.history import History, SiteHistory
from pca_torch.monitor.metrics import METRICS, logged_names
from pca_torch.monitor.record import Alert

__all__ = ["WIDTH", "run_table"]

WIDTH = 80  # of a terminal
COLUMNS = (  # metrics shown where none are asked for, as far as they are logged and fit
    *("rank_95", "effective_rank", "participation_ratio"),
    *("alpha_req", "drift_start", "total_variance"),
)
TITLES = {
    "participation_ratio": "PR",
    "effective_rank": "effective\nrank",
    "total_variance": "total\nvariance",
}
NOTES = {
    "participation_ratio": "PR: participation ratio.",
    "alpha_req": "alpha_req: exponent of the decay of the variances, λ {span} at most.",
    "drift_start": "drift_start: 1 - mean cos² of the angles between V_k at the start and the end.",
}
GAP = 2  # blanks between columns: one of the grid, one of padding
LONGEST_NAME = 18  # characters of a site
LONGEST_PATTERN = 36
MOST_ALARMS = 10  # that are listed
SHORTEST_RULE = 16
VARIES = 1.05  # N is told once where it varies by less
DRIFT = "drift_"
NONE = "–"


def run_table(history: History, width: int = WIDTH) -> Group:
    """A run as text: the first and the last value of a few metrics at each site, then the alarms.

    Args:
        history: what `arrange` made.
        width: letters of a line; columns that do not fit are named below.
    """
    sites = [site.name for site in history.sites]
    short, pattern = short_names(sites)
    names = [clip(name, LONGEST_NAME) for name in short]
    left = {"site": names} | _sizes(history.sites)
    asked = history.metrics if history.chosen else _asked(history.metrics)
    cells = {metric: [_cell(metric, site.values(metric)) for site in history.sites] for metric in asked}
    shown = _fitting(cells, width - sum(_width(*column) + GAP for column in left.items()))
    parts = [
        Text("\n".join(_heading(history, pattern))),
        _grid([*left.items(), *((_header(metric), cells[metric]) for metric in shown)]),
        Text("\n".join(_notes(history, {metric: cells[metric] for metric in shown}, asked)), style="dim"),
    ]
    return Group(*parts, *_alarms(history.alerts, dict(zip(sites, names, strict=True)), width))


def _asked(metrics: Sequence[str]) -> list[str]:
    """What is shown where nothing is asked for: metrics of the user's own, then the usual ones."""
    own = [name for name in metrics if name not in logged_names(METRICS)]
    return [*own, *(name for name in COLUMNS if name in metrics)] or list(metrics)


def _fitting(cells: Mapping[str, list[str]], room: int) -> list[str]:
    """The metrics whose columns fit, tried in their order."""
    shown = []
    for metric, column in cells.items():
        needed = _width(_header(metric), column)
        if needed <= room:
            shown.append(metric)
            room -= needed + GAP
    return shown


def _header(metric: str) -> str:
    return TITLES.get(metric) or printable(metric).replace("_", "\n", 1)


def _heading(history: History, pattern: str) -> list[str]:
    """What was run and how it was watched."""
    run, steps = history.run, history.steps
    span = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"
    first = [str(run.get("model", "unnamed model")), span, f"{len(steps):,} logged", f"{history.view} tokens"]
    lines = [", ".join(first), f"windows: {_window(run)}"]
    for each in history.resumed:
        lines.append(f"resumed at step {each.step:,} with other {', '.join(each.changed)}")
    sites = "" if pattern == "*" else f"sites: {clip(pattern, LONGEST_PATTERN)}"
    some = len(history.sites) < history.n_logged
    part = f"{len(history.sites)} of {history.n_logged} sites" if some else ""
    lines.append(", ".join(filter(None, [sites, part, _common_n(history.sites), _common_d(history.sites)])))
    return [printable(line) for line in lines if line]


def _window(run: Mapping[str, Any]) -> str:
    """The sampling in words."""
    decay = run.get("decay")
    of = f"{run.get('window', '?')} of every {run.get('every_n_steps', '?')} steps"
    return of if decay is None else f"{of}, earlier ones weigh {decay}, {decay}², …"


def _common_n(sites: Sequence[SiteHistory]) -> str:
    """N where it is much the same everywhere, and what the weights leave of it."""
    every = [n for site in sites for n in site.n_samples]
    if _varies(every):
        return ""
    weighed = min(site.n_effective for site in sites)
    return (
        f"N = {_span(every)} tokens each{f', {weighed:,.0f} by weight' if weighed < min(every) - 0.5 else ''}"
    )


def _common_d(sites: Sequence[SiteHistory]) -> str:
    widths = {site.n_features for site in sites}
    return f"D = {widths.pop():,}" if len(widths) == 1 else ""


def _sizes(sites: Sequence[SiteHistory]) -> dict[str, list[str]]:
    """Columns of what differs from site to site, or from step to step."""
    columns = {}
    if any(site.heads for site in sites) and len({site.heads for site in sites}) > 1:
        columns["heads"] = [str(site.heads or "") for site in sites]
    if not _common_n(sites):
        columns["tokens N"] = [_tokens(site.n_samples) for site in sites]
    if not _common_d(sites):
        columns["D"] = [str(site.n_features) for site in sites]
    return columns


def _tokens(n: Sequence[int]) -> str:
    return _arrow(str(n[0]), str(n[-1])) if _varies(n) else str(n[-1])


def _varies(n: Sequence[int]) -> bool:
    return max(n) > VARIES * min(n)


def _grid(columns: Sequence[tuple[str, list[str]]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for header, _ in columns:
        text = Text(header if "\n" in header else f"\n{header}")
        table.add_column(text, justify="left" if header == "site" else "right", no_wrap=True)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _width(header: str, cells: Sequence[str]) -> int:
    return max(cell_len(text) for text in [*header.split("\n"), *cells])


def _cell(metric: str, values: Sequence[float | None]) -> str:
    """The first and the last value; of a drift the last alone, as it begins with nothing."""
    last = _number(values[-1])
    return last if metric.startswith(DRIFT) else _arrow(_number(values[0]), last)


def _arrow(first: str, last: str) -> str:
    return first if first == last else f"{first}→{last}"


def _number(value: float | None) -> str:
    """Three digits, as short as they can be."""
    if value is None:
        return NONE
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, exponent = f"{value:.1e}".split("e")
        return f"{digits}e{int(exponent)}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:#.3g}"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _notes(history: History, shown: Mapping[str, list[str]], asked: Sequence[str]) -> list[str]:
    """What the columns mean, and what bounds the numbers."""
    sites = history.sites
    notes = ["first → last step."] if len(history.steps) > 1 else []
    if any(site.heads for site in sites):
        notes.append("of heads: the mean, over those that have the number.")
    notes += [text.format(span=history.fit_span) for metric, text in NOTES.items() if metric in shown]
    if any(NONE in cell for cells in shown.values() for cell in cells):
        notes.append(f"{NONE}: not defined at that step.")
    notes += _bounds(sites)
    if unshown := [metric for metric in asked if metric not in shown]:
        notes.append(f"no room for {', '.join(map(printable, unshown))}: see --json.")
    return notes


def _bounds(sites: Sequence[SiteHistory]) -> list[str]:
    """What too few tokens do to ranks."""
    short = [site for site in sites if site.is_short]
    if not short:
        return []
    n, d = [n for site in short for n in site.n_samples], [site.n_features for site in short]
    if len(short) == len(sites) and max(n) <= min(d):
        return [f"N = {_span(n)} tokens bound every rank: N - 1 at most, of D = {_span(d)}."]
    where = f"the ranks of {len(short)} of {len(sites)} sites" if len(sites) > 1 else "the ranks"
    when = "" if max(n) <= min(d) else ", in some windows"
    return [f"N = {min(n):,} tokens bound {where}, D = {_span(d)}{when}."]


def _alarms(alerts: Sequence[Alert], names: Mapping[str, str], width: int) -> list[Text]:
    """The first alarms, a line each, and how many more there are."""
    if not alerts:
        return [Text("\nno alarms")]
    listed = alerts[:MOST_ALARMS]
    steps = [f"step {alert.step:,}" for alert in listed]
    values = [_value(alert) for alert in listed]
    rules = [printable(alert.rule) for alert in listed]
    taken = _longest(steps) + _longest(values) + 3 * GAP
    where = _places(listed, {name: printable(name) for name in names})
    if _longest(where) + _longest(rules) + taken > width:
        where = _places(listed, names)
    room = max(SHORTEST_RULE, width - taken - _longest(where))
    rules = [clip(rule, room) for rule in rules]
    padded = [[cell.ljust(_longest(column) + GAP) for cell in column] for column in (steps, where, rules)]
    lines = [f"{len(alerts):,} alarm{'s' * (len(alerts) > 1)}"]
    lines += ["".join(cells) for cells in zip(*padded, values, strict=True)]
    if (more := len(alerts) - MOST_ALARMS) > 0:
        lines.append(f"and {more:,} more, the last at step {alerts[-1].step:,}")
    return [Text(), Text("\n".join(lines))]


def _places(alerts: Sequence[Alert], names: Mapping[str, str]) -> list[str]:
    return [names[a.site] + ("" if a.head is None else f" head {a.head}") for a in alerts]


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts))


def _value(alert: Alert) -> str:
    value = _number(alert.value)
    change = value if alert.before is None else f"{_number(alert.before)}→{value}"
    return change if alert.view == "typical" else f"{change}, {alert.view} tokens"
