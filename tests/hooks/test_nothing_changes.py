"""With a hook on every site a model computes what it computed without, to the last bit."""

import pytest
import torch

from pca_torch.hooks import capture
from pca_torch.sites import find_sites
from tests.families import FAMILIES, build
from tests.hooks.models import Recorder, hooks_on

POINTS = {
    "input": ("input", "input_rows"),
    "output": ("output", "rows"),
}  # the second where axes are in doubt
SHORTCUTS = ("resid", "resid_pre", "attn", "mlp", "q", "k", "v", "kv_latent", "experts")


class Counts:
    """Takes anything, and counts how often."""

    def __init__(self):
        self.times = 0

    def update(self, x, *, mask=None):
        self.times += 1


def tensors_of(output):
    return [t for t in output.values() if isinstance(t, torch.Tensor)]


def floating_sides(model, inputs):
    """Names "PATH:input" and "PATH:output" of all modules that are called with or return rows of floats."""
    names = []

    def note(path):
        def hook(module, args, kwargs, output):
            for side, values in (("input", (*args, *kwargs.values())), ("output", [output])):
                flat = [v for x in values for v in (x if isinstance(x, (tuple, list)) else [x])]
                flat = [v for x in flat for v in (x.values() if isinstance(x, dict) else [x])]
                first = next((v for v in flat if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
                if first is not None and first.ndim >= 2:
                    names.append(f"{path}:{POINTS[side][first.ndim > 3]}")

        return hook

    handles = [m.register_forward_hook(note(p), with_kwargs=True) for p, m in model.named_modules()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(names))


def all_sites(model, inputs):
    sites = find_sites(model, floating_sides(model, inputs))
    for word in SHORTCUTS:
        try:
            sites += find_sites(model, word)
        except ValueError:  # not in this family
            continue
    return list({site.name: site for site in sites}.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_the_same_with_a_hook_on_every_site(name):
    model, inputs = build(name)
    sites, hooks = all_sites(model, inputs), hooks_on(model)
    assert len(sites) > 20
    caching = [{}, {"use_cache": True}, {"use_cache": False}] if FAMILIES[name].causal else [{}]
    for options in caching:
        sinks = {site: Counts() for site in sites}
        with torch.no_grad():
            want = tensors_of(model(**inputs, **options))
            with capture(model, sinks, mask=None):
                got = tensors_of(model(**inputs, **options))
        assert want
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(sink.times for site, sink in sinks.items() if not site.may_be_empty)
    assert hooks_on(model) == hooks


def test_a_hook_that_changes_what_passes_would_be_seen():
    model, inputs = build("llama")
    with torch.no_grad():
        want = model(**inputs).logits
        handle = model.model.layers[0].register_forward_hook(lambda m, a, out: out * (1 + 1e-6))
        assert not torch.equal(model(**inputs).logits, want)
    handle.remove()


@pytest.mark.model
def test_smollm2_with_a_hook_on_every_site(smollm2):
    model = smollm2.model
    ids = smollm2.tokenizer("The cat sat on the mat, and the dog lay by the door.", return_tensors="pt")
    inputs = dict(ids)
    sites = all_sites(model, inputs)
    sinks = {site: Recorder() for site in sites}
    with torch.no_grad():
        want = model(**inputs).logits
        with capture(model, sinks):
            got = model(**inputs).logits
    assert torch.equal(got, want)
    assert {len(sink.rows) for sink in sinks.values()} == {inputs["input_ids"].numel()}
    kinds = {site.kind for site in sites}
    assert {"q", "k", "v", "resid"} <= kinds
    assert sum(site.side == "cache" for site in sites) == 30
