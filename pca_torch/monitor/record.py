"""What is logged: the spectrum of one site at one step, read off in numbers, and the alarms it set off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

__all__ = ["POINTS", "VIEWS", "Alert", "Sink", "SpectrumRecord", "View", "thinned"]

View = Literal["typical", "all"]
VIEWS: tuple[View, View] = ("typical", "all")
POINTS = 128  # variances of a spectrum that a record keeps


@dataclass(frozen=True, kw_only=True)
class SpectrumRecord:
    """One view of one site, over the tokens of one window of training steps; JSON types alone."""

    step: int  # optimizer steps done
    site: str  # "model.layers.3:output"
    view: View
    head: int | None  # which head; None where all features are one
    n_samples: int  # N, rows that count
    n_effective: float  # (Σw)²/Σw² of their weights; N where none is discounted
    n_features: int  # D
    metrics: Mapping[str, float | None]  # by name; None where a metric is not defined
    index: Sequence[int]  # of the variances kept, 1 is the largest; all of them up to POINTS
    variance: Sequence[float]  # in activation units squared, descending
    rounding_floor: float  # variances at or below this are noise
    trusted: int  # how many variances stand above it
    extreme: int  # rows of extreme norm among those of this window, in the view of all tokens alone
    extreme_share: float  # their share of the variance of these rows
    heavy_tailed: bool  # more than 5 % were extreme: of this window both views hold the same rows
    nonfinite: int  # rows with NaN or inf, left out
    tokens: Mapping[str, int]  # of the window: "kept", and left out by reason; empty where none are known

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A rule that came true."""

    step: int
    site: str
    view: View
    head: int | None
    rule: str  # as it was written, "rank_95 < 8"
    metric: str
    value: float
    before: float | None = None  # for a drop, the value it is measured from
    before_step: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON types."""
        return asdict(self)


class Sink(Protocol):
    """Where records go."""

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Get ready; what was written of later steps, by a run that was killed, is to be written again.

        Args:
            run: settings of the run, JSON types.
            step: optimizer steps done.
        """
        ...

    def write(self, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> None:
        """Take what was measured at one step.

        Args:
            records: of all sites.
            alerts: that they set off.
        """
        ...

    def close(self) -> None:
        """Give back what is open."""
        ...


def thinned(spectrum: Tensor) -> tuple[list[int], list[float]]:
    """At most `POINTS` variances of a spectrum, about evenly in the logarithm of their index.

    Args:
        spectrum: variances (M,), descending.

    Returns:
        Indices from 1, ascending, and the variances to seven digits.
    """
    m = len(spectrum)
    count = min(m, POINTS)
    index: list[int] = []
    for i in range(count):  # where logarithms ask for the same whole number twice, the next one is taken
        even = round(m ** (i / (count - 1))) if count > 1 else 1
        index.append(min(max(even, i + 1), m - (count - 1 - i)))
    values = spectrum.tolist()
    return index, [float(f"{values[place - 1]:.7g}") for place in index]
