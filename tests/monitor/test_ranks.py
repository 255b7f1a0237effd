"""Two processes train a model on batches of their own: the first logs the spectrum of the tokens of both."""

import json
import math
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from pca_torch.monitor import SpectrumMonitor, read_log
from pca_torch.precision import unit_roundoff
from tests.support import truth
from tests.test_distributed import start_ranks

D = 32
STEPS = 5
WINDOWS = {2: (1, 2), 4: (3, 4)}  # logged step → steps sampled, of window 2 in every 4; step 5 is not
STRATEGIES = ["ddp", "fsdp"]
ACCUMULATED = 2  # forwards in each step
SITES = ["model.layers.0:output", "model.layers.1:output"]
U64 = unit_roundoff(torch.float64)
DIGITS = 5e-7  # seven are logged


def llama() -> nn.Module:
    """Two layers of width 32, with the same weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=32, **sizes)).train()


def wrapped(strategy: str, model: nn.Module) -> nn.Module:
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batch(rank: int, step: int, part: int) -> dict[str, torch.Tensor]:
    """Sequences of several lengths, padded on the left on one rank and on the right on the other."""
    g = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    b, t = 3 + rank, 20
    ids = torch.randint(1, 97, (b, t), generator=g)
    length = torch.randint(4, t + 1, (b, 1), generator=g)
    place = torch.arange(t)
    mask = (place >= t - length if rank else place < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# --- the work of one rank ------------------------------------------------------------------------------


def work(rank: int, folder: Path) -> None:
    for strategy in STRATEGIES:
        (folder / strategy).mkdir(exist_ok=True)
        train(rank, folder / strategy, strategy)


def train(rank: int, folder: Path, strategy: str) -> None:
    """Train without and with a monitor; write losses, and rows that plain hooks saw, for the parent."""
    plain, _ = run(rank, strategy, None, {})
    rows: dict[str, list[np.ndarray]] = {}
    path = folder / f"spectra.{rank}.jsonl"
    losses, returned = run(rank, strategy, path, rows)
    np.savez(folder / f"rows.{rank}.npz", **{name: np.concatenate(parts) for name, parts in rows.items()})
    told = {"plain": plain, "monitored": losses, "returned": returned}
    (folder / f"{rank}.json").write_text(json.dumps(told))


def run(
    rank: int, strategy: str, path: Path | None, rows: dict[str, list[np.ndarray]]
) -> tuple[list[float], list[int]]:
    """Losses of every forward, and how many records each step gave."""
    inner = llama()
    model = wrapped(strategy, inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    returned: list[int] = []
    with ExitStack() as stack:
        monitor = None
        if path is not None:
            monitor = stack.enter_context(SpectrumMonitor(inner, every_n_steps=4, window=2, path=path))
        for step in range(1, STEPS + 1):
            for part in range(ACCUMULATED):
                inputs = batch(rank, step, part)
                with ExitStack() as hooks:
                    if path is not None:
                        look_on(inner, inputs["attention_mask"].bool(), step, rows, hooks)
                    loss = backward(strategy, model, inputs, last=part == ACCUMULATED - 1)
                losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                returned.append(len(monitor.step()))
    return losses, returned


def backward(strategy: str, model: Any, inputs: dict[str, torch.Tensor], last: bool) -> float:
    """One forward and backward; gradients are exchanged after the last of a step."""
    if strategy == "fsdp":
        model.set_requires_gradient_sync(last)
    with nullcontext() if last or strategy == "fsdp" else model.no_sync():
        loss = model(**inputs).loss / ACCUMULATED
        loss.backward()
    return loss.item()


def look_on(inner: Any, keep: torch.Tensor, step: int, rows: Any, hooks: ExitStack) -> None:
    """Collect the rows of a forward: those that count and, apart, all of them."""
    for name, layer in zip(SITES, inner.model.layers, strict=True):

        def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
            x = (output if isinstance(output, torch.Tensor) else output[0]).detach().double()
            rows.setdefault(f"{name}/{step}", []).append(x[keep].numpy())
            rows.setdefault(f"{name}/{step}/padded", []).append(x.flatten(0, 1).numpy())

        hooks.callback(layer.register_forward_hook(hook).remove)


# --- what they say -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    start_ranks(work, 2, path)
    return path


@pytest.fixture(params=STRATEGIES)
def folder(request, trained):
    return trained / request.param


def told(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def rows_of(folder, record, ranks=(0, 1), padded=""):
    """(N, D) float64, what plain hooks saw in the window of a record."""
    files = [np.load(folder / f"rows.{rank}.npz") for rank in ranks]
    names = [f"{record.site}/{step}{padded}" for step in WINDOWS[record.step]]
    return torch.from_numpy(np.concatenate([file[name] for file in files for name in names]))


def bound(record, x):
    """What a logged variance may be off by: its certificate, γ_N tr C of the truth, and the digits logged."""
    _, variances, _ = truth(x)
    return record.rounding_floor + len(x) * U64 * variances.sum() + DIGITS * variances


def test_losses_are_bitwise_those_of_the_run_without_a_monitor(folder):
    first, second = told(folder)
    for rank in (first, second):
        assert rank["monitored"] == rank["plain"]
        assert len(rank["plain"]) == STEPS * ACCUMULATED
        assert all(map(math.isfinite, rank["plain"]))
    assert first["plain"] != second["plain"]  # they see other tokens


def test_the_first_rank_alone_logs(folder):
    first, second = told(folder)
    records = 2 * len(SITES)  # two views
    assert first["returned"] == [records if step in WINDOWS else 0 for step in range(1, STEPS + 1)]
    assert second["returned"] == [0] * STEPS
    assert [path.name for path in folder.glob("spectra*")] == ["spectra.0.jsonl"]
    log = read_log(folder / "spectra.0.jsonl")
    assert log.run["ranks"] == 2
    assert {(r.step, r.site, r.view) for r in log.records} == {
        (step, site, view) for step in WINDOWS for site in SITES for view in ("typical", "all")
    }


def test_every_token_of_both_ranks_counts_once_and_padding_does_not(folder):
    for record in read_log(folder / "spectra.0.jsonl").records:
        masks = [
            batch(rank, step, part)["attention_mask"]
            for rank in range(2)
            for step in WINDOWS[record.step]
            for part in range(ACCUMULATED)
        ]
        kept = sum(int(mask.sum()) for mask in masks)
        assert kept == len(rows_of(folder, record)) < sum(mask.numel() for mask in masks)
        assert record.n_samples == kept - (record.extreme if record.view == "typical" else 0)
        assert record.tokens == {"kept": kept, "padding": sum(mask.numel() for mask in masks) - kept}


def test_the_spectrum_is_that_of_the_rows_of_both_ranks(folder):
    for record in read_log(folder / "spectra.0.jsonl").records:
        if record.view == "typical" and record.extreme:
            continue
        x = rows_of(folder, record)
        allowed = bound(record, x)
        assert record.n_features == D
        assert list(record.index) == [*range(1, D + 1)]
        got = torch.tensor(record.variance, dtype=torch.float64)
        assert ((got - truth(x)[1]).abs() <= allowed).all()
        for other in (rows_of(folder, record, [0]), rows_of(folder, record, padded="/padded"), x[:-1]):
            assert ((got - truth(other)[1]).abs() > allowed).any()  # control: one rank, padding, a token less
        assert record.metrics["total_variance"] == pytest.approx(truth(x)[1].sum().item(), rel=1e-6)
