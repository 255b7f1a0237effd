"""How much memory does a fit take beyond its input, at its peak?

In a fresh process: the resident memory at its highest, minus what was resident after the imports, the
input and a tiny fit. Each case has a size and a limit:

    wide    PCA(3) of 4 × 200,000 float32 in memory; 200 MB
    disk    top 128 of a `.npy` file of 20,000 × 12,544 float32; one D×D float64 matrix
    sparse  top 20 of 200,000 × 50,000 CSR with 0.1 % of the entries; 1 GB

With `--pairs P` each case runs in P processes, and the largest figure counts.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pairs import parser, record, show
from spectra import blocks

import pca_torch as pt

SIZES = {"wide": (4, 200_000, 3), "disk": (20_000, 12_544, 128), "sparse": (200_000, 50_000, 20)}
LIMITS: dict[str, Callable[[int], float]] = {
    "wide": lambda d: 200e6,
    "disk": lambda d: 8.0 * d * d,
    "sparse": lambda d: 1e9,
}
ONE_IN = 1000  # entries of the sparse case that are not zero


def resident() -> tuple[int, int]:
    """Bytes resident now and at most so far, of this process alone.

    Not `ru_maxrss`: across exec that starts at the peak of the process before, and would hide ours.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    return 1024 * kib["VmRSS"], 1024 * kib["VmHWM"]


def build(case: str, n: int, d: int, k: int, folder: Path) -> None:
    """Write the input, in another process than the one that is measured.

    Args:
        case: one of `SIZES`.
        n: N.
        d: D.
        k: K.
        folder: where to.
    """
    if case != "sparse":
        target = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (n, d))
        first = 0
        for block in blocks("power", n, d, k):
            target[first : first + len(block)] = block.numpy()
            first += len(block)
        target.flush()
        return
    random = np.random.default_rng(0)
    per_row = max(1, d // ONE_IN)
    step = d // per_row  # one entry in each stretch of columns: sorted, and none twice
    columns = step * np.arange(per_row) + random.integers(step, size=(n, per_row))
    np.save(folder / "crow.npy", per_row * np.arange(n + 1))
    np.save(folder / "col.npy", columns.ravel())
    np.save(folder / "values.npy", random.standard_normal(columns.size, dtype=np.float32))


def load(case: str, n: int, d: int, folder: Path) -> Any:
    """The input of a case as it is handed to the fit.

    Args:
        case: one of `SIZES`.
        n: N.
        d: D.
        folder: where `build` wrote it.
    """
    if case == "disk":
        return pt.NpySource(folder / "x.npy")
    if case == "wide":
        return torch.from_numpy(np.load(folder / "x.npy"))
    crow, col, values = (
        torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("crow", "col", "values")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls all of its CSR support a beta
        return torch.sparse_csr_tensor(crow, col, values, (n, d))


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One fit in this process: bytes above the baseline, and what its certificate says.

    Args:
        args: `case`, `n`, `d`, `k`, `solver`, and the folder `measure`.
    """
    data = load(args.case[0], args.n, args.d, Path(args.measure))
    pt.PCA(1).fit(torch.eye(8, 4))
    gc.collect()
    before, _ = resident()
    if args.case[0] == "wide":
        result = pt.PCA(args.k, svd_solver=args.solver).fit(data).result_
    else:
        result = pt.decompose(data, args.k, args.solver)
    _, peak = resident()
    certificate = result.certificate
    return {
        "above": peak - before,
        "captured_ratio": certificate.captured_ratio,
        "missed_ratio_bound": certificate.missed_ratio_bound,
    }


def in_fresh_processes(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Build the input of a case and measure it in `args.pairs` processes; the largest figure.

    Args:
        case: one of `SIZES`.
        args: with the sizes filled in.

    Raises:
        RuntimeError: the fit failed, with the last line of what it said.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        build(case, args.n, args.d, args.k, Path(folder))
        sizes = [f"--{name}={getattr(args, name)}" for name in ("n", "d", "k", "solver")]
        command = [sys.executable, __file__, f"--measure={folder}", f"--case={case}", *sizes]
        for _ in range(args.pairs):
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
                raise RuntimeError(f"{case}: {last}")
            found.append(json.loads(run.stdout))
    return max(found, key=lambda one: one["above"])


def main() -> None:
    """Measure every case; the exit code is 1 if one failed."""
    options = parser(__doc__, n=None, d=None)
    options.add_argument("--case", nargs="+", choices=list(SIZES), default=list(SIZES))
    options.add_argument("--solver", default="auto", help="svd_solver (%(default)s)")
    options.add_argument("--measure", help=argparse.SUPPRESS)
    options.set_defaults(pairs=1)
    args = options.parse_args()
    if args.device != "cpu":
        options.error("`--device` must be cpu: what is measured is the memory of the host.")
    if args.measure:
        print(json.dumps(measure(args)))
        return
    failed = False
    for case in args.case:
        n, d, k = (
            a if a is not None else b for a, b in zip((args.n, args.d, args.k), SIZES[case], strict=True)
        )
        sized = argparse.Namespace(**{**vars(args), "n": n, "d": d, "k": k, "case": [case]})
        try:
            found = in_fresh_processes(case, sized)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        summarise(case, sized, found)
    sys.exit(int(failed))


def summarise(case: str, args: argparse.Namespace, found: dict[str, float]) -> None:
    """Print and record one case.

    Args:
        case: one of `SIZES`.
        args: with the sizes filled in.
        found: of `measure`.
    """
    above, limit = found["above"], LIMITS[case](args.d)
    square = 4 * args.d**2
    verdict = "below" if above <= limit else "ABOVE"
    print(f"{case}: {above / 1e6:.1f} MB beyond the input, {verdict} its limit of {limit / 1e6:.1f} MB")
    show({"D×D float32 MB": square / 1e6, "D×D float64 MB": 2 * square / 1e6, **found})
    facts = {"ratio": above / limit, "limit": limit, "square_float32": square, "square_float64": 2 * square}
    record("memory", args, **{**facts, **found, "case": case})


if __name__ == "__main__":
    main()
