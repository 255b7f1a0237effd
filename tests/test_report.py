"""The report as a dictionary and as a file: its numbers, its verdicts, and what is no report."""

import copy
import io
import json
import math
import os
import random

import numpy as np
import pytest
import torch
from rich.console import Console

from pca_torch.report import read_report, render_table, report_dict, verdict, write_report
from pca_torch.result import Certificate
from tests.reports import layers, sink, site

D = 64
TYPICAL = 0.95 ** np.arange(D)
LOUD = np.array([1000.0, *TYPICAL[1:]])


def report_of(one, **more):
    return report_dict({"model.layers.3": one}, {"name": "m"}, {"seen": 2000}, more)


def verdict_of(*args, **more):
    return report_of(site(*args, **more))["sites"]["model.layers.3"]["verdict"]


def rank_of(variances, share):
    """The rank rule in numpy; no cumulative ratio of these spectra is within 1e-9 of a share."""
    return int((np.cumsum(variances) / np.sum(variances) < share).sum()) + 1


# ---------------------------------------------------------------- the dictionary


def test_report_has_exactly_the_fields_of_version_2():
    report = report_of(site(TYPICAL, all_variances=LOUD, extreme=sink()), seed=3)
    assert report.keys() == {"version", "model", "tokens", "settings", "sites", "heads", "empty", "shared"}
    assert (report["version"], report["model"], report["tokens"]) == (2, {"name": "m"}, {"seen": 2000})
    assert (report["heads"], report["empty"], report["shared"]) == ({}, [], {})
    one = report["sites"]["model.layers.3"]
    assert one.keys() == {"n_features", "extreme", "verdict", "typical", "all_tokens"}
    assert one["extreme"] == {
        "count": 16,
        "n_samples": 2000,
        "threshold": 9.0,
        "positions": {"0": 16},
        "trace_share": 0.0,
        "heavy_tailed": False,
        "exact": True,
    }
    for view, n, variances in (("typical", 1984, TYPICAL), ("all_tokens", 2000, LOUD)):
        got = one[view]
        assert got.keys() == {
            "n_samples",
            "total_variance",
            "explained_variance",
            "rank",
            "participation_ratio",
            "effective_rank",
            "top_share",
            "certificate",
        }
        assert got["n_samples"] == n
        assert got["explained_variance"] == variances.tolist()
        assert got["rank"] == {
            share: rank_of(variances, float(share)) for share in ("0.5", "0.9", "0.95", "0.99")
        }
        assert got["total_variance"] == pytest.approx(variances.sum(), rel=1e-14)
        assert got["top_share"] == pytest.approx(variances[0] / variances.sum(), rel=1e-14)
        assert got["participation_ratio"] == pytest.approx(
            variances.sum() ** 2 / (variances**2).sum(), rel=1e-14
        )
        p = np.sqrt(variances) / np.sqrt(variances).sum()
        assert got["effective_rank"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-13)
        assert Certificate.from_dict(got["certificate"]).trusted == D


def test_what_the_computed_variances_cannot_say_is_null():
    """2 of 64 variances, 70 % of the total."""
    one = report_of(site([5.0, 2.0], d=D, total=10.0))["sites"]["model.layers.3"]["typical"]
    assert one["rank"] == {"0.5": 1, "0.9": None, "0.95": None, "0.99": None}
    assert one["participation_ratio"] is one["effective_rank"] is None
    assert one["top_share"] == pytest.approx(5 / 10, rel=1e-15)


def test_every_computed_variance_is_reported_not_only_the_kept():
    one = report_of(site(TYPICAL, k=3))["sites"]["model.layers.3"]["typical"]
    assert one["explained_variance"] == TYPICAL.tolist()
    assert one["rank"]["0.95"] == rank_of(TYPICAL, 0.95)


def test_numbers_that_are_not_finite_are_null_and_other_types_their_text():
    settings = {
        "dtype": torch.float32,
        "lr": math.nan,
        "top": (np.int64(3), np.float32(0.5), math.inf),
        7: None,
    }
    report = report_of(site(TYPICAL, gap=math.inf), **{"settings": settings})
    assert report["settings"]["settings"] == {
        "dtype": "torch.float32",
        "lr": None,
        "top": [3, 0.5, None],
        "7": None,
    }
    assert report["sites"]["model.layers.3"]["typical"]["certificate"]["gap"] is None
    json.dumps(report, allow_nan=False)


def test_a_report_of_nothing_is_refused():
    with pytest.raises(ValueError, match="`sites` must hold at least one site, got none"):
        report_dict({}, {}, {}, {})


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (15, "low-rank, 23%"),
        (16, "moderate, 25%"),
        (49, "moderate, 73%"),
        (50, "near full, 75%"),
        (64, "near full, 95%"),
    ],
)
def test_verdict_on_the_fullness_of_a_layer(k, words):
    """k equal variances have rank ⌈0.95 k⌉ at 95 %: 15, 16, 47, 48 and 61 of 64."""
    assert verdict_of([1.0] * k + [0.0] * (D - k)) == words


