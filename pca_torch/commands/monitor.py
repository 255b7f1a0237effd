"""`pca-torch monitor`: how the spectra of a model changed while it learned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pca_torch._safetensors import naming
from pca_torch.commands.common import View, check_out, show

if TYPE_CHECKING:
    from pca_torch.monitor.history import History

__all__ = ["monitor"]


def monitor(
    file: Annotated[Path, typer.Argument(help="The .jsonl file that a `SpectrumMonitor` writes.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the pictures; none is that of the file.")
    ] = None,
    view: Annotated[View, typer.Option(help="Tokens that are shown: typical or all.")] = "typical",
    sites: Annotated[
        list[str] | None, typer.Option(help="Names or patterns: 'model.layers.*', '**.3', '**:k'.")
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="Metrics by name; 'rank' is all that begin with 'rank_'.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as JSON on standard output.")
    ] = False,
) -> None:
    """Show how spectra changed during a training run: a table and two pictures."""
    from pca_torch.monitor.heat_map import draw_spectra
    from pca_torch.monitor.history import arrange
    from pca_torch.monitor.log_file import read_log
    from pca_torch.monitor.picture import draw_metrics
    from pca_torch.monitor.table import run_table

    folder = file.parent if out is None else out
    check_out(folder)
    log = read_log(file)
    with naming(str(file)):
        history = arrange(log, view=view, sites=sites, metrics=metrics)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"metrics": draw_metrics, "spectrum": draw_spectra}
    paths = {folder / f"{file.stem}_{name}.png": draw for name, draw in pictures.items()}
    written = _draw(paths, history)
    summary = history.to_dict() | {"file": str(file), "written": list(map(str, written))}
    show(summary, as_json, written, run_table(history, Console().width))


def _draw(paths: Mapping[Path, Callable[[History, Path], None]], history: History) -> list[Path]:
    """The pictures that could be drawn: they are an extra, the numbers are not."""
    try:
        for path, draw in paths.items():
            draw(history, path)
    except ImportError as error:
        warnings.warn(f"{' and '.join(map(str, paths))} are not written: {error}", stacklevel=2)
        return []
    return list(paths)
