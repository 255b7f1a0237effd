"""A small network that learns, its batches, and what a record of the monitor must say of given rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY = 16, 64
PATHS = ("blocks.0", "blocks.1.up")  # what the second returns is overwritten in place
NAMES = {path: f"{path}:output" for path in PATHS}
FLOAT64 = torch.finfo(torch.float64).eps
DIGITS = 5e-7  # a record has seven of them, so it is off by half a unit of the seventh


class Block(nn.Module):
    """A residual branch with dropout, so that the order of random numbers shows in the losses."""

    def __init__(self, dropout):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.down(self.act(self.up(x))))
        return x.mul_(0.9)  # in place, behind what a hook on a branch would have seen


class Net(nn.Module):
    """Ids to logits; like a transformer it takes a padding mask, and a block can be computed again.

    Args:
        reentrant: the kind of gradient checkpointing of its blocks, None for none.
        dropout: its rate.
    """

    def __init__(self, reentrant=None, dropout=0.1):
        super().__init__()
        self.reentrant = reentrant
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.reentrant is None or not self.training:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def net(**settings):
    """A network with weights from a seed; the random numbers of its training begin there too."""
    torch.manual_seed(0)
    return Net(**settings).train()


def batches(n, seed=0):
    """Ids (3, 9), of which the mask leaves 3 to 9 in a row, the first two of them without a label."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(n):
        ids = torch.randint(VOCABULARY, (3, 9), generator=g)
        lengths = torch.randint(3, 10, (3, 1), generator=g)
        mask = (torch.arange(9) < lengths).long()
        labels = ids.masked_fill((mask == 0) | (torch.arange(9) < 2), -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def loss_of(logits, batch):
    """Mean cross entropy of the next token."""
    logits, labels = logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, labels, ignore_index=-100)


def counting(batch, labels=False):
    """(3, 9) booleans, which tokens count."""
    keep = batch["attention_mask"].bool()
    return keep & (batch["labels"] != -100) if labels else keep


class Witness:
    """Keeps what modules return in training, with plain hooks: for a model that is not monitored.

    Args:
        model: to be watched, from now on.
        paths: of the modules.
    """

    def __init__(self, model: nn.Module, paths=PATHS):
        self.batches: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
        self.latest: dict[str, Tensor] = {}
        for path in paths:
            model.get_submodule(path).register_forward_hook(self._keep(path))

    def _keep(self, path):
        def hook(module, args, output):
            if path not in self.latest:  # a block computed again comes second, an evaluation behind it
                self.latest[path] = output.detach().clone()

        return hook

    def begin(self, batch):
        """A forward of training comes, whose rows are those of this batch."""
        self.latest = {}
        self.batches.append((batch, self.latest))

    def rows(self, path, steps, accumulate=1, labels=False):
        """(n, D) float64 rows of optimizer steps from 1, that of step s from `accumulate` batches."""
        found = []
        for step in steps:
            for batch, seen in self.batches[(step - 1) * accumulate : step * accumulate]:
                found.append(seen[path][counting(batch, labels)].double())
        return torch.cat(found)


def spectrum(rows: Tensor) -> Tensor:
    """(D,) variances of rows (n, D), descending, from a float64 covariance by definition."""
    return torch.linalg.eigvalsh(torch.cov(rows.double().mT)).flip(0).clamp_min(0)


def error_bounds(variance: Tensor, n: int) -> Tensor:
    """(D,) largest error of variances that are summed in float64 and written with seven digits.

    Each of the two routes sums N products, |E| ≤ N·u·|X|ᵀ|X| (Higham 2002, §3.5), and takes eigenvalues, a
    modest multiple of D·u·tr C; with Weyl no eigenvalue is off by more. Two routes: eps = 2u in place of u.
    """
    summed = (n + 4 * len(variance)) * FLOAT64 * variance.sum()
    return DIGITS * variance + 2 * summed


def says(record, rows: Tensor) -> bool:
    """Whether a record tells exactly of these rows: their number and their spectrum."""
    if record.n_samples != len(rows) or record.n_features != rows.shape[1]:
        return False
    want = spectrum(rows)
    kept = len(record.index)  # a narrow site keeps all its variances but those that are zero
    assert list(record.index) == list(range(1, kept + 1))
    assert kept >= min(len(rows) - 1, len(want))
    have = torch.tensor([*record.variance, *[0.0] * (len(want) - kept)], dtype=torch.float64)
    return bool(((have - want).abs() <= error_bounds(want, len(rows))).all())
