"""How do the time and the peak of memory of each route grow with N, D and K?

N, D and K are swept one at a time, the others held. Every point is three runs in a process of its own, with
float32 samples of a power law in memory: the median of the seconds, the largest resident memory beyond
what was there before, and the share of the variance that the K directions miss, by the float64 truth.

What the README's table leads one to expect (N samples, D features, K components, N > D):

    route             time                      memory beyond the input
    krylov            N·D²/2 + D²·(4…12)·K      D² + 3·D·4K
    covariance_eigh   N·D²/2 + 9·D³             D²
    tsqr              2·N·D² + 10·D³            D²
    full              2·N·D² + 10·D³            N·D
    randomized        N·D·(K + 10)·10           N·D
    streaming         as krylov, `partial_fit` of batches of 1024 rows

The fitted exponents are printed beside those of these formulas. A matrix product runs several times faster
per operation than an eigensolver, so sums of both can lean to either term. The cost of all D components
is stated for `covariance_eigh`; K of them take about a third of its D³.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import ChildError, in_child, measured
from exponents import LETTERS, TIME, plot, rows, stored, table
from pairs import RESULTS, append, record
from spectra import samples
from torch import Tensor
from truth import covariance, eigenvalues, missed

import pca_torch as pt

BATCH = 1024
Point = tuple[int, int, int]  # N, D, K

PLANS: dict[str, dict[str, list[Point]]] = {
    "full": {
        "N": [(n, 1024, 64) for n in (2048, 4096, 8192, 16384, 32768, 65536)],
        "D": [(8192, d, 64) for d in (768, 1024, 1536, 2048, 4096)],
        "K": [(8192, 2048, k) for k in (8, 32, 64, 128, 192, 512)],
    },
    "tiny": {
        "N": [(n, 48, 4) for n in (96, 192, 384)],
        "D": [(192, d, 4) for d in (24, 48, 96)],
        "K": [(192, 48, k) for k in (2, 4, 8)],
    },
}


def streamed(x: Tensor, k: int) -> pt.PCAResult:
    """Top K of a stream of batches.

    Args:
        x: (N, D).
        k: K.
    """
    pca = pt.PCA(k)
    for batch in x.split(BATCH):
        pca.partial_fit(batch)
    return pca.result_


def solver(route: str) -> Callable[[Tensor, int], pt.PCAResult]:
    """What a route runs on samples (N, D) and K."""
    if route == "streaming":
        return streamed
    return lambda x, k: pt.decompose(x, k, route)


def measure(route: str, path: Path, k: int, repeats: int, cap: float) -> dict[str, Any]:
    """Seconds and bytes of one point, in this process.

    Args:
        route: of `TIME`.
        path: the samples, `.npy`.
        k: K.
        repeats: runs.
        cap: seconds of a run after which there is no other.
    """
    x, solve = torch.from_numpy(np.load(path)), solver(route)
    solve(x[:1024, :640].clone(), min(k, 8))  # the code of the route is in memory from here on
    result, seconds, above = measured(lambda: solve(x, k), repeats, cap)
    certificate = result.certificate
    return {
        "seconds": seconds,
        "above": above,
        "components": result.components.double().numpy(),
        "missed_ratio_bound": certificate.missed_ratio_bound,
        "solver": certificate.solver,
        "handed_over": certificate.solver != ("krylov" if route == "streaming" else route),
    }


class Judge:
    """The samples of one N and D on disk, and their float64 truth."""

    def __init__(self, n: int, d: int, folder: str) -> None:
        self.path = Path(folder) / "x.npy"
        x = samples("power", n, d, d)
        np.save(self.path, x.numpy())
        self._covariance = covariance(x)
        self._variance = eigenvalues(self._covariance)

    def missed(self, components: Tensor) -> float:
        """Share of the variance that the best K directions capture and these do not.

        Args:
            components: (K, D).
        """
        return missed(self._covariance, self._variance, components)


def run(route: str, point: Point, judge: Judge, args: argparse.Namespace) -> dict[str, Any]:
    """One point, measured and judged, or why it was not.

    Args:
        route: of `TIME`.
        point: N, D, K.
        judge: of that N and D.
        args: `repeats` and `cap`.
    """
    limit = 60 + (args.repeats + 1) * args.cap
    try:
        found = in_child(measure, route, judge.path, point[2], args.repeats, args.cap, limit=limit)
    except ChildError as error:
        return {"skipped": str(error)}
    lost = judge.missed(torch.from_numpy(found.pop("components")))
    over = max(found["seconds"]) > args.cap
    return {**found, "missed": lost, "skipped": f"a run takes more than {args.cap:g} s" if over else None}


def progress(route: str, point: Point, facts: dict[str, Any]) -> str:
    """One line of at most 80 columns."""
    n, d, k = point
    head = f"{route:16}{n:>6}×{d:<5}K={k:<4}"
    if facts["skipped"] is not None:
        return f"{head} {facts['skipped']}"[:80]
    seconds, bound = np.median(facts["seconds"]), facts["missed_ratio_bound"]
    return f"{head}{seconds:8.3f} s{facts['above'] / 1e6:7.0f} MB, missed {facts['missed']:.0e} ≤ {bound:.0e}"


def keep_others(folder: Path, routes: set[str], every: list[Point]) -> None:
    """Drop the stored lines of the routes that are measured now, and of points of another plan.

    Args:
        folder: of `scaling.jsonl`.
        routes: those measured now.
        every: points of the plan.
    """
    kept = [line for line in stored(folder) if line["case"] not in routes]
    kept = [line for line in kept if (line["n"], line["d"], line["k"]) in every]
    (folder / "scaling.jsonl").unlink(missing_ok=True)
    append(folder, "scaling", kept)


def sweep(args: argparse.Namespace) -> None:
    """Measure every point of the plan, smaller ones first; one JSON line for each."""
    plan = PLANS["tiny" if args.tiny else "full"]
    every = sorted({p for found in plan.values() for p in found}, key=lambda p: p[0] * p[1] ** 2)
    keep_others(Path(args.out), set(args.routes), every)
    options = argparse.Namespace(out=args.out, device="cpu", repeats=args.repeats, cap=args.cap)
    slow: list[tuple[str, Point]] = []
    for n, d in dict.fromkeys(p[:2] for p in every):
        with tempfile.TemporaryDirectory() as folder:
            judge = Judge(n, d, folder)
            for point in (p for p in every if p[:2] == (n, d)):
                for route in args.routes:
                    facts = {"skipped": "a smaller one took too long"}
                    if not any(route == r and all(map(int.__le__, p, point)) for r, p in slow):
                        facts = run(route, point, judge, args)
                    if facts["skipped"] is not None:
                        slow.append((route, point))
                    print(progress(route, point, facts), flush=True)
                    sweeps = [letter for letter in LETTERS if point in plan[letter]]
                    sizes = dict(zip(("n", "d", "k"), point, strict=True))
                    record("scaling", options, case=route, sweeps=sweeps, **sizes, **facts)


def main() -> None:
    """Measure, then print the exponents and draw them; or print the stored ones as Markdown."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--routes", nargs="+", choices=list(TIME), default=list(TIME))
    options.add_argument("--repeats", type=int, default=3, help="runs of a point (%(default)s)")
    options.add_argument("--cap", type=float, default=20.0, help="seconds of a run at most (%(default)s)")
    options.add_argument("--tiny", action="store_true", help="sizes of a test")
    options.add_argument("--out", help="folder of lines and picture (bench/results; none if --tiny)")
    options.add_argument("--table", action="store_true", help="measure nothing, print stored exponents")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        args.out = args.out or (nowhere if args.tiny and not args.table else str(RESULTS))
        act(args)


def act(args: argparse.Namespace) -> None:
    """What was asked for.

    Args:
        args: of the command line, with a folder.
    """
    out = Path(args.out)
    if args.table:
        if not (out / "scaling.jsonl").exists():
            sys.exit(f"{out / 'scaling.jsonl'}: no such file; run scaling.py without --table first.")
        print("\n".join(rows(out)))
        return
    sweep(args)
    print("\n" + "\n".join(table(stored(out))))
    try:
        plot(stored(out), out / "scaling.png")
    except ImportError as error:
        sys.exit(f"scaling.png needs matplotlib: `pip install matplotlib` ({error}).")


if __name__ == "__main__":
    main()
