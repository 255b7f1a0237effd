"""What a report says of the heads of one site: ranks of each head, and their mean and spread over heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import Any

from pca_torch import spectrum
from pca_torch._labels import CERTIFIED, RANK_SHARES
from pca_torch.heads import Heads, HeadsReport
from pca_torch.result import ExtremeRows

__all__ = ["extreme_entry", "heads_entry"]


def heads_entry(report: HeadsReport) -> dict[str, Any]:
    """One site under `heads` of a report: lists over the H heads, and [mean, std] over them.

    Args:
        report: what was measured.
    """
    return {
        "heads": report.heads,
        "width": report.width,
        "kind": report.kind,
        "rope": report.rope,
        "layer": report.layer,
        "extreme": extreme_entry(report.extreme),
        "typical": _view(report.typical, report.typical_uncentred),
        "all_tokens": _view(report.all_tokens, report.all_tokens_uncentred),
    }


def extreme_entry(rows: ExtremeRows) -> dict[str, Any]:
    """The extreme rows of a site in JSON types.

    Args:
        rows: what was found.
    """
    fields = asdict(rows)
    return fields | {"positions": {str(place): count for place, count in sorted(rows.positions.items())}}


def _view(centred: Heads, uncentred: Heads) -> dict[str, Any]:
    return {
        "n_samples": centred[0].n_samples,
        "centred": _spectra(centred),
        "uncentred": _spectra(uncentred),
    }


def _spectra(heads: Heads) -> dict[str, Any]:
    """Everything that one decomposition of H heads says, every value a list over the heads."""
    ranks = {share: [spectrum.rank(head, float(share)) for head in heads] for share in RANK_SHARES}
    ratios = [spectrum.participation_ratio(head) for head in heads]
    return {
        "total_variance": [head.total_variance.item() for head in heads],
        "explained_variance": [head.spectrum.tolist() for head in heads],
        "rank": ranks,
        "participation_ratio": ratios,
        "over_heads": {
            "rank": {share: _mean_and_std(values) for share, values in ranks.items()},
            "participation_ratio": _mean_and_std(ratios),
        },
        "certificate": {name: [getattr(head.certificate, name) for head in heads] for name in CERTIFIED},
    }


def _mean_and_std(values: Sequence[float]) -> list[float]:
    """Over all the heads there are, so the spread is not that of a sample."""
    return [fmean(values), pstdev(values)]
