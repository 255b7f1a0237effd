"""Rules are read as they are written, ring once where they come true, and survive a resume."""

import json
import random
import warnings

import pytest

from pca_torch.monitor.alarms import Alarm, check_alarms, is_among, sentence, warn
from pca_torch.monitor.record import Alert, SpectrumRecord
from pca_torch.monitor.watch import Watch


def record(step, value, site="layers.0:output", view="typical", head=None, metric="rank_95"):
    return SpectrumRecord(
        step=step,
        site=site,
        view=view,
        head=head,
        n_samples=64,
        n_effective=64.0,
        n_features=16,
        metrics={metric: value},
        index=[1],
        variance=[1.0],
        rounding_floor=0.0,
        trusted=1,
        extreme=0,
        extreme_share=0.0,
        heavy_tailed=False,
        nonfinite=0,
        tokens={},
    )


def ignore(alert):
    pass


def rings(rule, values, every=50, **options):
    """Indices of `values`, logged `every` steps, at which a rule rings."""
    watch = Watch([Alarm(rule, ignore, **options)])
    return [i for i, value in enumerate(values) if watch.update([record(every * (i + 1), value)])]


@pytest.mark.parametrize(
    ("rule", "metric", "verb", "number", "within"),
    [
        ("rank_95 < 8", "rank_95", "<", 8.0, None),
        ("rank_99.5<=8", "rank_99.5", "<=", 8.0, None),
        ("  condition > 1e6 ", "condition", ">", 1e6, None),
        ("mine >= -.5", "mine", ">=", -0.5, None),
        ("rank_95 drops 50% within 200", "rank_95", "drops", 50.0, 200),
        ("drift_start rises 12.5 % within 1 step", "drift_start", "rises", 12.5, 1),
        ("total_variance rises 300% within 200 steps", "total_variance", "rises", 300.0, 200),
    ],
)
def test_a_rule_is_read(rule, metric, verb, number, within):
    alarm = Alarm(rule)
    parsed = alarm.parsed
    assert (alarm.metric, parsed.verb, parsed.number, parsed.within) == (metric, verb, number, within)


