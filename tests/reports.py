"""Results and reports with spectra we choose, without a fit."""

import numpy as np
import torch

from pca_torch.report import report_dict
from pca_torch.result import Certificate, ExtremeRows, PCAResult, SiteReport


def result(variances, *, n=100, d=100, k=None, total=None, error=0.0, floor=0.0, gap=0.0):
    """A result of `n` samples and `d` features that knows these variances and keeps `k` directions."""
    values = torch.tensor(variances, dtype=torch.float64)
    k = len(values) if k is None else k
    certificate = Certificate(
        captured_ratio=1.0,
        missed_ratio_bound=0.0,
        bound_kind="deterministic",
        variance_error=(error,) * k,
        rounding_floor=floor,
        trusted=k,
        quantisation_floor=None,
        residual_norms=(0.0,) * k,
        gap=gap,
        angle_bound=0.0,
        unique=True,
        solver="full",
        precision="float64",
    )
    return PCAResult(
        mean=torch.zeros(d, dtype=torch.float64),
        components=torch.eye(d, dtype=torch.float64)[:k],
        spectrum=values,
        total_variance=values.sum() if total is None else torch.tensor(total, dtype=torch.float64),
        n_samples=n,
        divisor=n - 1.0,
        certificate=certificate,
    )


def site(variances, *, n=2000, all_variances=None, extreme=None, **more):
    """A site of `n` rows whose typical rows have these variances; without `extreme` both views agree."""
    d, extreme = more.pop("d", len(variances)), extreme or ExtremeRows(count=0, n_samples=n, threshold=9.0)
    return SiteReport(
        all_tokens=result(variances if all_variances is None else all_variances, n=n, d=d, **more),
        typical=result(variances, n=n - extreme.count, d=d, **more),
        extreme=extreme,
    )


def sink(n=2000, count=16, positions=None, **more):
    """`count` rows of extreme norm, at position 0 unless told otherwise."""
    return ExtremeRows(
        count=count,
        n_samples=n,
        threshold=9.0,
        positions={0: count} if positions is None else positions,
        **more,
    )


def layers(count=30, d=576, n=7168):
    """A report of `count` layers; the middle third has a sink at position 0 that leaves rank 1."""
    sites = {}
    for i in range(count):
        variances = np.exp(-np.arange(d) / d * (3 + 3 * i / count))
        loud = variances.copy()
        loud[0] += 60 * variances.sum()
        middle = count <= 3 * i < 2 * count
        sites[f"model.layers.{i}"] = site(
            variances,
            n=n,
            all_variances=loud if middle else None,
            extreme=sink(n, trace_share=0.98) if middle else None,
        )
    return report_dict(sites, {"name": "org/model-1b"}, {"seen": n, "padding": 512}, {"dtype": torch.float32})
