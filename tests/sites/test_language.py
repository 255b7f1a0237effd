"""Names of sites: paths, points, shortcuts, layers; wrappers; what is refused, and what it then says."""

import contextlib
import os

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import pytorch_utils

from pca_torch.sites import Site, decoder_layers, find_sites
from tests.families import FAMILIES, HEADS, HIDDEN, LLAMA, VOCAB, build, decoder
from tests.sites.firings import read_sites


def names(model, *sites):
    return [site.name for site in find_sites(model, list(sites))]


@pytest.fixture(scope="module")
def llama():
    return build("llama")[0]


def test_without_names_the_stream_after_every_block_is_meant(llama):
    assert [site.name for site in find_sites(llama)] == ["model.layers.0:output", "model.layers.1:output"]
    assert {site.kind for site in find_sites(llama)} == {"resid"}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("model.norm", ["model.norm:output"]),
        ("model.norm:input", ["model.norm:input"]),
        ("model.layers.*", ["model.layers.0:output", "model.layers.1:output"]),
        ("model.layers.*.mlp:input", ["model.layers.0.mlp:input", "model.layers.1.mlp:input"]),
        ("resid@1", ["model.layers.1:output"]),
        ("resid@0-1", ["model.layers.0:output", "model.layers.1:output"]),
        ("v@1,0", ["model.layers.0.self_attn:v", "model.layers.1.self_attn:v"]),
        ("k@1", ["model.layers.1.self_attn:k", "model.layers.1.self_attn:k_rope"]),
        ("model.layers.1:q", ["model.layers.1.self_attn:q"]),
        ("model.layers.1.self_attn:k", ["model.layers.1.self_attn:k"]),
        ("**:hidden", ["model.layers.0.mlp:hidden", "model.layers.1.mlp:hidden"]),
        ("model.layers.0:hidden", ["model.layers.0.mlp:hidden"]),
    ],
)
def test_a_name_finds(llama, spec, want):
    assert names(llama, spec) == want


def test_order_is_that_of_the_model_and_nothing_comes_twice(llama):
    found = names(llama, "final", "model.layers.1", "resid", "resid_pre@1", "model.layers.*")
    assert found == [
        "model.layers.0:output",
        "model.layers.1:input",
        "model.layers.1:output",
        "model.norm:input",
        "model.norm:output",
    ]


def test_a_block_by_its_path_is_the_stream(llama):
    (by_path,), (by_word,) = find_sites(llama, "model.layers.1"), find_sites(llama, "resid@1")
    assert (by_path.name, by_path.kind, by_path.width) == (by_word.name, by_word.kind, by_word.width)


def test_sites_found_before_pass_through(llama):
    (site,) = find_sites(llama, "resid@1")
    assert find_sites(llama, site) == [site]
    assert find_sites(llama, [site, "resid"])[1] is site


def test_a_module_under_two_names_is_one_site():
    layer = nn.Linear(3, 3)
    assert names(nn.Sequential(layer, layer), "*") == ["0:output"]


def test_a_word_that_is_a_path_means_the_module():
    model = nn.ModuleDict({"mlp": nn.Linear(4, 5)})
    (site,) = find_sites(model, "mlp")
    assert (site.name, site.kind, site.width) == ("mlp:output", "module", 5)


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (
            "model.layer.3",
            ValueError,
            r"'model.layer.3', which is no submodule .* nearest to 'model.layer.3'",
        ),
        ("rezid", ValueError, "no shortcut; nearest to 'rezid': 'resid'"),
        ("resid@7", ValueError, r"asks for layers \[7\] of 'resid', the model has 0 to 1"),
        ("resid@a", ValueError, "write layers after '@' as 'resid@0-5,10'"),
        ("resid@", ValueError, "write layers after '@'"),
        ("resid@1-0", ValueError, "'resid@1-0'; write the span '1-0' upwards, '0-1'"),
        ("k@0,9-3", ValueError, "write the span '9-3' upwards, '3-9'"),
        ("model.norm:keys", ValueError, "the point after ':' must be one of output, input, rows"),
        ("model.norm:k", ValueError, "'model.norm:k'; no attention is found there"),
        ("model.norm:hidden", ValueError, "no MLP is found there"),
        ("model.layers.0:expert_9", ValueError, "no experts are routed to there"),
        ("kv_latent", ValueError, "its cache holds keys and values: take 'k' and 'v'; it has resid, "),
        ("k@0:output", ValueError, "write layers after '@'"),
        ("model.layers.0:q_rope", ValueError, "rotated queries go to no cache: take 'q'"),
        ([3], TypeError, "`sites` must hold names or Site objects, got int"),
    ],
)
def test_what_is_refused_says_what_to_do(llama, spec, error, text):
    with pytest.raises(error, match=text):
        find_sites(llama, spec)


