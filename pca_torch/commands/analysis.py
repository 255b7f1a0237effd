"""`pca-torch run`, `fit` and `report`: from a model or files to a report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pca_torch.commands.common import (
    OUT,
    AsJson,
    Components,
    View,
    as_components,
    check_out,
    progress_bar,
    show,
)
from pca_torch.precision import Precision

__all__ = ["fit", "report", "run"]


def run(
    model: Annotated[
        str, typer.Argument(help="smollm2, a local folder, a .gguf file, or a hub id.")
    ] = "smollm2",
    text: Annotated[list[Path] | None, typer.Option(help="Text or jsonl files; several may follow.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids as .npy, instead of text.")] = None,
    sites: Annotated[
        list[str] | None, typer.Option(help="Modules or patterns, such as 'model.layers.*'.")
    ] = None,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to run at most.")] = 8192,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 4,
    n_components: Components = "0.95",
    view: Annotated[View, typer.Option(help="Tokens the basis file is of: typical or all.")] = "typical",
    drop_first: Annotated[int, typer.Option(min=0, help="Leave out the first tokens of each sequence.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, float64.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the report, the basis and the picture.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Run a language model and report the dimensions of its layers."""
    from pca_torch import pipeline

    check_out(out)
    with progress_bar() as progress:
        summary, results = pipeline.run(
            model,
            text=text or (),
            tokens=tokens,
            sites=sites or None,
            seq_len=seq_len,
            max_tokens=max_tokens,
            batch_size=batch_size,
            n_components=as_components(n_components),
            drop_first=drop_first,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    files = pipeline.write_outputs(out, summary, results, view)
    show(summary, as_json, files)


def fit(
    files: Annotated[list[Path], typer.Argument(help=".npy files of samples (..., D), one data set.")],
    n_components: Components = "0.95",
    view: Annotated[View, typer.Option(help="Rows the basis file is of: typical or all.")] = "all",
    precision: Annotated[Precision, typer.Option(help="Products in auto, float32 or float64.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the report, the basis and the picture.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Report the dimensions of arrays on disk, read by blocks."""
    from pca_torch import pipeline

    check_out(out)
    with progress_bar() as progress:
        summary, results = pipeline.fit_files(
            files,
            n_components=as_components(n_components),
            precision=precision,
            progress=progress,  # pyright: ignore[reportArgumentType]
        )
    written = pipeline.write_outputs(out, summary, results, view)
    show(summary, as_json, written)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `run` or `fit` wrote.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Show a report again."""
    from pca_torch.report import read_report

    path = folder / "report.json" if folder.is_dir() else folder
    show(read_report(path), as_json, [])
