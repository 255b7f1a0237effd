"""`pca-torch run`, `fit` and `report`: from a model or files to a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

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

GO_ON = "--resume goes on from the last checkpoint, if there is one"
Model = Annotated[str, typer.Argument(help="smollm2, a local folder, a .gguf file, or a hub id.")]
Text = Annotated[list[Path] | None, typer.Option(help="Text or jsonl files; several may follow.")]
Sites = Annotated[
    list[str] | None,
    typer.Option(help="Shortcuts (resid, k, v@0-5), modules or patterns: see `pca-torch sites`."),
]
DropSpecial = Annotated[
    bool, typer.Option("--drop-special", help="Leave out BOS, EOS and all special tokens.")
]
Passes = Annotated[
    int, typer.Option(min=1, help="Passes over the tokens allowed, if not all sites fit at once.")
]
StatisticsOn = Annotated[
    Literal["auto", "cpu"], typer.Option(help="Where statistics lie: auto is beside the activations.")
]
Products = Annotated[Precision, typer.Option(help="Products in auto, float32 or float64.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Most that statistics may take: 2GiB, 500MB, 50%. By default 80% of what is free."),
]
Statistics = Annotated[
    Path | None, typer.Option("--save-statistics", help="File for the statistics, to merge or report later.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")]
Every = Annotated[float, typer.Option("--checkpoint-every", min=0.0, help="Seconds between checkpoints.")]
Out = Annotated[Path, typer.Option(help="Folder for the report, the basis and the picture.")]


def run(
    model: Model = "smollm2",
    text: Text = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids as .npy, instead of text.")] = None,
    roles: Annotated[Path | None, typer.Option(help="The role of each of those ids, as .npy.")] = None,
    keep_roles: Annotated[list[int] | None, typer.Option("--role", help="A role that counts.")] = None,
    sites: Sites = None,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to run at most.")] = 8192,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 4,
    n_components: Components = "0.95",
    view: Annotated[View, typer.Option(help="Tokens the basis file is of: typical or all.")] = "typical",
    drop_first: Annotated[int, typer.Option(min=0, help="Leave out the first tokens of each sequence.")] = 0,
    drop_special: DropSpecial = False,
    precision: Products = "auto",
    memory: Memory = None,
    passes: Passes = 1,
    statistics_on: StatisticsOn = "auto",
    statistics: Statistics = None,
    resume: Resume = False,
    every: Every = 60.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16, float64.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run a language model and report the dimensions of its layers."""
    from pca_torch import pipeline

    check_out(out)
    keeping = pipeline.Keeping(out, statistics, resume, every)
    reading = pipeline.Reading(
        text or (), tokens, roles, keep_roles or (), seq_len=seq_len, max_tokens=max_tokens
    )
    with progress_bar(GO_ON) as progress:
        summary, results = pipeline.run(
            model,
            reading,
            sites=sites or None,
            batch_size=batch_size,
            n_components=as_components(n_components),
            drop_first=drop_first,
            drop_special=drop_special,
            precision=precision,
            device=device,
            dtype=dtype,
            revision=revision,
            budget=pipeline.Budget(memory, passes, statistics_on),
            keeping=keeping,
            announce=None if as_json else _say,
            progress=progress,
        )
    _finish(keeping, summary, results, view, as_json)


def fit(
    files: Annotated[
        list[Path],
        typer.Argument(help=".npy, .safetensors or .pt files of samples (..., D), or folders of them."),
    ],
    tensor: Annotated[str | None, typer.Option(help="Which tensor of files that hold several.")] = None,
    n_components: Components = "0.95",
    view: Annotated[View, typer.Option(help="Rows the basis file is of: typical or all.")] = "all",
    precision: Products = "auto",
    statistics: Statistics = None,
    resume: Resume = False,
    every: Every = 60.0,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Report the dimensions of arrays on disk, read by blocks."""
    from pca_torch import pipeline

    check_out(out)
    keeping = pipeline.Keeping(out, statistics, resume, every)
    with progress_bar(GO_ON) as progress:
        summary, results = pipeline.fit_files(
            files,
            tensor=tensor,
            n_components=as_components(n_components),
            precision=precision,
            keeping=keeping,
            progress=progress,
        )
    _finish(keeping, summary, results, view, as_json)


def report(
    source: Annotated[
        Path,
        typer.Argument(help="Folder that `run` or `fit` wrote, or a file of --save-statistics or `merge`."),
    ] = OUT,
    n_components: Components = "0.95",
    view: Annotated[View, typer.Option(help="Rows the basis file is of, from a statistic file.")] = "typical",
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files of a report from a statistic file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a report again, or make one from a statistic file."""
    from pca_torch import pipeline
    from pca_torch._safetensors import is_safetensors
    from pca_torch.report import read_report

    if not is_safetensors(source):
        _refuse(out, source)
        show(read_report(source / "report.json" if source.is_dir() else source), as_json, [])
        return
    if out is not None:
        check_out(out)
    summary, results = pipeline.report_statistics(source, n_components=as_components(n_components))
    show(summary, as_json, [] if out is None else pipeline.write_outputs(out, summary, results, view))


def _say(lines: list[str]) -> None:
    print(*lines, sep="\n", file=sys.stderr)


def _refuse(out: Path | None, source: Path) -> None:
    """Nothing is written of a report that is there.

    Raises:
        ValueError: it is asked for.
    """
    if out is not None:
        raise ValueError(f"`--out` is for statistic files, {source} is a report; leave it out.")


def _finish(keeping: Any, summary: dict[str, Any], results: Any, view: View, as_json: bool) -> None:
    """Write the files, and then remove what was only there to resume the run."""
    from pca_torch import pipeline

    written = pipeline.write_outputs(keeping.folder, summary, results, view)
    if keeping.statistics is not None:
        written.append(keeping.statistics)
    keeping.clear()
    show(summary, as_json, written)
