"""Hundreds of statistic files that lie, in a process of its own: each is refused in one line or is sound."""

import json
import random
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pca_torch.statistic_file import load_statistics, save_statistics
from pca_torch.tokens import TokenViews
from tests.test_export_fuzz import MUTATIONS, flip
from tests.test_export_reading import split
from tests.test_statistic_file import example

ROOT = Path(__file__).parents[1]
FILES = 500


def flip_numbers(data: bytes, rng: random.Random) -> bytes:
    """Bits of what is small and decides much, not of the long histograms."""
    header, blob = split(data)
    names = [name for name in header if name != "__metadata__" and "counts" not in name]
    begin = len(data) - len(blob)
    start, stop = header[rng.choice(names)]["data_offsets"]
    return flip(data, begin + start, begin + stop, rng)


def assert_sound(statistic: Any) -> None:
    """A loaded statistic goes on, and what it tells is finite."""
    if isinstance(statistic, TokenViews):
        n = statistic.n_samples
        everything, typical, extreme = statistic.result()
        assert extreme.n_samples == n == everything.n_samples
        statistic.update(torch.zeros(2, statistic.n_features))
        parts = [everything, typical]
    else:
        parts = [statistic]
    for part in parts:
        assert torch.isfinite(part.mean).all()
        if part.n_samples:
            assert torch.isfinite(part.covariance(0)).all()
            assert (part.covariance(0).diagonal(dim1=-2, dim2=-1) >= 0).all()


def outcome(path: Path) -> str:
    """Read a file, as a user would; only an error in one line that names it counts as a refusal."""
    try:
        statistics = dict(load_statistics(path))
    except ValueError as error:
        text = str(error)
    else:
        for statistic in statistics.values():
            assert_sound(statistic)
        return "loaded"
    assert text.startswith(f"{path}: "), text
    assert "\n" not in text, text
    return "refused"


def fuzz(folder: Path) -> None:
    """Print how many mutated files came out how, and the KiB by which the peak memory of the process grew."""
    torch.set_num_threads(1)
    rng = random.Random(0)
    path = folder / "s"
    save_statistics(path, example(), {"n": 1})
    data = path.read_bytes()
    outcomes = Counter({outcome(path): 0})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mutations = [*MUTATIONS, flip_numbers, flip_numbers]
    for i in range(FILES):
        path.write_bytes(mutations[i % len(mutations)](data, rng))
        outcomes[outcome(path)] += 1
    outcomes["grown"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print(json.dumps(outcomes))


def test_mutated_files_are_refused_or_sound(tmp_path):
    code = "import sys, tests.test_statistic_fuzz as f; f.fuzz(f.Path(sys.argv[1]))"
    run = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a crash of the interpreter would show here too
    outcomes = json.loads(done.stdout)
    assert outcomes["refused"] + outcomes["loaded"] == FILES
    assert outcomes["refused"] > FILES / 2  # most mutations break something
    assert outcomes["loaded"] > 0  # the low bits of a mean, say, cannot be told from others
    assert outcomes["grown"] < 100 * 1024
