"""Keys and values against the cache of transformers, under each of the names that it gives that cache.

`scripts/version_matrix` runs this file on several versions of transformers.
"""

import inspect

import pytest
import torch
from transformers import DynamicCache

from pca_torch.hooks import capture
from pca_torch.moments import Moments
from pca_torch.sites import find_sites
from tests.families import build

ROTATED = ["llama", "qwen3", "gpt_neox", "phi3"]  # plain; with a norm of the keys; fused, in part; fused
CACHED = [*ROTATED, "gemma3", "mixtral"]  # and with sliding windows; and with experts
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
STEPS = 3
UNIT = {torch.float32: 2**-24, torch.float64: 2**-53}  # largest relative error of one rounding


@pytest.fixture(scope="module", params=CACHED)
def cached(request):
    return Caches(request.param)


@pytest.fixture(scope="module", params=ROTATED)
def rotated(request):
    return Caches(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return Caches("gpt2")


class Caches:
    """A tiny model, a left-padded batch, and what the model's own cache holds after it."""

    def __init__(self, family):
        self.model, batch = build(family)
        self.batch = batch | {"attention_mask": MASK}
        self.name = argument(self.model)
        with torch.no_grad():
            self.output = self.model(**self.batch)

    def rows(self, part, output=None):
        """Rows (B, T, H·E) of "keys" or "values" in each layer."""
        cache = getattr(output or self.output, self.name)
        return [side_by_side(getattr(layer, part)) for layer in cache.layers]

    def capture(self, word, run):
        """What `run` returns, and the rows that the sites of `word` saw meanwhile, each in one tensor."""
        seen = {site: [] for site in find_sites(self.model, word)}
        with torch.no_grad(), capture(self.model, {site: rows.append for site, rows in seen.items()}):
            output = run()
        return output, {site: torch.cat(rows) for site, rows in seen.items()}

    def forward(self, **changes):
        return self.model(**self.batch | changes)

    def generate(self):
        settings = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None}
        return self.model.generate(**self.batch, max_new_tokens=STEPS + 1, **settings)


