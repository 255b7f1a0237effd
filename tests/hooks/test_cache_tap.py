"""Keys as the cache gets them: with a cache, without one, in packed batches, checkpointed and generated."""

import inspect

import pytest
import torch
import transformers
from torch import nn

from pca_torch.hooks import capture
from pca_torch.sites import Site, find_sites
from tests.families import CAUSAL, LAYERS, build
from tests.hooks.models import IDS, LEFT, Recorder, checkpointed, hooks_on, tiny

NAME = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
UNROTATED = {"gpt2", "opt", "bloom", "falcon_old"}  # positions are embedded, or biases


def rotated(model):
    return [site for site in find_sites(model, "k") if site.side == "cache"]


def stored_keys(cache, layer):
    """Keys of a layer in a cache, heads side by side: (B, T, H·E)."""
    return cache.layers[layer].keys.transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in UNROTATED])
def test_keys_are_those_that_the_cache_of_the_model_holds(name):
    model, inputs = build(name)
    found = find_sites(model, "k_rope" if name == "deepseek_v3" else "k")
    sites = [site for site in found if site.side == "cache"]
    assert len(sites) == LAYERS
    sinks = {site: Recorder() for site in sites}
    with torch.no_grad(), capture(model, sinks, mask=None):
        cache = model(**inputs, use_cache=True)[NAME]
    with torch.no_grad(), capture(model, bare := {site: Recorder() for site in sites}, mask=None):
        model(**inputs, use_cache=False)
    for site in sites:
        assert site.layer is not None
        stored = cache.layers[site.layer]
        want = site.read(model, (stored.keys, stored.values, site.layer), {}, None).flatten(0, 1)
        assert torch.equal(sinks[site].rows, want)
        assert torch.equal(bare[site].rows, want)


def test_rotated_keys_differ_from_those_before(llama):
    sinks = {site: Recorder() for site in find_sites(llama, "k@0")}
    with torch.no_grad(), capture(llama, sinks):
        llama(IDS)
    before, after = (sink.rows for sink in sinks.values())
    norms = before.norm(dim=1), after.norm(dim=1)
    assert not torch.equal(before, after)
    torch.testing.assert_close(norms[0], norms[1])  # a rotation


@pytest.mark.parametrize("given", [True, False, None], ids=["given", "refused", "made"])
def test_padding_does_not_count(llama, given):
    kwargs = {NAME: transformers.DynamicCache(config=llama.config)} if given else {"use_cache": given is None}
    site = rotated(llama)[1]
    with torch.no_grad(), capture(llama, {site: (sink := Recorder())}):
        llama(IDS, attention_mask=LEFT, **kwargs)
    with torch.no_grad():
        cache = llama(IDS, attention_mask=LEFT, use_cache=True)[NAME]
    assert torch.equal(sink.rows, stored_keys(cache, 1)[LEFT.bool()])


def test_nothing_is_left_on_a_cache_that_was_given(llama):
    cache = transformers.DynamicCache(config=llama.config)
    before = dict(vars(cache))
    with torch.no_grad(), capture(llama, {site: Recorder() for site in rotated(llama)}):
        llama(IDS, **{NAME: cache})
        assert vars(cache).keys() == before.keys()
    assert cache.get_seq_length() == IDS.shape[1]


def test_nested_captures_hear_the_same_cache(llama):
    outer, inner = Recorder(), Recorder()
    site = rotated(llama)[0]
    cache = transformers.DynamicCache(config=llama.config)
    with torch.no_grad(), capture(llama, {site: outer}), capture(llama, {site: inner}):
        llama(IDS, **{NAME: cache})
    assert torch.equal(outer.rows, inner.rows)
    assert "update" not in vars(cache)


def test_an_exception_in_attention_gives_the_cache_back(llama):
    cache = transformers.DynamicCache(config=llama.config)

    def fail(*args):
        raise ArithmeticError("boom")

    handle = llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(fail)
    hooks = hooks_on(llama)
    with pytest.raises(ArithmeticError), torch.no_grad(), capture(llama, {rotated(llama)[0]: Recorder()}):
        llama(IDS, **{NAME: cache})
    handle.remove()
    assert "update" not in vars(cache)
    assert hooks_on(llama) == hooks - 1


