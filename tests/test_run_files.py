"""Runs that are interrupted, split over data and put together again: the files say what one run says."""

import json

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import pipeline
from pca_torch.cli import main
from pca_torch.statistic_file import load_statistics
from tests.families import build

SITES = [
    "resid",
    "k",
    "v@1",
    "model.layers.*.self_attn.q_proj:input",
    "model.layers.*.self_attn.k_proj:input",
]


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """16 sequences of 24 tokens, some padded on the right, in one file and in two."""
    folder = tmp_path_factory.mktemp("ids")
    ids = np.random.default_rng(0).integers(0, 42, (16, 24))
    ids[3, 20:] = ids[11, 5:] = -1
    for name, part in (("all", ids), ("a", ids[:6]), ("b", ids[6:])):
        np.save(folder / f"{name}.npy", part)
    return folder


def run(model, tokens, roles=None, keep_roles=(), **options):
    reading = pipeline.Reading(tokens=tokens, roles=roles, keep_roles=keep_roles, max_tokens=10**6)
    return pipeline.run(str(model), reading, sites=SITES, batch_size=2, **options)


FILES = ["report.json", "basis.safetensors", "spectra.png"]


class Stopped(Exception):
    """The end of a run that was to go on."""


def stopping(after):
    """Progress that ends the run after so many batches."""
    seen = []

    def step(n):
        seen.append(n)
        if len(seen) == after:
            raise Stopped

    return lambda description, total: step


@pytest.mark.parametrize("after", [1, 5, 8])
def test_a_resumed_run_ends_as_one_that_never_stopped(local_model, ids, tmp_path, after):
    tokens, out = ids / "all.npy", tmp_path / "out"
    whole = pipeline.Keeping(tmp_path / "whole", tmp_path / "whole.safetensors")
    summary, _ = run(local_model, tokens, keeping=whole)
    with pytest.raises(Stopped):
        run(local_model, tokens, keeping=pipeline.Keeping(out, every_seconds=0), progress=stopping(after))
    seen = []
    again = pipeline.Keeping(out, tmp_path / "again.safetensors", resume=True)
    resumed, _ = run(local_model, tokens, keeping=again, progress=lambda *_: seen.append)
    assert len(seen) == 8 - after
    assert resumed == summary
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_what_is_left_out_is_counted_over_the_interruption(local_model, ids, tmp_path):
    keeping = pipeline.Keeping(tmp_path, every_seconds=0)
    with pytest.raises(Stopped):
        run(local_model, ids / "all.npy", keeping=keeping, progress=stopping(3), drop_first=2)
    keeping = pipeline.Keeping(tmp_path, resume=True)
    summary, _ = run(local_model, ids / "all.npy", keeping=keeping, drop_first=2)
    assert summary["tokens"]["excluded"] == {"padding": 4 + 19, "first": 2 * 16}
    assert summary["sites"]["model.layers.0:output"]["all_tokens"]["n_samples"] == 16 * 24 - 23 - 32


def test_another_run_is_not_gone_on_with(local_model, ids, tmp_path):
    keeping = pipeline.Keeping(tmp_path, every_seconds=0)
    with pytest.raises(Stopped):
        run(local_model, ids / "all.npy", keeping=keeping, progress=stopping(2))
    with pytest.raises(ValueError, match=r"is of another run: data was '\w+…?.*now it is"):
        run(local_model, ids / "a.npy", keeping=pipeline.Keeping(tmp_path, resume=True))


def test_sites_that_see_one_tensor_are_counted_once(local_model, ids, tmp_path):
    keeping = pipeline.Keeping(tmp_path, tmp_path / "s.safetensors")
    summary, results = run(local_model, ids / "all.npy", keeping=keeping)
    shared = {
        f"model.layers.{i}.self_attn.k_proj:input": f"model.layers.{i}.self_attn.q_proj:input"
        for i in range(3)
    }
    assert summary["shared"] == shared
    assert not shared.keys() & load_statistics(tmp_path / "s.safetensors").keys()
    for follower, leader in shared.items():
        assert results[follower] is results[leader]