@pytest.mark.parametrize(
    ("rule", "match"),
    [
        ("", r'`rule` must be like "rank_95 < 8" .* or "rank_95 drops 50% within 200 steps"'),
        ("rank_95", "`rule` must be like"),
        ("rank_95 == 8", "`rule` must be like .* got 'rank_95 == 8'"),
        ("rank_95 < eight", "`rule` must be like"),
        ("rank_95 < 50%", "`rule` must be like"),
        ("rank_95 < nan", "`rule` must be like"),
        ("rank 95 < 8", "`rule` must be like"),
        ("rank_95 drops 50%", "`rule` must be like"),
        ("rank_95 drops 50 within 200", "`rule` must be like"),
        ("rank_95 drops 50% within -3", "`rule` must be like"),
        ("rank_95 < 8 or rank_99 < 8", "`rule` must be like"),
        ("rank_95 < 1e999", "number that float64 can hold, got 'rank_95 < 1e999'"),
        ("rank_95 drops 0% within 200", "a percentage above 0"),
        ("rank_95 rises -5% within 200", "a percentage above 0"),
        ("rank_95 drops 100% within 200", "a percentage below 100"),
        ("rank_95 drops 50% within 0 steps", "at least 1 step"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused(rule, match):
    with pytest.raises(ValueError, match=match):
        Alarm(rule)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rule": 8}, "`rule` must be text like .*, got int"),
        ({"rule": "a < 1", "call": "print"}, "`call` must be a function of an `Alert`, got 'print'"),
        ({"rule": "a < 1", "sites": 3}, "`sites` must be a pattern, several, or None for all, got 3"),
        ({"rule": "a < 1", "sites": ["a", 3]}, "`sites` must be a pattern, several, or None for all"),
    ],
)
def test_other_types_are_refused(arguments, match):
    with pytest.raises(TypeError, match=match):
        Alarm(**arguments)


def test_an_unknown_view_is_refused():
    with pytest.raises(ValueError, match="`view` must be one of 'typical', 'all', got 'both'"):
        Alarm("a < 1", view="both")


@pytest.mark.parametrize(
    ("rule", "values", "at"),
    [
        ("rank_95 < 8", [9, 8, 7, 6, 9, 7], [2, 5]),  # once while it is true, and again after it was false
        ("rank_95 <= 8", [9, 8, 7], [1]),
        ("rank_95 > 8", [8, 9, 10], [1]),
        ("rank_95 >= 8", [7, 8, 7, 8], [1, 3]),
        ("rank_95 < 8", [7, None, 7, None, 9, None, 7], [0, 6]),  # undefined: neither tells nor forgets
    ],
)
def test_a_bound_rings_once(rule, values, at):
    assert rings(rule, values) == at


@pytest.mark.parametrize(
    ("rule", "values", "at"),
    [
        # logged at 50, 100, …: within 100 steps are this value and the two before it
        ("rank_95 drops 50% within 100 steps", [20, 15, 9], [2]),  # 20 is just within
        ("rank_95 drops 50% within 99 steps", [20, 15, 9], []),  # and here it is not
        ("rank_95 drops 50% within 100", [20, 15, 10], []),  # more than half, not half
        ("rank_95 drops 50% within 100", [20, 9, 8, 8, 3], [1, 4]),  # 8 of 9 resets it; 3 of 8
        ("rank_95 drops 50% within 100", [20, None, 9], [2]),
        ("rank_95 drops 7% within 50", [100, 93], []),  # 100·(1 - 0.07) rounds to 92.99…, not so here
        ("rank_95 drops 50% within 100", [0, -5, -50], []),  # of 0 and below there are no percent
        ("rank_95 drops 50% within 100", [4, 0], [1]),
        ("rank_95 rises 50% within 100", [10, 12, 16], [2]),
        ("rank_95 rises 50% within 100", [10, 12, 15, 18.5], [3]),  # 18.5 of 12
        ("rank_95 rises 50% within 100", [0, 1, 2, 3], [3]),  # 1, 2, 3 at last without the 0
        ("rank_95 rises 300% within 100", [10, 41], [1]),
    ],
)
def test_a_change_is_measured_within_its_steps(rule, values, at):
    assert rings(rule, values) == at


def test_changes_agree_with_all_pairs():
    """Against the sentence itself: some value of the window is more than y percent above."""
    rng = random.Random(0)
    values = [rng.choice([None, *range(1, 30)]) for _ in range(400)]
    steps = [50 * (i + 1) for i in range(400)]
    expected, was = [], False
    for i, now in enumerate(values):
        if now is None:
            continue
        window = [v for s, v in zip(steps[: i + 1], values, strict=False) if s >= steps[i] - 200 and v]
        true = any(now * 100 < v * (100 - 60) for v in window)
        if true and not was:
            expected.append(i)
        was = true
    assert rings("rank_95 drops 60% within 200 steps", values) == expected
    assert 20 < len(expected) < 200  # the rule both came true and stopped being so
    assert rings("rank_95 drops 60% within 199 steps", values) != expected


def test_an_alert_says_what_happened():
    got = []
    watch = Watch([Alarm("rank_95 drops 50% within 200 steps", got.append), Alarm("rank_95 < 8", got.append)])
    assert watch.update([record(50, 20, head=3), record(50, 20, head=4)]) == []
    assert watch.update([record(100, 20, head=3), record(100, 20, head=4)]) == []
    told = watch.update([record(150, 7, head=3), record(150, 20, head=4)])
    assert got == []  # `update` calls nobody: the log comes first
    for alarm, alert in told:
        alarm.call(alert)
    place = {"step": 150, "site": "layers.0:output", "view": "typical", "head": 3, "metric": "rank_95"}
    drop = Alert(rule="rank_95 drops 50% within 200 steps", value=7.0, before=20.0, before_step=100, **place)
    assert got == [drop, Alert(rule="rank_95 < 8", value=7.0, **place)]  # of equal values the latest
    assert sentence(got[0]) == (
        "layers.0:output, head 3 at step 150: rank_95 is 7, it was 20 at step 100 "
        "(alarm 'rank_95 drops 50% within 200 steps')."
    )
    with pytest.warns(UserWarning, match=r"layers.0:output, head 3 at step 150: rank_95 is 7 \(alarm"):
        Alarm("rank_95 < 8").call(got[1])


def test_each_site_view_and_head_is_followed_by_itself():
    watch = Watch([Alarm("rank_95 < 8", ignore), Alarm("rank_95 < 8", ignore, view="all", sites="*.1")])
    step = [
        record(50, 7, "layers.0:output"),
        record(50, 7, "layers.1:output", "all"),
        record(50, 7, "layers.0:output", "all"),
        record(50, 7, "layers.1:q", head=0),
        record(50, 9, "layers.1:q", head=1),
    ]
    told = [(alert.site, alert.view, alert.head) for _, alert in watch.update(step)]
    assert told == [
        ("layers.0:output", "typical", None),
        ("layers.1:output", "all", None),
        ("layers.1:q", "typical", 0),
    ]
    again = [record(100, 7, "layers.1:q", head=0), record(100, 7, "layers.1:q", head=1)]
    assert [alert.head for _, alert in watch.update(again)] == [1]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (None, True),
        ("**", True),
        ("model.layers.3.mlp", True),
        ("model.layers.3.mlp:hidden", True),
        ("model.layers.*.mlp:h*", True),
        (["lm_head", "**.mlp"], True),
        ("model.layers.*", False),  # one segment
        ("model.layers.3.mlp:output", False),
        ("**:hid", False),
        ([], False),
    ],
)
def test_patterns_mean_sites(patterns, found):
    assert is_among("model.layers.3.mlp:hidden", patterns) is found


