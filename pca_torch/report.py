"""The report of a run: one dictionary, as JSON on disk and as a table on the terminal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pca_torch import spectrum
from pca_torch._files import replacing
from pca_torch._labels import RANK_SHARES
from pca_torch.head_report import extreme_entry, heads_entry
from pca_torch.heads import HeadsReport
from pca_torch.report_schema import VERSION, check_report
from pca_torch.result import PCAResult, SiteReport
from pca_torch.table import render_table

__all__ = ["read_report", "render_table", "report_dict", "verdict", "write_report"]

HIDDEN = 4  # rows hide a layer when they divide its rank by this
ENOUGH = 2  # tokens per feature below which the rank still grows with the tokens
LOW, FULL = 0.25, 0.75  # share of the D dimensions that 95 % of the variance take


def report_dict(
    sites: Mapping[str, SiteReport | HeadsReport],
    model: Mapping[str, Any],
    tokens: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    empty: Sequence[str] = (),
    shared: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The report of a run, in JSON types alone.

    `explained_variance` is every variance that was computed. A rank or dimension that needs more than
    those is null, and so is a number that is not finite. Sites of heads stand under `heads`.

    Args:
        sites: what was measured, in order of depth.
        model: what was run; its `name` or `id` heads the outputs.
        tokens: counts, such as "seen" and "padding"; under "excluded" those left out, by reason.
        settings: how it was run.
        empty: names of sites that saw no token, such as an expert that none was sent to.
        shared: sites that saw the same tensor as another, each with the one whose numbers it has.

    Raises:
        ValueError: `sites` is empty.
    """
    if not sites:
        raise ValueError("`sites` must hold at least one site, got none.")
    return _strict({
        "version": VERSION,
        "model": model,
        "tokens": tokens,
        "settings": settings,
        "sites": {name: _site(site) for name, site in sites.items() if isinstance(site, SiteReport)},
        "heads": {name: heads_entry(site) for name, site in sites.items() if isinstance(site, HeadsReport)},
        "empty": list(empty),
        "shared": dict(shared or {}),
    })


def write_report(path: str | os.PathLike[str], report: Mapping[str, Any]) -> None:
    """Write a report as strict JSON; an existing file is replaced as a whole.

    Args:
        path: the file.
        report: what `report_dict` made.
    """
    text = json.dumps(report, allow_nan=False, ensure_ascii=False)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a report and check all that the table and the plot use.

    Args:
        path: a file of `write_report`; the errors of a file that cannot be opened are left as they are.

    Raises:
        ValueError: it is something else, damaged, or of another version.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        return check_report(report)
    except RecursionError:
        raise ValueError(f"{path} is no report of pca-torch: it is nested too deeply.") from None
    except ValueError as error:  # also a text that is not UTF-8
        raise ValueError(f"{path} is no report of pca-torch: {error}") from error


def verdict(site: Mapping[str, Any]) -> str:
    """A few words (34 characters at most) on one site of a report.

    The first of these that holds, rank being that for 95 % of the variance:

    1. "no variance": all typical rows are equal.
    2. "heavy-tailed norms": over 5 % of the rows are extreme, so that both views are the same.
    3. "sink@0 hides 263" or "126 rows hide 263": with those extreme rows the rank is at
       most a quarter of what it is without them. "263+" if 4. or 5. holds as well.
    4. "few tokens: 900 for D=576": fewer than 2·D typical tokens, the rank would grow with more.
    5. "over 128 of 576 dims": the variances that were computed do not reach 95 %.
    6. "low-rank", "moderate" or "near full", with the rank in percent of D: below 25 %, below 75 %, more.

    Args:
        site: one entry of `sites` in a report.
    """
    typical, extreme, d = site["typical"], site["extreme"], site["n_features"]
    rank, rank_all = typical["rank"]["0.95"], site["all_tokens"]["rank"]["0.95"]
    known = len(typical["explained_variance"])
    least = known + 1 if rank is None else rank
    few = typical["n_samples"] < ENOUGH * d
    if typical["total_variance"] == 0:
        return "no variance"
    if extreme["heavy_tailed"]:
        return "heavy-tailed norms"
    if extreme["count"] and rank_all and HIDDEN * rank_all <= least:
        return f"{_who_hides(extreme)} {least - rank_all}{'+' if few or rank is None else ''}"
    if few:
        return f"few tokens: {typical['n_samples']} for D={d}"
    if rank is None:
        return f"over {known} of {d} dims"
    word = "low-rank" if rank < LOW * d else "moderate" if rank < FULL * d else "near full"
    return f"{word}, {100 * rank / d:.0f}%"


def _who_hides(extreme: Mapping[str, Any]) -> str:
    places = list(extreme["positions"])
    if len(places) == 1 and extreme["positions"][places[0]] == extreme["count"]:
        return f"sink@{places[0]} hides"
    return f"{extreme['count']} rows hide"


def _site(report: SiteReport) -> dict[str, Any]:
    site = {
        "n_features": report.typical.n_features,
        "extreme": extreme_entry(report.extreme),
        "verdict": "",
        "typical": _view(report.typical),
        "all_tokens": _view(report.all_tokens),
    }
    return site | {"verdict": verdict(site)}


def _view(result: PCAResult) -> dict[str, Any]:
    return {
        "n_samples": result.n_samples,
        "total_variance": result.total_variance.item(),
        "explained_variance": result.spectrum.tolist(),
        "rank": {share: _if_known(spectrum.rank, result, float(share)) for share in RANK_SHARES},
        "participation_ratio": _if_known(spectrum.participation_ratio, result),
        "effective_rank": _if_known(spectrum.effective_rank, result),
        "top_share": spectrum.top_share(result),
        "certificate": result.certificate.to_dict(),
    }


def _if_known(function: Callable[..., Any], *args: Any) -> Any:
    """None where `function` refuses because too few variances were computed."""
    try:
        return function(*args)
    except ValueError:
        return None


def _strict(value: Any) -> Any:
    """`value` in types that JSON has; what is not finite becomes None, any other type its text."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value)


def _refuse_constant(text: str) -> None:
    """JSON has no NaN and no Infinity.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{text} is no JSON")
