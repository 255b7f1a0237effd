"""Trainings of a tiny Llama by the Trainer of transformers; as a script, one killed, or two ranks."""

import gc
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from pca_torch.monitor import SpectrumMonitor, TrainerSpectrumCallback
from pca_torch.selection import TokenSelection

VOCABULARY = 64
SITES = {  # as asked for, and the name in the records
    "model.layers.0": "model.layers.0:output",
    "model.layers.1.self_attn.k_proj": "model.layers.1.self_attn.k_proj:output",
}
EVERY, WINDOW, STEPS = 4, 2, 12
WINDOWS = {2: [1, 2], 4: [3, 4], 8: [7, 8], 12: [11, 12]}  # the first two steps, and the last two of four
SAVED, KILLED = 7, 10  # in the middle of a window, and the step after the next


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers of width 32; with dropout, so that losses tell of random numbers drawn in between."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=2,
                attention_dropout=0.1,
                max_position_embeddings=32,
            )
        )


def sequences(n: int = 30, seed: int = 0) -> list[dict[str, list[int]]]:
    """Sequences of 8 to 20 tokens, of which the first 2 to 5 have no label."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        length, prompt = (int(torch.randint(*ends, (), generator=g)) for ends in ((8, 21), (2, 6)))
        ids = torch.randint(VOCABULARY, (length,), generator=g).tolist()
        found.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return found


def padded(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, filled up on the right: 0 in the mask, -100 as label."""
    longest = max(len(example["input_ids"]) for example in examples)

    def filled(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    ids = [example["input_ids"] for example in examples]
    return {
        "input_ids": filled(ids, 0),
        "attention_mask": filled([[1] * len(row) for row in ids], 0),
        "labels": filled([example["labels"] for example in examples], -100),
    }


def arguments(folder: Path, **settings) -> TrainingArguments:
    """On the CPU, every loss logged, nothing saved and nobody told."""
    usual = {
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **(usual | settings))


class Witness(Trainer):
    """A Trainer that keeps the rows of each training step that have a label, by hooks of its own.

    They are on the model while the loss is computed, so what the backward pass computes again is not kept.
    """

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.rows: dict[int, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def compute_loss(self, model, inputs, *args, **options):
        """The loss, while hooks are on."""
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **options)
        keep = inputs["attention_mask"].bool() & (inputs["labels"] != -100)
        rows = self.rows[self.state.global_step + 1]
        handles = [
            self.model.get_submodule(path).register_forward_hook(keeping(rows[name], keep))
            for path, name in SITES.items()
        ]
        try:
            return super().compute_loss(model, inputs, *args, **options)
        finally:
            for handle in handles:
                handle.remove()


def keeping(rows: list[Tensor], keep: Tensor) -> Callable[..., None]:
    """A hook that adds the rows that count, (n, D), to a list."""
    return lambda module, args, output: rows.append(output.detach()[keep].double())


def untrained(
    kind: type[Trainer], folder: Path, model: nn.Module, *callbacks: TrainerCallback, **settings
) -> Trainer:
    """A Trainer of the model, with these callbacks and arguments."""
    return kind(
        model=model,
        args=arguments(folder, **settings),
        train_dataset=sequences(),
        eval_dataset=sequences(4, seed=1),
        data_collator=padded,
        callbacks=list(callbacks),
    )


def trained(
    kind: type[Trainer],
    folder: Path,
    model: nn.Module,
    *callbacks: TrainerCallback,
    resume: bool | str | None = None,
    **settings,
) -> Trainer:
    """The same, when it has trained the model, from a checkpoint or from the beginning."""
    trainer = untrained(kind, folder, model, *callbacks, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def monitored(model: nn.Module, path: Path, **settings) -> TrainerSpectrumCallback:
    """A monitor of the two sites, as a callback."""
    usual = {"window": WINDOW, "selection": TokenSelection(labels=True)}
    return TrainerSpectrumCallback(
        SpectrumMonitor(model, list(SITES), EVERY, path=path, **(usual | settings))
    )


class Killed(TrainerCallback):
    """Ends the process like `kill -9`, when a step begins."""

    def on_step_begin(self, args, state, control, **kwargs):
        """Before the forward."""
        if state.global_step + 1 == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


def saving(folder: Path, *others: TrainerCallback, log: str = "spectra.jsonl", **settings) -> Trainer:
    """Train with a checkpoint in the middle of a window, and averages that go back to the first.

    Args:
        folder: of checkpoints and log.
        others: callbacks besides the monitor's.
        log: name of the log.
        settings: for `trained`.
    """
    folder.mkdir(exist_ok=True)
    model = tiny_llama()
    callback = monitored(model, folder / log, decay=0.5)
    usual = {"save_strategy": "steps", "save_steps": SAVED, "gradient_accumulation_steps": 2}
    return trained(Witness, folder, model, callback, *others, **(usual | settings))


def on_two_ranks(folder: Path) -> dict[str, list]:
    """Train, then again from the checkpoint.

    Returns:
        How many rows this rank saw in each step of the first, from the first on, and the losses of both.
    """
    checkpoint = str(folder / f"checkpoint-{SAVED}")
    first = saving(folder, log="whole.jsonl", ddp_backend="gloo")
    again = saving(folder, log="resumed.jsonl", ddp_backend="gloo", resume=checkpoint)
    rows = [sum(len(x) for x in first.rows[step + 1]["model.layers.0:output"]) for step in range(STEPS)]
    return {"rows": rows, "losses": [losses(first), losses(again)]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[2])
    if sys.argv[1] == "killed":
        saving(out, Killed())
    told = on_two_ranks(out)
    (out / f"rank_{dist.get_rank()}.json").write_text(json.dumps(told))
    gc.collect()  # a wrapper that outlived the process group would wait for it for ever
    dist.destroy_process_group()
