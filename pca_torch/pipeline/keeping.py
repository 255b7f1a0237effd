"""What a run keeps on disk beside its report: checkpoints on the way, the statistics at the end."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pca_torch._files import replacing
from pca_torch.checkpoint import Checkpoint
from pca_torch.statistic_file import (
    STATISTICS,
    Statistic,
    StatisticFile,
    save_statistics,
    write_file,
)

__all__ = ["Keeping"]

CHECKPOINT = ".pca_torch-checkpoint-*.safetensors"  # of each pass
PART = ".pca_torch-pass-*.safetensors"  # the statistics of one of several passes, when it is over
PASSES = ".pca_torch-passes.json"  # which sites each pass counts, where there are several
OURS = ("report.json", "basis.safetensors", "spectra.png")  # what a run writes into its folder


@dataclass
class Keeping:
    """Where a run keeps what it has counted, and whether it goes on with what is there.

    Sites that do not fit in memory together are counted in several passes, each of which leaves its
    statistics in a file of the folder until the run is over.

    Raises:
        ValueError: `statistics` is a file that the run writes for itself.
    """

    folder: Path | None = None  # None keeps nothing on the way
    statistics: Path | None = None  # the file of all statistics, which stays
    resume: bool = False
    every_seconds: float = 60.0  # between two checkpoints; 0 is after every batch
    fingerprint: dict[str, Any] = field(default_factory=dict)  # what decides the result

    def __post_init__(self) -> None:
        if self.folder is None or self.statistics is None:
            return
        self.folder, self.statistics = Path(self.folder), Path(self.statistics)
        same = self.statistics.absolute().parent.resolve() == self.folder.absolute().resolve()
        if same and (self.statistics.name in OURS or self.statistics.name.startswith(".pca_torch-")):
            raise ValueError(
                f"`statistics` must not be {self.statistics}, which the run itself writes; give another."
            )

    def begin(self, fingerprint: Mapping[str, Any]) -> Keeping:
        """The same for one run; what an unfinished one left is removed, with a warning, unless it goes on.

        Args:
            fingerprint: what decides its result, in JSON types.
        """
        if self.resume and self.folder is not None and not self._left():
            warnings.warn(f"{self.folder} holds no checkpoint to resume; starting anew", stacklevel=2)
        if self._left() and not self.resume:
            warnings.warn(
                f"{self.folder} held the checkpoint of an unfinished run, which is removed; `--resume` "
                "goes on with one",
                stacklevel=2,
            )
            self.clear()
        return replace(self, fingerprint=dict(fingerprint))

    def grouped(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        """The sites of each pass: those of the run that this one goes on with, else `groups`.

        How many fit depends on what memory is free, which must not decide whether a run can go on.

        Args:
            groups: names of sites, by pass.
        """
        planned = [list(group) for group in groups]
        if self.folder is None:
            return planned
        path = self.folder / PASSES
        if self.resume and path.exists():
            try:
                found = json.loads(path.read_text(encoding="utf-8"))
            except ValueError:
                found = None
            before = found["passes"] if isinstance(found, dict) and "passes" in found else []
            if sorted(chain.from_iterable(before)) == sorted(chain.from_iterable(planned)):
                return before
        if len(planned) > 1:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft:
                draft.write_text(json.dumps({"passes": planned}), encoding="utf-8")
        return planned

    def checkpoint(self, index: int, sites: Sequence[str]) -> Checkpoint | None:
        """That of a pass.

        Args:
            index: of the pass.
            sites: names of those that are counted in it.
        """
        if self.folder is None:
            return None
        path = self._path(CHECKPOINT, index)
        return Checkpoint(path, self._of(sites), every_seconds=self.every_seconds)

    def finished(self, index: int, sites: Sequence[str]) -> StatisticFile | None:
        """The statistics of a pass that an earlier run finished, if this one goes on with it.

        Args:
            index: of the pass.
            sites: names of those that are counted in it.
        """
        if self.folder is None or not self.resume or not self._path(PART, index).exists():
            return None
        file = StatisticFile(self._path(PART, index), device=None)
        return file if file.metadata.get("fingerprint") == self._of(sites) else None

    def finish(
        self, index: int, sites: Sequence[str], statistics: Mapping[str, Statistic], facts: Mapping[str, Any]
    ) -> None:
        """Keep the statistics of one of several passes.

        Args:
            index: of the pass.
            sites: names of those that were counted in it.
            statistics: by site.
            facts: what else to know of it, in JSON types.
        """
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            about = dict(facts) | {"fingerprint": self._of(sites)}
            write_file(self._path(PART, index), STATISTICS, statistics, about)

    def save(
        self, statistics: Mapping[str, Statistic] | None, metadata: Mapping[str, Any], passes: int = 1
    ) -> None:
        """Write the file of all statistics, if it is wanted.

        Args:
            statistics: by site; None joins those of the passes, a site at a time.
            metadata: about the run, in JSON types.
            passes: how many there were.
        """
        if self.statistics is None:
            return
        if statistics is None:
            parts = [self._path(PART, index) for index in range(passes)]
            statistics = _Joined([StatisticFile(path, device=None) for path in parts])
        self.statistics.parent.mkdir(parents=True, exist_ok=True)
        save_statistics(self.statistics, statistics, metadata)

    def clear(self) -> None:
        """Remove what a run that is over needs no longer."""
        for path in self._left():
            path.unlink(missing_ok=True)

    def _left(self) -> list[Path]:
        """What an unfinished run leaves."""
        return (
            []
            if self.folder is None
            else [path for pattern in (CHECKPOINT, PART, PASSES) for path in self.folder.glob(pattern)]
        )

    def _path(self, pattern: str, index: int) -> Path:
        assert self.folder is not None
        return self.folder / pattern.replace("*", f"{index + 1:04d}")

    def _of(self, sites: Sequence[str]) -> dict[str, Any]:
        """What decides the result of one pass."""
        return self.fingerprint | {"pass": list(sites)}


class _Joined(Mapping[str, Statistic]):
    """Several files as one: a site is read when it is asked for."""

    def __init__(self, files: Sequence[StatisticFile]) -> None:
        self._holders = {site: file for file in files for site in file}

    def __getitem__(self, site: str) -> Statistic:
        return self._holders[site][site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)
