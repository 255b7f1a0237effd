"""Every kind of site, on tiny models of each family and on a real one: the judge is the SVD of the rows."""

import pytest
import torch

import pca_torch as pt
from pca_torch import texts
from pca_torch.heads import HeadsReport
from pca_torch.sites import find_sites
from tests.families import FAMILIES, build
from tests.support import truth

SHORTCUTS = (
    "resid",
    "resid_pre",
    "resid_mid",
    "final",
    "attn",
    "attn_heads",
    "mlp",
    "mlp_out",
    "q",
    "k",
    "v",
    "kv_latent",
    "experts",
)
SHARE = 0.9
MAPS = ["encoder.stages.*:map", "embedder.embedder.convolution"]  # convolutions have no shortcut


def sites_of(model):
    """All that the shortcuts find, and nothing twice."""
    found = {}
    for shortcut in SHORTCUTS:
        try:
            found |= {site.name: site for site in find_sites(model, shortcut)}
        except ValueError:  # a family without it; tests of the sites say which has what
            continue
    return list(found.values())


def rows_of(model, batches, sites):
    """The rows that count at each site, collected one by one."""
    rows = {site.name: [] for site in sites}
    with torch.no_grad(), pt.capture(model, {site: rows[site.name].append for site in sites}):
        for batch in batches:
            model(**batch)
    return {name: torch.cat(parts).double() if parts else torch.empty(0, 1) for name, parts in rows.items()}


def agrees(result, rows, *, centred=True):
    """Whether the whole spectrum is that of the rows, as far off as the certificate allows and no further."""
    variances = truth(rows)[1] if centred else torch.linalg.svdvals(rows).square() / result.divisor
    known = result.spectrum[: len(variances)]
    noise = result.spectrum[len(variances) :]
    allowed = max(result.certificate.variance_error) + 1e-13 * variances.sum()
    return bool((known - variances).abs().max() <= allowed) and bool((noise.abs() <= allowed).all())


def body_of(rows):
    """The rows below median + 10 · 1.4826 · MAD of all norms, by sorting; all where 5 % are above."""
    norms = rows.norm(dim=1)
    median = norms.quantile(0.5)
    near = norms <= median + 10 * 1.4826 * (norms - median).abs().quantile(0.5)
    return rows[near] if near.double().mean() >= 0.95 else rows


def check(report, rows, site):
    """Both views of a site, or of each of its heads around its mean and around zero, against the rows."""
    body = body_of(rows)
    if isinstance(report, HeadsReport):
        assert report.heads == site.heads
        for view, centred, uncentred in (
            (rows, report.all_tokens, report.all_tokens_uncentred),
            (body, report.typical, report.typical_uncentred),
        ):
            for head, own in enumerate(view.unflatten(-1, (site.heads, -1)).unbind(1)):
                assert agrees(centred[head], own)
                assert agrees(uncentred[head], own, centred=False)
        return
    assert report.all_tokens.n_samples == len(rows)
    assert report.typical.n_samples == len(body)
    assert agrees(report.all_tokens, rows)
    assert agrees(report.typical, body)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:no token, or a")
def test_tiny_models(family):
    model, batch = build(family)
    other = {key: value.flip(0, -1) for key, value in batch.items()}
    found = find_sites(model, MAPS) if family == "resnet" else sites_of(model)
    assert found
    reports = pt.analyse(model, [batch, other], found, n_components=SHARE)
    rows = rows_of(model, [batch, other], found)
    empty = {site.name for site in found} - reports.keys()
    assert empty == {site.name for site in found if len(rows[site.name]) < 2}
    for site in found:
        if site.name not in empty:
            check(reports[site.name], rows[site.name], site)


def test_the_judge_would_see_a_head_in_the_wrong_place():
    model, batch = build("llama")
    site = find_sites(model, "k")[0]
    report = pt.analyse(model, [batch], site)[site.name]
    rows = rows_of(model, [batch], [site])[site.name].unflatten(-1, (site.heads, -1))
    assert agrees(report.all_tokens[0], rows[:, 0])
    assert not agrees(report.all_tokens[0], rows[:, 1])
    assert not agrees(report.all_tokens_uncentred[0], rows[:, 0])


@pytest.mark.model
def test_every_kind_of_site_on_real_weights(smollm2):
    ids = texts.token_windows([texts.default_text()], smollm2.tokenizer, 128, 512).ids
    batches = list(texts.batches(ids, 2))
    kinds = ["resid", "resid_pre", "resid_mid", "attn", "attn_heads", "mlp", "mlp_out", "q", "k", "v"]
    sites = find_sites(smollm2.model, [*(f"{kind}@2,15" for kind in kinds), "final"])
    reports = pt.analyse(smollm2.model, batches, sites)
    rows = rows_of(smollm2.model, batches, sites)
    assert len(sites) == 2 * (len(kinds) + 1) + 2  # keys stand before and after RoPE
    for site in sites:
        check(reports[site.name], rows[site.name], site)
