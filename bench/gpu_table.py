"""What did a GPU say? The README's table, from the last run of `scripts/gpu_check` on a CUDA device."""

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NONE = "Not yet measured on a GPU; `scripts/gpu_check` measures it in six minutes and records every row."
HEAD = "| job | size | data | seconds | of the limit | error | may be |\n|---|---|---|---|---|---|---|"
NOTE = (
    'Where "may be" is empty the route promises nothing. '
    "The drivers of `torch.linalg.svd` run on float32 samples alone."
)
PARTS = ("leading", "all", "sums", "heads", "blocks", "capture", "ceilings")
KINDS = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "uint8": "bytes"}


def last_run(folder: Path) -> list[dict]:
    """Lines of the last run on a CUDA device; none where there is no such run."""
    path = folder / "gpu_check.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    runs = [line["run"] for line in lines if line.get("device_type") == "cuda"]
    return [line for line in lines if line["run"] == runs[-1]] if runs else []


def is_shown(line: dict) -> bool:
    """Whether a row stands in the README; other spectra and bfloat16 samples are in the file."""
    return line["part"] in {"capture", "ceilings"} or (
        line.get("spectrum") in {None, "power"} and line.get("dtype") != "bfloat16"
    )


def row(line: dict) -> str:
    """One row, or what it says in place of one."""
    size = f"{line['n']}×{line['d']}" if "n" in line else ""
    kind = KINDS.get(line.get("dtype"), "")
    data = " ".join(filter(None, [kind, line.get("spectrum")]))
    if "seconds" not in line:
        cells = [line["case"], size, data, line.get("skipped") or line["failed"], "", "", ""]
        return f"| {' | '.join(cells)} |"
    limit = "" if line.get("of_limit") is None else f"{line['of_limit']:.2f}"
    if "ratio" in line:
        limit = f"{line['ratio']:.2f} × a plain forward"
    bound = "" if line.get("bound") is None else f"{line['bound']:.0e}"
    case = line["case"] if line["part"] != "capture" else f"every layer into {line['case']}"
    return f"| {case} | {size} | {data} | {line['seconds']:.3g} | {limit} | {line['error']:.0e} | {bound} |"


def tests(lines: list[dict]) -> str:
    """How the marked tests ended, as a clause."""
    found = next((line for line in lines if line["part"] == "tests"), None)
    if found is None:
        return ""
    left = "" if found["finished"] else ", the rest did not fit the time"
    return f"; {found['passed']} tests passed, {found['failed_tests']} failed{left}"


def table(folder: Path) -> str:
    """Markdown: one sentence where nothing was measured, else what was, on what, and the rows."""
    lines = last_run(folder)
    if not lines:
        return NONE
    where = next(line for line in lines if line["part"] == "environment")
    on = f"{where['device']}, torch {where['torch']}, CUDA {where['cuda']}"
    shown = [line for part in PARTS for line in lines if line["part"] == part and is_shown(line)]
    hidden = sum(line["part"] in PARTS and not is_shown(line) for line in lines)
    wrong = sum(not line.get("ok", True) for line in lines)
    others = f"{hidden} rows on other spectra and in bfloat16 are in the file; {wrong} of all rows are wrong."
    return "\n".join([f"On {on}{tests(lines)}:", "", HEAD, *map(row, shown), "", NOTE, others])


def main() -> None:
    """Print it."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON lines")
    print(table(options.parse_args().out))


if __name__ == "__main__":
    main()