def test_packed_sequences_stay_apart(llama):
    ids = torch.cat([IDS[1:2], IDS[2:3]], 1)
    positions = torch.arange(5).repeat(1, 2)
    sites = rotated(llama)
    with torch.no_grad():
        alone = [llama(part, use_cache=True) for part in (IDS[1:2], IDS[2:3])]
        plain = llama(ids, position_ids=positions, use_cache=False).logits
        mixed = llama(ids, position_ids=positions, use_cache=True).logits
        with capture(llama, sinks := {site: Recorder() for site in sites}):
            packed = llama(ids, position_ids=positions, use_cache=False).logits
    assert torch.equal(packed, plain)
    assert not torch.allclose(mixed, plain)  # a cache of the model's own would have mixed them
    for site in sites:
        want = torch.cat([stored_keys(out[NAME], site.layer)[0] for out in alone])
        torch.testing.assert_close(sinks[site].rows, want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_keeps_each_key_once(reentrant):
    model, sites = tiny(), rotated(tiny())
    with torch.no_grad():
        cache = model(IDS, use_cache=True)[NAME]
    checkpointed(model, reentrant)
    model.get_input_embeddings().weight.requires_grad_()
    sites = rotated(model)
    with capture(model, sinks := {site: Recorder() for site in sites}):
        model(IDS, use_cache=False).logits.sum().backward()
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    assert gradient.abs().sum() > 0
    for site in sites:
        assert torch.equal(sinks[site].rows, stored_keys(cache, site.layer).flatten(0, 1))


def test_generate_counts_the_prompt_and_each_step(llama):
    site = rotated(llama)[1]
    with capture(llama, {site: (sink := Recorder())}):
        out = llama.generate(
            IDS, attention_mask=LEFT, max_new_tokens=4, do_sample=False, return_dict_in_generate=True
        )
    keys = stored_keys(out[NAME], 1)  # (3, 5 + 3, H·E): the last token generated was never fed
    steps = [keys[:, 5 + i] for i in range(3)]
    want = torch.cat([keys[:, :5][LEFT.bool()], *steps])
    assert torch.equal(sink.rows, want)


def test_beam_search_and_a_static_cache(llama):
    site = rotated(llama)[0]
    options = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
    for extra in ({"num_beams": 2}, {"cache_implementation": "static"}):
        want = llama.generate(IDS, attention_mask=LEFT, **options, **extra)
        with capture(llama, {site: (sink := Recorder())}, mask=None):  # with a static cache it is 4-D
            got = llama.generate(IDS, attention_mask=LEFT, **options, **extra)
        assert torch.equal(got, want)
        assert [len(batch) for batch in sink.batches][1:] == [3 * extra.get("num_beams", 1)] * 2


def test_a_module_without_a_cache_is_refused():
    net = nn.Sequential(nn.Linear(2, 2))
    site = Site("0:k_rope", "0", "cache", "k", "keys", read=lambda module, args, kwargs, output: args[0])
    with (
        pytest.raises(ValueError, match=r"'0:k_rope', but Linear takes no cache .* before rotary embedding"),
        capture(net, {site: Recorder()}),
    ):
        pytest.fail("the block must not be entered")
    assert hooks_on(net) == 0


class Positional(nn.Module):
    """An attention module that is given its cache by position."""

    def forward(self, x, past_key_value=None):
        keys = x.unflatten(-1, (2, -1)).transpose(1, 2)
        if past_key_value is not None:
            keys, _ = past_key_value.update(key_states=keys, value_states=keys, layer_idx=0)
        return keys.sum(1)


class Stores:
    """The least that a cache has."""

    def __init__(self):
        self.stored = []

    def update(self, key_states, value_states, layer_idx):
        self.stored.append(key_states)
        return key_states, value_states


@pytest.mark.parametrize("cache", [None, Stores()], ids=["none", "given"])
def test_a_cache_by_position_and_an_update_by_keyword(cache):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Positional()

        def forward(self, x, cache=None):
            return self.attention(x, cache)

    def read(module, args, kwargs, output):
        return args[0].transpose(1, 2).flatten(2)

    site = Site("attention:k_rope", "attention", "cache", "k", "keys", read=read)
    x = torch.randn(2, 3, 4)
    model = Model()
    with capture(model, {site: (sink := Recorder())}):
        got = model(x, cache)
    assert torch.equal(sink.rows, x.flatten(0, 1))
    assert torch.equal(got, model(x, None))
    if cache is not None:
        assert len(cache.stored) == 1
        assert "update" not in vars(cache)
