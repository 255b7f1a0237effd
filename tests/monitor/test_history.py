"""A log sorted by site and step, what is chosen of it, and its summary."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pca_torch.monitor.history import arrange
from pca_torch.monitor.log_file import Log, read_log
from tests.monitor import logs


def names(history):
    return [site.name for site in history.sites]


def test_a_log_from_a_file_is_sorted_by_site_and_step(tmp_path):
    """Written step by step, read back, and the records of one site stand in a row."""
    log = logs.log(3, 4, 16)
    history = arrange(read_log(logs.write(tmp_path / "spectra.jsonl", log)))
    assert names(history) == log.run["sites"]
    for site in history.sites:
        assert site.steps == [1, 10, 20, 30]
        want = [r for r in log.records if (r.site, r.view) == (site.name, "typical")]
        assert [records[0].to_dict() for records in site.records.values()] == [r.to_dict() for r in want]
    assert history.steps == [1, 10, 20, 30]


def test_sites_are_in_the_order_of_the_model_also_those_that_come_late():
    """An expert that is reached first in the second window stands where the header has it."""
    log = logs.log(3, 3, 16)
    late = [r for r in log.records if r.site != log.run["sites"][0] or r.step > 1]
    history = arrange(replace(log, records=late[::-1]))
    assert names(history) == log.run["sites"]
    assert history.sites[0].steps == [10, 20]
    assert history.steps == [1, 10, 20]


def test_metrics_of_heads_are_their_mean_over_those_that_have_one():
    record = logs.record(10, "attn:k", logs.spectrum(8, 1.0))
    heads = [
        replace(record, head=h, n_samples=2000 + h, metrics={"a": a, "b": b})
        for h, (a, b) in enumerate([(1, None), (4, None), (None, None)])
    ]
    history = arrange(Log(run=logs.run(["attn:k"]), records=heads, alerts=[], resumed=[]))
    assert history.sites[0].values("a") == [2.5]
    assert history.sites[0].values("b") == [None]
    assert history.sites[0].heads == 3
    assert history.sites[0].n_samples == [2000]
    assert history.to_dict()["sites"]["attn:k"]["heads"] == 3


def test_the_later_of_two_records_counts():
    values = logs.spectrum(8, 1.0)
    twice = [logs.record(10, "a", values), logs.record(10, "a", 2 * values)]
    history = arrange(Log(run=logs.run(["a"]), records=twice, alerts=[], resumed=[]))
    assert history.sites[0].values("total_variance") == [pytest.approx(2 * values.sum())]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (["model.layers.*"], [0, 1, 2, 3]),
        (["**.1"], [1]),
        (["**:k"], [4, 5, 6, 7]),
        (["model.layers.2:output", "**.0"], [0, 2]),
        (["model.layers.3.**:k"], [7]),
        (["**"], list(range(8))),
        (None, list(range(8))),
    ],
)
def test_sites_are_chosen_by_pattern(patterns, kept):
    heads = logs.log(4, 2, 8, heads=2, pattern="model.layers.{}.self_attn:k")
    log = logs.both(logs.log(4, 2, 8), heads)
    history = arrange(log, sites=patterns)
    assert names(history) == [log.run["sites"][i] for i in kept]
    assert history.n_logged == 8


def test_metrics_are_chosen_by_name_or_by_family():
    log = logs.log(1, 2, 16)
    every = arrange(log).metrics
    assert set(log.records[0].metrics) - set(every) == {"alpha_req_from", "alpha_req_to"}
    assert arrange(log, metrics=["drift_gap", "rank", "nesum"]).metrics == [
        *("drift_gap", "rank_50", "rank_90", "rank_95", "rank_99", "nesum"),
    ]
    assert arrange(log, metrics=["alpha_req"]).metrics == ["alpha_req", "alpha_req_r2"]
    assert arrange(log, metrics=["alpha_req_to"]).metrics == ["alpha_req_to"]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"sites": ["**.9"]}, r"`--sites` has '\*\*\.9', which is no site in the log; nearest to"),
        (
            {"metrics": ["rank_59"]},
            r"`--metrics` has 'rank_59', which is not in the log; nearest to .*'rank_95'",
        ),
        ({"view": "all"}, r"`--view` must be one that was logged, 'typical', got 'all'"),
    ],
)
def test_what_is_not_in_the_log_is_an_error(chosen, message):
    with pytest.raises(ValueError, match=message):
        arrange(logs.log(2, 2, 8, views=("typical",)), **chosen)


def test_a_header_alone_is_an_error():
    with pytest.raises(ValueError, match="has a header alone: no window of training steps is complete yet"):
        arrange(Log(run=logs.run([]), records=[], alerts=[], resumed=[]))


@pytest.mark.parametrize("metrics", [None, ["nesum"]])
def test_a_log_without_metrics_is_an_error(metrics):
    log = logs.log(1, 2, 8)
    bare = [replace(record, metrics={}) for record in log.records]
    with pytest.raises(ValueError, match="the log has no metric; give the monitor some, or read the spectra"):
        arrange(replace(log, records=bare), metrics=metrics)


def test_the_mean_over_heads_does_not_overflow():
    record = logs.record(10, "attn:k", logs.spectrum(8, 1.0))
    heads = [replace(record, head=h, metrics={"own": 1.5e308}) for h in range(3)]
    history = arrange(Log(run=logs.run(["attn:k"]), records=heads, alerts=[], resumed=[]))
    assert history.sites[0].values("own") == [pytest.approx(1.5e308, rel=1e-15)]  # two additions


def test_the_summary_has_the_ends_and_the_extremes():
    log = logs.log(3, 9, 16, collapse=True)
    history = arrange(log, metrics=["rank_95", "drift_last"])
    summary = json.loads(json.dumps(history.to_dict(), allow_nan=False))
    assert summary["run"] == log.run
    assert (summary["view"], summary["steps"]) == ("typical", {"first": 1, "last": 80, "logged": 9})
    for name, site in summary["sites"].items():
        mine = [r for r in log.records if (r.site, r.view) == (name, "typical")]
        ranks, n = [r.metrics["rank_95"] for r in mine], [r.n_samples for r in mine]
        assert site["n_samples"] == {"first": n[0], "last": n[-1], "least": min(n)}
        want = {"first": ranks[0], "last": ranks[-1], "least": min(ranks), "most": max(ranks)}
        assert site["metrics"]["rank_95"] == want
        assert site["metrics"]["drift_last"]["first"] is None
        assert site["metrics"]["drift_last"]["least"] == min(r.metrics["drift_last"] for r in mine[1:])
        assert (site["n_features"], site["heads"]) == (16, None)
    assert summary["alarms"] == [alert.to_dict() for alert in log.alerts]
    assert len(summary["alarms"]) > 0


def test_alarms_of_other_sites_are_left_out():
    log = logs.log(6, 30, collapse=True)
    assert {alert.site for alert in log.alerts} >= {"model.layers.4:output", "model.layers.5:output"}
    kept = arrange(log, sites=["**.5"]).alerts
    assert {alert.site for alert in kept} == {"model.layers.5:output"}


def test_few_tokens_are_known():
    """N = D bounds the rank as well: it is at most N - 1."""
    short = [arrange(logs.log(1, 2, 32, n=n)).sites[0].is_short for n in (31, 32, 40)]
    assert short == [True, True, False]
    assert np.count_nonzero(np.array(arrange(logs.log(1, 1, 32, n=20)).sites[0].records[1][0].variance)) <= 19