@pytest.mark.parametrize(
    ("family", "spec", "text"),
    [
        ("deepseek_v3", "k", "its cache holds a latent of keys and values: take 'kv_latent' and 'k_rope'"),
        ("deepseek_v3", "v", "take 'kv_latent' and 'k_rope'"),
        ("gpt2", "k_rope", "nothing rotates its keys: take 'k'"),
        ("mixtral", "mlp", "its MLPs are experts: take 'experts', their inputs, or 'mlp_out'"),
        ("llama", "experts", "no experts are routed to there"),
        ("convnext", "resid", "'encoder.stages.0' works on maps; write 'encoder.stages.\\*:map'"),
        ("convnext", "k", "no attention is found there; it has mlp, mlp_out"),
        ("resnet", "mlp", "no MLP is found there; it has none of the shortcuts: name modules by path"),
    ],
)
def test_a_shortcut_that_a_model_has_not_names_what_it_has(family, spec, text):
    with pytest.raises(ValueError, match=text):
        find_sites(build(family)[0], spec)


def test_layouts_that_are_not_known_are_refused():
    family = decoder(
        "CodeGenConfig", vocab_size=VOCAB, n_embd=64, n_layer=1, n_head=8, n_positions=64, rotary_dim=4
    )
    with pytest.raises(ValueError, match="layout of CodeGenAttention is not known here: take its projection"):
        find_sites(family.build(), "k")


def test_a_fused_projection_of_another_width_is_refused():
    model, _ = build("gpt2")
    model.transformer.h[0].attn.c_attn = pytorch_utils.Conv1D(100, HIDDEN)
    with pytest.raises(ValueError, match="has 100 features, which 6 heads of width 8 do not divide into"):
        find_sites(model, "k@0")


class Encoder(nn.Module):
    """torch's own encoder in a list of blocks."""

    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(12, 3, 20, batch_first=True, norm_first=True, dropout=0.0),
            num_layers=2,
            enable_nested_tensor=False,
        ).layers

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_attention_of_torch_is_read_whole():
    model = Encoder().eval()
    with pytest.raises(ValueError, match=r"nn\.MultiheadAttention computes them inside: take 'attn'"):
        find_sites(model, "k")
    found = find_sites(model, ["resid_pre", "resid_mid", "attn", "mlp", "mlp_out", "resid"])
    x = torch.randn(2, 5, 12)
    read = read_sites(model, {"x": x}, found)
    mid, attn, out = (
        read[f"layers.0.{name}"] for name in ("norm2:input", "self_attn:output", "linear2:output")
    )
    assert torch.allclose(mid, x + attn, atol=1e-6)
    assert torch.allclose(read["layers.0:output"], mid + out, atol=1e-6)
    assert torch.equal(read["layers.0:input"], x)
    assert read["layers.1:hidden"].shape == (2, 5, 20)
    assert all(site.width == read[site.name].shape[-1] for site in found if site.width)


def compiled(model):
    return torch.compile(model, backend="eager")


