"""The table of a report, rendered to text, and the names it shares with the plot."""

import io

import numpy as np
import pytest
from rich.console import Console

from pca_torch._labels import clip, describe, printable, short_names
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


def test_one_site_keeps_its_name():
    lines = rendered(report_of({"model.layers.17": site(np.ones(8))}))
    assert lines[2] == "2,000 tokens each, D = 8"
    assert any(line.startswith("model.layers.17 ") for line in lines)


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
        (["model.layers.0"], ["model.layers.0"], "*"),
        (["", "a"], ["", "a"], "*"),
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
