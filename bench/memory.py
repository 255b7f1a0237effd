"""How much memory does a fit take beyond its input, at its peak?

In a fresh process: the resident memory at its highest, minus what was resident after the imports, the
input and a tiny fit. Each case has a size and a limit:

    wide    PCA(3) of 4 × 200,000 float32 in memory; 200 MB
    disk    top 128 of a `.npy` file of 20,000 × 12,544 float32; one D×D float64 matrix
    sparse  top 20 of 200,000 × 50,000 CSR with 0.1 % of the entries; 1 GB

With `--pairs P` each case runs in P processes, and the largest figure counts.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import ChildError, in_child, measured
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


def measure(case: str, n: int, d: int, k: int, solver: str, folder: Path) -> dict[str, float]:
    """One fit in this process: bytes above the baseline, and what its certificate says.

    Args:
        case: one of `SIZES`.
        n: N.
        d: D.
        k: K.
        solver: `svd_solver`.
        folder: where `build` wrote the input.
    """
    data = load(case, n, d, folder)
    pt.PCA(1).fit(torch.eye(8, 4))

    def fit() -> pt.PCAResult:
        if case == "wide":
            return pt.PCA(k, svd_solver=solver).fit(data).result_
        return pt.decompose(data, k, solver)

    result, _, above = measured(fit, 1, 0)
    certificate = result.certificate
    return {
        "above": above,
        "captured_ratio": certificate.captured_ratio,
        "missed_ratio_bound": certificate.missed_ratio_bound,
    }


def in_fresh_processes(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Build the input of a case and measure it in `args.pairs` processes; the largest figure.

    Args:
        case: one of `SIZES`.
        args: with the sizes filled in.

    Raises:
        ChildError: the fit failed.
    """
    sizes = case, args.n, args.d, args.k
    with tempfile.TemporaryDirectory() as folder:
        in_child(build, *sizes, Path(folder))
        found = [in_child(measure, *sizes, args.solver, Path(folder)) for _ in range(args.pairs)]
    return max(found, key=lambda one: one["above"])


def main() -> None:
    """Measure every case; the exit code is 1 if one failed."""
    options = parser(__doc__, n=None, d=None)
    options.add_argument("--case", nargs="+", choices=list(SIZES), default=list(SIZES))
    options.add_argument("--solver", default="auto", help="svd_solver (%(default)s)")
    options.set_defaults(pairs=1)
    args = options.parse_args()
    if args.device != "cpu":
        options.error("`--device` must be cpu: what is measured is the memory of the host.")
    failed = False
    for case in args.case:
        n, d, k = (
            a if a is not None else b for a, b in zip((args.n, args.d, args.k), SIZES[case], strict=True)
        )
        sized = argparse.Namespace(**{**vars(args), "n": n, "d": d, "k": k, "case": [case]})
        try:
            found = in_fresh_processes(case, sized)
        except ChildError as error:
            print(f"{case}: {error}", file=sys.stderr)
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
