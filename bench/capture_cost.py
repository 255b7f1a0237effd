"""What do the statistics of every layer cost a forward pass of a language model?

SmolLM2 (30 layers, D = 576, float32) reads random tokens, its head included. Four things run in turn, in
random order within each round:

    plain     the forward alone
    captured  the same forward, the output of every layer counted in both token views, exactly
    updates   the counting alone, of outputs that were kept before
    products  of that, one float64 product of each output with itself

The figure that counts is captured over plain within each round. Beside it stands how far the covariance of
the last layer is from that of its rows. `--clock wall` needs a quiet machine.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pairs import RESULTS, parser, record, show
from rounds import Runs, interleaved
from torch import Tensor

import pca_torch as pt
from pca_torch.linalg import add_gram
from pca_torch.models import load_model
from pca_torch.tokens import TokenViews

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
HELD = 256  # rows held aside by each site, as in a run
LEN = 512  # tokens of a sequence
TOKENS = (2048, 4096, 8192)
D = 576
LAYERS = 30
ROUNDS = 11


def make_sinks(names: list[str]) -> dict[str, TokenViews[pt.Moments]]:
    """Empty views of each site.

    Args:
        names: of the sites.
    """
    exact = partial(pt.Moments, D, precision="float64")
    return {name: TokenViews(exact, exact, max_held=HELD) for name in names}


def kept_outputs(
    forward: Callable[[], object], model: torch.nn.Module, names: list[str]
) -> dict[str, Tensor]:
    """Rows (n, D) of each site in one forward.

    Args:
        forward: runs the model.
        model: that is captured.
        names: of the sites.
    """
    rows: dict[str, Tensor] = {}
    with pt.capture(model, {name: partial(rows.__setitem__, name) for name in names}):
        forward()
    return rows


def measure(model: torch.nn.Module, tokens: int, rounds: int, clock: str) -> tuple[dict[str, Runs], float]:
    """Runs of all four, and the error of the covariance of the last layer, relative (Frobenius norm).

    Args:
        model: SmolLM2.
        tokens: of one forward.
        rounds: how many.
        clock: a key of `CLOCKS`.
    """
    ids = torch.randint(0, 49_000, (tokens // LEN, LEN), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    names = [f"model.layers.{i}" for i in range(LAYERS)]
    sinks, alone = make_sinks(names), make_sinks(names)

    def plain() -> None:
        with torch.no_grad():
            model(**batch, use_cache=False)

    rows = kept_outputs(plain, model, names)
    target = torch.zeros(D, D, dtype=torch.float64)

    def captured() -> None:
        with pt.capture(model, sinks):
            plain()

    def updates() -> None:
        for name, sink in alone.items():
            sink.update_rows(rows[name])

    def products() -> None:
        for x in rows.values():
            add_gram(target, x.double())

    calls = {"plain": plain, "captured": captured, "updates": updates, "products": products}
    for call in calls.values():
        call()
    runs = interleaved(calls, rounds, float("inf"), slow=float("inf"), clock=CLOCKS[clock])
    truth = torch.cov(rows[names[-1]].double().mT, correction=0)  # the same rows each time
    counted = sinks[names[-1]].result()[0].covariance(0)
    return runs, (torch.linalg.norm(counted - truth) / torch.linalg.norm(truth)).item()


def facts_of(runs: dict[str, Runs], error: float) -> dict[str, Any]:
    """What is recorded: medians, ratios within rounds and their range.

    Args:
        runs: of `measure`.
        error: of the covariance.
    """
    ratios = {name: run.ratios(runs["plain"]) for name, run in runs.items() if name != "plain"}
    middle = {name: sorted(values)[len(values) // 2] for name, values in ratios.items()}
    return {
        "ratio": middle["captured"],
        "ratio_min": min(ratios["captured"]),
        "ratio_max": max(ratios["captured"]),
        "updates_share": middle["updates"],
        "products_share": middle["products"],
        "error": error,
        "seconds": {name: run.seconds for name, run in runs.items()},
    }


def table() -> str:
    """The last record of each size as a Markdown table."""
    path = RESULTS / "capture_cost.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if not rows:
        return "Not yet measured; `python bench/capture_cost.py` takes minutes."
    last = {row["tokens"]: row for row in rows}
    lines = [
        "| tokens of a forward | captured over plain | least and most | float64 products alone | error |",
        "|---|---|---|---|---|",
    ]
    for tokens, row in sorted(last.items()):
        spread = f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}, {len(row['seconds']['plain'])} rounds"
        cells = (
            f"{tokens:,}",
            f"{row['ratio']:.3f}",
            spread,
            f"{row['products_share']:.1%}",
            f"{row['error']:.0e}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure each size, print and record it; or print what is recorded."""
    options = parser(__doc__, n=None, d=None)
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="of one forward")
    options.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="seconds of which (%(default)s)"
    )
    options.add_argument("--table", action="store_true", help="print what is recorded, measure nothing")
    options.set_defaults(pairs=ROUNDS)
    args = options.parse_args()
    if args.table:
        print(table())
        return
    if args.device != "cpu":
        options.error("`--device` must be cpu: elsewhere nothing here waits for the device.")
    if any(tokens < LEN or tokens % LEN for tokens in args.tokens):
        options.error(f"`--tokens` must be multiples of {LEN}, the tokens of a sequence.")
    model = load_model("smollm2").model
    for tokens in args.tokens:
        facts = facts_of(*measure(model, tokens, args.pairs, args.clock))
        print(
            f"{tokens} tokens: captured over plain {facts['ratio']:.3f} "
            f"({facts['ratio_min']:.3f}–{facts['ratio_max']:.3f}), error {facts['error']:.0e}"
        )
        show({name: facts[name] for name in ("updates_share", "products_share")})
        record("capture_cost", args, **{**facts, "tokens": tokens})


if __name__ == "__main__":
    main()
