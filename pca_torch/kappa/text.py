"""The table of a study for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from pca_torch._labels import clip, printable
from pca_torch.kappa.routes import Route, Study
from pca_torch.kappa.shifts import DTYPES
from pca_torch.precision import Precision, unit_roundoff

__all__ = ["table"]

WIDTH = 80  # of a terminal
NAMES, COLUMN = 30, 10  # letters of the first three columns, and of each variance beside them
BOTH = 72  # letters of both arithmetics side by side in the table of offsets
NOISY = "*"  # after a variance that the certificate does not trust
LONGEST_NAME = 40


def table(study: Study, width: int = WIDTH) -> Group:
    """The study for a terminal: routes, offsets, and what the signs mean.

    Args:
        study: what `study` made.
        width: letters of a line; a narrow terminal has fewer numbers side by side.
    """
    across = max(1, (width - NAMES) // COLUMN)
    parts: list[Text | Table] = [Text(_heading(study), style="bold")]
    for start in range(0, len(study.truth), across):
        parts.append(_routes(study, slice(start, start + across)))
    parts += [Text(_notes(study), style="dim"), Text("\nThe same samples around an offset", style="bold")]
    every = tuple(DTYPES)
    together = [every] if width >= BOTH else [every[i : i + 1] for i in range(len(every))]
    tables = [_shifts(study, precisions) for precisions in together]
    return Group(*parts, *tables, Text(SHIFT_NOTES, style="dim"))


def _heading(study: Study) -> str:
    name = clip(printable(study.name), LONGEST_NAME)
    what = f"{name}: {study.n_samples:,} samples, {study.n_features:,} features"
    return f"{what}\n{study.condition}"


def _grid(*headers: str) -> Table:
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, header_style="bold")
    for i, header in enumerate(headers):
        grid.add_column(Text(header), justify="right" if i else "left", no_wrap=True)
    return grid


def _routes(study: Study, part: slice) -> Table:
    """Truth and routes for some of the variances, the relative error under each."""
    indices = range(study.first, study.last + 1)[part]
    of = f"of {study.last}"
    grid = _grid("\nroute", f"trusted\n{of}", f"right\n{of}", *(f"\n{f'λ{i}':>8} " for i in indices))
    grid.add_row("truth", "", "", *(f"{value:.1e} " for value in study.truth[part]))
    if study.truth_digits is None:
        grid.add_row("  ± at most", "", "", *(f"{error:.0e} " for error in study.truth_error[part]))
    for precision in DTYPES:
        grid.add_row()
        grid.add_row(Text(precision, style="bold"))
        for route in study.routes:
            if route.precision == precision:
                _add_route(grid, study, route, part)
    return grid


def _add_route(grid: Table, study: Study, route: Route, part: slice) -> None:
    indices = range(study.first, study.last + 1)[part]
    values = zip(indices, route.variances[part], strict=True)
    cells = [f"{value:.1e}{NOISY if i > route.trusted else ' '}" for i, value in values]
    grid.add_row(f"  {route.method}", str(route.trusted), str(route.right), *cells)
    known = zip(route.relative_errors[part], study.truth[part], study.truth_error[part], strict=True)
    grid.add_row("    off by", "", "", *(f"{_error(*each)} " for each in known), style="dim")


def _error(error: float | None, true: float, doubt: float) -> str:
    """A relative error, or what the truth leaves open."""
    if error is None:
        return "-"
    if error == doubt == 0:
        return "0"
    if doubt >= true:
        return "?"
    return f"<{doubt / true:.0e}" if error * true < doubt else f"{error:.0e}"


def _notes(study: Study) -> str:
    roundoff = [unit_roundoff(dtype) for dtype in DTYPES.values()]
    keeps, root = ([f"{u:.0e}" for u in us] for us in (roundoff, [u**0.5 for u in roundoff]))
    lines = [
        "",
        "λ: variances, divisor N, as computed: negative ones are not clamped to zero.",
        "off by: relative error. right: leading variances within 10 % of the truth.",
        "trusted: what the certificate of the route promises, without the truth;",
        f"{NOISY} it calls this variance noise.",
        f"covariance and krylov square X and keep σ above √u·σ₁: {root[0]}·σ₁ in float32,",
        f"{root[1]}·σ₁ in float64. SVD and TSQR keep it above u·σ₁: {keeps[0]}·σ₁, {keeps[1]}·σ₁.",
        "float32 routes round the centred samples too, which alone moves σ by some u·σ₁.",
    ]
    if study.truth_digits is None:
        lines.append("truth: the SVD in float64, which cannot tell what stands beside < and ?.")
    else:
        lines.append(f"truth: exact sums, and their eigenvalues to {study.truth_digits} digits.")
    return "\n".join(lines)


def _shifts(study: Study, precisions: tuple[Precision, ...]) -> Table:
    """One row per offset, with some arithmetics side by side."""
    headers = [f"\n{title}" for title in ("XᵀX-nmmᵀ", "rank", "centred", "rank", "true")]
    grid = _grid("\noffset")
    for precision in precisions:
        for i, header in enumerate(headers):
            title = f"{precision}{header}" if i == 0 else header
            grid.add_column(Text(title), justify="right", no_wrap=True)
    rows: dict[float, list[str]] = {}
    for shift in study.shifts:
        if shift.precision not in precisions:
            continue
        rows.setdefault(shift.offset, []).extend([
            _judged(shift.uncentred, shift.judge),
            str(shift.uncentred_rank),
            _judged(shift.centred, shift.judge),
            str(shift.centred_rank),
            str(shift.true_rank),
        ])
    for offset, cells in rows.items():
        grid.add_row(f"{offset:,.0f}", *(f"  {cell}" for cell in cells))
    return grid


def _judged(error: float, judge: float) -> str:
    return f"<{judge:.0e}" if error < judge else f"{error:.0e}"


SHIFT_NOTES = """
offset: in units of the largest standard deviation, added to every column.
XᵀX-nmmᵀ: samples squared first, their mean m taken off afterwards; it loses
offset²·u of λ₁. centred: `Moments`, which takes the mean off each chunk first.
Both: largest error of any variance, over λ₁. < is the accuracy of the judge.
rank: components for 95 % of the variance by each formula; true: in truth."""
