"""Which rows are handed over, with what positions, and how often that is worked out."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from pca_torch.hooks.masks import Rows
from pca_torch.selection import TokenSelection
from pca_torch.sites import Site, find_sites
from tests.families import HEADS, LLAMA, decoder, tokens
from tests.hooks.models import IDS, LEFT, Net, Recorder, hooks_on, seeded, tiny

X = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))


class Taker:
    """A statistic that takes selected rows."""

    def __init__(self):
        self.rows, self.positions = [], []

    def update(self, x, *, mask=None):
        raise AssertionError("it has `update_rows`")

    def update_rows(self, rows, positions=None):
        self.rows.append(rows.clone())
        self.positions.append(positions)


@pytest.fixture(scope="module")
def llama():
    return tiny()


def test_selected_rows_and_their_places():
    net, sink = seeded(Net), Taker()
    with torch.no_grad(), capture(net, {"first": sink}):
        net(X, LEFT)
        net(X)
        net(X, torch.ones(3, 5))
        net(X.flatten(0, 1))
    want = net.first(X)
    assert torch.equal(sink.rows[0], want[LEFT.bool()])
    assert all(torch.equal(rows, want.flatten(0, 1)) for rows in sink.rows[1:])
    assert sink.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert sink.positions[1].tolist() == sink.positions[2].tolist() == [0, 1, 2, 3, 4] * 3
    assert sink.positions[3] is None  # rows of no sequence


def test_a_decoding_step_has_the_place_after_those_before(llama):
    sink = Taker()
    with capture(llama, {"model.layers.1": sink}):
        llama.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    assert [p.tolist() for p in sink.positions] == [[0, 1, 2, 0, 1, 2, 3, 4, 0], [3, 5, 1], [4, 6, 2]]


def test_flat_activations_and_heads_have_the_place_of_their_token():
    class Shapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.heads = nn.Identity(), nn.Identity()

        def forward(self, x, attention_mask=None):
            self.flat(x.flatten(0, 1))
            self.heads(x[:, :, None].expand(-1, -1, 2, -1))

    net, flat, heads = Shapes(), Taker(), Taker()
    with capture(net, {"flat": flat, "heads:rows": heads}):
        net(X, LEFT)
    keep = LEFT.bool()
    assert torch.equal(flat.rows[0], X[keep])
    assert torch.equal(heads.rows[0], X[keep].repeat_interleave(2, 0))
    assert flat.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0]
    assert heads.positions[0].tolist() == [p for p in flat.positions[0].tolist() for _ in range(2)]


@pytest.mark.parametrize("length", [5, HEADS])
@pytest.mark.parametrize("point", ["output", "rows", "input"])
def test_norms_on_heads_keep_the_rows_of_their_tokens(point, length):
    """They get (B, H, T, E): with as many tokens as heads, shapes do not tell these apart."""
    model = decoder("PhiConfig", **LLAMA, qk_layernorm=True).build()
    ids = tokens(2, length)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    sink, seen = Taker(), []
    norm = model.model.layers[1].self_attn.q_layernorm
    handle = norm.register_forward_hook(lambda m, args, out: seen.extend([args[0], out]))
    with torch.no_grad(), capture(model, {f"model.layers.1.self_attn.q_layernorm:{point}": sink}):
        model(ids, attention_mask=mask)
    handle.remove()
    x = seen[0 if point == "input" else 1]
    assert x.shape == (2, HEADS, length, 8)
    want = torch.cat([x[b, :, t] for b in range(2) for t in range(length) if mask[b, t]])
    assert torch.equal(sink.rows[0], want)
    places = [[t - 2 * (b == 0)] * HEADS for b in range(2) for t in range(length) if mask[b, t]]
    assert sink.positions[0].tolist() == [place for token in places for place in token]


@pytest.mark.parametrize("callable_mask", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_of_fixed_size_counts_the_rows_of_one_that_grows(llama, attention, callable_mask):
    """`generate` then hands over a mask (B, 1, T, S) that says which places each token attends to."""
    model = copy.deepcopy(llama)
    model.set_attn_implementation(attention)
    seen = {}
    for cache in ("dynamic", "static"):
        sink, mask = Taker(), TokenSelection(drop_first=1) if callable_mask else "attention_mask"
        with torch.no_grad(), capture(model, {"model.layers.1": sink}, mask=mask):
            made = model.generate(
                IDS, attention_mask=LEFT, max_new_tokens=4, do_sample=False, cache_implementation=cache
            )
        places = [p.tolist() for p in sink.positions]
        seen[cache] = torch.cat(sink.rows), places, made.tolist()
    (rows, *facts), (want, *wanted_facts) = seen["static"], seen["dynamic"]
    assert facts == wanted_facts
    assert rows.shape == want.shape == (9 + 3 * 3 - 3 * callable_mask, 32)
    # Places behind the last token weigh nothing, but sums over more terms may go in another order.
    torch.testing.assert_close(rows, want)
    assert not torch.allclose(rows, want.roll(1, 0), atol=1e-4)


def test_layers_of_two_kinds_bring_a_mask_for_each():
    kinds = ["sliding_attention", "full_attention"]
    model = decoder("Gemma3TextConfig", **LLAMA, head_dim=8, sliding_window=4, layer_types=kinds).build()
    ids = tokens(2, 5)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    counts = {}
    for cache in ("dynamic", "static"):
        sink = Taker()
        with torch.no_grad(), capture(model, {"model.layers.1": sink}):
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=3,
                min_new_tokens=3,
                do_sample=False,
                cache_implementation=cache,
            )
        counts[cache] = [len(rows) for rows in sink.rows]
    assert counts["static"] == counts["dynamic"] == [8, 2, 2]


def test_other_masks_of_four_axes_are_refused(llama):
    """Padding may attend to itself in them."""
    mask = (torch.ones(5, 5).tril() * LEFT[:, None]).bool()[:, None]
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"`attention_mask` must be a 2-D tensor .*\(3, 1, 5, 5\)"),
        capture(llama, {"model.layers.1": Taker()}),
    ):
        llama(IDS, attention_mask=mask)


def test_a_mask_that_knows_places_is_believed():
    class Mask:
        positions = None

        def __call__(self, module, args, kwargs):
            self.positions = torch.arange(15).reshape(3, 5) * 10
            return LEFT.bool()

    net, sink = seeded(Net), Taker()
    with capture(net, {"first": sink}, mask=Mask()):
        net(X)
    assert sink.positions[0].tolist() == (torch.arange(15).reshape(3, 5) * 10)[LEFT.bool()].tolist()


def test_rows_are_worked_out_once_per_forward(llama, monkeypatch):
    made = []
    original = Rows.__init__
    monkeypatch.setattr(Rows, "__init__", lambda self, *args: (made.append(1), original(self, *args))[1])
    sites = find_sites(llama, ["resid", "resid_pre", "k", "v", "mlp"])
    with torch.no_grad(), capture(llama, {site: Taker() for site in sites}):
        for _ in range(3):
            llama(IDS, attention_mask=LEFT)
    assert len(sites) == 12
    assert len(made) == 3


def test_a_callable_makes_the_mask_once_per_forward(llama):
    class Outer(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    calls = []

    def mask(module, args, kwargs):
        calls.append(type(module).__name__)

    for model in (llama, Outer(llama)):
        with torch.no_grad(), capture(model, {"model.layers.0": Recorder()}, mask=mask):
            for _ in range(2):
                model(IDS, attention_mask=LEFT)
            llama.model(IDS)
    assert calls == ["LlamaForCausalLM", "LlamaForCausalLM", "LlamaModel"] * 2


def test_rows_that_a_site_narrows(llama):
    site = find_sites(llama, "model.layers.0")[0]
    first = replace(site, name="positive", only=lambda module, args, kwargs, output: output[..., 0] > 0)
    none = replace(site, name="none", only=lambda module, args, kwargs, output: output[..., 0] > 1e9)
    sinks = {site: Recorder(), first: Recorder(), none: (empty := Taker())}
    for kwargs in ({}, {"attention_mask": LEFT}):
        with torch.no_grad(), capture(llama, sinks):
            llama(IDS, **kwargs)
        seen = sinks[site].batches[-1]
        kept = seen[seen[:, 0] > 0]
        assert 0 < len(kept) < len(seen)
        assert torch.equal(sinks[first].batches[-1], kept)
    assert [len(rows) for rows in empty.rows] == [0, 0]


def test_a_site_that_may_be_empty_need_not_fire():
    net = nn.Sequential(nn.Linear(3, 3))
    net.add_module("idle", nn.ModuleList([nn.Linear(3, 3)]))
    net.forward = net[0].forward
    site = find_sites(net, "idle.0")[0]
    x = torch.randn(4, 3)
    with capture(net, {replace(site, may_be_empty=True): Recorder()}):
        net(x)
    with (
        pytest.raises(RuntimeError, match=r"sites 'idle\.0:output' never fired"),
        capture(net, {site: Recorder()}),
    ):
        net(x)


def test_inputs_are_read_before_the_module_changes_them():
    class Adds(nn.Module):
        def forward(self, x):
            x += 1
            return x

    net, before, after = nn.Sequential(nn.Identity(), Adds()), Recorder(), Recorder()
    x = torch.randn(4, 3)
    want = x.clone()
    with capture(net, {"1:input": before, "1": after}):
        net(x)
    assert torch.equal(before.rows, want)
    assert torch.equal(after.rows, want + 1)


def test_inputs_are_what_earlier_hooks_made_of_them():
    net, seen = nn.Sequential(nn.Linear(3, 3)), Recorder()
    x = torch.randn(4, 3)
    early = net[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with capture(net, {"0:input": seen}):
        late = net[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        net(x)
    assert torch.equal(seen.rows, x * 2)
    early.remove()
    late.remove()


def test_keyword_only_calls():
    class Attention(nn.Module):
        def forward(self, *, attention_mask=None, hidden_states):
            return hidden_states + 1

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Attention()

        def forward(self, x, attention_mask=None):
            return self.attention(attention_mask=attention_mask.float(), hidden_states=x)

    before, after = Recorder(), Recorder()
    model = Model()
    with capture(model, {"attention:input": before, "attention": after}):
        model(X, attention_mask=LEFT)
    assert torch.equal(before.rows, X[LEFT.bool()])
    assert torch.equal(after.rows, X[LEFT.bool()] + 1)


def test_the_root_as_a_site_on_both_sides():
    net, before, after = seeded(Net), Recorder(), Recorder()
    with torch.no_grad(), capture(net, {":input": before, "": after}):
        out = net(X, LEFT)
    assert torch.equal(before.rows, X[LEFT.bool()])
    assert torch.equal(after.rows, out[LEFT.bool()])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["first", "first:output:x"], "point after ':' must be one of"),
        (
            ["second.*"],
            r"'second\.\*' for 'second\.0:output', 'second\.1:output'; expand it with `find_sites`",
        ),
        (["k"], "no list of equal blocks"),
        (
            [Site("a:output", "a", "output", "module", "", lambda *_: X)],
            r"'a:output', a site that the model has not",
        ),
    ],
)
def test_keys_that_are_no_one_site(keys, message):
    net = Net()
    with pytest.raises(ValueError, match=message), capture(net, {key: Recorder() for key in keys}):
        pytest.fail("the block must not be entered")
    assert hooks_on(net) == 0


def test_a_site_given_twice_is_refused():
    net = Net()
    site = find_sites(net, "first")[0]
    with (
        pytest.raises(ValueError, match=r"'first:output' twice, as a name and as a site"),
        capture(net, {"first:output": Recorder(), site: Recorder()}),
    ):
        pytest.fail("the block must not be entered")


def test_an_interrupt_does_not_leave_its_mask_behind():
    class Interrupted(Net):
        stop = True

        def forward(self, x, attention_mask=None):
            if self.stop:
                raise KeyboardInterrupt
            return super().forward(x)

    net, sink = Interrupted(), Recorder()
    with capture(net, {"first": sink}):
        with pytest.raises(KeyboardInterrupt):
            net(X, LEFT)
        net.stop = False
        net(X)
    assert len(sink.rows) == 15