def compiled_layers(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def compiled_last_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def checkpointed(model):
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    return model


def adapted(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "down_proj"]))


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning"
)  # between peft and transformers
@pytest.mark.parametrize("wrap", [compiled, compiled_layers, compiled_last_layer, checkpointed, adapted])
def test_wrappers_do_not_show(wrap):
    words = ["resid", "resid_mid", "final", "attn", "attn_heads", "q", "k", "v", "mlp", "mlp_out"]
    bare = find_sites(build("llama")[0], words)
    found = find_sites(wrap(build("llama")[0]), words)
    facts = [(site.name, site.path, site.heads, site.width, site.layer) for site in bare]
    assert [(site.name, site.path, site.heads, site.width, site.layer) for site in found] == facts


def test_names_of_a_distributed_model_do_not_show():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(build("llama")[0])
        assert names(model, "resid@1", "module.model.norm") == ["model.layers.1:output", "model.norm:output"]
        vision = nn.parallel.DistributedDataParallel(build("vit")[0])  # the root alone has the configuration
        assert [site.width for site in find_sites(vision, "resid")] == [HIDDEN] * 2
        assert "decoder.block.1:output" in names(nn.parallel.DistributedDataParallel(build("t5")[0]), "resid")
    finally:
        torch.distributed.destroy_process_group()


class Packed(nn.Module):
    """A projection as quantisation leaves it: no nn.Linear, the weight packed away."""

    def __init__(self, inner):
        super().__init__()
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self.register_buffer("packed", inner.weight.detach().to(torch.bfloat16).view(torch.int16))

    def forward(self, x):
        return x @ self.packed.view(torch.bfloat16).to(x.dtype).mT


def test_quantised_projections_count_by_their_features():
    model, inputs = build("llama")
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, Packed(child))
    found = find_sites(model, ["q", "k", "v", "attn_heads", "attn", "mlp", "mlp_out"])
    assert len(found) == 2 * 8
    assert (found[0].heads, found[0].width) == (HEADS, 48)
    read = read_sites(model, inputs, found)
    assert all(site.width == read[site.name].shape[-1] for site in found)


class Mixture(nn.Module):
    """Experts as a list of modules, of which some see no token."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([
            nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])})
        ])

    def forward(self, x):
        experts = self.blocks[0]["experts"]
        return experts[0](x[:, :2]), experts[2](x[:, 2:])


def test_experts_that_are_modules_are_read_one_by_one():
    model, x = Mixture(), torch.randn(2, 5, 4)
    found = find_sites(model, "experts")
    assert [site.name for site in found] == [f"blocks.0.experts:expert_{e}" for e in range(3)]
    assert all(site.may_be_empty and site.width == 4 for site in found)
    read = read_sites(model, {"x": x}, found)
    assert list(read) == [found[0].name, found[2].name]
    assert torch.equal(read[found[2].name], x[:, 2:])


def test_arguments_by_keyword_are_read(llama):
    """The attention of transformers is called by keywords alone, with masks and tables beside the tokens."""
    model, inputs = build("llama")
    (attention, norm) = find_sites(
        model, ["model.layers.1.self_attn:input", "model.layers.1.input_layernorm"]
    )
    read = read_sites(model, inputs, [attention, norm])
    assert torch.equal(read[attention.name], read[norm.name])


class Named(nn.Module):
    """A float mask before the tokens, both by keyword."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, mask, hidden_states):
        return {"ids": torch.ones(2, dtype=torch.long), "values": [hidden_states + mask]}


def test_tokens_come_before_masks_and_floats_before_integers():
    model = Named()
    found = find_sites(model, [":input", ":output"])
    mask, x = torch.zeros(2, 1), torch.randn(2, 3)
    read = read_sites(model, {"mask": mask, "hidden_states": x}, found)
    assert all(torch.equal(read[site.name], x) for site in found)


