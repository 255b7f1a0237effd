"""The command line `pca-torch`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from pca_torch.commands.analysis import fit, report, run
from pca_torch.commands.compare import compare
from pca_torch.commands.export import export
from pca_torch.commands.kappa import kappa
from pca_torch.commands.merge import merge
from pca_torch.commands.monitor import monitor
from pca_torch.commands.sites import sites

__all__ = ["app", "main"]

SPREAD = {"--text", "--sites", "--metrics"}  # options that take all values up to the next option
app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="How many dimensions the layers of a model use, and which ones.",
)

for command in (run, sites, fit, report, merge, export, compare, kappa, monitor):
    app.command()(command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Exit codes: 0 done; 1 the data or the model is at fault, said in one line; 2 usage; 130 interrupted.

    Args:
        argv: arguments; None is those of the process.

    Raises:
        SystemExit: always.
    """
    warnings.showwarning = _warn
    arguments = _spread(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments, prog_name="pca-torch", standalone_mode=True)
    except KeyboardInterrupt:  # later than where typer waits for it
        raise SystemExit(130) from None
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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


def _warn(message: Warning | str, *_: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _fail(text: str, code: int) -> None:
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(code)