def test_verdict_names_the_rows_that_hide_a_layer():
    rank, rank_all = rank_of(TYPICAL, 0.95), rank_of(LOUD, 0.95)
    assert rank_all == 1
    hidden = rank - rank_all
    many = {place: 1 for place in range(16)}
    unknown = {0: 15}  # of one of the 16 rows the position is not known
    for positions, words in ((None, "sink@0 hides"), (many, "16 rows hide"), (unknown, "16 rows hide")):
        assert (
            verdict_of(TYPICAL, all_variances=LOUD, extreme=sink(positions=positions)) == f"{words} {hidden}"
        )
    few = verdict_of(TYPICAL, n=2 * D + 15, all_variances=LOUD, extreme=sink(n=2 * D + 15))
    assert few == f"sink@0 hides {hidden}+"  # with more tokens the typical rank would be larger


@pytest.mark.parametrize(("loud", "words"), [(16, "near full, 95%"), (15, "sink@0 hides 45")])
def test_extreme_rows_hide_a_layer_at_a_quarter_of_its_rank(loud, words):
    """63 equal variances have rank 60; with `loud` large ones the rank is their number."""
    every = np.concatenate([np.full(loud, 1000.0), np.ones(63 - loud)])
    assert verdict_of(np.ones(63), all_variances=every, extreme=sink()) == words


def test_verdict_on_too_few_tokens():
    assert verdict_of(TYPICAL, n=2 * D - 1) == "few tokens: 127 for D=64"
    assert verdict_of(np.ones(D), n=2 * D) == "near full, 95%"


def test_verdict_on_heavy_tails_constant_rows_and_truncated_spectra():
    heavy = sink(heavy_tailed=True)
    assert verdict_of(TYPICAL, all_variances=LOUD, extreme=heavy) == "heavy-tailed norms"
    assert verdict_of(np.zeros(D)) == "no variance"
    assert verdict_of([5.0, 2.0], d=D, total=10.0) == "over 2 of 64 dims"
    hides = site([5.0, 2.0, 1.0, 1.0], d=D, total=10.0, all_variances=[9.9], extreme=sink())
    assert report_of(hides)["sites"]["model.layers.3"]["verdict"] == "sink@0 hides 4+"


@pytest.mark.parametrize("place", [0, 131071])
@pytest.mark.parametrize("d", [D, 131072])
def test_the_longest_verdicts_fit_34_characters(d, place):
    """Read from a report with the largest numbers of a long context and a wide model."""
    entry = report_of(site(TYPICAL, all_variances=LOUD, extreme=sink()))["sites"]["model.layers.3"]
    entry["n_features"] = entry["typical"]["n_samples"] = d
    entry["typical"]["rank"]["0.95"] = d
    for count, positions in ((99999, {str(place): 99999}), (99999, {}), (0, {})):
        entry["extreme"] |= {"count": count, "positions": positions}
        assert 10 < len(verdict(entry)) <= 34
    entry["typical"]["rank"]["0.95"] = None
    assert len(verdict(entry)) <= 34


# ---------------------------------------------------------------- the file


def test_a_report_comes_back_as_it_was_written(tmp_path):
    report = layers(count=3, d=D, n=2000)
    path = tmp_path / "report.json"
    path.write_text("old")
    write_report(path, report)
    assert read_report(path) == report
    assert os.listdir(tmp_path) == ["report.json"]
    for entry in report["sites"].values():
        assert verdict(entry) == entry["verdict"]


