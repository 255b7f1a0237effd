"""Heads in a report: their numbers against a float64 SVD of the rows, the file, the tables and the names."""

import copy
import io
import json
import random
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

from pca_torch.head_moments import HeadMoments
from pca_torch.heads import report_heads
from pca_torch.report import read_report, render_table, report_dict, write_report
from pca_torch.tokens import TokenViews
from tests.head_reports import E, H, falling, head_layers, heads_site
from tests.reports import layers, sink, site
from tests.support import samples

SHARES = ("0.5", "0.9", "0.95", "0.99")


def rendered(report, width=80):
    text = io.StringIO()
    Console(width=width, file=text, force_terminal=False).print(render_table(report))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def rank_of(variances, share):
    return int((np.cumsum(variances) / np.sum(variances) < share).sum()) + 1


# ---------------------------------------------------------------- the numbers


def captured(n=1200, sequences=24):
    """(24, 50, H·E) rows with a sink at the first place of each sequence, and their report."""
    parts = [samples(n, E, decay=0.7 + 0.1 * i, offset=0.5, seed=i) for i in range(H)]
    x = torch.stack(parts, 1).reshape(sequences, -1, H * E)
    x[:, 0] *= 20
    views = TokenViews(partial(HeadMoments, H, E))
    for part in x.split(6):
        views.update(part)
    return x, report_heads(views, 0.9, kind="k", rope="pre", layer=7)


def spectrum_of(rows, centred):
    rows = rows - rows.mean(0) if centred else rows
    return np.linalg.svd(rows.numpy(), compute_uv=False) ** 2 / (len(rows) - 1)


def test_every_number_is_that_of_the_rows():
    """The judge is the SVD of the rows in float64; no cumulative share here is within 1e-9 of those asked."""
    x, report = captured()
    one = report_dict({"model.layers.7.self_attn:k": report}, {}, {}, {})["heads"][
        "model.layers.7.self_attn:k"
    ]
    assert [one[key] for key in ("heads", "width", "kind", "rope", "layer")] == [H, E, "k", "pre", 7]
    assert (one["extreme"]["count"], one["extreme"]["positions"]) == (24, {"0": 24})
    rows = {"all_tokens": x.reshape(-1, H, E), "typical": x[:, 1:].reshape(-1, H, E)}
    for view, centred in ((view, centred) for view in rows for centred in (True, False)):
        found = one[view]["centred" if centred else "uncentred"]
        want = np.stack([spectrum_of(head, centred) for head in rows[view].unbind(1)])
        assert one[view]["n_samples"] == len(rows[view])
        np.testing.assert_allclose(found["explained_variance"], want, rtol=1e-9, atol=1e-13 * want.max())
        np.testing.assert_allclose(found["total_variance"], want.sum(1), rtol=1e-12)
        for share in SHARES:
            ranks = [rank_of(values, float(share)) for values in want]
            assert found["rank"][share] == ranks
            np.testing.assert_allclose(
                found["over_heads"]["rank"][share], [np.mean(ranks), np.std(ranks)], rtol=1e-12
            )
        ratio = want.sum(1) ** 2 / (want**2).sum(1)
        np.testing.assert_allclose(found["participation_ratio"], ratio, rtol=1e-10)
        np.testing.assert_allclose(
            found["over_heads"]["participation_ratio"], [ratio.mean(), ratio.std()], rtol=1e-9
        )
        assert found["certificate"]["trusted"] == [E] * H
    ranks = {
        (view, key): tuple(one[view][key]["rank"]["0.95"])
        for view in rows
        for key in ("centred", "uncentred")
    }
    assert len(set(ranks.values())) == 4  # a view or a centring in the place of another would show


def test_what_is_kept_of_the_heads():
    _, report = captured()
    assert (report.heads, report.width) == (H, E)
    for heads in (report.typical, report.typical_uncentred):
        assert [head.n_components for head in heads] == [
            rank_of(head.spectrum.numpy(), 0.9) for head in heads
        ]
    assert {head.centred for head in report.typical + report.all_tokens} == {True}
    assert {head.centred for head in report.typical_uncentred + report.all_tokens_uncentred} == {False}


