"""Maps (B, C, H, W) become one row for each position; what could be either is refused."""

import pytest
import torch
from torch import nn

from pca_torch.sites import find_sites
from tests.families import build
from tests.sites.firings import read_sites


def one(module, name=":output"):
    (site,) = find_sites(module, name)
    return site


def positions(x):
    """(B, C, ...) as (B, positions, C), by a loop over positions."""
    flat = [
        x[:, :, *place]
        for place in torch.cartesian_prod(*map(torch.arange, x.shape[2:])).reshape(-1, x.ndim - 2).tolist()
    ]
    return torch.stack(flat, 1)


class LayerNorm2d(nn.LayerNorm):
    """Channels first, as vision libraries have it."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(3, 4, 3, padding=1), (2, 3, 5, 6)),
        (nn.ConvTranspose2d(3, 4, 3), (2, 3, 5, 6)),
        (nn.Conv1d(3, 4, 1), (2, 3, 5)),
        (nn.Conv3d(3, 4, 1), (2, 3, 2, 3, 4)),
        (nn.BatchNorm2d(3), (2, 3, 3, 3)),
        (nn.BatchNorm1d(3), (2, 3, 5)),
        (nn.InstanceNorm2d(3), (2, 3, 5, 6)),
        (nn.GroupNorm(1, 3), (2, 3, 5)),
        (nn.GroupNorm(1, 3), (2, 3, 4, 5)),
        (nn.MaxPool2d(2), (2, 3, 4, 6)),
        (nn.AdaptiveAvgPool2d(2), (2, 3, 4, 6)),
        (nn.Dropout2d(), (2, 3, 4, 6)),
        (LayerNorm2d(3), (2, 3, 3, 3)),
        (nn.Sequential(nn.Conv2d(3, 4, 1))[0], (2, 3, 4, 4)),
    ],
)
def test_modules_that_work_on_maps_give_positions(module, shape):
    module, x = module.eval(), torch.randn(shape)
    out = module(x).detach()
    assert torch.equal(one(module).read(module, (x,), {}, out), positions(out))
    assert torch.equal(one(module, ":input").read(module, (x,), {}, out), positions(x))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 7), (2, 3, 5, 6)),
        (nn.LayerNorm(6), (2, 3, 6, 6)),
        (nn.BatchNorm1d(6), (4, 6)),
        (nn.Identity(), (2, 3, 5)),
        (nn.Sequential(nn.Linear(6, 6)), (2, 3, 5, 6)),
    ],
)
def test_modules_whose_features_are_last_give_rows(module, shape):
    module, x = module.eval(), torch.randn(shape)
    out = module(x).detach()
    assert torch.equal(one(module).read(module, (x,), {}, out), out)


def test_a_single_picture_has_positions_too():
    conv, x = nn.Conv2d(3, 4, 1), torch.randn(3, 5, 6)
    out = conv(x).detach()
    assert torch.equal(one(conv).read(conv, (x,), {}, out), positions(out[None])[0])


@pytest.mark.parametrize("module", [nn.Sequential(nn.Conv2d(3, 3, 1)), nn.ReLU(), nn.Identity()])
def test_what_could_be_either_is_refused(module):
    x = torch.randn(2, 3, 4, 5)
    with pytest.raises(
        ValueError, match=r"has shape \(2, 3, 4, 5\), which can be a map .* ':map' or ':rows'"
    ):
        one(module).read(module, (x,), {}, x)
    with pytest.raises(ValueError, match=r"the input of .* ':input_map' or ':input_rows'"):
        one(module, ":input").read(module, (x,), {}, x)
    assert torch.equal(one(module, ":map").read(module, (x,), {}, x), positions(x))
    assert torch.equal(one(module, ":rows").read(module, (x,), {}, x), x)
    assert torch.equal(one(module, ":input_map").read(module, (x,), {}, x), positions(x))
    assert torch.equal(one(module, ":input_rows").read(module, (x,), {}, x), x)


@pytest.mark.parametrize("name", ["convnext", "resnet"])
def test_stages_of_a_vision_model_are_maps(name):
    model, inputs = build(name)
    found = find_sites(model, "encoder.stages.*:map")
    read = read_sites(model, inputs, found)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[1:]
    assert len(found) == len(states)
    for site, state in zip(found, states, strict=True):
        assert torch.equal(read[site.name], positions(state))


def test_norms_of_convnext_know_where_their_channels_are():
    model, inputs = build("convnext")
    found = find_sites(
        model, ["embeddings.layernorm", "encoder.stages.1.layers.0.layernorm", "**.pwconv1:input"]
    )
    read = read_sites(model, inputs, found)
    assert [read[site.name].shape[-1] for site in found] == [site.width for site in found]
    first, *_ = (site for site in found if site.path == "embeddings.layernorm")
    assert read[first.name].shape == (2, 64, 8)  # 16 × 16 pixels in patches of two


def test_patches_of_a_vision_transformer_are_rows():
    model, inputs = build("vit")
    found = find_sites(model, ["resid@1", "embeddings", "**.projection"])
    read = read_sites(model, inputs, found)
    with torch.no_grad():
        hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(read["embeddings:output"], hidden[0])
    assert read["layers.1:output"].shape == (2, 1 + 16, 48)  # the class token and 4 × 4 patches
    patches = read["embeddings.patch_embeddings.projection:output"]
    assert patches.shape == (2, 16, 48)
