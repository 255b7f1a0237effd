"""How many variances of a spectrum lie in each tenth of a decade."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pca_torch.monitor.record import SpectrumRecord

__all__ = ["LogHistogram", "log_histogram"]

WIDTH = 0.1  # decades; edges are multiples of it, so that histograms of all sites and steps line up
MOST_BINS = 512  # of a W&B histogram


@dataclass(frozen=True, eq=False)
class LogHistogram:
    """The variances above the rounding floor, by their decimal logarithm."""

    values: np.ndarray  # (trusted,) log10 of variances in activation units squared, descending
    counts: np.ndarray  # (B,) variances in each bin, their sum is `trusted`; int64
    edges: np.ndarray  # (B + 1,) of log10, ascending; a bin holds its lower edge


def log_histogram(record: SpectrumRecord) -> LogHistogram | None:
    """Histogram of log10 of a record's variances; None where none stands above the rounding floor.

    A record of a long spectrum keeps some of its variances. Those between are read off the line through
    their neighbours in log λ over log i, which is exact where λ is a power of i, so the counts add up to
    the number of variances above the floor. Zeros and what is at or below the floor are in no bin.

    Args:
        record: one view of one site.
    """
    if not record.trusted:
        return None
    index, variance = np.array(record.index), np.array(record.variance)
    known = index <= record.trusted
    wanted = np.arange(1, record.trusted + 1)
    values = np.interp(np.log(wanted), np.log(index[known]), np.log10(variance[known]))
    width = WIDTH
    while (values[0] - values[-1]) / width > MOST_BINS - 2:  # the outermost bins are cut by the range
        width *= 2
    places = np.floor(values / width).astype(int)
    counts = np.bincount(places - places[-1])
    return LogHistogram(values, counts, (places[-1] + np.arange(len(counts) + 1)) * width)