def test_without_extreme_rows_both_views_are_the_same_results():
    views = TokenViews(partial(HeadMoments, H, E))
    views.update(samples(600, H * E))
    report = report_heads(views)
    assert report.typical is report.all_tokens
    assert report.typical_uncentred is report.all_tokens_uncentred


def test_a_constant_head_has_rank_0():
    x = samples(600, 2 * E)
    x[:, E:] = 3.0
    views = TokenViews(partial(HeadMoments, 2, E)).update(x)
    with pytest.warns(UserWarning, match="total variance is zero"):
        report = report_heads(views)
    one = report_dict({"a:k": report}, {}, {}, {})["heads"]["a:k"]["typical"]
    assert one["centred"]["rank"]["0.95"][1] == one["centred"]["participation_ratio"][1] == 0
    assert one["uncentred"]["rank"]["0.95"][1] == 1


def test_the_heads_of_a_real_model(smollm2):
    """Keys and values of two layers: the ranks in the report are those of the rows that passed."""
    names = [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in (3, 20) for kind in "kv"]
    views = {name: TokenViews(partial(HeadMoments, 3, 64)) for name in names}
    rows, hooks = {name: [] for name in names}, []

    def feed(name, _module, _args, output):
        views[name].update(output)
        rows[name].append(output.double().reshape(-1, 3, 64))

    text = "The heads of one layer look at different places. " * 12
    ids = torch.tensor([smollm2.tokenizer(text).input_ids[:120]])
    try:
        for name in names:
            module = smollm2.model.get_submodule(name)
            hooks.append(module.register_forward_hook(partial(feed, name)))
        with torch.no_grad():
            smollm2.model(ids)
            smollm2.model(ids.flip(1))
    finally:
        for hook in hooks:
            hook.remove()
    sites = {name: report_heads(views[name], kind=name[-6]) for name in names}
    report = report_dict(sites, {}, {}, {})
    for name in names:
        every = torch.cat(rows[name])
        for centred, key in ((True, "centred"), (False, "uncentred")):
            found = report["heads"][name]["all_tokens"][key]
            for head in range(3):
                want = spectrum_of(every[:, head], centred)
                np.testing.assert_allclose(found["explained_variance"][head], want, atol=1e-11 * want[0])
                assert found["rank"]["0.95"][head] == rank_of(want, 0.95)


# ---------------------------------------------------------------- the file


