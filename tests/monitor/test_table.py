"""The table of a run on a terminal of 80 columns."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pca_torch.monitor.history import arrange
from pca_torch.monitor.log_file import Log, Resumption
from pca_torch.monitor.record import Alert
from pca_torch.monitor.table import run_table
from tests.monitor import logs


def rendered(log, width=80, **chosen):
    """Lines of the table on a terminal, without the space at their ends."""
    text = io.StringIO()
    console = Console(width=width, file=text, force_terminal=False)
    console.print(run_table(arrange(log, **chosen), width))
    return [line.rstrip() for line in text.getvalue().splitlines()]


def cases():
    k = logs.log(12, 4, 64, heads=2, pattern="model.layers.{}.self_attn:k")
    yield "two sites", logs.log(2, 3, 48), {}
    yield "six", logs.log(6, 30, collapse=True), {}
    yield "thirty", logs.log(30, 4, 256), {}
    yield "one step", logs.log(1, 1, 8), {}
    yield "heads and more", logs.both(logs.log(12, 4, 256, n=200), k), {}
    yield "wide", logs.log(2, 3, 4096, n=100_000), {}
    yield "asked", logs.log(2, 3, 48), {"metrics": ["rank", "drift"], "view": "all"}
    yield (
        "long names",
        logs.log(3, 3, 16, pattern="encoder.stage{}." + "block." * 30 + "x:output", collapse=True),
        {},
    )


@pytest.mark.parametrize("width", [80, 60, 120])
@pytest.mark.parametrize(("log", "chosen"), [case[1:] for case in cases()], ids=[case[0] for case in cases()])
def test_no_line_is_longer_than_the_terminal(log, chosen, width):
    """And no number is cut: only names of sites may end in an ellipsis."""
    lines = rendered(log, width, **chosen)
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if "→" in line and "step" not in line]
    assert all("…" not in line.split(maxsplit=1)[1] for line in rows)


def test_the_rows_are_the_first_and_the_last_values():
    log = logs.log(3, 5, 64)
    lines = rendered(log)
    assert lines[:3] == [
        "LlamaForCausalLM, steps 1 to 40, 5 logged, typical tokens",
        "windows: 1 of every 10 steps",
        lines[2],
    ]
    assert lines[2].startswith("sites: model.layers.*:output, N = 2,0")
    assert lines[2].endswith(" tokens each, D = 64")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line[:1].isdigit()}
    assert list(rows) == ["0", "1", "2"]
    for layer, cells in rows.items():
        mine = [r for r in log.records if (r.site, r.view) == (f"model.layers.{layer}:output", "typical")]
        first, last = mine[0].metrics, mine[-1].metrics
        assert cells[0] == f"{first['rank_95']}→{last['rank_95']}"
        for cell, name in zip(
            cells[1:4], ("effective_rank", "participation_ratio", "alpha_req"), strict=True
        ):
            ends = [float(end) for end in cell.split("→")]
            assert ends == [pytest.approx(first[name], rel=5e-3), pytest.approx(last[name], rel=5e-3)]
        assert float(cells[4]) == pytest.approx(last["drift_start"], rel=5e-3)
        assert len(cells) == 6


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(None, "–"), (0.0, "0"), (12, "12"), (7.9, "7.90"), (123.456, "123"), (0.012345, "0.0123")],
        *[(1e-9, "1.0e-9"), (2.5e12, "2.5e12"), (-3.0, "-3"), (99_999.4, "99999")],
    ],
)
def test_numbers_have_three_digits(value, text):
    record = replace(logs.record(1, "a", logs.spectrum(8, 1.0)), metrics={"own": value})
    lines = rendered(Log(run=logs.run(["a"]), records=[record], alerts=[], resumed=[]))
    assert next(line for line in lines if line.startswith("a ")).split() == ["a", text]
    assert ("–: not defined at that step." in lines) == (value is None)


def test_few_tokens_bound_every_rank():
    text = "\n".join(rendered(logs.log(2, 3, 64, n=40, views=("typical",))))
    assert "N = 40 tokens bound every rank: N - 1 at most, of D = 64." in text
    assert "bound" not in "\n".join(rendered(logs.log(2, 3, 64, n=80)))


def test_few_tokens_at_some_sites_are_told_apart():
    log = logs.both(logs.log(2, 3, 64, n=40), logs.log(1, 3, 16, n=2000, pattern="head.{}:output"))
    text = "\n".join(rendered(log))
    assert "N = 40 tokens bound the ranks of 2 of 3 sites, D = 64." in text
    assert "tokens N" in text
    log = logs.log(1, 3, 64, n=40, views=("typical",))
    log = replace(log, records=[*log.records[:2], replace(log.records[2], n_samples=400)])
    lines = rendered(log)
    assert "N = 40 tokens bound the ranks, D = 64, in some windows." in lines
    assert any(line.split()[:2] == ["layers.0", "40→400"] for line in lines)


def test_columns_that_do_not_fit_are_named():
    lines = rendered(logs.log(2, 3, 48), 50)
    assert any(line.startswith("no room for") and "total_variance" in line for line in lines)
    assert not any(line.startswith("no room for") for line in rendered(logs.log(2, 3, 48)))


def test_tokens_that_weigh_less_are_told():
    log = logs.log(1, 2, 16, n=300)
    log = replace(
        log,
        run=log.run | {"decay": 0.9},
        records=[replace(r, n_samples=600, n_effective=412.4) for r in log.records],
    )
    lines = rendered(log)
    assert "windows: 1 of every 10 steps, earlier ones weigh 0.9, 0.9², …" in lines
    assert any("N = 600 tokens each, 412 by weight" in line for line in lines)


def test_a_resumed_run_says_what_changed():
    log = replace(logs.log(1, 3, 16), resumed=[Resumption(step=20, changed={"window": 2, "metrics": []})])
    assert "resumed at step 20 with other window, metrics" in rendered(log)


def alert(step, **more):
    given = {"site": "model.layers.0:output", "view": "typical", "head": None, "rule": "rank_95 < 8"}
    return Alert(step=step, metric="rank_95", value=6.0, **given | more)


def test_the_first_alarms_are_listed():
    log = replace(logs.log(2, 3, 16), alerts=[alert(10 * i) for i in range(1, 26)])
    lines = rendered(log)
    assert "25 alarms" in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == [
        str(10 * i) for i in range(1, 11)
    ]
    assert "step 10   model.layers.0:output  rank_95 < 8  6" in lines
    assert lines[-1] == "and 15 more, the last at step 250"
    assert "no alarms" in rendered(logs.log(1, 2, 8))


def test_an_alarm_says_head_view_and_change():
    long = "participation_ratio drops 50% within 2000 steps"
    alerts = [
        alert(1_234_560, head=31, view="all", rule=long, before=1234.0, before_step=7),
        alert(1_234_570),
    ]
    log = replace(logs.log(2, 3, 16), alerts=alerts)
    lines = [line for line in rendered(log) if line.startswith("step 1,234,5")]
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("step 1,234,560  0 head 31  participation_")  # the short name leaves room
    assert lines[0].endswith(" 2000 steps  1234→6, all tokens")
    assert "…" in lines[0]


def test_what_moves_the_cursor_is_not_printed():
    log = logs.log(2, 2, 8, pattern="evil\x1b[31m.{}:output")
    log = replace(
        log,
        run=log.run | {"model": "\x1b]0;x\x07[red]"},
        alerts=[alert(1, site=log.run["sites"][0], rule="a\x1b")],
    )
    text = "\n".join(rendered(log))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text


@pytest.mark.parametrize("run", [{}, {"fit_range": 3, "decay": "x", "sites": 5, "model": None, "window": []}])
def test_a_strange_header_is_no_obstacle(run):
    log = replace(logs.log(2, 2, 128), run=run)
    assert any(line.startswith("1 ") for line in rendered(log))
