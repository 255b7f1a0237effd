"""Adapters by what they read and where they write, against an SVD of the whole ΔW."""

import copy

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import lora
from tests.tiny_model import tiny_llama

EPS = torch.finfo(torch.float64).eps


def factors(r, d_in, d_out, *, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(r, d_in, generator=g, dtype=torch.float64)
    return a.to(dtype), torch.randn(d_out, r, generator=g, dtype=torch.float64).to(dtype)


def truth(delta, rank):
    """Singular values and projectors on the input and the output space of a ΔW (out, in), in float64."""
    u, s, vh = np.linalg.svd(np.asarray(delta, dtype=np.float64), full_matrices=False)
    return s[:rank], vh[:rank].T @ vh[:rank], u[:, :rank] @ u[:, :rank].T


def agree(spans, want, tolerance):
    values, inputs, outputs = want
    assert spans.rank == len(values)
    np.testing.assert_allclose(spans.singular_values, values, rtol=0, atol=tolerance * values[0])
    for rows, projector in ((spans.input, inputs), (spans.output, outputs)):
        np.testing.assert_allclose(rows.mT @ rows, projector, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize(("d_in", "d_out"), [(20, 9), (9, 20), (3, 8)])
def test_a_pair_and_its_product_have_the_same_directions(d_in, d_out, length):
    a, b = factors(3, d_in, d_out)
    want = truth(b @ a, 3)
    # a span is bent by the error of a product of length r over its gap: the smallest singular value
    tolerance = 20 * EPS * want[0][0] / want[0][-1]
    pair = lora.adapter_spans((a * length, b))
    agree(pair, (want[0] * length, *want[1:]), tolerance)
    agree(lora.adapter_spans(b @ a), want, tolerance)
    agree(lora.adapter_spans((b @ a).mT, fan_in_fan_out=True), want, tolerance)
    swapped = lora.adapter_spans((b @ a).mT)
    assert swapped.input.shape == (3, d_out)  # the other side


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", ["pair", "delta"])
def test_the_rank_is_that_of_the_adapter_not_of_its_rounding(form, dtype):
    a, b = factors(4, 64, 48, dtype=dtype)
    a[3], b[:, 3] = a[0], b[:, 0]  # two of four directions are one
    delta = (b.double() @ a.double()).to(dtype)
    assert lora.adapter_spans((a, b) if form == "pair" else delta).rank == 3
    assert np.linalg.matrix_rank(delta.double().numpy()) > 3


def test_an_adapter_without_effect_has_no_directions():
    a, b = factors(2, 6, 5)
    fresh = lora.adapter_spans((a, torch.zeros_like(b)))
    assert (fresh.rank, fresh.input.shape, fresh.output.shape) == (0, (0, 6), (0, 5))
    assert not lora.overlap((a, torch.zeros_like(b)), (a, b), "input")
    assert not lora.overlap((a, torch.zeros_like(b)), torch.zeros(5, 6), "output")


def test_overlap_is_that_of_the_spans():
    first, second = factors(2, 12, 10), factors(5, 12, 10, seed=1)
    for side, rows in (("input", [first[0], second[0]]), ("output", [first[1].mT, second[1].mT])):
        for normalise in ("min", "max"):
            want = pt.subspace.overlap(*rows, normalise)
            assert lora.overlap(first, second, side, normalise) == pytest.approx(want, abs=100 * EPS)
    assert len(lora.input_basis(first[0])) == len(lora.output_basis(first[1])) == 2


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads the old name
@pytest.mark.parametrize("layer", ["linear", "conv1d"])
def test_adapters_of_peft(layer):
    """`get_delta_weight` has the layout of the layer; the files of PEFT have A (r, in) and B (out, r)."""
    peft = pytest.importorskip("peft")
    import transformers

    torch.manual_seed(0)
    if layer == "linear":
        model, target, name = tiny_llama(), "down_proj", "model.layers.0.mlp.down_proj"
    else:
        config = transformers.GPT2Config(
            n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        model, target, name = transformers.GPT2LMHeadModel(config), "c_attn", "transformer.h.0.attn.c_attn"
    conv = layer == "conv1d"
    config = peft.LoraConfig(
        r=3, target_modules=[target], fan_in_fan_out=conv, task_type="CAUSAL_LM", init_lora_weights=False
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    module = adapted.base_model.model.get_submodule(name)
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    delta = module.get_delta_weight("default").detach()
    whole = lora.adapter_spans(delta, fan_in_fan_out=conv)
    pair = lora.adapter_spans((a, b))
    assert pair.rank == whole.rank == 3
    u32 = torch.finfo(torch.float32).eps
    bend = 4 * 3 * u32 * (pair.singular_values[0] / pair.singular_values[-1]).item()
    for side in ("input", "output"):
        angles = pt.subspace.principal_angles(getattr(pair, side), getattr(whole, side))
        assert angles.max() < bend
    inputs = torch.randn(7, whole.input.shape[1])
    reached = module(inputs) - module.base_layer(inputs)  # what the adapter adds, by running it
    outside = reached.detach().double() - reached.detach().double() @ pair.output.mT @ pair.output
    size = module(inputs).detach().norm().double()
    assert outside.norm() < 20 * u32 * size
    assert reached.norm() > 1e3 * outside.norm()


A, B = factors(2, 6, 5)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ((B, A), r"`adapter` must be A \(r, in\) and B \(out, r\) with one r, got \(5, 2\) and \(2, 6\)"),
        ((A,), r"`adapter` must be the pair \(A, B\) or ΔW, got 1 tensors"),
        ((A[0], B), r"`A` must be a matrix, got shape \(6,\)"),
        ((A * torch.nan, B), "`A` must be finite, got NaN or inf"),
        ((A, B / 0), "`B` must be finite, got NaN or inf"),
        (torch.zeros(0, 4), r"`adapter` must be a matrix, got shape \(0, 4\)"),
    ],
)
def test_what_is_no_adapter_is_refused(adapter, message):
    with pytest.raises(ValueError, match=message):
        lora.adapter_spans(adapter)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="`side` must be one of 'input', 'output', got 'A'"):
        lora.overlap((A, B), (A, B), "A")
    with pytest.raises(ValueError, match="must have the same features, got 6 and 7"):
        lora.overlap((A, B), factors(2, 7, 5), "input")
    with pytest.raises(ValueError, match="`fan_in_fan_out` must be True or False"):
        lora.adapter_spans((A, B), fan_in_fan_out=2)
