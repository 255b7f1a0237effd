"""What do the stored results say? The tables of the README files."""

import argparse
from collections.abc import Callable
from pathlib import Path

import peer_tables
import suites
from pairs import RESULTS

HEAD = ["| job | against | time ratio | accuracy beside it |", "|---|---|---|---|"]


def of_suites(folder: Path) -> list[str]:
    """The suites of `pytest bench`."""
    return [*HEAD, *suites.rows(folder)]


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "summary": peer_tables.summary,
    "claims": peer_tables.claims,
    "peers": peer_tables.peers,
    "suites": of_suites,
}


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", nargs="?", choices=list(TABLES), default="summary", help="(%(default)s)")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    given = options.parse_args()
    print("\n".join(TABLES[given.name](given.out)))


if __name__ == "__main__":
    main()
