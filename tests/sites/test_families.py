"""Sites of every family against what the model itself computes from them.

Queries, keys and values are proven by use: attention recomputed from them alone must give what the heads put
out, with the scale, the rotation and the mask of the family. A wrong order of heads, thirds or groups, a
missing norm or a wrong side of the rotation gives something else.
"""

import pytest
import torch
from torch.nn import functional as F

from pca_torch.sites import find_sites
from pca_torch.sites.shortcuts import available
from pca_torch.sites.tree import Tree
from tests.families import CAUSAL, FAMILIES, HEADS, HIDDEN, LAYERS, build
from tests.sites.firings import arguments_of, read_sites

U = torch.finfo(torch.float32).eps / 2
LATENT = {"deepseek_v3"}
BIASED = {"bloom", "falcon_old", "t5"}  # scores have a bias of position that is no site
ROTATED = {
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_neox", "phi", "phi3", "mixtral"),
    *("qwen3_moe", "qwen2_moe", "olmo2", "falcon", "falcon_new"),
}
TRANSFORMERS = [name for name in FAMILIES if name not in {"convnext", "resnet"}]
HEADED = [name for name in TRANSFORMERS if name not in LATENT | BIASED]


def captured(name, sites, length=None):
    """Model, inputs, sites and what they read."""
    model, inputs = build(name)
    if length is not None:
        inputs = {key: value[:, :length] for key, value in inputs.items()}
    found = find_sites(model, sites)
    return model, inputs, found, read_sites(model, inputs, found)


def last(found, point):
    """The last site of a point."""
    return [site for site in found if site.name.endswith(f":{point}")][-1]


def close(got, want, terms):
    """Whether two float32 results agree to the rounding of sums of `terms` products, taken four deep.

    A sum of n products is off by n u Σ|aᵢbᵢ| at most (Higham 2002, 3.5); the spread of the result stands
    for the sum of the sizes, and layers follow each other, hence 4.
    """
    return (got - want).abs().max() <= 4 * terms * U * (1 + want.abs().max())


def attend(q, k, v, scale, causal, softcap=None):
    """Heads (B, T, H, E) of softmax attention, keys and values shared by groups of queries."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bthe,bshe->bhts", q.double(), k.double()) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v.double()).float()


def rotate(x, cos, sin, sign=1):
    """Rotary embedding of the first features of each head, halves paired; `sign` -1 undoes it."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    half = torch.cat([-second, first], -1)
    return torch.cat([turned * cos[:, :, None] + sign * half * sin[:, :, None], rest], -1)


def angles(model, inputs, attention):
    """cos and sin (B, T, E_rot) as the attention module gets them."""
    _, kwargs, _ = arguments_of(model, inputs, attention)
    return kwargs["position_embeddings"]


