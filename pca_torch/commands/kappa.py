"""`pca-torch kappa`: what squaring the samples costs."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pca_torch._files import replacing
from pca_torch.commands.common import check_out, progress_bar, show

if TYPE_CHECKING:
    from pca_torch.kappa import Study

__all__ = ["kappa"]


def kappa(
    file: Annotated[
        Path | None, typer.Argument(help="A .npy file of samples (..., D); none is the built-in matrix.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many of the smallest variances are shown.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Folder for kappa.json and kappa.png.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the study as JSON on standard output.")
    ] = False,
) -> None:
    """Show what squaring the samples does to their smallest variances."""
    from pca_torch.kappa import STEPS, read, study, table

    if out is not None:
        check_out(out)
    rows = None if file is None else read(file)
    with progress_bar() as progress:
        name = None if file is None else file.name
        found = study(rows, count=count, name=name, progress=progress("kappa", STEPS))
    files = [] if out is None else _write_study(found, out)
    show(found.to_dict(), as_json, files, table(found, Console().width))


def _write_study(study: Study, out: Path) -> list[Path]:
    """`kappa.json` and, where matplotlib is there, `kappa.png`; the files written."""
    from pca_torch.kappa import plot

    files = [out / "kappa.json"]
    out.mkdir(parents=True, exist_ok=True)
    with replacing(files[0]) as draft:
        draft.write_text(json.dumps(study.to_dict(), allow_nan=False), encoding="utf-8")
    try:
        plot(study, out / "kappa.png")
        files.append(out / "kappa.png")
    except ImportError as error:  # the picture is an extra; the numbers are not
        warnings.warn(f"{out / 'kappa.png'} is not written: {error}", stacklevel=2)
    return files
