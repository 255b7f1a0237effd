"""The log of a monitored run: a JSON object on each line, whole lines at every moment.

The first line is {"format": "pca_torch.monitor", "version": 1, "kind": "run", …}, the settings of the run.
Those behind it are of kind "spectrum" (a `SpectrumRecord`), "alarm" (an `Alert`) or "resumed", in the order
of their steps. What lies behind the last line break was cut off by a kill, and does not count.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import os
import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pca_torch.monitor.log_lines import (
    Resumption,
    entry_line,
    header_line,
    read_entries,
    read_header,
    resumption_line,
)
from pca_torch.monitor.record import Alert, SpectrumRecord

__all__ = ["JsonlSink", "Log", "Resumption", "read_log"]


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a log holds, in the order of steps."""

    run: dict[str, Any]  # settings at the start
    records: list[SpectrumRecord]
    alerts: list[Alert]
    resumed: list[Resumption]  # with other settings


OPEN: weakref.WeakSet[JsonlSink] = weakref.WeakSet()


class JsonlSink:
    """A log that survives a kill: each step reaches the disk at once, whole or not at all.

    A run that begins at step 0 moves an earlier log aside, to `spectra.1.jsonl` and so on. A run that is
    resumed goes on in its own log, the one with its `id`, from which the steps that it will do again are
    dropped. Two runs cannot write
    one log at a time (except on Windows, where nothing keeps them from it).

    Args:
        path: the file; its folder is made where it is missing.
    """

    _descriptor: int | None = None
    _end = 0  # where the last whole line ends
    _torn = False  # whether a write that failed has left something behind it

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _path_of(path).absolute()  # the run may change its folder

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Open the log and write what the run is, or how a resumed one differs from what it was.

        Args:
            run: settings in JSON types.
            step: optimizer steps done; 0 begins anew.

        Raises:
            ValueError: there is a file that is no log, or one that is damaged where a resumed run goes on; or
                `run` is not what JSON can hold.
            BlockingIOError: another run writes this log.
            OSError: the disk does not take it.
        """
        self.close()
        header = header_line(run)
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"`path` must be a file, got {self.path}, which is none.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        try:
            if step > 0:
                self._resume(header, step)
            else:
                self._start(header)
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> None:
        """Append what was measured at one step.

        Args:
            records: of all sites.
            alerts: that they set off.

        Raises:
            OSError: the disk does not take it; the log stays as it was, and the next step is tried again.
            ValueError: a record holds NaN or inf.
            RuntimeError: the log is not open.
        """
        self._append(b"".join(map(entry_line, [*records, *alerts])))

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:  # a copy is another log, which is not open
        return {"path": self.path}

    def __del__(self) -> None:  # a log that is forgotten may be opened again
        self.close()

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._descriptor = os.open(self.path, flags, 0o666)
        try:
            _lock(self._descriptor, self.path)
        except BaseException:
            self.close()
            raise
        _let_go_in_children()
        OPEN.add(self)
        self._end, self._torn = 0, False

    def _start(self, header: bytes) -> None:
        """Write the header, to a file without anything of an earlier run."""
        with open(_opened(self._descriptor), "rb", closefd=False) as file:
            filled = read_header(file, self.path) is not None and file.read(1)
        if filled:
            self._move_aside("an earlier run")
        os.ftruncate(_opened(self._descriptor), 0)
        self._append(header)

    def _move_aside(self, whose: str) -> None:
        """Leave a log to another name, and open an empty file in its place."""
        names = (f"{self.path.stem}.{i}{self.path.suffix}" for i in itertools.count(1))
        aside = next(path for path in map(self.path.with_name, names) if not path.exists())
        self.close()
        self.path.rename(aside)
        warnings.warn(f"{self.path} held the log of {whose}, which is now {aside}", stacklevel=4)
        self._open()

    def _resume(self, header: bytes, step: int) -> None:
        """Drop what comes after `step`, and write the settings that changed."""
        now = read_header(io.BytesIO(header), self.path) or {}  # as JSON gives it back
        with open(_opened(self._descriptor), "rb", closefd=False) as file:
            before = read_header(file, self.path)
            is_other = before is not None and before.get("id") != now.get("id")
            if before is not None and not is_other:
                self._end = _end_of(file, self.path, step, before)
        if is_other:
            self._move_aside("another run")
            self._append(header)
            return
        os.ftruncate(_opened(self._descriptor), self._end)
        if before is None:
            told = f"{self.path} holds no log to go on with at step {step}; a new one begins there"
            warnings.warn(told, stacklevel=3)
            self._append(header)
            return
        names = sorted(before.keys() | now.keys())
        changed = {name: now.get(name) for name in names if before.get(name) != now.get(name)}
        if changed:
            self._append(resumption_line(step, changed))

    def _append(self, lines: bytes) -> None:
        """Bring whole lines to the disk, or leave the file as it was.

        Raises:
            OSError: the disk does not take them.
        """
        descriptor = _opened(self._descriptor)
        try:
            if not self.path.exists():
                raise OSError(errno.ENOENT, "it was removed or moved away")
            if self._torn:
                os.ftruncate(descriptor, self._end)
            self._torn = True
            left = memoryview(lines)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
            self._end, self._torn = self._end + len(lines), False
        except BaseException as error:
            with suppress(OSError):  # or before the next line
                os.ftruncate(descriptor, self._end)
            if not isinstance(error, OSError):
                raise
            told = f"the log could not be written: {error.strerror}"
            raise OSError(error.errno, told, str(self.path)) from error


def read_log(path: str | os.PathLike[str]) -> Log:
    """Read a log, also one that is being written.

    Args:
        path: the file.

    Raises:
        ValueError: it is no log, or a line of it is damaged.
        TypeError: `path` is no path.
        OSError: it cannot be opened.
    """
    with open(_path_of(path), "rb") as file:
        settings = read_header(file, path)
        if settings is None:
            raise ValueError(f"{path}: holds no whole line of a log.")
        log = Log(run=settings, records=[], alerts=[], resumed=[])
        for _, entry in read_entries(file, path):
            match entry:
                case SpectrumRecord():
                    log.records.append(entry)
                case Alert():
                    log.alerts.append(entry)
                case Resumption():
                    log.resumed.append(entry)
    return log


def _path_of(path: Any) -> Path:
    """The path of a file.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise TypeError(f"`path` must be the path of a file, got {path!r:.60}.")
    return Path(path)


def _end_of(file: BinaryIO, path: Path, step: int, settings: dict[str, Any]) -> int:
    """Where the last whole line up to `step` ends; `settings` of the header become those of that moment."""
    end = file.tell()
    for end_of_line, entry in read_entries(file, path):
        if entry.step > step:
            break
        end = end_of_line
        if isinstance(entry, Resumption):
            settings |= entry.changed
    return end


def _opened(descriptor: int | None) -> int:
    """The descriptor of an open log.

    Raises:
        RuntimeError: it is not open.
    """
    if descriptor is None:
        raise RuntimeError("the log is not open; `begin` opens it.")
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    """Keep other runs away while the file is open.

    Raises:
        BlockingIOError: there is one.
    """
    if sys.platform == "win32":
        return
    import fcntl

    told = "another run writes this log, give each a `path` of its own"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, told, str(path)) from None
    except OSError:  # a file system without locks
        return
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):  # just moved aside
        raise BlockingIOError(errno.EWOULDBLOCK, told, str(path))


@functools.cache
def _let_go_in_children() -> None:
    """Close open logs in processes that this one forks.

    They would keep the lock of a run that was killed: workers of a data loader outlive it by seconds.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for sink in list(OPEN):
        sink.close()
