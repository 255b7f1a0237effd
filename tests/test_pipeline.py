"""The main job against a float64 SVD of collected activations; its memory; its files."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import pipeline, texts
from pca_torch.report import report_dict
from tests.families import build
from tests.support import truth

LAYERS = (1, 5, 15, 29)  # few extreme rows, many, one sink per sequence, after the last block
SEQUENCES, LENGTH = 4, 256
SHARES = (0.5, 0.9, 0.95, 0.99)


def rank_of(variances, share):
    """Smallest k whose share is reached, from a float64 SVD; no code of the package."""
    return int((np.cumsum(variances) / np.sum(variances) < share - 1e-12).sum()) + 1


def extreme_rows(rows):
    """Which rows lie above median + 10 · 1.4826 · MAD, by sorting."""
    norms = rows.double().norm(dim=1).numpy()
    median = np.median(norms)
    return norms > median + 10 * 1.4826 * np.median(np.abs(norms - median))


@pytest.fixture(scope="module")
def analysed(smollm2):
    """Reports of four layers on 1,024 tokens, and the activations themselves."""
    tokens = texts.token_windows([texts.default_text()], smollm2.tokenizer, LENGTH, SEQUENCES * LENGTH)
    sites = [f"model.layers.{layer}" for layer in LAYERS]
    reports = pt.analyse(smollm2.model, texts.batches(tokens.ids, 2), sites)
    rows = {site: [] for site in sites}
    with torch.no_grad(), pt.capture(smollm2.model, {site: rows[site].append for site in sites}):
        for batch in texts.batches(tokens.ids, 2):
            smollm2.model.base_model(**batch, use_cache=False)
    return reports, {site: torch.cat(parts) for site, parts in rows.items()}


@pytest.mark.model
@pytest.mark.parametrize("layer", LAYERS)
def test_ranks_of_a_real_model_are_those_of_the_collected_activations(analysed, layer):
    reports, rows = analysed[0][f"model.layers.{layer}"], analysed[1][f"model.layers.{layer}"]
    far = extreme_rows(rows)
    assert reports.extreme.count == far.sum()
    assert reports.extreme.exact
    for result, sample in ((reports.all_tokens, rows), (reports.typical, rows[torch.from_numpy(~far)])):
        assert result.n_samples == len(sample)
        variances = truth(sample)[1].numpy()
        for share in SHARES:
            assert pt.spectrum.rank(result, share) == rank_of(variances, share)
        assert result.n_components == rank_of(variances, 0.95)
        error = np.abs(result.spectrum.numpy() - variances)
        assert error.max() <= max(result.certificate.variance_error)


@pytest.mark.model
def test_extreme_rows_matter_on_a_real_model(analysed):
    """The two views must differ where a sink stands, or the test above compares one number with itself."""
    site = analysed[0]["model.layers.15"]
    assert pt.spectrum.rank(site.all_tokens, 0.95) == 1
    assert pt.spectrum.rank(site.typical, 0.95) > 50
    assert site.extreme.positions == {0: SEQUENCES}
    assert site.extreme.trace_share > 0.9


class Toy(torch.nn.Module):
    """Blocks that add noise-free products to their input; a head that must not run."""

    def __init__(self, d=8, layers=3):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Embedding(50, d)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(d, d) for _ in range(layers))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, input_ids, attention_mask=None):
        del attention_mask
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x


def token_batches(n=6, length=12, seed=1):
    ids = torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, -4:] = 0, 0
    return [{"input_ids": ids[i : i + 2], "attention_mask": mask[i : i + 2]} for i in range(0, n, 2)]


def collected(model, batches, site, keep=lambda mask: mask.bool()):
    rows, outputs = [], []
    with torch.no_grad():
        handle = model.get_submodule(site).register_forward_hook(lambda m, a, out: outputs.append(out))
        for batch in batches:
            model(**batch)
            rows.append(outputs.pop()[keep(batch["attention_mask"])])
        handle.remove()
    return torch.cat(rows)


def test_default_sites_are_the_blocks_and_padding_does_not_count():
    model, batches = Toy(), token_batches()
    reports = pt.analyse(model, batches, n_components=None)
    assert list(reports) == ["blocks.0:output", "blocks.1:output", "blocks.2:output"]
    for site, found in reports.items():
        rows = collected(model, batches, site.removesuffix(":output"))
        assert found.all_tokens.n_samples == len(rows) == 6 * 12 - 7
        want = truth(rows)[1]
        error = (found.all_tokens.spectrum - want).abs()
        assert bool((error <= torch.tensor(found.all_tokens.certificate.variance_error)).all())


def test_drop_first_leaves_out_the_first_tokens_after_the_padding():
    model, batches = Toy(), token_batches()

    def keep(mask):
        return mask.bool() & (mask.cumsum(1) > 2)

    found = pt.analyse(model, batches, "blocks.1", drop_first=2, n_components=None)["blocks.1"]
    rows = collected(model, batches, "blocks.1", keep)
    assert found.all_tokens.n_samples == len(rows) == 6 * 10 - 7
    torch.testing.assert_close(found.all_tokens.mean, rows.double().mean(0), rtol=1e-12, atol=1e-12)


def test_positions_are_counted_in_the_whole_sequence_when_tokens_are_dropped():
    model = Toy()
    model.embed.weight.data[7] = 1e4  # the loud token stands at place 5 of each sequence
    ids = torch.randint(8, 50, (30, 12), generator=torch.Generator().manual_seed(3))
    ids[:, 5] = 7
    for drop in (0, 2):
        found = pt.analyse(model, [{"input_ids": ids}], "embed", drop_first=drop)["embed"]
        assert set(found.extreme.positions) == {5}
    assert ids.shape[0] / ids.numel() > 0.05  # one in twelve: above 5 %, so the site is heavy-tailed
    assert found.extreme.heavy_tailed


def test_the_head_of_a_language_model_does_not_run(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    reports = pt.analyse(model, [torch.arange(60).reshape(2, 30)], "model.layers.*")
    assert list(reports) == ["model.layers.0:output", "model.layers.1:output"]
    assert calls == []
    assert sum(len(module._forward_hooks) for module in model.modules()) == 1  # the one of this test


def test_the_model_is_left_as_it_was():
    model = Toy().train()
    pt.analyse(model, token_batches(), "blocks.*")
    assert model.training
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sites": "blocs.*"}, "blocks"),
        ({"batches": []}, "at least one batch"),
        ({"batches": token_batches()[:1], "drop_first": 12}, "no token that counts"),
        ({"n_components": 9}, "n_components"),
        ({"drop_first": -1}, "drop_first"),
        ({"batches": [{"input_ids": torch.zeros(1, 1, dtype=torch.long)}]}, "ddof"),
    ],
    ids=["sites", "batches", "all dropped", "k", "negative", "one token"],
)
def test_what_is_wrong_is_named(arguments, message):
    arguments = {"batches": token_batches(), "sites": "blocks.*"} | arguments
    with pytest.raises(ValueError, match=message):
        pt.analyse(Toy(), **arguments)


def test_a_model_without_blocks_needs_sites():
    with pytest.raises(ValueError, match="`sites` must be given"):
        pt.analyse(torch.nn.Linear(3, 3), [torch.ones(5, 3)])


def test_nan_in_a_site_names_it():
    model = Toy()
    model.blocks[1].weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"blocks\.1.*NaN or inf"):
        pt.analyse(model, token_batches())


def test_outputs_are_complete_and_load(tmp_path):
    results = pt.analyse(Toy(), token_batches())
    summary = report_dict(results, {"name": "toy"}, {"seen": 65, "padding": 7}, {})
    files = pipeline.write_outputs(tmp_path / "new" / "out", summary, results)
    assert [file.name for file in files] == ["report.json", "basis.safetensors", "spectra.png"]
    loaded = pt.load(files[1])
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(4))
    for site, result in results.items():
        assert torch.equal(loaded[site].transform(x), result.typical.transform(x))
    assert loaded.metadata["view"] == "typical"
    with pytest.raises(ValueError, match="`out` must be a folder"):
        pipeline.write_outputs(files[0], summary, results)


MEMORY = """
import resource, sys
import torch
torch.set_num_threads(1)
from tests.test_pipeline import Wide
import pca_torch as pt