def test_alarms_that_could_never_ring_are_refused():
    alarms = [Alarm("rank_95 drops 50% within 20 steps", warn, sites="layers.*")]
    assert check_alarms(alarms, ["rank_95"], ["layers.0:output"], every=20) == tuple(alarms)
    assert check_alarms(alarms) == tuple(alarms)
    with pytest.raises(
        ValueError,
        match="but 'rank_95' is not logged; add it to `metrics`, or take one that is: 'rank_99', 'alpha_req'",
    ):
        check_alarms(alarms, ["alpha_req", "rank_99"])
    with pytest.raises(ValueError, match=r"`sites` 'layers.\*', which match no site that is logged: 'norm:o"):
        check_alarms(alarms, None, ["norm:output"])
    with pytest.raises(ValueError, match="logged every 50 steps; look back over at least 50 steps"):
        check_alarms(alarms, every=50)
    with pytest.raises(
        TypeError, match=r"`alarms` must hold `Alarm` objects, got 'rank_95 < 8'; write Alarm"
    ):
        check_alarms(["rank_95 < 8"])
    with pytest.raises(TypeError, match="`alarms` must hold `Alarm` objects, got <"):
        check_alarms(Alarm)


ALARMS = [
    Alarm("rank_95 drops 50% within 200 steps", ignore),
    Alarm("rank_95 < 8", ignore),
    Alarm("rank_95 < 8", ignore, sites=("layers.0",)),
]


def test_a_resumed_watch_tells_what_an_unbroken_one_tells():
    rng = random.Random(1)
    values = [rng.choice([None, *range(1, 30)]) for _ in range(60)]
    whole, broken = Watch(ALARMS), Watch(ALARMS)
    told = forgotten = 0
    for i, value in enumerate(values):
        broken = Watch.from_state(ALARMS, json.loads(json.dumps(broken.to_state())))
        step = [record(50 * (i + 1), value, head=0), record(50 * (i + 1), values[-i], head=1)]
        expected = whole.update(step)
        assert broken.update(step) == expected
        told += len(expected)
        forgotten += Watch(ALARMS).update(step) != expected
    assert told > 20
    assert forgotten > 20  # a watch that starts anew at each step tells something else


def test_alarms_may_change_between_two_runs():
    watch = Watch(ALARMS)
    watch.update([record(50, 20)])
    watch.update([record(100, 7)])  # all three are true now
    state = watch.to_state()
    new = Alarm("rank_95 <= 7", ignore)
    resumed = Watch.from_state([new, Alarm("rank_95 < 8", ignore, view="all"), *ALARMS[::-1]], state)
    told = [alarm for alarm, _ in resumed.update([record(150, 7), record(150, 7, view="all")])]
    assert told == [new, resumed.alarms[1]]  # known alarms are recognised in any order, and only they


@pytest.mark.parametrize(
    "state",
    [
        {},
        [],
        None,
        {"alarms": 3},
        {"alarms": [{}]},
        {"alarms": [{"alarm": ["a < 1", None], "places": []}]},
        {"alarms": [{"alarm": ["a < 1", None, "all"], "places": [{"site": "a"}]}]},
        {"alarms": [{"alarm": ["a < 1", [[]], "all"], "places": []}]},
        {
            "alarms": [
                {
                    "alarm": ["a < 1", None, "all"],
                    "places": [{"site": "a", "head": "b", "true": True, "history": []}],
                }
            ]
        },
        {
            "alarms": [
                {
                    "alarm": ["a < 1", None, "all"],
                    "places": [{"site": "a", "head": 1, "true": True, "history": [[1, "x"]]}],
                }
            ]
        },
    ],
)
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(ValueError, match=r"`state` must be what `Watch.to_state` gave"):
        Watch.from_state([], state)


def test_nothing_is_told_where_there_are_no_alarms():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Watch([]).update([record(50, 1)]) == []
