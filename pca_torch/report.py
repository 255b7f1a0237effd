"""The report of a run: one dictionary, as JSON on disk and as a table on the terminal."""

from __future__ import annotations

import json
import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from pca_torch import spectrum
from pca_torch._files import replacing
from pca_torch._labels import RANK_SHARES, printable
from pca_torch.result import ExtremeRows, PCAResult, SiteReport
from pca_torch.table import render_table

__all__ = ["read_report", "render_table", "report_dict", "verdict", "write_report"]

VERSION = 1
HIDDEN = 4  # rows hide a layer when they divide its rank by this
ENOUGH = 2  # tokens per feature below which the rank still grows with the tokens
LOW, FULL = 0.25, 0.75  # share of the D dimensions that 95 % of the variance take


def report_dict(
    sites: Mapping[str, SiteReport],
    model: Mapping[str, Any],
    tokens: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of a run, in JSON types alone.

    `explained_variance` is every variance that was computed. A rank or dimension that needs more than
    those is null, and so is a number that is not finite.

    Args:
        sites: what was measured, in order of depth.
        model: what was run; its `name` or `id` heads the outputs.
        tokens: counts, such as "seen" and "padding".
        settings: how it was run.

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
        "sites": {name: _site(site) for name, site in sites.items()},
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
        _check(report, _REPORT, "report")
        for name, site in report["sites"].items():
            _check_site(name, site)
    except RecursionError:
        raise ValueError(f"{path} is no report of pca-torch: it is nested too deeply.") from None
    except ValueError as error:  # also a text that is not UTF-8
        raise ValueError(f"{path} is no report of pca-torch: {error}") from error
    return report


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
        "extreme": _extreme(report.extreme),
        "verdict": "",
        "typical": _view(report.typical),
        "all_tokens": _view(report.all_tokens),
    }
    return site | {"verdict": verdict(site)}


def _extreme(rows: ExtremeRows) -> dict[str, Any]:
    fields = asdict(rows)
    return fields | {"positions": {str(place): count for place, count in sorted(rows.positions.items())}}


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


def _check(value: Any, schema: Any, where: str) -> None:
    """Compare with a schema: a dictionary of schemas, or a predicate with its description.

    Raises:
        ValueError: `value` differs, with the place where.
    """
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {reprlib.repr(value)}")
        for key, inner in schema.items():
            if key not in value:
                raise ValueError(f"{where} has no `{key}`")
            _check(value[key], inner, f"{where}.{key}")
    else:
        fits, what = schema
        if not fits(value):
            raise ValueError(f"{where} must be {what}, got {reprlib.repr(value)}")


def _check_site(name: str, site: Any) -> None:
    """Compare one site with its schema, and its numbers with each other.

    Raises:
        ValueError: a view has more variances than features, or a rank beyond its variances.
    """
    where = f"site {printable(name)}"
    _check(site, _SITE, where)
    for key in ("typical", "all_tokens"):
        known = len(site[key]["explained_variance"])
        if known > site["n_features"]:
            raise ValueError(f"{where}.{key} has {known} variances of {site['n_features']} features")
        if max(site[key]["rank"][share] or 0 for share in RANK_SHARES) > known:
            raise ValueError(f"{where}.{key} has a rank beyond its {known} variances")


def _is_number(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and 0 <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _or_null(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or predicate(value)


def _is_positions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(str.isdecimal, value)) and all(map(_is_count, value.values()))


def _is_variances(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


_COUNT = (_is_count, "an integer ≥ 0")
_NUMBER = (_is_number, "a finite number ≥ 0")
_COUNT_OR_NULL = (_or_null(_is_count), "an integer ≥ 0 or null")
_NUMBER_OR_NULL = (_or_null(_is_number), "a finite number ≥ 0 or null")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_OBJECT: dict[str, Any] = {}  # with any content
_VIEW = {
    "n_samples": _COUNT,
    "total_variance": _NUMBER,
    "explained_variance": (_is_variances, "a list of finite numbers ≥ 0"),
    "rank": dict.fromkeys(RANK_SHARES, _COUNT_OR_NULL),
    "participation_ratio": _NUMBER_OR_NULL,
    "effective_rank": _NUMBER_OR_NULL,
    "top_share": _NUMBER,
    "certificate": {"rounding_floor": _NUMBER_OR_NULL},
}
_SITE = {
    "n_features": (lambda value: _is_count(value) and value > 0, "an integer > 0"),
    "extreme": {
        "count": _COUNT,
        "positions": (_is_positions, "an object of integers by position"),
        "trace_share": _NUMBER,
        "heavy_tailed": _FLAG,
        "exact": _FLAG,
    },
    "verdict": (lambda value: isinstance(value, str), "a text"),
    "typical": _VIEW,
    "all_tokens": _VIEW,
}
_REPORT = {
    "version": (lambda value: value is not True and value == VERSION, f"{VERSION}"),
    "model": _OBJECT,
    "tokens": _OBJECT,
    "settings": _OBJECT,
    "sites": (lambda value: isinstance(value, dict) and bool(value), "an object with at least one site"),
}
