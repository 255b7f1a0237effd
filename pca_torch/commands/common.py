"""What the commands share: options, the progress bar, and showing a report."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["OUT", "AsJson", "Components", "View", "as_components", "check_out", "progress_bar", "show"]

OUT = Path("pca_torch_out")
View = Literal["typical", "all"]

Components = Annotated[
    str, typer.Option(help="Directions kept: a share of the variance (0.95), a count (128), or 'all'.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]


def as_components(text: str) -> float | None:
    """A share, a count or None.

    Raises:
        ValueError: neither.
    """
    if text == "all":
        return None
    try:
        return int(text) if text.isdigit() else float(text)
    except ValueError:
        raise ValueError(f"`n_components` must be a share, a count or 'all', got {text!r}.") from None


def check_out(out: Path) -> None:
    """Refuse a folder that cannot be one before the work, not after it.

    Raises:
        ValueError: it is a file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, {out} is a file; give another.")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"`--out` cannot be made: {above} is no folder to write in; give another.")


@contextmanager
def progress_bar(advice: str = "run it again") -> Generator[Callable[[str, int], Callable[[int], object]]]:
    """A progress bar on a terminal, nothing in a pipe.

    Args:
        advice: what to do after an interrupt.

    Yields:
        What makes, from a description and a total, a function to be told of each step.

    Raises:
        KeyboardInterrupt: after saying so.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:

        def start(description: str, total: int) -> Callable[[int], object]:
            task = bar.add_task(description, total=total)
            return lambda done: bar.advance(task, done)

        try:
            yield start
        except KeyboardInterrupt:
            told = f"interrupted; files that were there before are as they were, {advice}."
            print(told, file=sys.stderr)
            raise


def show(
    summary: dict[str, Any], as_json: bool, files: Sequence[Path], table: RenderableType | None = None
) -> None:
    """The table, by default that of a report, and where the files are; or the JSON alone."""
    from pca_torch.report import render_table

    if as_json:
        print(json.dumps(summary, allow_nan=False))
        return
    console = Console()
    console.print(table or render_table(summary))
    if files:
        wrote = f"wrote {', '.join(map(str, files))}"
        console.print(wrote, markup=False, highlight=False, soft_wrap=True)  # a name that breaks is no name