def test_halves_merge_to_the_whole(local_model, ids, tmp_path, capsys):
    for name in ("all", "a", "b"):
        run(
            local_model,
            ids / f"{name}.npy",
            keeping=pipeline.Keeping(tmp_path / name, tmp_path / f"{name}.safetensors"),
        )
    with pytest.raises(SystemExit) as ended:
        main([
            "merge",
            str(tmp_path / "a.safetensors"),
            str(tmp_path / "b.safetensors"),
            "--out",
            str(tmp_path / "m.safetensors"),
        ])
    assert not ended.value.code
    found, _ = pipeline.report_statistics(tmp_path / "m.safetensors")
    want, results = pipeline.report_statistics(tmp_path / "all.safetensors")
    assert found["tokens"]["seen"] == want["tokens"]["seen"]
    assert found["tokens"]["excluded"] == want["tokens"]["excluded"]
    assert found["shared"] == want["shared"]
    assert found["sites"].keys() == want["sites"].keys()
    assert found["heads"].keys() == want["heads"].keys()
    for name, site in want["sites"].items():
        bound = 2 * max(results[name].all_tokens.certificate.variance_error)
        off = np.subtract(
            found["sites"][name]["all_tokens"]["explained_variance"], site["all_tokens"]["explained_variance"]
        )
        assert np.abs(off).max() <= bound
    part, _ = pipeline.report_statistics(tmp_path / "a.safetensors")  # a half is not the whole
    site = "model.layers.0:output"
    off = np.subtract(
        part["sites"][site]["all_tokens"]["explained_variance"],
        want["sites"][site]["all_tokens"]["explained_variance"],
    )
    assert np.abs(off).max() > bound


def test_a_statistic_file_gives_the_report_of_its_run(local_model, ids, tmp_path, capsys):
    file = tmp_path / "s.safetensors"
    summary, _ = run(local_model, ids / "all.npy", keeping=pipeline.Keeping(tmp_path / "run", file))
    with pytest.raises(SystemExit):
        main(["report", str(file), "--json", "--out", str(tmp_path / "out")])
    said = json.loads(capsys.readouterr().out)
    assert said == summary
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "basis.safetensors",
        "report.json",
        "spectra.png",
    ]
    basis = pt.load(tmp_path / "out" / "basis.safetensors")
    heads = basis["model.layers.1.self_attn:k"]
    assert isinstance(heads, tuple)
    assert len(heads) == said["heads"]["model.layers.1.self_attn:k"]["heads"]
    torch.testing.assert_close(
        basis["model.layers.0:output"].total_variance.item(),
        said["sites"]["model.layers.0:output"]["typical"]["total_variance"],
    )


def test_roles_and_special_tokens_are_left_out(local_model, ids, tmp_path):
    roles = np.random.default_rng(1).integers(0, 3, (16, 24))
    np.save(tmp_path / "roles.npy", roles)
    tokens = np.load(ids / "all.npy")
    summary, _ = run(
        local_model, ids / "all.npy", roles=tmp_path / "roles.npy", keep_roles=[1, 2], drop_special=True
    )
    real = tokens >= 0
    special = real & (tokens <= 1)  # <unk> and </s>
    other = real & ~special & (roles == 0)
    assert summary["tokens"]["excluded"] == {"padding": 23, "special": special.sum(), "role": other.sum()}
    kept = (real & ~special & (roles > 0)).sum()
    assert summary["sites"]["model.layers.0:output"]["all_tokens"]["n_samples"] == kept


def test_a_run_that_is_over_leaves_no_checkpoint(local_model, ids, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main([
            "run",
            str(local_model),
            "--tokens",
            str(ids / "a.npy"),
            "--out",
            str(tmp_path),
            "--checkpoint-every",
            "0",
        ])
    assert not ended.value.code
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "basis.safetensors",
        "report.json",
        "spectra.png",
    ]


def small_budget(model, ids, sites):
    """A budget that all sites together exceed, and two of the residual stream do not."""
    loaded = pipeline.run(str(model), pipeline.Reading(tokens=ids / "a.npy"), sites=sites)[0]
    whole = loaded["settings"]["memory"]["bytes"]["cpu"]
    return pipeline.Budget(memory=int(0.8 * whole), max_passes=9)


@pytest.mark.parametrize("after", [None, 3, 11])
def test_sites_that_do_not_fit_are_counted_in_passes(local_model, ids, tmp_path, after):
    whole = pipeline.Keeping(tmp_path / "whole", tmp_path / "whole.safetensors")
    summary, _ = run(local_model, ids / "all.npy", keeping=whole)
    budget = small_budget(local_model, ids, SITES)
    keeping = pipeline.Keeping(tmp_path / "parts", tmp_path / "parts.safetensors", every_seconds=0)
    if after is not None:
        with pytest.raises(Stopped):
            run(local_model, ids / "all.npy", keeping=keeping, budget=budget, progress=stopping(after))
        keeping.resume = True
    parts, _ = run(local_model, ids / "all.npy", keeping=keeping, budget=budget)
    assert parts["settings"]["memory"]["passes"] > 1
    assert parts["sites"] == summary["sites"]
    assert parts["heads"] == summary["heads"]
    assert parts["tokens"] == summary["tokens"]
    keeping.clear()
    assert list((tmp_path / "parts").iterdir()) == []
    assert (
        load_statistics(tmp_path / "parts.safetensors").keys()
        >= load_statistics(tmp_path / "whole.safetensors").keys()
    )


