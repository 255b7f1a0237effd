"""Write the tables of Markdown files anew from the stored results: `python bench/fill.py README.md …`.

What a command prints stands between `<!-- python bench/COMMAND -->` and `<!-- end -->`.
"""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^(<!-- python (bench/.+?) -->\n)(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """Command and content of each block.

    Args:
        text: of a Markdown file.
    """
    return [(found[2], found[3].strip("\n")) for found in BLOCK.finditer(text)]


def output(command: str) -> str:
    """What a command prints.

    Args:
        command: a script below `bench/` and its arguments.

    Raises:
        CalledProcessError: it failed.
    """
    words = [sys.executable, *shlex.split(command)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip("\n")


def filled(text: str) -> str:
    """The text with what its commands print now.

    Args:
        text: of a Markdown file.
    """
    return BLOCK.sub(lambda found: f"{found[1]}{output(found[2])}\n<!-- end -->", text)


def main() -> None:
    """Rewrite the files given."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("file", nargs="+", type=Path, help="Markdown")
    for path in options.parse_args().file:
        try:
            path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
        except subprocess.CalledProcessError as error:
            sys.exit(f"{path} is as it was: {shlex.join(error.cmd[1:])} failed: {error.stderr.strip()}")


if __name__ == "__main__":
    main()