def test_heads_come_back_as_they_were_written(tmp_path):
    report = head_layers(2)
    assert report["sites"] == {}
    write_report(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report


def lists_of(one):
    return one["heads"]["model.layers.0.self_attn:k"]["typical"]["centred"]


LIES = [
    (("heads",), 0, "heads must be an integer > 0, got 0"),
    (("heads",), 2, "must have one value for each of 2 heads"),
    (("width",), 15, "has 16 variances of 15 features"),
    (("kind",), None, "kind must be a text"),
    (("rope",), "both", '"pre", "post" or null'),
    (("layer",), -1, "layer must be an integer ≥ 0 or null"),
    (("extreme", "heavy_tailed"), 1, "heavy_tailed must be true or false"),
    (("typical", "uncentred"), None, "uncentred must be an object"),
    (("all_tokens", "n_samples"), 1.5, "n_samples must be an integer"),
    (("typical", "centred", "rank", "0.95"), [1, 2, None], "a list of integers ≥ 0"),
    (("typical", "centred", "rank", "0.95"), [1, 2], "one value for each of 3 heads"),
    (("typical", "centred", "rank", "0.95"), [1, 2, 17], "a rank beyond its 16 variances"),
    (("typical", "centred", "explained_variance"), [[1.0], [1.0], [-1.0]], "lists of finite numbers ≥ 0"),
    (
        ("typical", "centred", "participation_ratio"),
        [1e308] * 3,
        "participation ratio beyond its 16 features",
    ),
    (("typical", "centred", "over_heads", "rank", "0.5"), [1.0], "two finite numbers"),
    (("typical", "centred", "certificate", "trusted"), [16, 16], "one value for each of 3 heads"),
]


@pytest.mark.parametrize(("keys", "lie", "match"), LIES, ids=lambda value: str(value)[:30])
def test_heads_that_lie_are_refused_where_they_lie(tmp_path, keys, lie, match):
    report = head_layers(1)
    node = report["heads"]["model.layers.0.self_attn:k"]
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = lie
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(ValueError, match=match) as caught:
        read_report(tmp_path / "report.json")
    assert "heads model.layers.0.self_attn:k" in str(caught.value)


def test_every_damaged_report_of_heads_is_read_or_refused(tmp_path):
    """Any node replaced by any nonsense: what is read can be shown."""
    report = head_layers(2, d=4)
    random_ = random.Random(0)
    path, refused = tmp_path / "report.json", 0
    nonsense = [None, -1, 1.5, "\x1b[31m", [], {}, {"x": []}, True, 10**30, ["a"], [1e308] * 3]
    for _ in range(300):
        bad = copy.deepcopy(report)
        node = bad["heads"]
        while isinstance(node, dict) and node:
            key = random_.choice(list(node))
            if not isinstance(node[key], dict) or random_.random() < 0.1:
                node[key] = random_.choice(nonsense)
                break
            node = node[key]
        path.write_text(json.dumps(bad))
        try:
            shown = read_report(path)
        except ValueError as error:
            refused += "report.json" in str(error)
            continue
        assert "\x1b[31m" not in "\n".join(rendered(shown))
    assert 100 < refused < 300


# ---------------------------------------------------------------- the tables


def table_of(lines, kind):
    """Lines of one table, from its title to the next empty line."""
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{kind} by "))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return lines[start:end]


def cell(found, share, digits):
    ranks = found["rank"][share]
    return f"{np.mean(ranks):.{digits}f}±{np.std(ranks):.{digits}f}"


@pytest.mark.parametrize("d", [16, 64])
def test_a_layer_is_one_line_with_all_its_cells(d):
    """Keys before and after RoPE take twelve columns, in whole numbers; values six, with a decimal."""
    report = head_layers(30, d=d, h=3)
    lines = rendered(report)
    assert max(map(len, lines)) <= 80
    for kind, name, states, digits in (
        ("keys", "k", ("k", "k_rope"), 0),
        ("values", "v", ("v",), 1),
        ("queries", "q", ("q",), 1),
    ):
        table = table_of(lines, kind)
        assert table[0] == f"{kind} by layer: rank of each of {9 if name == 'q' else 3} heads, E = {d}"
        rows = [line.split() for line in table if line.split()[0].isdecimal()]
        assert [row[0] for row in rows] == [str(i) for i in range(30)]
        for i, row in enumerate(rows):
            sites = [report["heads"][f"model.layers.{i}.self_attn:{state}"]["typical"] for state in states]
            spectra = [site[centring] for site in sites for centring in ("centred", "uncentred")]
            assert row[1:] == [cell(found, share, digits) for found in spectra for share in SHARES[1:]]
        mean = next(line.split() for line in table if line.split()[0] == "mean")
        every = [
            rank
            for i in range(30)
            for rank in report["heads"][f"model.layers.{i}.self_attn:{states[0]}"]["typical"]["centred"][
                "rank"
            ]["0.9"]
        ]
        assert mean[1] == f"{np.mean(every):.{digits}f}±{np.std(every):.{digits}f}"
    keys = table_of(lines, "keys")
    assert keys[1].split() == ["before", "RoPE", "after", "RoPE"]
    assert keys[2].split() == ["centred", "uncentred"] * 2
    assert keys[1].index("after") == keys[2].rindex(" centred") + 1
    assert keys[3].split() == ["90%", "95%", "99%"] * 4
    assert table_of(lines, "values")[1].split() == ["centred", "uncentred"]


def test_what_is_too_wide_stands_one_below_the_other():
    """Ranks of three figures with a spread of two, twelve times, take more than 80 columns."""
    spread = [np.ones(256) * 0.99 ** np.arange(256), np.ones(256), 0.9 ** np.arange(256)]
    sites = {
        f"model.layers.{i}.self_attn:{kind}": heads_site(spread, d=256, kind="k", rope=rope, layer=i)
        for i in range(3)
        for kind, rope in (("k", "pre"), ("k_rope", "post"))
    }
    lines = table_of(rendered(report_dict(sites, {}, {}, {})), "keys")
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if "centred" in line and "ratio" not in line] == [
        ["centred", "centred"],
        ["uncentred", "uncentred"],
    ]
    assert [line.split()[0] for line in lines if line.split()[0].isdecimal()] == ["0", "1", "2"] * 2


