"""What a report read from disk must hold before anything in it is shown."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

from pca_torch._labels import CENTRINGS, CERTIFIED, RANK_SHARES, printable

__all__ = ["VERSION", "check_report"]

VERSION = 2  # 1 knew no heads, and no sites that are empty or shared
VIEWS = ("typical", "all_tokens")


def check_report(report: Any) -> dict[str, Any]:
    """The report as the present version has it, if all that the table and the plot use is right.

    Args:
        report: what JSON gave.

    Raises:
        ValueError: what is wrong, and where.
    """
    _check(report, _ANY_VERSION, "report")
    if report["version"] == 1:
        report = {**report, "version": VERSION, "heads": {}, "empty": [], "shared": {}}
    _check(report, _REPORT, "report")
    if not report["sites"] and not report["heads"]:
        raise ValueError("report must hold at least one site, in `sites` or in `heads`")
    for name, site in report["sites"].items():
        _check_site(f"site {printable(name)}", site)
    for name, site in report["heads"].items():
        _check_heads(f"heads {printable(name)}", site)
    return report


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


def _check_site(where: str, site: Any) -> None:
    """Compare one site with its schema, and its numbers with each other.

    Raises:
        ValueError: a view has more variances than features, or a rank beyond its variances.
    """
    _check(site, _SITE, where)
    for key in VIEWS:
        known = len(site[key]["explained_variance"])
        if known > site["n_features"]:
            raise ValueError(f"{where}.{key} has {known} variances of {site['n_features']} features")
        if max(site[key]["rank"][share] or 0 for share in RANK_SHARES) > known:
            raise ValueError(f"{where}.{key} has a rank beyond its {known} variances")


def _check_heads(where: str, site: Any) -> None:
    """Compare the heads of one site with their schema, and the lists with the heads.

    Raises:
        ValueError: a list of another length, more variances than features, or a rank beyond them.
    """
    _check(site, _HEADS, where)
    for view, centring in product(VIEWS, CENTRINGS):
        found, place = site[view][centring], f"{where}.{view}.{centring}"
        lists = [found[key] for key in ("total_variance", "explained_variance", "participation_ratio")]
        lists += [found["rank"][share] for share in RANK_SHARES]
        lists += [found["certificate"][name] for name in CERTIFIED]
        if any(len(values) != site["heads"] for values in lists):
            raise ValueError(f"{place} must have one value for each of {site['heads']} heads")
        if max(found["participation_ratio"]) > site["width"] * (1 + 1e-6):
            raise ValueError(f"{place} has a participation ratio beyond its {site['width']} features")
        for head, variances in enumerate(found["explained_variance"]):
            if len(variances) > site["width"]:
                raise ValueError(f"{place} has {len(variances)} variances of {site['width']} features")
            if max(found["rank"][share][head] for share in RANK_SHARES) > len(variances):
                raise ValueError(f"{place} has a rank beyond its {len(variances)} variances")


def _is_number(value: Any) -> bool:
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return numeric and 0 <= value <= sys.float_info.max


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_null(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or predicate(value)


def _list_of(predicate: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(predicate, value))


def _is_positions(value: Any) -> bool:
    return isinstance(value, dict) and all(map(str.isdecimal, value)) and all(map(_is_count, value.values()))


def _is_texts_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


def _is_pair(value: Any) -> bool:
    return _list_of(_is_number)(value) and len(value) == 2


_COUNT = (_is_count, "an integer ≥ 0")
_POSITIVE = (lambda value: _is_count(value) and value > 0, "an integer > 0")
_NUMBER = (_is_number, "a finite number ≥ 0")
_COUNT_OR_NULL = (_or_null(_is_count), "an integer ≥ 0 or null")
_NUMBER_OR_NULL = (_or_null(_is_number), "a finite number ≥ 0 or null")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TEXT = (_is_text, "a text")
_NUMBERS = (_list_of(_is_number), "a list of finite numbers ≥ 0")
_PAIR = (_is_pair, "two finite numbers ≥ 0")
_OBJECT: dict[str, Any] = {}  # with any content
_VIEW = {
    "n_samples": _COUNT,
    "total_variance": _NUMBER,
    "explained_variance": _NUMBERS,
    "rank": dict.fromkeys(RANK_SHARES, _COUNT_OR_NULL),
    "participation_ratio": _NUMBER_OR_NULL,
    "effective_rank": _NUMBER_OR_NULL,
    "top_share": _NUMBER,
    "certificate": {"rounding_floor": _NUMBER_OR_NULL},
}
_EXTREME = {
    "count": _COUNT,
    "positions": (_is_positions, "an object of integers by position"),
    "trace_share": _NUMBER,
    "heavy_tailed": _FLAG,
    "exact": _FLAG,
}
_SITE = {
    "n_features": _POSITIVE,
    "extreme": _EXTREME,
    "verdict": _TEXT,
    "typical": _VIEW,
    "all_tokens": _VIEW,
}
_SPECTRA = {
    "total_variance": _NUMBERS,
    "explained_variance": (_list_of(_list_of(_is_number)), "lists of finite numbers ≥ 0"),
    "rank": dict.fromkeys(RANK_SHARES, (_list_of(_is_count), "a list of integers ≥ 0")),
    "participation_ratio": _NUMBERS,
    "over_heads": {"rank": dict.fromkeys(RANK_SHARES, _PAIR), "participation_ratio": _PAIR},
    "certificate": dict.fromkeys(CERTIFIED, _NUMBERS),
}
_HEADS_VIEW = {"n_samples": _COUNT, **dict.fromkeys(CENTRINGS, _SPECTRA)}
_HEADS = {
    "heads": _POSITIVE,
    "width": _POSITIVE,
    "kind": _TEXT,
    "rope": (lambda value: value in ("pre", "post", None), '"pre", "post" or null'),
    "layer": _COUNT_OR_NULL,
    "extreme": _EXTREME,
    "typical": _HEADS_VIEW,
    "all_tokens": _HEADS_VIEW,
}
_ANY_VERSION = {
    "version": (lambda value: type(value) is int and value in (1, VERSION), f"1 or {VERSION}"),
}
_REPORT = {
    "model": _OBJECT,
    "tokens": _OBJECT,
    "settings": _OBJECT,
    "sites": _OBJECT,
    "heads": _OBJECT,
    "empty": (_list_of(_is_text), "a list of texts"),
    "shared": (_is_texts_by_name, "an object of texts"),
}
