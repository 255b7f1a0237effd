"""What does capture cost a forward pass?

A random transformer, whose layers feed a `Moments` each inside the hook, against the same forward without.
"""

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
        what="of the covariance of the last layer, relative (Frobenius norm)",
        judge=judge,
    )