batches = ({"input_ids": torch.full((4, 256), i % 50) } for i in range(int(sys.argv[1])))
pt.analyse(Wide(), batches, "blocks.*")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


class Wide(torch.nn.Module):
    """Random activations (B, T, 512) at four sites: 2 MiB per site and batch if a hook kept them."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Identity() for _ in range(4))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, input_ids):
        x = torch.randn(*input_ids.shape, 512, generator=self.generator)
        x[:, 0] *= 100  # sinks, so that rows are held aside and folded
        for block in self.blocks:
            x = block(x)
        return x


def test_memory_does_not_grow_with_the_tokens():
    """Twice the tokens, each in a process of its own: 100 more batches would be 800 MiB if they were kept."""
    peaks = []
    for count in (100, 200):
        run = subprocess.run(
            [sys.executable, "-c", MEMORY, str(count)], capture_output=True, text=True, check=True
        )
        peaks.append(int(run.stdout))
    grown, kept = peaks[1] - peaks[0], 100 * 4 * 256 * 512 * 4 * 4
    assert grown < 0.05 * kept


def test_each_part_of_the_model_keeps_its_mode():
    model = Toy().train()
    model.blocks[1].eval()  # frozen
    pt.analyse(model, token_batches())
    assert [block.training for block in model.blocks] == [True, False, True]


def test_a_site_in_the_head_makes_the_head_run():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    reports = pt.analyse(model, [torch.arange(120).reshape(4, 30) % 12], ["lm_head", "model.layers.0"])
    assert reports["lm_head"].all_tokens.n_features == 12


def test_too_many_components_are_refused_before_the_work():
    seen = []
    with pytest.raises(ValueError, match=r"`n_components` must be in 0\.\.8, got 9"):
        pt.analyse(Toy(), token_batches(), n_components=9, progress=seen.append)
    assert seen == []


def test_a_wrapper_with_a_base_model_of_its_own_is_run_whole():
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_model = torch.nn.Sequential(torch.nn.Linear(8, 8))

        def forward(self, x):
            return self.base_model(100 * x)

    model, x = Wrapper(), torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    found = pt.analyse(model, [x], "base_model.0")["base_model.0"].all_tokens
    with torch.no_grad():
        want = truth(model(x))[1].sum()
    assert found.total_variance.item() == pytest.approx(want.item(), rel=1e-9)


class Looped(torch.nn.Module):
    """A block that runs as often as the batch says."""

    def __init__(self):
        super().__init__()
        self.block = torch.nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = torch.tanh(self.block(x))
        return x


@pytest.mark.parametrize("times", [(1, 3, 3, 2), (3, 1, 3, 2)])
def test_a_module_that_runs_a_varying_number_of_times_is_counted_each_time(times):
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    found = pt.analyse(Looped(), [{"x": x, "times": n} for n in times], "block")["block"]
    assert found.all_tokens.n_samples == 40 * sum(times)


def test_one_head_of_keys_is_a_head_all_the_same():
    model, batch = build("falcon")
    reports = pt.analyse(model, [batch, batch], ["k", "v"])
    assert {name.rpartition(":")[2] for name in reports} == {"k", "k_rope", "v"}
    for report in reports.values():
        assert isinstance(report, pt.HeadsReport)
        assert report.heads == 1
        assert not report.all_tokens_uncentred[0].centred


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses the old names of transformers
def test_adapters_that_act_outside_the_blocks_run_too():
    peft = pytest.importorskip("peft")
    model, batch = build("llama")
    bare = pt.analyse(model, [batch, batch], "resid")["model.layers.1"].all_tokens.mean
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted = peft.get_peft_model(model, config)
    found = pt.analyse(adapted, [batch, batch], "resid", selection=pt.TokenSelection(padding=None))
    rows = []
    hook = model.model.layers[1].register_forward_hook(lambda *given: rows.append(given[2].detach()))
    with torch.no_grad():
        adapted.eval()(**batch)
    hook.remove()
    mean = next(found[name] for name in found if name.endswith("layers.1:output")).all_tokens.mean
    torch.testing.assert_close(mean, rows[0].double().flatten(0, 1).mean(0), rtol=1e-6, atol=1e-6)
    assert (mean - bare).abs().max() > 1e-3


def test_a_batch_may_ask_for_a_cache():
    model, batch = build("llama")
    want = pt.analyse(model, [batch], "resid")["model.layers.1"]
    found = pt.analyse(model, [batch | {"use_cache": True}], "resid")["model.layers.1"]
    assert torch.equal(found.all_tokens.spectrum, want.all_tokens.spectrum)
