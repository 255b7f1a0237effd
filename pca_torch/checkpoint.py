"""Where a long run has come to, in one file that is whole at every moment."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from pca_torch._checks import check_number
from pca_torch._files import remove_stale_drafts
from pca_torch._safetensors import Format, decode, encode
from pca_torch.statistic_file import Statistic, StatisticFile, write_file

__all__ = ["Checkpoint"]

CHECKPOINT = Format("pca_torch_checkpoint", "1", "checkpoint")
ABSENT = "nothing"  # how errors call a setting that one of two runs does not have
SHOWN = 3  # differences in one error

T = TypeVar("T")


class Checkpoint:
    """A statistic file that a run writes as it goes, from which it can be resumed after any end.

    A resumed run skips the batches that were counted and ends bit for bit as if it had never stopped, given
    the same batches, device, threads and libraries. A kill at any moment leaves the last file whole.

        checkpoint = Checkpoint(path, {"model": name, "settings": settings})
        statistics = checkpoint.load() or new_statistics()
        for batch in checkpoint.remaining(batches):
            ...  # update the statistics
            checkpoint.tick(statistics)
        checkpoint.remove()  # once the results are written

    Args:
        path: the file.
        fingerprint: what decides the result: model, data and settings, in JSON types.
        every_batches: save after so many batches; None does not count them.
        every_seconds: save after the first batch that ends so much later than the last save, 0 after each
            batch; None does not look at the clock.

    Raises:
        TypeError: a value in `fingerprint` is of no JSON type.
        ValueError: an interval is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        fingerprint: Mapping[str, Any],
        *,
        every_batches: int | None = None,
        every_seconds: float | None = 60.0,
    ) -> None:
        whole = every_batches is None or (type(every_batches) is int and every_batches >= 1)
        check_number(every_batches, "every_batches", "a positive integer or None", whole)
        number = every_seconds is None or (type(every_seconds) in {int, float} and every_seconds >= 0)
        check_number(every_seconds, "every_seconds", "a number ≥ 0 or None", number)
        self.path = Path(path)
        self.fingerprint = decode(json.dumps(encode(dict(fingerprint), "fingerprint"), allow_nan=False))
        self.every_batches = every_batches
        self.every_seconds = every_seconds
        self.done = 0  # batches counted
        self.progress: dict[str, Any] = {}  # what else was told with the last save
        self._saved_at = 0, time.monotonic()  # batches and seconds at the last save

    def load(self, device: torch.device | str | None = None) -> dict[str, Statistic]:
        """The statistics to go on with, by site; none where there is no file. Sets `done` and `progress`.

        Args:
            device: where they go; None is where each of them was.

        Raises:
            ValueError: the file is of another run, of another version, or damaged.
        """
        if self.path.parent.is_dir():
            remove_stale_drafts(self.path.parent)
        if not self.path.exists():
            return {}
        file = StatisticFile(self.path, CHECKPOINT, device)
        found = file.metadata
        fits = found.keys() == {"done", "fingerprint", "progress"} and type(found["done"]) is int
        if not fits or found["done"] < 0 or not isinstance(found["progress"], dict):
            raise ValueError(f"{self.path}: does not say how far its run had come; remove it and start anew.")
        if differences := _differences(found["fingerprint"], self.fingerprint):
            told = "; ".join(differences[:SHOWN]) + ("; …" if len(differences) > SHOWN else "")
            raise ValueError(
                f"{self.path}: is of another run: {told}. Run that one, or remove the file and start anew."
            )
        statistics = dict(file)
        self.done, self.progress = found["done"], found["progress"]
        self._saved_at = self.done, time.monotonic()
        return statistics

    def remaining(self, batches: Iterable[T]) -> Iterator[T]:
        """Those of `batches` that were not counted yet.

        Args:
            batches: of the whole run, in the same order as before.

        Yields:
            Them.

        Raises:
            ValueError: there are fewer than were counted.
        """
        left = iter(batches)
        skipped = sum(1 for _ in itertools.islice(left, self.done))
        if skipped < self.done:
            raise ValueError(
                f"{self.path}: counted {self.done} batches, but there are {skipped}; the data have changed."
            )
        yield from left

    def tick(self, statistics: Mapping[str, Statistic], progress: Mapping[str, Any] | None = None) -> bool:
        """One more batch is counted; save if it is time.

        Args:
            statistics: site name → statistic, with that batch and no part of the next.
            progress: what else the run must remember, in JSON types.

        Returns:
            Whether a file was written.
        """
        self.done += 1
        batches, seconds = self.done - self._saved_at[0], time.monotonic() - self._saved_at[1]
        due = self.every_batches is not None and batches >= self.every_batches
        if not due and (self.every_seconds is None or seconds < self.every_seconds):
            return False
        self.save(statistics, progress)
        return True

    def save(self, statistics: Mapping[str, Statistic], progress: Mapping[str, Any] | None = None) -> None:
        """Replace the file, once the new one is complete on the disk.

        Args:
            statistics: site name → statistic.
            progress: what else the run must remember, in JSON types.

        Raises:
            RuntimeError: an interrupt left rows of a statistic counted in part; the old file stays.
        """
        self.progress = dict(progress or {})
        metadata = {"done": self.done, "fingerprint": self.fingerprint, "progress": self.progress}
        self.path.parent.mkdir(parents=True, exist_ok=True)  # a run that failed before leaves nothing
        write_file(self.path, CHECKPOINT, statistics, metadata)
        remove_stale_drafts(self.path.resolve().parent)
        self._saved_at = self.done, time.monotonic()

    def remove(self) -> None:
        """Remove the file: the results are written."""
        self.path.unlink(missing_ok=True)


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    """What differs between two runs, a clause each."""
    if not (isinstance(there, dict) and isinstance(here, dict)):
        return [] if there == here else [f"{name} was {there!r:.60}, now it is {here!r:.60}"]
    found = []
    for key in sorted(there.keys() | here.keys()):
        inner = f"{name}.{key}" if name else key
        found += _differences(there.get(key, ABSENT), here.get(key, ABSENT), inner)
    return found