def test_a_report_with_nan_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(tmp_path / "report.json", {"version": 1, "x": math.nan})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[1]",
        b'"report"',
        b"\xff\xfe\x00",
        b"PK\x03\x04",
        b'{"version": NaN}',
        b"[" * 100_000,
        b'{"version": ' + b"9" * 5000 + b"}",
        b'{"version": 1}',
        b'{"version": 1, "model": {}, "tokens": {}, "settings": {}, "sites": {}}',
        b'{"version": 1, "model": {}, "tokens": {}, "settings": {}, "sites": {"a\\n": 3}}',
    ],
    ids=lambda content: content[:12],
)
def test_a_foreign_file_is_refused_in_one_line_that_names_it(tmp_path, content):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"foreign\.json is no report of pca-torch: .+") as caught:
        read_report(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("version", [0, 3, True, 1.0, "1"])
def test_another_version_is_named(tmp_path, version):
    (tmp_path / "report.json").write_text(json.dumps(layers(1, D, 2000) | {"version": version}))
    with pytest.raises(ValueError, match=rf"report\.version must be 1 or 2, got '?{version}"):
        read_report(tmp_path / "report.json")


def test_a_report_of_version_1_is_read_as_one_of_today(tmp_path):
    report = layers(2, D, 2000)
    old = {key: value for key, value in report.items() if key not in {"heads", "empty", "shared"}}
    (tmp_path / "report.json").write_text(json.dumps(old | {"version": 1}))
    assert read_report(tmp_path / "report.json") == report


def test_sites_without_numbers_of_their_own_are_listed(tmp_path):
    one, shared = site(TYPICAL), {"a.up:input": "a.gate:input"}
    report = report_dict({"a.gate:input": one}, {}, {}, {}, empty=["a.expert.5:input"], shared=shared)
    assert (report["empty"], report["shared"]) == (["a.expert.5:input"], shared)
    assert list(report["sites"]) == ["a.gate:input"]
    write_report(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("key", "lie", "match"),
    [
        ("empty", {}, r"empty must be a list of texts, got \{\}"),
        ("empty", [1], "empty must be a list of texts"),
        ("shared", [], "shared must be an object of texts"),
        ("shared", {"a": 1}, "shared must be an object of texts"),
        ("heads", [], "heads must be an object"),
        ("sites", {}, "must hold at least one site, in `sites` or in `heads`"),
    ],
)
def test_lists_that_are_none_are_refused(tmp_path, key, lie, match):
    (tmp_path / "report.json").write_text(json.dumps(layers(1, D, 2000) | {key: lie}))
    with pytest.raises(ValueError, match=match):
        read_report(tmp_path / "report.json")


LIES = [
    (("n_features",), 0, r"n_features must be an integer > 0, got 0"),
    (("n_features",), 63, r"typical has 64 variances of 63 features"),
    (("verdict",), 5, r"verdict must be a text"),
    (("extreme", "positions"), {"first": 1}, r"positions must be an object of integers by position"),
    (("extreme", "positions"), {"0": 0.5}, r"positions must be an object of integers by position"),
    (("extreme", "heavy_tailed"), 1, r"heavy_tailed must be true or false"),
    (("typical", "n_samples"), True, r"n_samples must be an integer ≥ 0"),
    (("typical", "total_variance"), -1.0, r"total_variance must be a finite number ≥ 0"),
    (("typical", "explained_variance"), [1, "x"], r"explained_variance must be a list of finite numbers"),
    (("all_tokens", "explained_variance"), {"0": 1}, r"explained_variance must be a list of finite numbers"),
    (("all_tokens", "rank", "0.5"), 65, r"all_tokens has a rank beyond its 64 variances"),
    (("all_tokens", "rank", "0.99"), 3.5, r"rank\.0\.99 must be an integer ≥ 0 or null"),
    (("all_tokens", "rank"), {"0.5": 1}, r"rank has no `0\.9`"),
    (("typical", "top_share"), None, r"top_share must be a finite number"),
    (("typical", "certificate"), [], r"certificate must be an object, got \[\]"),
    (("typical", "certificate", "rounding_floor"), 10**400, r"rounding_floor must be a finite number"),
]


@pytest.mark.parametrize(("keys", "lie", "match"), LIES, ids=lambda value: str(value)[:24])
def test_a_lying_report_is_refused_where_it_lies(tmp_path, keys, lie, match):
    report = layers(count=1, d=D, n=2000)
    node = report["sites"]["model.layers.0"]
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = lie
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=match):
        read_report(tmp_path / "report.json")


def test_a_number_beyond_float64_is_refused(tmp_path):
    """Standard JSON, which Python reads as infinity."""
    text = json.dumps(layers(count=1, d=D, n=2000)).replace(
        '"total_variance": ', '"total_variance": 1e999, "x": '
    )
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match="total_variance must be a finite number ≥ 0, got inf"):
        read_report(tmp_path / "report.json")


def test_every_damaged_report_is_read_or_refused(tmp_path):
    """Any node replaced by any nonsense: what is read can be shown."""
    report = layers(count=2, d=4, n=100)
    random_ = random.Random(0)
    path = tmp_path / "report.json"
    refused = 0
    for _ in range(300):
        bad = copy.deepcopy(report)
        node = bad
        while isinstance(node, dict) and node:
            key = random_.choice(list(node))
            if not isinstance(node[key], dict) or random_.random() < 0.2:
                node[key] = random_.choice([
                    None,
                    -1,
                    1.5,
                    "\x1b[31m",
                    [],
                    {},
                    {"x": []},
                    True,
                    10**30,
                    ["a"],
                ])
                break
            node = node[key]
        path.write_text(json.dumps(bad))
        try:
            shown = read_report(path)
        except ValueError as error:
            refused += "report.json" in str(error)
            continue
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(render_table(shown))
        assert "\x1b[31m" not in console.export_text(styles=False)
    assert 100 < refused < 300