@pytest.mark.parametrize("length", [None, HEADS], ids=["long", "as_long_as_heads"])
@pytest.mark.parametrize("name", HEADED)
def test_attention_recomputed_from_the_sites_is_that_of_the_model(name, length):
    if not FAMILIES[name].causal and name != "bert" and length is not None:
        pytest.skip("one encoder is enough: nothing there holds heads on an axis of their own")
    words = ["q", "k", "v", "attn_heads"]
    model, inputs, found, read = captured(name, words, length)
    sites = {point: last(found, point) for point in ("q", "k", "v", "heads")}
    q, k, v, heads = (
        read[site.name].unflatten(-1, (site.heads, site.width // site.heads)) for site in sites.values()
    )
    attention = model.get_submodule(sites["q"].name.rpartition(":")[0])
    softcap = getattr(attention, "attn_logit_softcapping", None)
    if name in ROTATED:
        cos, sin = angles(model, inputs, sites["q"].name.rpartition(":")[0])
        cached = last(found, "k_rope")
        q, k_before = rotate(q, cos, sin), k
        k = read[cached.name].unflatten(-1, (cached.heads, -1))
        assert cached.rope == "post"
        assert sites["k"].rope == "pre"
        assert not close(k, k_before, HEADS)
    scale = getattr(attention, "scaling", None) or getattr(attention, "inv_norm_factor", None)
    want = attend(q, k, v, scale, FAMILIES[name].causal, softcap)
    assert close(heads, want, HIDDEN)
    flipped = attend(q.flip(2), k, v, scale, FAMILIES[name].causal, softcap)
    assert not close(heads, flipped, HIDDEN)


@pytest.mark.parametrize("name", sorted(ROTATED))
def test_cached_keys_are_the_rotated_ones(name):
    model, inputs, found, read = captured(name, "k")
    before, after = last(found, "k"), last(found, "k_rope")
    layer = model.get_submodule(after.path).layer_idx
    with torch.no_grad():
        kept = model(**inputs, use_cache=True).cache.layers[layer].keys  # (B, H, T, E)
    in_cache = kept[:, :: kept.shape[1] // after.heads].transpose(1, 2).flatten(-2)
    assert torch.equal(read[after.name], in_cache)
    cos, sin = angles(model, inputs, after.path)
    heads = (after.heads, after.width // after.heads)
    undone = rotate(read[after.name].unflatten(-1, heads), cos, sin, sign=-1).flatten(-2)
    # Each of two rotations rounds two products and a sum, |cos|, |sin| ≤ 1, and cos² + sin² is 1 within 4u.
    bound = 16 * U * read[before.name].abs().max()
    assert (undone - read[before.name]).abs().max() <= bound
    late = rotate(read[after.name].unflatten(-1, heads), cos.roll(1, 1), sin.roll(1, 1), sign=-1).flatten(-2)
    assert (late - read[before.name]).abs().max() > bound


@pytest.mark.parametrize("name", sorted(set(CAUSAL) - ROTATED - LATENT))
def test_models_that_do_not_rotate_cache_the_keys_of_the_projection(name):
    model, inputs, found, read = captured(name, ["k", "v"])
    key, value = last(found, "k"), last(found, "v")
    assert key.rope is None
    with torch.no_grad():
        layer = model(**inputs, use_cache=True).cache.layers[-1]
    for site, kept in ((key, layer.keys), (value, layer.values)):
        assert torch.equal(read[site.name], kept.transpose(1, 2).flatten(-2))


def test_the_latent_of_deepseek_is_named_as_such():
    model, inputs, found, read = captured("deepseek_v3", ["kv_latent", "k_rope", "q", "attn_heads"])
    latent, shared, q, heads = (last(found, point) for point in ("kv_latent", "k_rope", "q", "heads"))
    assert (latent.kind, shared.kind, shared.rope) == ("kv_latent", "k_rope", "post")
    assert (latent.width, shared.width, q.heads, heads.heads) == (16, 4, HEADS, HEADS)
    with torch.no_grad():
        layer = model(**inputs, use_cache=True).cache.layers[-1]
    assert torch.equal(read[latent.name], layer.keys[:, 0])
    assert torch.equal(read[shared.name], layer.values[:, 0])
    attention = model.get_submodule(shared.path)
    _, kwargs, output = arguments_of(model, inputs, shared.path)
    with torch.no_grad():
        x = kwargs["hidden_states"]
        want = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
        assert torch.equal(read[q.name], want)
        out = F.linear(read[heads.name], attention.o_proj.weight)
    assert close(output[0], out, HIDDEN)


def test_expanded_keys_of_older_caches_give_the_shared_rotary_key():
    model, _ = build("deepseek_v3")
    site = find_sites(model, "k_rope@1")[0]
    nope, rotary = torch.randn(2, HEADS, 5, 8), torch.randn(2, 1, 5, 4)
    keys = torch.cat([nope, rotary.expand(-1, HEADS, -1, -1)], -1)
    values = torch.randn(2, HEADS, 5, 10)
    got = site.read(model.get_submodule(site.path), (keys, values, 1), {}, None)
    assert torch.equal(got, rotary[:, 0])


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if name != "t5"])
def test_the_stream_is_the_sum_of_what_the_parts_add(name):
    model, _, found, read = captured(name, ["resid_pre", "resid", "attn", "mlp_out"])
    kinds = {kind: [site for site in found if site.kind == kind] for kind in ("resid", "attn", "mlp")}
    assert [len(kinds[kind]) for kind in kinds] == [2 * LAYERS, LAYERS, LAYERS]
    pre, post = (read[site.name] for site in kinds["resid"][-2:])
    attn, mlp = (read[kinds[kind][-1].name].reshape(pre.shape) for kind in ("attn", "mlp"))
    with torch.no_grad():
        want = block_sum(name, model.get_submodule(kinds["resid"][-1].path), pre, attn, mlp)
    assert close(post, want, HIDDEN)
    assert not close(post, pre + mlp, HIDDEN)


def block_sum(name, block, pre, attn, mlp):
    """How a block of each family puts its parts together, as its source writes it."""
    if name in {"gemma2", "gemma3", "olmo2"}:
        return pre + block.post_attention_layernorm(attn) + block.post_feedforward_layernorm(mlp)
    if name in {"bert", "roberta"}:
        return block.output.LayerNorm(block.attention.output.LayerNorm(pre + attn) + mlp)
    if name == "distilbert":
        return block.output_layer_norm(block.sa_layer_norm(pre + attn) + mlp)
    return pre + attn + mlp


SEQUENTIAL = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "qwen3_moe"),
    *("qwen2_moe", "deepseek_v3", "opt", "bloom", "t5", "vit"),
]


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_the_middle_of_a_block_lies_between_attention_and_mlp(name):
    model, _, found, read = captured(name, ["resid_pre", "resid_mid", "attn"])
    middle = [site for site in found if "between" in site.point]
    assert len(middle) == LAYERS * (2 if name == "t5" else 1)
    site = middle[LAYERS - 1]
    block = next(s for s in found if "before the block" in s.point and s.layer == LAYERS - 1)
    attn = read[[s for s in found if s.kind == "attn"][LAYERS - 1].name]
    if name in {"gemma2", "gemma3"}:
        attn = model.get_submodule(block.path).post_attention_layernorm(attn).detach()
    got = read[site.name].reshape(attn.shape)
    assert close(got, read[block.name] + attn, HIDDEN)
    assert not close(got, read[block.name], HIDDEN)


