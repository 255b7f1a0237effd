"""How the table and the picture of a report arrange its heads: by kind, by place, before and after RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pca_torch._labels import clip, short_names

__all__ = ["KINDS", "STATES", "Row", "Site", "by_kind", "rows_of"]

KINDS = {"k": "keys", "v": "values", "q": "queries"}  # in this order; others follow under their own name
STATES = {"pre": "before RoPE", "post": "after RoPE", None: "without RoPE"}
LONGEST_NAME = 20  # characters of a row's label

Site = Mapping[str, Any]  # one entry under `heads`
Row = dict[str | None, Site]  # what one place has to say, by state


def by_kind(heads: Mapping[str, Site]) -> dict[str, dict[str, Site]]:
    """The sites of each kind by name: keys, values, queries, then what else there is.

    Args:
        heads: the entries under `heads` of a report.
    """
    found = dict.fromkeys(site["kind"] for site in heads.values())
    kinds = [kind for kind in KINDS if kind in found] + [kind for kind in found if kind not in KINDS]
    return {kind: {name: site for name, site in heads.items() if site["kind"] == kind} for kind in kinds}


def rows_of(sites: Mapping[str, Site]) -> tuple[list[Row], list[str]]:
    """Sites of one kind with those of one module in one row, and what the rows are called.

    Args:
        sites: by name; a row is called by its layer where that tells the rows apart.
    """
    rows: dict[str, Row] = {}
    for name, site in sites.items():
        place = name.rpartition(":")[0] or name
        if site["rope"] in rows.get(place, {}):
            place = name
        rows.setdefault(place, {})[site["rope"]] = site
    layers = [next(iter(row.values()))["layer"] for row in rows.values()]
    if None not in layers and len(set(layers)) == len(layers):
        return list(rows.values()), [str(layer) for layer in layers]
    return list(rows.values()), [clip(name, LONGEST_NAME) for name in short_names(list(rows))[0]]
