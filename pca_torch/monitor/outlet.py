"""A sink that may fail, for a full disk or a dashboard out of reach, without ending the training run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pca_torch.monitor.record import Alert, Sink, SpectrumRecord

__all__ = ["Outlet"]

KEPT = 100  # steps whose records wait for a sink that fails


class Outlet:
    """Hands records on; those that a sink could not take wait, and are offered again with the next ones.

    Args:
        sink: where they go.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._waiting: list[tuple[Sequence[SpectrumRecord], Sequence[Alert]]] = []

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Get the sink ready; what it raises is raised, since nothing has been trained yet.

        Args:
            run: settings of the run.
            step: optimizer steps done.
        """
        self._waiting.clear()  # what a run before this one could not hand over was told as lost
        self.sink.begin(run, step)

    def write(self, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> None:
        """Hand over what waits, then these.

        Args:
            records: of one step.
            alerts: that they set off.
        """
        self._waiting.append((records, alerts))
        try:
            self._hand_over()
        except Exception as error:
            del self._waiting[:-KEPT]
            warnings.warn(
                f"{type(self.sink).__name__} could not write ({error}); the records of {len(self._waiting)} "
                "logged steps wait, and are written with the next ones.",
                stacklevel=4,
            )

    def close(self) -> None:
        """Try once more to hand over what waits, then close the sink."""
        try:
            self._hand_over()
        except Exception as error:
            warnings.warn(f"records of {len(self._waiting)} logged steps are lost ({error}).", stacklevel=4)
        try:
            self.sink.close()
        except Exception as error:
            warnings.warn(f"{type(self.sink).__name__} could not be closed ({error}).", stacklevel=4)

    def _hand_over(self) -> None:
        """Write what waits, the oldest first; where the sink raises, the rest goes on waiting."""
        while self._waiting:
            self.sink.write(*self._waiting[0])
            del self._waiting[0]
