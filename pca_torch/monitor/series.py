"""What a dashboard plots of a record, and under which path."""

from __future__ import annotations

from collections.abc import Sequence

from pca_torch.monitor.record import Alert, SpectrumRecord, View

__all__ = ["GROUP", "SPECTRUM", "metric_names", "path", "scalars", "step_of"]

GROUP: dict[View, str] = {"typical": "pca", "all": "pca_all"}  # the first part of a tag groups panels
SPECTRUM = "spectrum_log10"  # the tag of the histogram


def path(record: SpectrumRecord) -> str:
    """The start of its tags: `pca/model.layers.3:output`, of a head in all tokens `pca_all/…:query/head5`."""
    head = "" if record.head is None else f"/head{record.head}"
    return f"{GROUP[record.view]}/{record.site}{head}"


def scalars(record: SpectrumRecord) -> dict[str, float]:
    """The metrics that are defined, and the counts to judge them by: rows, and variances lost in rounding."""
    facts: dict[str, float] = {
        "n_samples": record.n_samples,
        "below_rounding": _n_variances(record) - record.trusted,
    }
    if record.view == "all":
        facts["extreme_share"] = record.extreme_share
    return facts | {name: value for name, value in record.metrics.items() if value is not None}


def metric_names(records: Sequence[SpectrumRecord]) -> list[str]:
    """Every metric that one of the records has, in their order."""
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def step_of(records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> int:
    """The step at which all of them were measured; there is one at least."""
    return next(iter((*records, *alerts))).step


def _n_variances(record: SpectrumRecord) -> int:
    return record.index[-1] if record.index else 0
