"""The command line: `pca-torch run`, `fit`, `report` and `kappa`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pca_torch._files import replacing
from pca_torch.precision import Precision

if TYPE_CHECKING:
    from pca_torch.kappa import Study

__all__ = ["app", "main"]

SPREAD = {"--text", "--sites"}  # options that take all values up to the next option
OUT = Path("pca_torch_out")
View = Literal["typical", "all"]

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="How many dimensions the layers of a model use, and which ones.",
)

Components = Annotated[
    str, typer.Option(help="Directions kept: a share of the variance (0.95), a count (128), or 'all'.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")]


@app.command()
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

    _check_out(out)
    with _progress() as progress:
        summary, results = pipeline.run(
            model,
            text=text or (),
            tokens=tokens,
            sites=sites or None,
            seq_len=seq_len,
            max_tokens=max_tokens,
            batch_size=batch_size,
            n_components=_components(n_components),
            drop_first=drop_first,
            device=device,
            dtype=dtype,
            revision=revision,
            progress=progress,
        )
    files = pipeline.write_outputs(out, summary, results, view)
    _show(summary, as_json, files)


@app.command()
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

    _check_out(out)
    with _progress() as progress:
        summary, results = pipeline.fit_files(
            files,
            n_components=_components(n_components),
            precision=precision,
            progress=progress,  # pyright: ignore[reportArgumentType]
        )
    written = pipeline.write_outputs(out, summary, results, view)
    _show(summary, as_json, written)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Folder that `run` or `fit` wrote.")] = OUT,
    as_json: AsJson = False,
) -> None:
    """Show a report again."""
    from pca_torch.report import read_report

    path = folder / "report.json" if folder.is_dir() else folder
    _show(read_report(path), as_json, [])


@app.command()
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
        _check_out(out)
    rows = None if file is None else read(file)
    with _progress() as progress:
        name = None if file is None else file.name
        found = study(rows, count=count, name=name, progress=progress("kappa", STEPS))
    files = [] if out is None else _write_study(found, out)
    _show(found.to_dict(), as_json, files, table(found, Console().width))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit codes: 0 done; 1 the data or the model is at fault, said in one line; 2 usage; 130 interrupted.

    Args:
        argv: arguments; None is those of the process.
    """
    warnings.showwarning = _warn
    arguments = _spread(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments, prog_name="pca-torch", standalone_mode=True)
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        _fail(_one_line(error), 1)


def _spread(arguments: Sequence[str]) -> list[str]:
    """`--text a b` as `--text a --text b`: shells expand patterns to several words."""
    spread: list[str] = []
    option, words = None, 0  # the option that is open, and how many words it has taken
    for word in arguments:
        if word.startswith("-"):
            option, words = (word if word in SPREAD else None), 0
            spread.append(word)
            continue
        if option is not None and words:
            spread.append(option)
        spread.append(word)
        words += 1
    return spread


def _components(text: str) -> float | None:
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


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be one before the work, not after it.

    Raises:
        ValueError: it is a file.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, {out} is a file; give another.")
    above = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"`--out` cannot be made: {above} is no folder to write in; give another.")


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


@contextmanager
def _progress() -> Generator[Callable[[str, int], Callable[[int], object]]]:
    """A progress bar on a terminal, nothing in a pipe.

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
            print(
                "interrupted; files that were there before are as they were, run it again.", file=sys.stderr
            )
            raise


def _show(
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
        console.print(f"wrote {', '.join(map(str, files))}", markup=False, highlight=False)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _warn(message: Warning | str, *_: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _fail(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(code)
