"""The table of a report, rendered to text, and the names it shares with the plot."""

import io

import numpy as np
import pytest
from rich.console import Console

from pca_torch._labels import clip, describe, excluded, printable, short_names
from pca_torch.report import render_table, report_dict
from tests.reports import layers, sink, site


def rendered(report, width=80):
    """Lines of the table on a terminal of this width, without the space at their ends."""
    text = io.StringIO()
    Console(width=width, file=text, force_terminal=False).print(render_table(report))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def report_of(sites, name="m"):
    return report_dict(sites, {"name": name}, {"seen": 2000}, {})


@pytest.mark.parametrize("width", [80, 120, 200])
def test_thirty_layers_take_one_line_each(width):
    report = layers()
    lines = rendered(report, width)
    assert max(map(len, lines)) <= 80
    assert lines[:3] == [
        "org/model-1b",
        "tokens: 7,168 seen, 512 padding",
        "sites: model.layers.*, 7,168 tokens each, D = 576",
    ]
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert len(rows) == 30
    for row, entry in zip(rows, report["sites"].values(), strict=True):
        ranks = [
            entry[view]["rank"][share]
            for view in ("typical", "all_tokens")
            for share in ("0.5", "0.9", "0.95", "0.99")
        ]
        assert row[1:9] == list(map(str, ranks))
        assert " ".join(row).endswith(entry["verdict"])
    sinks = [" ".join(row) for row in rows if "16@0, 98%" in " ".join(row)]
    assert len(sinks) == 10
    assert all("hides" in row for row in sinks)


@pytest.mark.parametrize("d", [8, 4096])
def test_nothing_is_cut_off_at_80_columns(d):
    """Wider numbers push the verdict onto more lines; no cell ends in an ellipsis."""
    lines = rendered(layers(count=3, d=d, n=100_000))
    assert max(map(len, lines)) <= 80
    assert "…" not in "\n".join(lines)


def test_what_differs_between_sites_is_a_column():
    lines = rendered(report_of({"a": site(np.ones(8)), "b": site(np.ones(6), n=3000)}))
    header = next(line for line in lines if line.startswith("site"))
    assert "sites" not in "".join(lines)
    assert header.split()[:3] == ["site", "tokens", "D"]
    assert [line.split()[:3] for line in lines if line[:2] in {"a ", "b "}] == [
        ["a", "2000", "8"],
        ["b", "3000", "6"],
    ]


def test_one_site_is_as_tidy_as_two():
    lines = rendered(report_of({"data": site(np.ones(8))}))
    assert lines[2] == "2,000 tokens each, D = 8"
    assert any(line.startswith("data ") for line in lines)
    lines = rendered(report_of({"model.layers.17:output": site(np.ones(8))}))
    assert lines[2] == "sites: model.*:output, 2,000 tokens each, D = 8"
    assert [line for line in lines if line.startswith("layers.17 ")] == [lines[6]]


def test_ranks_that_count_noise_are_marked():
    """Ranks of 8 equal variances are 4, 8, 8, 8; with 1, 1 and six of 1e-9 all are 1 or 2."""
    clean, noisy = site(np.ones(8), floor=0.5), site(np.ones(8), floor=1.0)
    assert "*" not in "\n".join(rendered(report_of({"a": clean})))
    lines = rendered(report_of({"a": noisy}))
    assert next(line for line in lines if line.startswith("a ")).split()[1:5] == ["4*", "8*", "8*", "8*"]
    assert "* counts variances at or below the rounding floor." in lines
    mostly = site([1.0, 1.0] + [0.04] * 6, floor=0.05)  # 2 directions hold 89 %, the rest is below the floor
    row = next(line for line in rendered(report_of({"a": mostly})) if line.startswith("a ")).split()
    assert row[1:5] == ["2", "3*", "6*", "8*"]


def test_what_was_not_computed_is_said():
    lines = rendered(report_of({"a": site([5.0, 2.0], d=64, total=10.0)}))
    row = next(line for line in lines if line.startswith("a ")).split()
    assert row[1:5] == ["1", ">2", ">2", ">2"]
    assert row[9] == "?"
    assert "> and ? need more variances than were computed." in lines


@pytest.mark.parametrize(
    ("extreme", "text"),
    [
        (None, "none"),
        (sink(trace_share=0.5), "16@0, 50%"),
        (sink(positions={7: 10, 0: 6}), "16@0,7, 0%"),
        (sink(positions={0: 1, 1: 1, 2: 14}), "16, 0%"),
        (sink(positions={}), "16, 0%"),
        (sink(exact=False), "16@0~, 0%"),
    ],
    ids=str,
)
def test_extreme_rows_in_few_signs(extreme, text):
    lines = rendered(report_of({"a": site(np.ones(8), extreme=extreme)}))
    assert f" {text} " in next(line for line in lines if line.startswith("a "))
    assert any(line.startswith("~") for line in lines) == ("~" in text)


