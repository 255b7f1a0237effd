"""Bases of cached keys and values, against an SVD of the rows of each head."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

import pca_torch as pt
from pca_torch import kv
from tests.support import truth
from tests.tiny_model import tiny_llama

IDS = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(0))


def states(model, cache, ids=IDS, **options):
    accepts = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepts else "past_key_values"  # before transformers 5.24
    with torch.no_grad():
        return model(ids, use_cache=True, **{name: cache}, **options)


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def cache(model):
    filled = transformers.DynamicCache()
    states(model, filled)
    return filled


def agree(found, rows, atol):
    """Variances and leading direction of each head (H, N, E), against an SVD."""
    for head, x in enumerate(rows):
        _, variance, components = truth(x)
        np.testing.assert_allclose(found.spectrum[head][: len(variance)], variance, rtol=0, atol=atol)
        assert abs(found.components[head, 0] @ components[0]) > 1 - 1e-6


def bound(x):
    """N products for a covariance and E for its eigenvalues, in float64, of a trace."""
    n, e = x.shape[-2:]
    return (
        2
        * (n + e)
        * torch.finfo(torch.float64).eps
        * x.double().square().sum((-2, -1)).max().item()
        / (n - 1)
    )


@pytest.mark.parametrize("which", ["keys", "values"])
def test_bases_of_a_real_cache(cache, which):
    spectra = kv.cache_spectra(cache, which=which)
    assert list(spectra) == [0, 1]
    for i, found in spectra.items():
        x = getattr(cache.layers[i], which)  # (B, H, T, E)
        rows = torch.stack([x[:, h].reshape(-1, x.shape[-1]) for h in range(x.shape[1])])
        assert found.spectrum.shape == (x.shape[1], x.shape[-1])
        agree(found, rows, bound(rows))


def test_every_form_of_one_cache_is_read_alike(cache):
    pairs = tuple((layer.keys, layer.values) for layer in cache.layers)
    forms = [
        pairs,
        [list(pair) for pair in pairs],
        [(*pair, None) for pair in pairs],
        SimpleNamespace(key_cache=[k for k, _ in pairs], value_cache=[v for _, v in pairs]),
        SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v) for k, v in pairs]),
    ]
    for which in ("keys", "values"):
        want = kv.cached(cache, which)
        for form in forms:
            found = kv.cached(form, which)
            assert found.keys() == want.keys()
            assert all(torch.equal(found[i], want[i]) for i in want)


def test_layers_that_hold_nothing_are_left_out(cache):
    first = cache.layers[0]
    empty = transformers.cache_utils.DynamicLayer()
    linear = SimpleNamespace(conv_states=torch.zeros(3, 4))
    assert list(kv.cached(SimpleNamespace(layers=[empty, linear, first]))) == [2]
    assert list(kv.cached([None, (first.keys, first.values)])) == [1]
    assert list(kv.cached(SimpleNamespace(key_cache=[[], first.keys]))) == [1]


def test_a_static_cache_is_cut_where_it_is_filled(model, cache):
    static = transformers.StaticCache(config=model.config, max_cache_len=50)
    states(model, static)
    found = kv.cached(static)
    assert found[0].shape[2] == IDS.shape[1]
    # the keys of the first layer are the same products; the attention before the second sums otherwise
    torch.testing.assert_close(found[0], cache.layers[0].keys)
    uncut = kv.head_spectra(static.layers[0].keys)
    assert not torch.allclose(uncut.spectrum, kv.cache_spectra(static)[0].spectrum, rtol=0.01)


def test_padding_does_not_count(model):
    mask = torch.ones_like(IDS)
    mask[0, :7] = 0
    mask[1, :2] = 0
    filled = transformers.DynamicCache()
    states(model, filled, attention_mask=mask)
    found = kv.cache_spectra(filled, mask=mask)[1]
    keys = filled.layers[1].keys
    rows = torch.stack([keys[:, h][mask.bool()] for h in range(keys.shape[1])])
    agree(found, rows, bound(rows))
    assert not torch.allclose(found.spectrum, kv.cache_spectra(filled)[1].spectrum, rtol=1e-3)


def test_a_sliding_window_has_the_last_positions():
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    model = transformers.MistralForCausalLM(config).eval()
    window = transformers.DynamicCache(config=config)
    mask = torch.ones_like(IDS)
    mask[0, :15] = 0
    states(model, window, attention_mask=mask)
    keys = window.layers[0].keys
    assert keys.shape[2] == 7
    rows = keys[:, 0][mask[:, -7:].bool()][None]
    agree(kv.cache_spectra(window, mask=mask)[0], rows, bound(rows))


def test_keys_of_smollm2_by_head(smollm2):
    ids = torch.arange(1000, 1200).reshape(2, 100)
    filled = transformers.DynamicCache()
    states(smollm2.model, filled, ids)
    spectra = kv.cache_spectra(filled, 8)
    heads = smollm2.model.config.num_key_value_heads
    assert len(spectra) == smollm2.model.config.num_hidden_layers
    for i in (0, 17):
        assert spectra[i].components.shape == (heads, 8, 64)
        keys = filled.layers[i].keys
        rows = keys.movedim(1, 0).reshape(heads, -1, 64)
        agree(spectra[i], rows, bound(rows))


def test_repeated_heads_count_once(cache):
    keys = torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(0))
    want = kv.head_spectra(keys)
    repeated = keys.repeat_interleave(2, dim=1)
    found = kv.head_spectra(repeated, num_key_value_heads=3)
    assert torch.equal(found.spectrum, want.spectrum)
    assert torch.equal(kv.head_spectra(keys, num_key_value_heads=3).spectrum, want.spectrum)
    with pytest.raises(ValueError, match="`states` must repeat each of 3 heads 2 times in a row, but they"):
        kv.head_spectra(keys.repeat(1, 2, 1, 1), num_key_value_heads=3)  # in another order
    with pytest.raises(ValueError, match="`num_key_value_heads` must divide the 3 heads of `states`, got 2"):
        kv.head_spectra(keys, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"^layer 0: `num_key_value_heads` must divide"):
        kv.cache_spectra(cache, num_key_value_heads=7)


def test_uncentred_keys_are_second_moments():
    keys = torch.randn(1, 2, 30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3
    found = kv.head_spectra(keys, center=False, ddof=0)
    for head in range(2):
        want = np.linalg.svd(keys[0, head].numpy(), compute_uv=False) ** 2 / 30
        np.testing.assert_allclose(found.spectrum[head], want, rtol=1e-12)
    assert not torch.allclose(kv.head_spectra(keys, ddof=0).spectrum, found.spectrum, rtol=0.1)


def test_the_basis_of_keys_agrees_with_the_estimator(cache):
    keys = cache.layers[1].keys
    found = kv.cache_spectra(cache)[1]
    for head in range(keys.shape[1]):
        pca = pt.decompose(keys[:, head], 3)
        assert pt.subspace.principal_angles(pca, found.components[head, :3]).max() < 1e-6


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (
            3,
            TypeError,
            r"`cache` must be a sequence of \(keys, values\).*got int; pass what the model returned",
        ),
        ([], ValueError, "`cache` holds no keys; run the model with it first"),
        ([(torch.ones(4, 5), None)], ValueError, r"must hold keys \(B, H, T, E\), got \(4, 5\) in layer 0"),
        (
            SimpleNamespace(layers=[SimpleNamespace(keys=torch.ones(1), _quantized_keys=1)]),
            ValueError,
            "`cache` is quantised in layer 0; capture",
        ),
    ],
)
def test_what_is_no_cache_is_refused(bad, error, message):
    with pytest.raises(error, match=message):
        kv.cache_spectra(bad)


def test_a_cache_of_an_encoder_and_a_decoder_is_two():
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    with pytest.raises(TypeError, match="got EncoderDecoderCache; pass its `self_attention_cache`"):
        kv.cache_spectra(both)


def test_bad_arguments_are_refused(cache):
    with pytest.raises(ValueError, match="`which` must be one of 'keys', 'values', got 'key'"):
        kv.cached(cache, "key")
    with pytest.raises(
        ValueError, match=r"`states` must be \(batch, heads, positions, width\), got shape \(2, 3"
    ):
        kv.head_spectra(torch.ones(2, 3, 4))
    with pytest.raises(
        ValueError, match=r"`mask` must have the leading shape of `x`, \(2, 5\), got \(2, 4\)"
    ):
        kv.head_spectra(torch.ones(2, 3, 5, 4), mask=torch.ones(2, 4))
