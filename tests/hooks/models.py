"""Small models and sinks for the tests of hooks."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pca_torch.moments import Moments

LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
IDS = torch.randint(2, 50, LEFT.shape, generator=torch.Generator().manual_seed(1))


class Recorder:
    """A statistic that keeps copies of the rows it was given."""

    def __init__(self):
        self.batches = []

    def update(self, x, *, mask=None):
        self.batches.append((x if mask is None else x[mask]).reshape(-1, x.shape[-1]).clone())

    @property
    def rows(self):
        return torch.cat(self.batches)


class Copying(Recorder):
    """One that can take part in sharing."""

    def copy_from(self, other):
        self.batches = list(other.batches)


class CopyingMoments(Moments):
    """`Moments` that can take part in sharing."""

    def copy_from(self, other):
        self.__dict__ = copy.deepcopy(other.__dict__)


class Net(nn.Module):
    """Two layers that take a padding mask like a transformer, and ignore it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))

    def forward(self, x, attention_mask=None):
        return self.second(self.first(x))


def seeded(make):
    """What `make` makes, its weights from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def tiny(**settings):
    """A Llama of two layers with weights from a seed."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **settings,
    )
    return seeded(lambda: LlamaForCausalLM(config).eval())


def checkpointed(model, reentrant):
    """Put a model of transformers in training, its layers to be computed again in the backward pass."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model.train()


def seen_by_plain_hooks(model, path, call):
    """Rows of what the module at `path` returns while `call` runs, kept by a hook of PyTorch alone."""
    rows = []

    def keep(module, args, output):
        x = output[0] if isinstance(output, tuple) else output
        rows.append(x.detach().reshape(-1, x.shape[-1]).clone())

    handle = model.get_submodule(path).register_forward_hook(keep)
    try:
        call()
    finally:
        handle.remove()
    return torch.cat(rows)


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