def test_markup_and_control_characters_are_shown_not_obeyed():
    lines = rendered(report_of({"[red]x\x1b[31m": site(np.ones(8))}, name="[bold]m\n\x07"))
    assert lines[0] == "[bold]m��"
    assert any(line.startswith("[red]x�[31m") for line in lines)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("names", "short", "pattern"),
    [
        (["model.layers.0", "model.layers.11"], ["0", "11"], "model.layers.*"),
        (["h.0.attn.k_proj", "h.1.attn.k_proj"], ["0", "1"], "h.*.attn.k_proj"),
        (["m.embed", "m.layers.0", "m.norm"], ["embed", "layers.0", "norm"], "m.*"),
        (["a.b", "a.b.c"], ["b", "b.c"], "a.*"),
        (["a.x", "a.a.x"], ["x", "a.x"], "a.*"),
        (["x", "y.z"], ["x", "y.z"], "*"),
        (["layers.0:out"], ["layers.0:out"], "*"),
        (["model.layers.0"], ["layers.0"], "model.*"),
        (["", "a"], ["", "a"], "*"),
        (["model.layers.0:output", "model.layers.11:output"], ["0", "11"], "model.layers.*:output"),
        (["m.layers.0:output", "m.norm:output"], ["layers.0", "norm"], "m.*:output"),
        (["m.0.attn:k", "m.0.attn:k_rope"], ["attn:k", "attn:k_rope"], "m.0.*"),
        (["m.0.attn:k", "m.1.attn:k"], ["0", "1"], "m.*.attn:k"),
        (["m.0:input", "m.0:output", "m.1:output"], ["0:input", "0:output", "1:output"], "m.*"),
        (["x:output", "y.z:output"], ["x", "y.z"], "*:output"),
        (["m.0:output", "m.1"], ["0:output", "1"], "m.*"),
        (["model.layers.0:output"], ["layers.0"], "model.*:output"),
        (["model.layers.10.self_attn:k"], ["10.self_attn"], "model.layers.*:k"),
        (["model.layers.10.mlp.up_projection:input"], ["up_projection"], "model.layers.10.mlp.*:input"),
        (["an_embedding_by_itself:output"], ["an_embedding_by_itself"], "*:output"),
        (["an_embedding_by_itself"], ["an_embedding_by_itself"], "*"),
    ],
)
def test_short_names_drop_what_all_share(names, short, pattern):
    assert short_names(names) == (short, pattern)


def test_clip_keeps_both_ends():
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghijk", 10) == "abcde…hijk"
    assert clip("abcdefghijk", 5) == "ab…jk"


def test_printable_keeps_letters_and_replaces_controls():
    assert printable("Größe 模型 λ") == "Größe 模型 λ"
    assert printable("a\x1b[2J\nb\ud800\u202e") == "a�[2J�b��"


def test_describe_finds_a_name_and_counts():
    report = {"model": {"id": "x/y"}, "tokens": {"seen": 12345, "padding": 0, "file": "t.txt", "flag": True}}
    assert describe(report) == ("x/y", "tokens: 12,345 seen")  # a zero says nothing
    assert describe({"model": {}, "tokens": {}}) == ("unnamed model", "tokens: not counted")


def test_excluded_tokens_are_counted_by_reason():
    reasons = {"padding": 1200, "special": 30, "first": 0, "by\x1b": 1, "odd": "x", "flag": True}
    assert excluded({"tokens": {"excluded": reasons}}) == "excluded: 1,200 padding, 30 special, 1 by�"
    for nothing in ({}, {"excluded": {"padding": 0}}, {"excluded": 3}):
        assert excluded({"tokens": nothing}) == ""
    report = report_dict({"a": site(np.ones(8))}, {"name": "m"}, {"seen": 9, "excluded": {"first": 2}}, {})
    assert rendered(report)[:3] == ["m", "tokens: 9 seen", "excluded: 2 first"]


def test_sites_without_numbers_of_their_own_are_one_line_each():
    names = [f"model.layers.{i}.mlp.experts.{'5' * 40}:input" for i in range(6)]
    for empty, words in ((names[:1], 1), (names, 4)):
        report = report_dict({"a": site(np.ones(8))}, {}, {}, {}, empty=empty, shared={"b": "a", "c": "a"})
        text = " ".join(rendered(report))
        assert text.count("model.layers.") == words
        assert ("and 2 more." in text) == (len(empty) > 4)
        assert "2 sites see the same tensor as another and share its numbers." in text
    assert "[b]�" in " ".join(rendered(report_dict({"a": site(np.ones(8))}, {}, {}, {}, empty=["[b]\x1b"])))
    assert not any("token reached" in line or "tensor" in line for line in rendered(layers(2)))


def test_the_point_that_all_sites_share_is_told_once():
    lines = rendered(report_of({f"model.layers.{i}:output": site(np.ones(8)) for i in range(3)}))
    assert lines[2] == "sites: model.layers.*:output, 2,000 tokens each, D = 8"
    assert [line.split()[0] for line in lines[6:9]] == ["0", "1", "2"]
    assert sum("output" in line for line in lines) == 1
