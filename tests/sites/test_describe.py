"""The list of what can be captured: every shortcut of a model, with shapes that a forward confirms."""

import json

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from pca_torch.commands.sites import sites
from pca_torch.sites import find_sites
from pca_torch.sites.describe import describe_sites, tiny_batch
from tests.families import FAMILIES, LAYERS, build
from tests.sites.firings import read_sites
from tests.tiny_model import tiny_llama, tiny_tokenizer


def shapes(model, **options):
    return {(group.shortcut, group.name): group.shape for group in describe_sites(model, **options)}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_width_is_that_of_a_forward(name):
    model, inputs = build(name)
    groups = describe_sites(model)
    found = [site for group in groups for site in group.sites]
    read = read_sites(model, inputs, found)
    for group in groups:
        for site in group.sites:
            width = read[site.name].shape[-1]
            said = f"{site.heads} heads × {width // site.heads}" if site.heads > 1 else f"{width}"
            assert group.shape.removesuffix(")").rpartition(", ")[2] == said


def test_layers_are_one_line_and_those_that_differ_are_not():
    groups = {group.name: group for group in describe_sites(build("deepseek_v3")[0])}
    assert (groups["model.layers.*:output"].layers, len(groups["model.layers.*:output"].sites)) == (
        "0-1",
        LAYERS,
    )
    assert groups["model.layers.1.mlp:output"].layers == ""  # the first block has an MLP, the second experts
    experts = groups["model.layers.*.mlp.experts:expert_*"]
    assert (experts.shape, len(experts.sites)) == ("(tokens, 48)", 4)
    assert experts.point == "input of expert … the tokens routed to it"


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "bert"])
def test_a_name_of_the_list_finds_what_it_lists(name):
    model, _ = build(name)
    for group in describe_sites(model):
        again = find_sites(model, group.name)
        assert {site.name for site in group.sites} <= {site.name for site in again}


def test_chosen_sites_alone_are_listed():
    got = shapes(build("llama")[0], sites=["k@1", "model.norm"])
    assert got == {
        (None, "model.layers.1.self_attn:k"): "(B, T, 2 heads × 8)",
        (None, "model.layers.1.self_attn:k_rope"): "(B, T, 2 heads × 8)",
        (None, "model.norm:output"): "(B, T, 48)",
    }


def test_layers_with_gaps_are_spans():
    model = nn.ModuleList([nn.Linear(2, 3) for _ in range(9)])
    (group,) = describe_sites(model, "resid@0-2,4,7-8")
    assert (group.layers, group.name, group.shape) == ("0-2,4,7-8", "*:output", "(..., 3)")


class Odd(nn.Module):
    """Its width is told by no attribute."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 7))
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.drop(self.inner(x)), "text"


def test_a_width_that_nothing_tells_is_measured_where_there_is_a_batch():
    model = Odd().train()
    names = ["inner", "drop", ""]
    assert set(shapes(model, sites=names).values()) == {"(..., ?)"}
    assert set(shapes(model, sites=names, batch={"x": torch.ones(1, 3)}).values()) == {"(..., 7)"}
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_forward_that_fails_leaves_widths_open():
    import transformers

    part = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config=part | {"vocab_size": 60}, vision_config=part | {"image_size": 8, "patch_size": 4}
    )
    model = transformers.CLIPModel(config)
    with pytest.raises(AttributeError):  # it wants pictures beside the token
        model(**tiny_batch(model))
    groups = describe_sites(model.train(), ["text_model.encoder.layers.0.mlp", "text_projection"])
    assert [group.shape for group in groups] == ["(B, T, ?)", "(B, T, 512)"]
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert {group.shortcut for group in describe_sites(model)} >= {"resid", "k", "mlp"}


def test_models_of_transformers_are_measured_by_one_token_or_picture():
    model = build("llama")[0]
    assert shapes(model, sites=["model.layers.0.mlp", "model.layers.0.mlp.act_fn"]) == {
        (None, "model.layers.0.mlp:output"): "(B, T, 48)",
        (None, "model.layers.0.mlp.act_fn:output"): "(B, T, 80)",
    }
    assert shapes(build("convnext")[0], sites="encoder.stages.1:map") == {
        (None, "encoder.stages.1:map"): "(..., 12)"
    }
    assert set(tiny_batch(build("t5")[0])) == {"input_ids", "decoder_input_ids"}
    assert tiny_batch(nn.Linear(2, 2)) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def command(*words):
    app = typer.Typer()
    app.command()(sites)
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_lists_what_fits_a_screen(folder):
    lines = command(folder).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if line.startswith(("resid", "k ", "mlp"))] == [
        *("resid", "resid_pre", "resid_mid", "k", "mlp", "mlp_out")
    ]
    assert any(line.startswith("resid ") and "model.layers.*:output" in line for line in lines)
    assert any(line.endswith("0-1     (B, T, 16)") for line in map(str.rstrip, lines))


def test_the_command_lists_chosen_sites(folder):
    text = command(folder, "--sites", "q@1", "--sites", "model.norm:input")
    assert "(B, T, 2 heads × 8)" in text
    assert "model.norm:input" in text
    assert "resid" not in text


def test_the_command_gives_every_site_as_json(folder):
    told = json.loads(command(folder, "--json"))
    assert told["model"]["model_class"] == "LlamaForCausalLM"
    keys = [site for site in told["sites"] if site["shortcut"] == "k"]
    assert [(site["layer"], site["rope"], site["heads"]) for site in keys] == [
        *((0, "pre", 1), (1, "pre", 1), (0, "post", 1), (1, "post", 1))
    ]
    assert keys[0]["name"] == "model.layers.0.self_attn:k"
