"""Files of runs over parts of the data, merged, are the file of one run over all of it."""

import copy
import itertools
import json
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from pca_torch import pipeline
from pca_torch.cli import main
from pca_torch.commands.merge import merge
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.statistic_file import StatisticFile, load_statistics, save_statistics
from pca_torch.statistic_merge import merge_statistics
from pca_torch.tokens import TokenViews
from tests.support import samples, truth

D = 24
U64 = torch.finfo(torch.float64).eps / 2
METADATA: dict[str, Any] = {
    "sites": {"a": {"rope": "pre", "point": "a place"}},
    "model": {"name": "m", "revision": None, "dtype": "float32", "transformers": "5.0"},
    "settings": {"sites": ["a", "b"], "drop_first": 0, "batch_size": 4, "text": ["one"]},
    "tokens": {"seen": 100, "excluded": {"padding": 3}, "seq_len": 512, "text": "default"},
}


def rows() -> torch.Tensor:
    """Rows far from zero, a few of which have a norm that is extreme."""
    x = samples(3000, D, offset=5.0, seed=3)
    x[::300] *= 50
    return x


def write(path: Path, x: torch.Tensor, metadata: dict[str, Any] | None = None) -> Path:
    views = TokenViews(partial(Moments, D))
    heads = TokenViews(partial(HeadMoments, 4, D // 4))
    for part in x.split(170):  # short batches: some rows wait when the file is written
        views.update(part)
        heads.update(part)
    save_statistics(path, {"a": views, "b": heads}, METADATA if metadata is None else metadata)
    return path


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    return [write(tmp_path / f"{i}.st", x) for i, x in enumerate(rows().split([1200, 300, 1500]))]


def variance_bound(x: torch.Tensor) -> float:
    """Largest error of a variance of float64 sums: γ_N tr Σxxᵀ/(N - 1) around zero, and twice for the merge.

    |E| ≤ γ |X|ᵀ|X| (Higham 2002, §3.5) and Weyl; the rows are centred, so the trace around the mean would do.
    """
    n = len(x)
    return 2 * n * U64 * x.square().sum().item() / (n - 1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_merged_files_are_one_run_over_all_rows(parts, order):
    x = rows()
    merged = merge_statistics([parts[i] for i in order])
    everything, typical, extreme = merged["a"].result()
    far = torch.zeros(len(x), dtype=torch.bool)
    far[::300] = True
    assert (extreme.count, extreme.n_samples, extreme.exact) == (10, 3000, True)
    for found, part in ((everything, x), (typical, x[~far])):
        mean, variances, _ = truth(part)
        got = torch.linalg.eigvalsh(found.covariance()).flip(0)
        assert found.n_samples == len(part)
        assert (got - variances).abs().max() < variance_bound(part)
        assert (found.mean - mean).abs().max() < len(part) * U64 * part.abs().max()
        one_less, _, _ = truth(part[1:])
        assert (found.mean - one_less).abs().max() > len(part) * U64 * part.abs().max()  # control


def test_merged_heads_are_one_run_over_all_rows(parts):
    x = rows()
    everything, _, _ = merge_statistics(parts)["b"].result()
    for head, block in enumerate(x.split(D // 4, 1)):
        _, variances, _ = truth(block)
        got = torch.linalg.eigvalsh(everything.covariance()[head]).flip(0)
        assert (got - variances).abs().max() < variance_bound(block)
        _, others, _ = truth(block[:-1])
        assert (got - others).abs().max() > variance_bound(block)  # control: one row less


def test_a_merged_file_is_saved_and_merged_again(parts, tmp_path):
    first = merge_statistics(parts[:2])
    save_statistics(tmp_path / "ab.st", first, first.metadata)
    again = merge_statistics([tmp_path / "ab.st", parts[2]])
    at_once = merge_statistics(parts)
    assert again.metadata == at_once.metadata
    assert again.metadata["merged"] == ["0.st", "1.st", "2.st"]
    got, want = (merged["a"].result()[0].covariance() for merged in (again, at_once))
    torch.testing.assert_close(got, want, rtol=0, atol=variance_bound(rows()))
    assert [again.n_samples(site) for site in again] == [3000, 3000]


def test_the_files_merged_stay_as_they_were(parts):
    before = [path.read_bytes() for path in parts]
    dict(merge_statistics(parts))
    assert [path.read_bytes() for path in parts] == before


def test_an_input_may_be_the_output(parts):
    merged = merge_statistics(parts)
    save_statistics(parts[0], merged, merged.metadata)
    assert load_statistics(parts[0]).n_samples("a") == 3000


def test_memory_holds_one_site_and_one_more(tmp_path, monkeypatch):
    """However many files and sites: a statistic that was read is gone before the next but one is."""
    for i in range(4):
        sites = {f"s{j}": Moments(4).update(samples(9, 4, seed=5 * i + j)) for j in range(5)}
        save_statistics(tmp_path / f"{i}", sites)
    alive, most, read = weakref.WeakSet(), 0, StatisticFile.__getitem__

    def counted(self, site):
        nonlocal most
        alive.add(found := read(self, site))
        most = max(most, len(alive))
        return found

    monkeypatch.setattr(StatisticFile, "__getitem__", counted)
    save_statistics(tmp_path / "all", merge_statistics([tmp_path / f"{i}" for i in range(4)]))
    assert most == 2
    assert load_statistics(tmp_path / "all").n_samples("s4") == 36


# --- what was counted before -----------------------------------------------------------------------------


def test_what_a_merged_file_holds_is_not_merged_into_it_again(parts, tmp_path, monkeypatch):
    both = merge_statistics(parts[:2])
    save_statistics(tmp_path / "ab", both, both.metadata)
    (tmp_path / "copy").write_bytes(parts[0].read_bytes())
    save_statistics(tmp_path / "again", load_statistics(tmp_path / "ab"))  # without a word of the metadata
    for one, other in (("ab", "0.st"), ("0.st", "ab"), ("0.st", "copy"), ("again", "1.st"), ("ab", "again")):
        message = f"{other} and .*{one} hold the same run, whose rows would count twice; leave one out"
        with pytest.raises(ValueError, match=message):
            merge_statistics([tmp_path / one, tmp_path / other])
    assert merge_statistics([tmp_path / "ab", parts[2]]).n_samples("a") == 3000
    monkeypatch.setattr("pca_torch.statistic_merge._check_runs", lambda files: None)
    assert merge_statistics([tmp_path / "ab", parts[0]]).n_samples("a") == 2700  # of 1500: the control


def test_a_run_is_known_by_what_it_counted(tmp_path):
    """Not by its file, the order of its sites, or what else is said of it; and one bit makes another run."""
    x = rows()[:200]

    def runs(x, metadata=None, order=("a", "b")):
        statistics = {"a": Moments(D).update(x), "b": HeadMoments(4, D // 4).update(x)}
        save_statistics(tmp_path / "s", {site: statistics[site] for site in order}, metadata)
        return load_statistics(tmp_path / "s").runs

    assert len(runs(x)) == 1
    assert runs(x) == runs(x, METADATA) == runs(x, order=("b", "a"))
    other = x.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(torch.inf, dtype=x.dtype))
    assert runs(other) != runs(x)
    assert runs(x[:199]) != runs(x)


def test_files_without_rows_hold_no_run(tmp_path):
    for name in "ab":
        save_statistics(tmp_path / name, {"s": Moments(D)})
    assert load_statistics(tmp_path / "a").runs == ()
    assert merge_statistics([tmp_path / "a", tmp_path / "b"]).n_samples("s") == 0


# --- what belongs together -----------------------------------------------------------------------------


def changed(*keys: str, value: Any) -> dict[str, Any]:
    metadata = copy.deepcopy(METADATA)
    inside = metadata
    for key in keys[:-1]:
        inside = inside[key]
    inside[keys[-1]] = value
    return metadata


def test_counts_add_up_and_what_was_read_is_listed(tmp_path):
    one = write(tmp_path / "one", rows()[:600])
    other = changed("tokens", value={"seen": 7, "excluded": {"special": 2}, "seq_len": 64, "text": ["t.txt"]})
    other["settings"] |= {"batch_size": 8, "text": ["one", "two"], "sites": None}
    other["model"]["transformers"] = "5.24"
    merged = merge_statistics([one, write(tmp_path / "two", rows()[600:], other)]).metadata
    assert merged["tokens"] == {
        "seen": 107,
        "excluded": {"padding": 3, "special": 2},
        "seq_len": None,
        "text": ["default", "t.txt"],
    }
    assert merged["settings"] == METADATA["settings"] | {"text": ["one", "two"]}
    assert merged["model"] == METADATA["model"]
    assert merged["merged"] == ["one", "two"]


def test_files_of_rows_name_the_model(tmp_path):
    names = ["a.npy", "b.npy", "a.npy", "c.npy"]  # of one name, in two folders
    paths = []
    for i, name in enumerate(names):
        about = METADATA | {"model": {"name": name}, "settings": {"files": [name]}}
        paths.append(write(tmp_path / str(i), rows()[300 * i : 300 * (i + 1)], about))
    two, four = (merge_statistics(paths[:n]).metadata for n in (2, 4))
    assert (two["model"], two["settings"]) == ({"name": "a.npy, b.npy"}, {"files": names[:2]})
    assert (four["model"], four["settings"]) == ({"name": "a.npy, b.npy, a.npy …"}, {"files": names})


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (changed("model", "name", value="n"), "model.name is 'n' and 'm'"),
        (changed("model", "revision", value="main"), "model.revision is 'main' and None"),
        (changed("model", "dtype", value="bfloat16"), "model.dtype is 'bfloat16' and 'float32'"),
        (changed("settings", "drop_first", value=1), "settings.drop_first is 1 and 0"),
        (
            changed("sites", value={"a": {"rope": "post", "point": "x"}}),
            r"sites.a.rope is 'post' and 'pre'",
        ),
        (changed("selection", value={"labels": True}), r"selection is \{'labels': True\} and None"),
    ],
)
def test_runs_that_measure_something_else_are_refused(tmp_path, metadata, message):
    one, two = write(tmp_path / "one", rows()[:300]), write(tmp_path / "two", rows()[300:600], metadata)
    with pytest.raises(ValueError, match=f"two and .*one cannot be merged: {message}"):
        merge_statistics([one, two])


def test_other_sites_are_refused(parts, tmp_path):
    moments = Moments(D).update(torch.randn(9, D))
    views = TokenViews(partial(Moments, D))
    cases = [
        ({"a": views}, "less lacks site 'b'; capture the same sites"),
        ({"a": views, "b": views, "c": views}, "0.st lacks site 'c'; capture the same sites"),
        ({"a": moments, "b": moments}, "site 'a' holds moments and views/moments; capture it alike"),
        ({"a": views, "b": views}, "site 'b' holds views/moments and views/head_moments"),
    ]
    for sites, message in cases:
        save_statistics(tmp_path / "less", sites, METADATA)
        with pytest.raises(ValueError, match=f"cannot be merged: {message}"):
            merge_statistics([parts[0], tmp_path / "less"])


def test_another_width_is_named_when_the_site_is_merged(parts, tmp_path):
    views = TokenViews(partial(Moments, 7)).update(torch.randn(9, 7))
    heads = TokenViews(partial(HeadMoments, 4, D // 4)).update(torch.randn(9, D))
    save_statistics(tmp_path / "narrow", {"a": views, "b": heads}, METADATA)
    merged = merge_statistics([parts[0], tmp_path / "narrow"])
    with pytest.raises(ValueError, match="narrow: site 'a': `other` must have 24 features, got 7"):
        save_statistics(tmp_path / "out", merged)
    assert not (tmp_path / "out").exists()


def test_a_site_that_no_token_reached_in_one_run_is_that_of_the_others(parts, tmp_path):
    views = TokenViews(partial(Moments, D)).update(torch.randn(9, D))
    save_statistics(tmp_path / "less", {"a": views}, METADATA | {"empty": ["b", "x"]})
    merged = merge_statistics([tmp_path / "less", parts[0]])
    assert [merged.n_samples(site) for site in merged] == [1209, 1200]
    assert merged["b"].n_samples == 1200
    assert merged.metadata["empty"] == []
    with pytest.raises(KeyError, match="nowhere"):
        merged["nowhere"]


def test_nothing_and_one_file_twice_are_refused(parts, tmp_path):
    with pytest.raises(ValueError, match="`paths` is empty; give at least one"):
        merge_statistics([])
    (tmp_path / "link").symlink_to(parts[0])
    with pytest.raises(ValueError, match="names a file twice; its rows would count twice"):
        merge_statistics([parts[0], parts[1], tmp_path / "link"])


def test_sites_may_be_asked_for_in_other_words(local_model, tmp_path):
    paths = []
    for i, sites in enumerate((["resid"], None, ["model.layers.*"])):
        ids = torch.randint(0, 42, (8, 12), generator=torch.Generator().manual_seed(i))
        np.save(tmp_path / "ids.npy", ids.numpy())
        paths.append(tmp_path / f"{i}.st")
        pipeline.run(
            str(local_model),
            pipeline.Reading(tokens=tmp_path / "ids.npy"),
            sites=sites,
            keeping=pipeline.Keeping(tmp_path / "run", paths[-1]),
        )
    merged = merge_statistics(paths)
    assert [merged.n_samples(f"model.layers.{i}:output") for i in range(3)] == [3 * 96] * 3
    assert merged.metadata == load_statistics(paths[0]).metadata | {
        "tokens": merged.metadata["tokens"],
        "merged": ["0.st", "1.st", "2.st"],
    }


# --- the command ---------------------------------------------------------------------------------------


@pytest.fixture
def command():
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(merge)
    return lambda *words: CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "80"})


def test_the_command_writes_the_file_and_says_so(parts, tmp_path, command):
    out = tmp_path / "all.st"
    done = command(*parts, "--out", out)
    assert done.exit_code == 0
    assert done.output == f"merged 3 files: 2 sites of 3,000 rows\nwrote {out}\n"
    assert load_statistics(out).metadata["tokens"]["seen"] == 300
    told = json.loads(command(*parts, "--out", out, "--json").output)
    assert told == {"files": list(map(str, parts)), "out": str(out), "sites": {"a": 3000, "b": 3000}}


def test_the_command_names_what_is_wrong(parts, tmp_path, command):
    done = command(parts[0], parts[0], "--out", tmp_path / "all.st")
    assert isinstance(done.exception, ValueError)  # the command line makes one line of it
    assert "names a file twice" in str(done.exception)
    assert sorted(os.listdir(tmp_path)) == ["0.st", "1.st", "2.st"]


def test_files_on_disk_are_fitted_apart_and_reported_together(tmp_path, capsys):
    """fit a, fit b, merge, report: what the rows of both say, through the command line."""
    x = samples(700, D, decay=0.8, offset=2.0, seed=5)
    for name, part in zip("ab", x.split([400, 300]), strict=True):
        np.save(tmp_path / f"{name}.npy", part.numpy())
        files = (tmp_path / f"{name}.npy", "--save-statistics", tmp_path / f"{name}.st")
        said("fit", *files, "--out", tmp_path)
    said("merge", tmp_path / "a.st", tmp_path / "b.st", "--out", tmp_path / "ab.st")
    capsys.readouterr()
    said("report", tmp_path / "ab.st", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == {"name": "a.npy, b.npy"}
    assert report["settings"]["files"] == ["a.npy", "b.npy"]
    assert report["tokens"] == {"rows": 700}
    found = report["sites"]["data"]["all_tokens"]
    for part, right in ((x, True), (x[:400], False)):  # and a control: one of the files alone
        _, variances, _ = truth(part)
        off = np.abs(np.subtract(found["explained_variance"], variances.numpy())).max()
        assert (off < variance_bound(x)) == right
    said("report", tmp_path / "ab.st")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["a.npy, b.npy", "tokens: 700 rows", f"700 tokens each, D = {D}"]
    assert max(map(len, lines)) <= 80
    with pytest.raises(SystemExit, match="1"):
        main(["merge", str(tmp_path / "ab.st"), str(tmp_path / "a.st"), "--out", str(tmp_path / "x.st")])
    assert "hold the same run" in capsys.readouterr().err
    assert not (tmp_path / "x.st").exists()


def said(*words):
    """Run the command line, which must succeed."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    assert not ended.value.code
