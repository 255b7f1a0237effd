"""Experts that are modules of their own see routed rows, whose tokens nobody tells."""

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from pca_torch.selection import TokenSelection
from pca_torch.sites import find_sites
from tests.hooks.models import Copying, Recorder, seeded

B, T, D, E = 4, 30, 8, 3
X = torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))
PADDED = torch.ones(B, T, dtype=torch.long)
PADDED[:, 20:] = 0


class Mixture(nn.Module):
    """Hands the rows of each expert to it, in an order by weight."""

    def __init__(self, per_token=1):
        super().__init__()
        self.gate = nn.Linear(D, E)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(E)])
        self.per_token = per_token

    def rows_of(self, x):
        """The rows of each expert as it gets them."""
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).topk(self.per_token)
        for e in range(E):
            rows, place = (chosen == e).nonzero(as_tuple=True)
            rows = rows[weights[rows, place].argsort(descending=True)]
            yield flat, rows

    def forward(self, x):
        out = torch.zeros_like(x).flatten(0, 1)
        for expert, (flat, rows) in zip(self.experts, self.rows_of(x), strict=True):
            out = out.index_add(0, rows, expert(flat[rows]))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.layers = nn.ModuleList([Block(mlp)])

    def forward(self, inputs_embeds, attention_mask=None):
        return self.layers[0](inputs_embeds)


def sites_of(model):
    """Experts by every name they have: the shortcut, and the paths of modules in them."""
    return find_sites(model, ["experts", "layers.0.mlp.experts.*", "layers.0.mlp.experts.0.0:input"])


@pytest.mark.parametrize("mask", ["attention_mask", TokenSelection(), None])
@pytest.mark.parametrize("given", [{}, {"attention_mask": torch.ones(B, T)}], ids=["no mask", "no padding"])
def test_all_rows_count_where_no_token_is_left_out(mask, given):
    model = seeded(lambda: Model(Mixture()))
    sites = sites_of(model)
    assert all(site.is_routed and site.may_be_empty for site in sites)
    sinks = {site: Recorder() for site in sites}
    with torch.no_grad(), capture(model, sinks, mask=mask):
        model(X, **given)
        want = [flat[rows] for flat, rows in model.layers[0].mlp.rows_of(X)]
    by_name = {site.name: sink.rows for site, sink in sinks.items()}
    assert len(by_name) == 2 * E + 1
    for e, rows in enumerate(want):
        assert 0 < len(rows) < B * T
        assert torch.equal(by_name[f"layers.0.mlp.experts:expert_{e}"], rows)
        assert torch.equal(by_name[f"layers.0.mlp.experts.{e}:output"], model.layers[0].mlp.experts[e](rows))
    assert torch.equal(by_name["layers.0.mlp.experts.0.0:input"], want[0])


@pytest.mark.parametrize("per_token", [1, E], ids=["some tokens", "as many rows as tokens"])
@pytest.mark.parametrize("mask", ["attention_mask", TokenSelection(), TokenSelection(drop_first=1)])
def test_a_token_left_out_is_refused(mask, per_token):
    model = seeded(lambda: Model(Mixture(per_token)))
    message = (
        r"the mask leaves tokens out, and which rows of an expert of 'layers\.0\.mlp' are theirs is not "
        r"known here; capture 'layers\.0\.mlp:input'"
    )
    for site in sites_of(model):
        sink = Recorder()
        with (
            pytest.raises(ValueError, match=message),
            torch.no_grad(),
            capture(model, {site: sink}, mask=mask),
        ):
            model(X, attention_mask=PADDED)
        assert sink.batches == []
    sink = Recorder()
    with torch.no_grad(), capture(model, {"layers.0.mlp:input": sink}):  # what the message tells to do
        model(X, attention_mask=PADDED)
    assert torch.equal(sink.rows, X[PADDED.bool()])


def test_experts_that_all_see_every_token_take_the_mask():
    class Dense(Mixture):
        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            return sum(weights[..., e, None] * expert(x) for e, expert in enumerate(self.experts))

    model = seeded(lambda: Model(Dense()))
    sinks = {site: Copying() for site in find_sites(model, "experts")}
    with torch.no_grad(), capture(model, sinks):
        model(X, attention_mask=PADDED)
    assert all(torch.equal(sink.rows, X[PADDED.bool()]) for sink in sinks.values())


def test_other_lists_are_no_experts():
    model = seeded(lambda: Model(Mixture()))
    names = ["layers.0", "layers.0.mlp", "layers.0.mlp.gate", "layers.0.mlp.experts"]
    assert not any(site.is_routed or site.may_be_empty for site in find_sites(model, names))
