"""What does capture cost a forward pass?

A random transformer, whose layers feed a `Moments` each inside the hook, against the same forward without;
and projections of one input that share a statistic, against one statistic for each.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from truth import covariance

import pca_torch as pt

HEADS = 4


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what comes in."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.feed = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (B, T, D) to hidden states."""
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(self.second(x))


class Projections(nn.Module):
    """Queries, keys and values of one input."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (B, T, D) to the sum of the three."""
        x = self.norm(x)
        return self.q(x) + self.k(x) + self.v(x)


class CopyingMoments(pt.Moments):
    """`Moments` that can take part in sharing."""

    def copy_from(self, other: "CopyingMoments") -> None:
        """Hold what `other` holds."""
        self.__dict__ = copy.deepcopy(other.__dict__)


@pytest.mark.parametrize("every", [False, True], ids=["one", "every"])
def test_captured_against_plain_forward(versus, sized, device, every):
    """One layer captured, and all of them."""
    layers, d, tokens, batches = sized(full=(6, 512, (8, 256), 2), tiny=(2, 16, (2, 8), 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(d) for _ in range(layers))).eval().to(device)
        inputs = [torch.randn(*tokens, d).to(device) for _ in range(batches)]
    names = [str(i) for i in range(layers)][0 if every else -1 :]

    def plain() -> list[Tensor]:
        with torch.inference_mode():
            return [model(x) for x in inputs]

    def captured() -> pt.Moments:
        sinks = {name: pt.Moments(d) for name in names}
        with pt.capture(model, sinks):
            plain()
        sinks[names[-1]].flush()
        return sinks[names[-1]]

    truth = covariance(torch.cat(plain()).flatten(0, 1))  # the last layer is the output of the model
    size = torch.linalg.norm(truth)

    def judge(answer: pt.Moments | list[Tensor]) -> float | None:
        if isinstance(answer, list):
            return None  # the plain forward knows no covariance
        return (torch.linalg.norm(answer.covariance() - truth) / size).item()

    count = batches * tokens[0] * tokens[1]
    versus(
        f"{len(names)} of {layers} layers, {count} tokens×{d}",
        captured,
        plain,
        against="plain forward",
        what="of the covariance of the last site, relative (Frobenius norm)",
        judge=judge,
    )


def test_shared_against_apart(versus, sized, device):
    """The inputs of three projections, which are one tensor."""
    d, tokens, batches = sized(full=(512, (8, 256), 2), tiny=(16, (2, 8), 3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Projections(d).eval().to(device)
        inputs = [torch.randn(*tokens, d).to(device) for _ in range(batches)]
    names = ["q:input", "k:input", "v:input"]

    def captured(share: bool) -> pt.Moments:
        sinks = {name: CopyingMoments(d) for name in names}
        with torch.no_grad(), pt.capture(model, sinks, share=share) as capture:
            for x in inputs:
                model(x)
        sinks[names[0]].flush()
        return sinks[capture.shared.get(names[-1], names[-1])]

    with torch.no_grad():
        truth = covariance(torch.cat([model.norm(x) for x in inputs]).flatten(0, 1))
    size = torch.linalg.norm(truth)
    versus(
        f"3 inputs, {batches * tokens[0] * tokens[1]} tokens×{d}",
        lambda: captured(share=True),
        lambda: captured(share=False),
        against="each apart",
        what="of the covariance of the last site, relative (Frobenius norm)",
        judge=lambda answer: (torch.linalg.norm(answer.covariance() - truth) / size).item(),
    )
