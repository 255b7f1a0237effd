"""What do the stored results say? The tables of the README, from the last line of each case."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import standings
import suites

RESULTS = Path(__file__).parent / "results"
HEAD = ["| job | against | time ratio | accuracy beside it |", "|---|---|---|---|"]


def lines(folder: Path, script: str) -> dict[tuple, dict]:
    """The last line of each case and precision of one script, in the order of the first."""
    path = folder / f"{script}.jsonl"
    if not path.exists():
        return {}
    stored = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(line["case"], line.get("precision")): line for line in stored}


def ratio(line: dict) -> str:
    """Median and range of the ratio of seconds."""
    return f"{line['ratio']:.2f} ({line['ratio_min']:.2f}–{line['ratio_max']:.2f})"


def ratios(folder: Path) -> list[str]:
    """Pairs of two methods."""
    found = []
    for (case, _), line in lines(folder, "symmetric_product").items():
        error = line["errors"]
        beside = f"entries off by {error['error']:.0e}, the plain product's by {error['plain_error']:.0e}"
        found.append((f"XᵀX of {line['n']}×{line['d']}, {case}", "the plain product", ratio(line), beside))
    for (case, _), line in lines(folder, "streaming").items():
        beside = f"share short by {line['errors']['missed']:.0e}"
        job = f"top {line['k']} of a stream {line['n']}×{line['d']}, {line['precision']} products, {case}"
        found.append((job, "TorchDR `ExactIncrementalPCA`, two passes", ratio(line), beside))
    for (case, _), line in lines(folder, "top_k").items():
        error = line["errors"]
        beside = f"missed at most {error['bound']:.0e} of the total, {error['bound_dir']:.0e} of λ_K"
        job = f"top {line['k']} of {line['n']}×{line['d']}, {case}"
        found.append((job, "`torch.linalg.svd`", ratio(line), beside))
    for (case, _), line in lines(folder, "all_components").items():
        error = line["errors"]
        beside = f"variances off by {error['error']:.0e}·λ₁, the SVD's by {error['svd_error']:.0e}·λ₁"
        job = f"all of {line['n']}×{line['d']}, {case}"
        found.append((job, "`torch.linalg.svd`", ratio(line), beside))
    for (case, _), line in lines(folder, "share").items():
        beside = f"K = {line['errors']['k']:.0f}, the truth is {line['errors']['true_k']:.0f}"
        job = f"a share of {case}, {line['n']}×{line['d']}"
        found.append((job, "`torch.linalg.svd`", ratio(line), beside))
    return [*HEAD, *(f"| {' | '.join(cells)} |" for cells in found)]


def of_suites(folder: Path) -> list[str]:
    """The suites of `pytest bench`."""
    return [*HEAD, *suites.rows(folder)]


TABLES: dict[str, Callable[[Path], list[str]]] = {
    "ratios": ratios,
    "suites": of_suites,
    "summary": standings.summary,  # of the peers
    "peers": standings.peers,
}


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name", nargs="?", choices=list(TABLES), default="ratios", help="(%(default)s)")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    given = options.parse_args()
    print("\n".join(TABLES[given.name](given.out)))


if __name__ == "__main__":
    main()
