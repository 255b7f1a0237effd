"""Files that are whole at every moment."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["remove_stale_drafts", "replacing"]

DRAFT = re.compile(r"\.pca_torch-([0-9a-f]{8})-([0-9]+)-[0-9a-f]{8}\.tmp")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Generator[Path]:
    """A draft to write, which reaches the disk and becomes `path` at the end of the block.

    If the block raises, `path` stays as it was and the draft is gone.

    Args:
        path: the file to make or to replace; a link keeps pointing to its file.

    Yields:
        The path of the draft, in the same folder.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"`path` is in {target.parent}, which is no folder; make it first.")
    draft = target.with_name(f".pca_torch-{_origin()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(target.parent, os.O_RDONLY)


def remove_stale_drafts(folder: str | os.PathLike[str]) -> None:
    """Remove drafts that processes of this machine left behind when they were killed.

    A draft of a process that lives, or of another machine or container, stays.

    Args:
        folder: where the files are that were being replaced.
    """
    if os.name != "posix":  # elsewhere asking for a process could end it
        return
    origin = _origin()
    for path in Path(folder).iterdir():
        named = DRAFT.fullmatch(path.name)
        if named and named[1] == origin and not _lives(int(named[2])):
            with suppress(OSError):  # of another user
                path.unlink()


def _origin() -> str:
    """Where process ids are unique: this boot of this machine, in this container."""
    try:
        known = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        known = platform.node()
    return hashlib.blake2s(known.encode(), digest_size=4).hexdigest()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