PARALLEL_OR_POST = ["gpt_neox", "phi", "falcon", "falcon_new", "olmo2", "bert", "roberta", "distilbert"]


@pytest.mark.parametrize("name", PARALLEL_OR_POST)
def test_blocks_without_a_middle_say_so(name):
    with pytest.raises(
        ValueError, match=r"'resid_mid', which \w+ has not: attention and MLP run side by side"
    ):
        find_sites(build(name)[0], "resid_mid")


@pytest.mark.parametrize("name", CAUSAL)
def test_the_final_norm_has_both_its_sides(name):
    model, inputs, _, read = captured(name, ["resid", "final"])
    sides = find_sites(model, "final")
    before, after = (read[site.name] for site in sides)
    assert [site.name.rpartition(":")[2] for site in sides] == ["input", "output"]
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(after, hidden)
        assert torch.equal(after, model.get_submodule(sides[0].path)(before))
    assert torch.equal(before, read[find_sites(model, "resid")[-1].name])


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_encoders_that_end_in_their_own_norm_have_no_final_one(name):
    with pytest.raises(ValueError, match="no norm follows the blocks: take 'resid'"):
        find_sites(build(name)[0], "final")


@pytest.mark.parametrize("name", [*TRANSFORMERS, "convnext"])
def test_hidden_activations_are_what_the_last_projection_takes(name):
    if name in {"mixtral", "qwen2_moe", "qwen3_moe"}:
        pytest.skip("all MLPs are experts")
    model, inputs, found, read = captured(name, "mlp")
    for site in found:
        down = model.get_submodule(site.path)
        args, _, output = arguments_of(model, inputs, site.path)
        weight = down.weight if hasattr(down, "in_features") else down.weight.mT
        assert read[site.name].shape[-1] == site.width
        assert torch.equal(read[site.name], args[0])
        with torch.no_grad():
            assert close(F.linear(read[site.name], weight, down.bias), output, site.width)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_widths_and_names_hold(name):
    """What a site says without running is what it reads, and its name finds it again."""
    model, inputs = build(name)
    found = find_sites(model, available(Tree(model)))
    assert len({site.name for site in found}) == len(found)
    read = read_sites(model, inputs, found)
    for site in found:
        assert site.width == read[site.name].shape[-1], site.name
        assert site.width % site.heads == 0
        (again,) = find_sites(model, site.name)
        assert (again.name, again.path, again.side, again.heads, again.width or site.width) == (
            site.name,
            site.path,
            site.side,
            site.heads,
            site.width,
        )


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_each_expert_gets_the_tokens_that_its_router_sends(name):
    model, inputs, found, read = captured(name, "experts")
    block = found[-1].path.rpartition(".")[0]
    args, _, _ = arguments_of(model, inputs, block)
    x = args[0].flatten(0, 1)
    gate = model.get_submodule(block).gate
    with torch.no_grad():
        scores = F.linear(x, gate.weight)
        if name == "deepseek_v3":
            scores = scores.sigmoid() + gate.e_score_correction_bias
    chosen = scores.topk(2, dim=-1).indices
    layer = [site for site in found if site.layer == LAYERS - 1]
    assert [site.may_be_empty for site in layer] == [True] * 4
    for expert, site in enumerate(layer):
        assert torch.equal(read[site.name], x[(chosen == expert).any(-1)])
    assert sum(len(read[site.name]) for site in layer) == 2 * len(x)


def test_an_expert_without_tokens_reads_nothing():
    model, inputs = build("mixtral")
    found = find_sites(model, "experts@1")
    read = read_sites(model, {key: value[:1, :1] for key, value in inputs.items()}, found)
    assert sorted(len(read[site.name]) for site in found) == [0, 0, 1, 1]
    assert all(read[site.name].shape[-1] == HIDDEN for site in found)