def test_what_does_not_fit_is_refused_with_what_would(local_model, ids, tmp_path):
    budget = small_budget(local_model, ids, SITES)
    with pytest.raises(ValueError, match=r"the statistics of \d+ sites need .* count them in \d passes"):
        run(local_model, ids / "all.npy", budget=pipeline.Budget(memory=budget.memory))


def test_beginning_anew_says_what_it_removes(local_model, ids, tmp_path):
    keeping = pipeline.Keeping(tmp_path, every_seconds=0)
    with pytest.raises(Stopped):
        run(local_model, ids / "all.npy", keeping=keeping, progress=stopping(3))
    with pytest.warns(
        UserWarning, match="held the checkpoint of an unfinished run, which is removed; `--resume` goes"
    ):
        summary, _ = run(local_model, ids / "a.npy", keeping=pipeline.Keeping(tmp_path))
    assert summary["tokens"]["n_sequences"] == 6
    assert list(tmp_path.iterdir()) == []


def test_analyse_goes_on_from_its_checkpoint_and_keeps_its_statistics(ids, tmp_path):
    model, _ = build("llama")
    tokens = torch.from_numpy(np.load(ids / "all.npy")).clamp_min(0)
    batches = [{"input_ids": part} for part in tokens.split(4)]
    want = pt.analyse(model, batches, ["resid", "k"])

    def stop(_):
        raise Stopped

    with pytest.raises(Stopped):
        pt.analyse(
            model, batches, ["resid", "k"], keeping=pt.Keeping(tmp_path, every_seconds=0), progress=stop
        )
    keeping = pt.Keeping(tmp_path, tmp_path / "s.safetensors", resume=True)
    seen = []
    found = pt.analyse(model, batches, ["resid", "k"], keeping=keeping, progress=seen.append)
    assert len(seen) == 3
    for name in ("model.layers.0", "model.layers.1"):
        assert torch.equal(found[name].typical.spectrum, want[name].typical.spectrum)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    assert load_statistics(tmp_path / "s.safetensors").keys() == want.keys()


def test_a_plain_path_finds_its_output():
    model, batch = build("llama")
    reports = pt.analyse(model, [batch, batch], "resid")
    assert "model.layers.1" in reports
    assert reports.get("model.layers.1") is reports["model.layers.1:output"]
    assert "model.layers.7" not in reports
    assert reports.get("model.layers.7", 5) == 5
    with pytest.raises(KeyError, match=r"model\.layers\.7"):
        reports["model.layers.7"]


@pytest.mark.parametrize(
    "name", ["report.json", "basis.safetensors", ".pca_torch-checkpoint-0001.safetensors"]
)
def test_statistics_may_not_go_where_the_run_writes(tmp_path, name):
    with pytest.raises(ValueError, match=rf"`statistics` must not be .*{name}, which the run itself writes"):
        pipeline.Keeping(tmp_path, tmp_path / "." / name)
    pipeline.Keeping(tmp_path, tmp_path / "below" / name)


def test_files_of_others_stay(local_model, ids, tmp_path):
    mine = tmp_path / "checkpoint-500.safetensors"
    mine.write_bytes(b"mine")
    keeping = pipeline.Keeping(tmp_path, every_seconds=0)
    run(local_model, ids / "a.npy", keeping=keeping)
    keeping.clear()
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]


def test_passes_and_a_single_pass_merge_though_they_share_other_sites(local_model, ids, tmp_path):
    sites = ["resid", "final"]  # the last block's output is what the final norm gets
    files = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for file, name, budget in (
        (files[0], "a", None),
        (files[1], "b", small_budget(local_model, ids, sites)),
        (files[2], "all", None),
    ):
        reading = pipeline.Reading(tokens=ids / f"{name}.npy", max_tokens=10**6)
        keeping = pipeline.Keeping(tmp_path / name, file)
        pipeline.run(str(local_model), reading, sites=sites, batch_size=2, budget=budget, keeping=keeping)
    assert load_statistics(files[0]).keys() < load_statistics(files[1]).keys()
    for order in (files[:2], files[1::-1]):
        merged, whole = pt.merge_statistics(order), load_statistics(files[2])
        assert merged.keys() == load_statistics(files[1]).keys()
        for name in merged:
            leader = whole.metadata["shared"].get(name, name)
            sums = [part.result()[0] for part in (merged[name], whole[leader])]
            assert sums[0].n_samples == sums[1].n_samples == merged.n_samples(name)
            bound = sum(part.scatter_error() for part in sums) / (sums[0].n_samples - 1)
            off = torch.linalg.matrix_norm(sums[0].covariance() - sums[1].covariance(), 2)
            assert off <= bound