def test_extreme_rows_get_a_line_for_all_tokens():
    loud = [np.array([1000.0] + [0.1] * (E - 1))] * H
    quiet = report_dict({"a:v": heads_site(falling(), kind="v")}, {}, {}, {})
    assert not any(line.lstrip().startswith("all") for line in rendered(quiet))
    sites = {"a:v": heads_site(falling(), kind="v", loud=loud, extreme=sink())}
    lines = table_of(rendered(report_dict(sites, {}, {}, {})), "values")
    row = next(line.split() for line in lines if line.split()[0] == "all")
    assert row == ["all", *["1.0±0.0"] * 6]
    assert "all: the same with extreme rows." in lines


def test_ranks_that_count_noise_are_marked_and_few_tokens_said():
    noisy = report_dict({"a:v": heads_site(falling(), kind="v", floor=0.5)}, {}, {}, {})
    found = noisy["heads"]["a:v"]["typical"]["centred"]
    found["certificate"]["trusted"] = [2] * H  # as a certificate with this floor says
    lines = rendered(noisy)
    assert any("±1.5*" in line or "*" in line.split()[1] for line in lines if line.lstrip().startswith("0 "))
    assert "* counts variances at or below the rounding floor." in lines
    few = report_dict({"a:v": heads_site(falling(), kind="v", n=2 * E - 1)}, {}, {}, {})
    enough = report_dict({"a:v": heads_site(falling(), kind="v", n=2 * E)}, {}, {}, {})
    note = "fewer than 2E tokens: the ranks would grow with more."
    assert (note in rendered(few), note in rendered(enough)) == (True, False)
    assert not any("*" in line for line in rendered(enough))


def test_one_head_has_no_spread_and_other_kinds_keep_their_name():
    sites = {
        "enc.attn:x": heads_site(falling(h=1), kind="kv[red]", layer=None),
        "enc.cross:x": heads_site(falling(h=1), kind="kv[red]", layer=None),
        "dec.attn:k": heads_site(falling(), kind="k", layer=2, rope=None),
    }
    lines = rendered(report_dict(sites, {}, {}, {}))
    assert [line.split(":")[0] for line in lines if ": rank of each" in line] == [
        "keys by layer",
        "kv[red] by module",
    ]
    table = table_of(lines, "kv[red]")
    assert table[0] == "kv[red] by module: rank of each of 1 head, E = 16"
    rows = [line.split() for line in table if line.split()[0] in {"attn", "cross"}]
    assert len(rows) == 2
    assert all("±" not in text for row in rows for text in row)


def test_layers_without_rope_stand_beside_those_with():
    sites = {
        f"l.{i}.attn:k": heads_site(falling(), layer=i, rope=None if i == 1 else "pre") for i in range(3)
    }
    lines = table_of(rendered(report_dict(sites, {}, {}, {})), "keys")
    assert lines[1].split() == ["before", "RoPE", "without", "RoPE"]
    assert next(line for line in lines if line.split()[0] == "1").split()[1:7] == ["-"] * 6


def test_heads_follow_the_table_of_layers():
    sites = {f"model.layers.{i}:output": site(np.ones(8)) for i in range(2)}
    sites |= {"model.layers.0.self_attn:k": heads_site(falling())}
    report = report_dict(sites, {"name": "m"}, {"seen": 2000}, {})
    assert (list(report["sites"]), list(report["heads"])) == (list(sites)[:2], list(sites)[2:])
    lines = rendered(report)
    assert lines[2] == "sites: model.layers.*:output, 2,000 tokens each, D = 8"
    assert [line[:2] for line in lines[:8] if line[:2] in {"0 ", "1 "}] == ["0 ", "1 "]
    assert lines.index("keys by layer: rank of each of 3 heads, E = 16") > next(
        i for i, line in enumerate(lines) if line.startswith("1 ")
    )
    without = rendered(layers(2))
    assert not any("heads" in line for line in without)