def test_no_tensor_and_no_features_are_refused():
    site = find_sites(nn.Linear(2, 2), ":output")[0]
    with pytest.raises(
        ValueError, match="the output must be or hold a floating tensor, got str; capture another"
    ):
        site.read(nn.Linear(2, 2), (), {}, "text")
    with pytest.raises(
        ValueError, match=r"the output must have shape \(..., D\), two or more, got Tensor with \(3,\)"
    ):
        site.read(nn.Linear(2, 2), (), {}, torch.ones(3))
    with pytest.raises(
        ValueError, match=r"the output must be or hold a floating tensor, got a tensor of torch\.int64"
    ):
        site.read(nn.Linear(2, 2), (), {}, torch.ones(3, dtype=torch.long))
    inward = find_sites(nn.Linear(2, 2), ":input")[0]
    with pytest.raises(ValueError, match="the input must be or hold a floating tensor, got tuple"):
        inward.read(nn.Linear(2, 2), (), {}, torch.ones(3, 2))


def test_heads_of_another_shape_are_refused():
    site = find_sites(build("qwen3")[0], "k@0")[0]
    with pytest.raises(ValueError, match=r"2 heads of width 12 were expected, got shape \(2, 3, 4, 12\)"):
        site.read(nn.Identity(), (), {}, torch.ones(2, 3, 4, 12))


def test_experts_without_routes_are_refused():
    site = find_sites(build("mixtral")[0], "experts@0")[0]
    with pytest.raises(ValueError, match="the experts were called without the indices of the experts"):
        site.only(nn.Identity(), (torch.ones(3, 4),), {}, None)


def test_a_model_without_blocks_asks_for_paths():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    with pytest.raises(ValueError, match="this model has no list of equal blocks"):
        find_sites(model)
    assert [(s.name, s.width) for s in find_sites(model, "*")] == [("0:output", 4), ("1:output", 5)]


def test_blocks_are_those_of_the_longest_list():
    assert decoder_layers(build("llama")[0]) == "model.layers.*"
    assert decoder_layers(build("mixtral")[0]) == "model.layers.*"
    assert decoder_layers(nn.ModuleList([nn.Linear(2, 2)] * 2)) == "*"


def test_a_model_that_sees_pictures_is_asked_about_its_text():
    """The stack of the pictures may be the deeper one."""
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=16, intermediate_size=20, num_hidden_layers=4, num_attention_heads=2
            ),
            text_config=transformers.LlamaConfig(**LLAMA),
        )
    )
    assert decoder_layers(model) == "model.language_model.layers.*"
    (site,) = find_sites(model, "k_rope@1")
    assert (site.name, site.heads, site.width) == ("model.language_model.layers.1.self_attn:k_rope", 2, 16)
    assert [site.width for site in find_sites(model, "**.encoder.layers.*:q")] == [16] * 4


def test_both_stacks_of_an_encoder_decoder_are_meant():
    assert {name.split(".")[0] for name in names(build("t5")[0], "resid@1")} == {"encoder", "decoder"}
    assert not any("EncDec" in name for name in names(build("t5")[0], "k"))
    cross = "decoder.block.1.layer.1.EncDecAttention"
    assert names(build("t5")[0], f"{cross}:k") == [f"{cross}:k"]


def test_a_site_is_a_value():
    (site,) = find_sites(build("llama")[0], "k_rope@1")
    assert isinstance(site, Site)
    assert (site.side, site.path, site.layer, site.heads) == ("cache", "model.layers.1.self_attn", 1, 2)
    with contextlib.suppress(AttributeError):
        site.name = "other"
    assert site.name == "model.layers.1.self_attn:k_rope"


def test_every_family_is_found_in_a_moment_and_unchanged():
    for family in FAMILIES:
        model, _ = build(family)
        before = {name: module._forward_hooks for name, module in model.named_modules()}
        with contextlib.suppress(ValueError):
            find_sites(model, ["resid", "attn", "mlp"])
        assert all(not hooks for hooks in before.values())
    assert os.environ["HF_HUB_OFFLINE"] == "1"
