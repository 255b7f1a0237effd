"""The seconds of pairs of runs, the environment they depend on, and one JSON line for the record."""

import argparse
import gc
import json
import os
import platform
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of pairs of runs."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs within each pair: what slows the machine down for a while slows both."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """Median of `ratios`."""
        return float(np.median(self.ratios))

    def to_dict(self) -> dict[str, Any]:
        """Quartiles of the seconds and of the ratio, with its extremes, and every single run."""
        quartiles = (
            (name, np.quantile(values, [0.25, 0.5, 0.75]).tolist())
            for name, values in (("ours", self.ours), ("theirs", self.theirs), ("ratio", self.ratios))
        )
        return {
            "ratio": self.ratio,
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "quartiles": dict(quartiles),
            "seconds": {"ours": self.ours, "theirs": self.theirs},
        }


def timed(
    run: Callable[[], Any], wait: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    """Seconds and answer of one run, after garbage was collected, on a device that was idle.

    Args:
        run: what is timed.
        wait: of `waiting_for`.
        clock: seconds.
    """
    gc.collect()
    wait()
    start = clock()
    answer = run()
    wait()
    return clock() - start, answer


def waiting_for(device: str) -> Callable[[], None]:
    """What returns when a device is idle; on a CPU there is nothing to wait for."""
    return torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None


def said(error: Exception) -> str:
    """What an exception is and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no reason given'])[0]}"


def show(values: Mapping[str, float]) -> None:
    """Print named numbers, indented, in lines of at most 80 columns."""
    text = ", ".join(f"{name} {value:.3g}".replace(" ", "\0") for name, value in values.items())
    lines = textwrap.wrap(text, 76, break_on_hyphens=False)
    print(textwrap.indent("\n".join(lines), "    ").replace("\0", " "), flush=True)


def record(script: str, args: argparse.Namespace, **facts: Any) -> None:
    """Append one JSON line to `OUT/script.jsonl`: the options, the facts and the environment.

    Args:
        script: names the file.
        args: of `parser`; the options that were set are written, without the folder.
        facts: anything that JSON holds.
    """
    options = {name: value for name, value in vars(args).items() if name != "out" and value is not None}
    append(Path(args.out), script, [{**options, **facts, "environment": environment(args.device)}])


def append(folder: Path, script: str, lines: Iterable[dict[str, Any]]) -> None:
    """Add JSON lines to `folder/script.jsonl`.

    Args:
        folder: made where it is missing.
        script: names the file.
        lines: what JSON holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{script}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def lines_of(folder: Path, script: str) -> list[dict[str, Any]]:
    """What `append` wrote; nothing where there is no file.

    Args:
        folder: of the file.
        script: names the file.
    """
    path = folder / f"{script}.jsonl"
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def environment(device: str) -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    cuda = torch.device(device).type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "commit": _commit(),
    }


def parser(
    question: str | None, *, n: int | None, d: int | None, k: int | None = None
) -> argparse.ArgumentParser:
    """The options that all scripts share, with the sizes of the claim as defaults.

    Args:
        question: the docstring of the script.
        n: samples.
        d: features.
        k: components; None for a script that does not choose them, whose `--k` changes nothing.
    """
    options = argparse.ArgumentParser(
        description=question, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--n", type=int, default=n, help="samples (%(default)s)")
    options.add_argument("--d", type=int, default=d, help="features (%(default)s)")
    options.add_argument("--k", type=int, default=k, help="components (%(default)s)")
    options.add_argument("--pairs", type=int, default=5, help="runs of each side (%(default)s)")
    options.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    options.add_argument("--out", default=str(RESULTS), help="folder of the JSON lines")
    return options


@cache
def _commit() -> str | None:
    """Of the checkout, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None


@cache
def _cpu_name() -> str:
    """The model of the processor; what `platform` knows where Linux does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
