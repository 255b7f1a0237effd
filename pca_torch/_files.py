"""Files that are whole at every moment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


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
    draft = target.with_name(f".pca_torch-{secrets.token_hex(8)}.tmp")
    try:
        yield draft
        _sync(draft, os.O_RDWR)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(target.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