def argument(model):
    """What the model's forward calls its cache."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in parameters)


def side_by_side(heads):
    """(B, H, T, E) as (B, T, H·E)."""
    return heads.transpose(1, 2).flatten(-2)


def same(seen, wanted):
    return len(seen) == len(wanted) > 0 and all(map(torch.equal, seen, wanted))


def heads_of(site, rows):
    """(n, H·E) in float64 as (n, H, E)."""
    return rows.double().unflatten(-1, (site.heads, -1))


@pytest.mark.parametrize(("word", "part"), [("k_rope", "keys"), ("v", "values")])
def test_a_forward_shows_what_its_cache_holds(cached, word, part):
    output, seen = cached.capture(word, cached.forward)
    assert torch.equal(output.logits, cached.output.logits)
    assert same(seen.values(), [rows[MASK.bool()] for rows in cached.rows(part)])
    assert same(cached.rows(part, output), cached.rows(part))  # the cache is as it would have been


@pytest.mark.parametrize(("word", "part"), [("k_rope", "keys"), ("v", "values")])
def test_without_a_cache_the_same_is_seen(cached, word, part):
    output, seen = cached.capture(word, lambda: cached.forward(use_cache=False))
    assert torch.equal(output.logits, cached.output.logits)
    assert same(seen.values(), [rows[MASK.bool()] for rows in cached.rows(part)])
    assert getattr(output, cached.name) is None


def test_keys_before_the_rotation_turn_into_those_after_it(rotated):
    angles = []
    rotary = next(m for name, m in rotated.model.named_modules() if name.endswith("rotary_emb"))
    handle = rotary.register_forward_hook(lambda module, args, output: angles.append(output))
    _, seen = rotated.capture("k", rotated.forward)
    handle.remove()
    cos, sin = (x.expand(*MASK.shape, -1)[MASK.bool()].double()[:, None] for x in angles[0])
    before = [heads_of(site, rows) for site, rows in seen.items() if site.rope == "pre"]
    after = [heads_of(site, rows) for site, rows in seen.items() if site.rope == "post"]
    for k, k_rope in zip(before, after, strict=True):
        x, rest = k.split([cos.shape[-1], k.shape[-1] - cos.shape[-1]], -1)
        got, got_rest = k_rope.split([x.shape[-1], rest.shape[-1]], -1)
        first, second = x.chunk(2, -1)
        straight, crossed = x * cos, torch.cat([-second, first], -1) * sin
        # float32 rounds both products and their sum: |error| ≤ (2u + u²)(|straight| + |crossed|)
        bound = 2.01 * UNIT[torch.float32] * (straight.abs() + crossed.abs())
        assert ((got - straight - crossed).abs() <= bound).all()
        assert not ((got - x).abs() <= bound).all()  # without the rotation it does not hold
        assert torch.equal(got_rest, rest)


@pytest.mark.parametrize(("word", "part"), [("k", "keys"), ("v", "values")])
def test_keys_that_nothing_rotates_are_those_of_the_cache(gpt2, word, part):
    output, seen = gpt2.capture(word, gpt2.forward)
    assert torch.equal(output.logits, gpt2.output.logits)
    assert same(seen.values(), [rows[MASK.bool()] for rows in gpt2.rows(part)])


@pytest.mark.parametrize(("word", "part"), [("k_rope", "keys"), ("v", "values")])
def test_generate_shows_prefill_and_steps(cached, word, part):
    with torch.no_grad():
        wanted = cached.generate()
    output, seen = cached.capture(word, cached.generate)
    assert torch.equal(output.sequences, wanted.sequences)
    length = MASK.shape[1]
    for rows, held in zip(seen.values(), cached.rows(part, wanted), strict=True):
        assert held.shape[1] == length + STEPS  # the last token is chosen and not fed
        assert torch.equal(rows, torch.cat([held[:, :length][MASK.bool()], *held[:, length:].unbind(1)]))


def test_the_cache_of_the_caller_is_filled_and_left_alone(cached):
    cache, half = DynamicCache(config=cached.model.config), 4
    ids = cached.batch["input_ids"]

    def run():
        first = {"input_ids": ids[:, :half], "attention_mask": MASK[:, :half]}
        cached.model(**first, **{cached.name: cache})
        return cached.model(input_ids=ids[:, half:], attention_mask=MASK, **{cached.name: cache})

    _, seen = cached.capture("k_rope", run)
    assert "update" not in vars(cache)
    assert cache.get_seq_length() == MASK.shape[1]
    for rows, layer in zip(seen.values(), cache.layers, strict=True):
        held, keep = side_by_side(layer.keys), MASK.bool()
        wanted = held[:, :half][keep[:, :half]], held[:, half:][keep[:, half:]]
        assert torch.equal(rows, torch.cat(wanted))


def test_the_latent_attention_shares_one_rotated_key():
    latent = Caches("deepseek_v3")
    output, seen = latent.capture("k_rope", latent.forward)
    assert torch.equal(output.logits, latent.output.logits)
    width = latent.model.config.qk_rope_head_dim
    for rows, layer in zip(seen.values(), getattr(output, latent.name).layers, strict=True):
        held = next(x for x in (layer.values, layer.keys) if x.shape[-1] == width or x is layer.keys)
        assert torch.equal(rows, held[:, 0, :, -width:][MASK.bool()])


@pytest.mark.parametrize(("word", "part"), [("k_rope", "keys"), ("v", "values")])
def test_a_statistic_of_keys_and_values(cached, word, part):
    sites = find_sites(cached.model, word)
    sinks = {site: Moments(site.width, precision="float64") for site in sites}
    with torch.no_grad(), capture(cached.model, sinks):
        cached.forward()
    for moments, rows in zip(sinks.values(), cached.rows(part), strict=True):
        x = rows[MASK.bool()].double()
        n = len(x)
        # sums of n products in any order are off by at most n·u·Σ|x|², the mean and its removal as often
        bound = 4 * n * UNIT[torch.float64] * x.square().sum(0).max() / (n - 1)
        assert moments.n_samples == n
        assert (moments.covariance() - torch.cov(x.mT)).abs().max() <= bound
        assert (moments.covariance() - x.mT @ x / (n - 1)).abs().max() > bound  # that is not centred
