"""Layouts beside those of the large families: other fused projections, clipping, norms on heads."""

import pytest
import torch

from pca_torch.sites import find_sites
from tests.families import HEADS, HIDDEN, LAYERS, LLAMA, VOCAB, WIDE, decoder, encoder
from tests.sites.firings import arguments_of, read_sites
from tests.sites.test_families import attend, close, rotate

GPT2 = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
LAYOUTS = {
    "one key for all, after the queries": decoder("GPTBigCodeConfig", **GPT2, multi_query=True),
    "by heads, under the name of thirds": decoder("GPTBigCodeConfig", **GPT2, multi_query=False),
    "thirds in an encoder": encoder("ModernBertConfig", **WIDE, intermediate_size=80, pad_token_id=0),
    "by heads, norms on heads": decoder(
        "PersimmonConfig", **(LLAMA | {"num_key_value_heads": HEADS}), qk_layernorm=True
    ),
    "norms of torch on heads": decoder("PhiConfig", **LLAMA, qk_layernorm=True),
    "a list of norms": decoder("StableLmConfig", **LLAMA, partial_rotary_factor=0.5, qk_layernorm=True),
    "clipped": decoder("OlmoConfig", **LLAMA, clip_qkv=0.5),
    "scaled otherwise": decoder("GraniteConfig", **LLAMA, attention_multiplier=0.3),
    "experts, norms on all heads": decoder("OlmoeConfig", **LLAMA, num_experts=4, num_experts_per_tok=2),
    "a layer without rotation": decoder("SmolLM3Config", **LLAMA, no_rope_layers=[1, 0]),
    "attention in some layers": decoder("Lfm2Config", **LLAMA, layer_types=["conv", "full_attention"]),
    "relative positions": encoder("ElectraConfig", **WIDE, intermediate_size=80, embedding_size=HIDDEN),
}


@pytest.mark.parametrize("length", [7, HEADS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_recomputed_from_the_sites_is_that_of_the_model(name, length):
    family = LAYOUTS[name]
    model = family.build()
    inputs = {key: value[:, :length] for key, value in family.inputs().items()}
    found = find_sites(model, ["q@1", "k@1", "v@1", "attn_heads@1"])
    read = read_sites(model, inputs, found)
    sites = {site.name.rpartition(":")[2]: site for site in found}
    heads = {point: read[site.name].unflatten(-1, (site.heads, -1)) for point, site in sites.items()}
    path = sites["q"].name.rpartition(":")[0]
    q, k = heads["q"], heads["k"]
    if sites["q"].rope == "pre":
        _, kwargs, _ = arguments_of(model, inputs, path)
        q, k = (rotate(x, *kwargs["position_embeddings"]) for x in (q, k))
        if family.causal:
            assert close(heads["k_rope"], k, 1)
    scale = getattr(model.get_submodule(path), "scaling", q.shape[-1] ** -0.5)
    want = attend(q, k, heads["v"], scale, family.causal)
    assert close(heads["heads"], want, HIDDEN)
    assert not close(heads["heads"], attend(q.flip(2), k, heads["v"], scale, family.causal), HIDDEN)


def test_a_layer_that_does_not_rotate_has_no_rotated_keys():
    model = LAYOUTS["a layer without rotation"].build()
    assert [(site.name[-6:], site.rope) for site in find_sites(model, "k")] == [
        *(("attn:k", "pre"), ("k_rope", "post"), ("attn:k", None))
    ]


@pytest.mark.parametrize("config", ["HunYuanDenseV1Config", "NanoChatConfig"])
def test_keys_before_a_rotation_that_a_norm_follows_are_those_of_the_projection(config):
    model = decoder(config, **LLAMA, head_dim=8).build()
    assert [site.path.rpartition(".")[2] for site in find_sites(model, "k@1")] == ["k_proj", "self_attn"]


def test_clipped_values_are_read_clipped():
    family = decoder(
        "MptConfig",
        vocab_size=VOCAB,
        d_model=HIDDEN,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=64,
        attn_config={"clip_qkv": 0.5},
    )
    model, inputs = family.build(), family.inputs()
    (site,) = find_sites(model, "v@1")
    got = read_sites(model, inputs, [site])[site.name]
    with torch.no_grad():
        kept = model(**inputs, use_cache=True).cache.layers[1].values
    assert torch.equal(got, kept.transpose(1, 2).flatten(-2))
    assert (got.abs() == got.abs().max()).sum() > 1  # several at the limit


def test_models_without_attention_have_their_stream():
    family = decoder(
        "MambaConfig", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=4
    )
    model = family.build()
    assert [site.width for site in find_sites(model, ["resid", "final"])] == [HIDDEN] * 4
    with pytest.raises(ValueError, match="no attention is found there; it has resid, resid_pre, final"):
        find_sites(model, "k")


@pytest.mark.model
def test_sites_of_the_embedded_model_hold_its_attention(smollm2):
    """30 layers of real weights: three keys of 64 for nine queries, rotated by their positions."""
    model = smollm2.model
    text = "The tower in Paris was built for a fair, and nobody thought that it would stand."
    ids = smollm2.tokenizer(text, return_tensors="pt")["input_ids"]
    found = find_sites(model, ["q@0,15,29", "k@0,15,29", "v@0,15,29", "attn_heads@0,15,29"])
    read = read_sites(model, {"input_ids": ids}, found)
    for layer in (0, 15, 29):
        sites = {s.name.rpartition(":")[2]: s for s in found if s.layer == layer}
        heads = {point: read[s.name].unflatten(-1, (s.heads, -1)) for point, s in sites.items()}
        path = f"model.layers.{layer}.self_attn"
        angles = arguments_of(model, {"input_ids": ids}, path)[1]["position_embeddings"]
        undone = rotate(heads["k_rope"], *angles, sign=-1)
        # Two rotations round four products and two sums, and cos² + sin² is 1 within 4 units.
        bound = 16 * torch.finfo(torch.float32).eps / 2 * heads["k"].abs().max()
        assert (undone - heads["k"]).abs().max() <= bound
        assert (heads["k_rope"] - heads["k"]).abs().max() > bound
        q = rotate(heads["q"], *angles)
        want = attend(q, heads["k_rope"], heads["v"], 64**-0.5, causal=True)
        assert close(heads["heads"], want, 576)
        assert not close(heads["heads"], attend(q.flip(2), heads["k_rope"], heads["v"], 64**-0.5, True), 576)
