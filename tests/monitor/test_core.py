"""The monitor by itself: what it logs is what was there, and what happens when things go wrong."""

import json
import warnings

import pytest
import torch
from torch import nn

from pca_torch import TokenSelection
from pca_torch.monitor import Alarm, SpectrumMonitor, read_log
from pca_torch.monitor.state import unpack

STEPS = 20


class Net(nn.Module):
    """Embedding, three residual blocks and a head, over (B, T) ids."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.depth = 3  # of them run
        self.head = nn.Linear(16, 40)

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers[: self.depth]:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def batch_of(step):
    ids = torch.randint(0, 40, (4, 12), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Training:
    """A loop that can stop and go on, and keeps the rows that a monitor should see."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.3)
        self.losses, self.rows = [], {}

    def step(self, number):
        batch = batch_of(number)
        with torch.no_grad():  # these are of the same weights, and do not count
            seen = {}
            hooks = [
                layer.register_forward_hook(lambda m, a, out, i=i: seen.update({f"layers.{i}:output": out}))
                for i, layer in enumerate(self.model.layers)
            ]
            self.model(**batch)
            for hook in hooks:
                hook.remove()
        kept = batch["attention_mask"].bool()
        self.rows[number] = {name: out[kept].double() for name, out in seen.items()}
        logits = self.model(**batch)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def run(tmp_path, first=1, last=STEPS, training=None, state=None, **settings):
    training = training or Training()
    settings = {"sites": "layers.*", "every_n_steps": 5, "path": tmp_path / "log.jsonl"} | settings
    monitor = SpectrumMonitor(training.model, **settings)
    if state is not None:
        monitor.load_state_dict(state)
    with monitor:
        for number in range(first, last + 1):
            training.step(number)
            monitor.step()
    return training, monitor, read_log(tmp_path / "log.jsonl")


def lines_of(path):
    """The lines of a log, of the first all but the number that tells runs apart."""
    first, *others = path.read_bytes().splitlines()
    return [{name: value for name, value in json.loads(first).items() if name != "id"}, *others]


def assert_same_state(one, other):
    """That both go on alike, bit for bit."""
    (one, facts), (other, more) = (unpack(monitor.state_dict()) for monitor in (one, other))
    assert facts | {"id": ""} == more | {"id": ""}
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def by_key(log):
    return {(r.step, r.site, r.view): r for r in log.records}


def weighted_spectrum(rows, weights, centred=True):
    """Variances (D,) of rows (N, D) in float64 by the SVD of the weighted rows; divisor Σw - Σw²/Σw."""
    mean = (weights[:, None] * rows).sum(0) / weights.sum() if centred else 0 * rows[0]
    sigma = torch.linalg.svdvals((rows - mean) * weights.sqrt()[:, None])
    divisor = weights.sum() - weights.square().sum() / weights.sum() if centred else weights.sum()
    return sigma.square() / divisor


@pytest.mark.parametrize(("window", "decay"), [(1, None), (2, None), (2, 0.5)])
def test_spectra_are_those_of_the_rows_of_the_window(tmp_path, window, decay):
    training, _, log = run(tmp_path, window=window, decay=decay)
    found = by_key(log)
    ends = [window, *range(5, STEPS + 1, 5)]
    assert sorted({step for step, _, _ in found}) == ends
    assert log.run["weighting"] == ("window" if decay is None else "exponential")
    for site in ("layers.0:output", "layers.2:output"):
        rows, weights = torch.empty(0, 16, dtype=torch.float64), torch.empty(0, dtype=torch.float64)
        for end in ends:
            new = torch.cat([training.rows[number][site] for number in range(end - window + 1, end + 1)])
            factor = 0.0 if decay is None else decay
            rows, weights = (
                torch.cat([rows, new]),
                torch.cat([weights * factor, torch.ones(len(new)).double()]),
            )
            rows, weights = rows[weights > 0], weights[weights > 0]
            record = found[end, site, "all"]
            want = weighted_spectrum(rows, weights)
            # float32 activations are summed in float64: 1e-9 is far above N·u·λ₁, and far below what one
            # row more or less would change
            got = torch.tensor(record.variance, dtype=torch.float64)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9 * want[0].item())
            assert record.n_samples == len(rows)
            assert record.n_effective == pytest.approx(
                weights.sum().item() ** 2 / weights.square().sum().item()
            )
            around_zero = weighted_spectrum(rows, weights, centred=False)
            want_stable = (around_zero.sum() / around_zero[0]).item()
            assert record.metrics["stable_rank"] == pytest.approx(want_stable, rel=1e-9)
            assert record.metrics["nesum"] == pytest.approx((want.sum() / want[0]).item(), rel=1e-9)
            without_one = weighted_spectrum(rows[1:], weights[1:])  # the control
            assert not torch.allclose(got, without_one, rtol=1e-6, atol=1e-9 * want[0].item())
            assert record.tokens == {"padding": 5 * window, "kept": 43 * window}


def test_losses_are_bitwise_those_without_a_monitor(tmp_path):
    plain = Training()
    for number in range(1, STEPS + 1):
        plain.step(number)
    training, _, _ = run(tmp_path, every_n_steps=2)
    assert training.losses == plain.losses
    assert all(
        torch.equal(a, b) for a, b in zip(training.model.parameters(), plain.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("settings", [{}, {"window": 3}, {"window": 2, "decay": 0.5}], ids=str)
@pytest.mark.parametrize("at", [5, 9, 13])
def test_a_resumed_run_logs_the_same_lines(tmp_path, settings, at):
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    alarms = {
        "alarms": [Alarm("rank_50 > 1", lambda alert: None), Alarm("rank_90 drops 1% within 10", print)]
    }
    _, whole, _ = run(tmp_path / "whole", **settings, **alarms)
    training, monitor, _ = run(tmp_path / "broken", last=at, **settings, **alarms)
    torch.save(monitor.state_dict(), tmp_path / "state.pt")
    broken = tmp_path / "broken" / "log.jsonl"
    with broken.open("a") as file:  # what a run that was killed later has left
        last = json.loads(broken.read_text().splitlines()[-1])
        file.write(json.dumps(last | {"step": at + 1}) + "\n{")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    training, resumed, _ = run(tmp_path / "broken", at + 1, STEPS, training, state, **settings, **alarms)
    assert lines_of(broken) == lines_of(tmp_path / "whole" / "log.jsonl")
    assert_same_state(whole, resumed)


def test_a_state_of_other_sites_begins_anew_for_them(tmp_path):
    training, monitor, _ = run(tmp_path, last=10, sites="layers.0")
    state = monitor.state_dict()
    with pytest.warns(UserWarning, match=r"does not know 'layers\.1:output'; these begin anew"):
        _, _, log = run(tmp_path, 11, 15, training, state, sites="layers.[01]")
    found = by_key(log)
    assert found[15, "layers.0:output", "all"].metrics["drift_last"] is not None
    assert found[15, "layers.1:output", "all"].metrics["drift_last"] is None


def test_a_window_of_another_rank_is_not_taken_over(tmp_path):
    training, monitor, _ = run(tmp_path, last=9, window=2)
    state = monitor.state_dict()
    facts = unpack(state)[1]
    assert facts["rank"] == 0
    changed = json.dumps(json.loads(bytes(state["facts"].tolist())) | {"rank": 1}).encode()
    state["facts"] = torch.frombuffer(bytearray(changed), dtype=torch.uint8)
    _, _, log = run(tmp_path, 10, 10, training, state, window=2)
    assert by_key(log)[10, "layers.0:output", "all"].n_samples == 43  # of one step, not of two


def damaged(state):
    """States that are none, each with what is said of it."""
    facts = bytes(state["facts"].tolist())
    last = next(name for name in state if name.endswith(".last"))
    yield {name: t for name, t in state.items() if name != last}, "lacks the tensor `last`"
    yield {name: t for name, t in state.items() if name != "facts"}, "without its facts"
    yield state | {"facts": torch.zeros(3, dtype=torch.uint8)}, "cannot be read"
    yield [1, 2], "tensors by name"
    for old, new in ((b'"steps": 10', b'"steps": -1'), (b'"kind": "monitor"', b'"kind": "moments"')):
        text = facts.replace(old, new)
        assert text != facts
        yield state | {"facts": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, "must be"
    basis = next(name for name in state if "drift" in name)
    yield state | {basis: torch.full_like(state[basis], torch.nan)}, "NaN"


def test_damaged_states_are_refused_and_change_nothing(tmp_path):
    _, monitor, _ = run(tmp_path, last=10)
    state = monitor.state_dict()
    for bad, why in damaged(state):
        with pytest.raises(ValueError, match=why):
            monitor.load_state_dict(bad)
        assert all(torch.equal(value, state[name]) for name, value in monitor.state_dict().items())


def test_hooks_are_there_in_sampled_steps_alone(tmp_path):
    training = Training()

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in training.model.modules())

    monitor = SpectrumMonitor(training.model, "layers.*", 5, window=2, path=tmp_path / "log.jsonl")
    assert not hooks()
    counted = []
    with monitor:
        for number in range(1, 13):
            counted.append(hooks())
            training.step(number)
            monitor.step()
    assert [number for number, n in enumerate(counted, 1) if n] == [1, 2, 4, 5, 9, 10]
    assert not hooks()


def test_hooks_are_gone_when_training_raises(tmp_path):
    training = Training()

    def fail():
        with SpectrumMonitor(training.model, "layers.*", path=tmp_path / "log.jsonl"):
            training.model(**batch_of(1))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in training.model.modules())


def test_a_pause_does_not_count(tmp_path):
    training = Training()
    with SpectrumMonitor(training.model, "layers.0", 1, path=tmp_path / "log.jsonl") as monitor:
        with monitor.pause():
            training.model(**batch_of(7))
        training.step(1)
        (record, _) = monitor.step()
    assert record.n_samples == 43


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (lambda model: model.eval()(**batch_of(1)), "all forwards ran in eval mode"),
        (lambda model: model.layers[0](torch.randn(3, 16)), "was not running"),
        (lambda model: None, "no forward of the model counted; is it the one that is trained"),
    ],
)
def test_why_nothing_is_logged_is_said(tmp_path, calls, told):
    training = Training()
    with SpectrumMonitor(training.model, "layers.0", 1, path=tmp_path / "log.jsonl") as monitor:
        calls(training.model)
        with pytest.warns(UserWarning, match=told):
            records = monitor.step()
    assert {record.site for record in records} <= {"layers.0:output"}


def test_a_site_that_did_not_run_is_named_once(tmp_path):
    training = Training()
    with SpectrumMonitor(training.model, "layers.*", 1, path=tmp_path / "log.jsonl") as monitor:
        training.model.depth = 2
        training.step(1)
        with pytest.warns(UserWarning, match="step 1: fewer than two tokens reached 'layers.2:output'"):
            records = monitor.step()
        assert {record.site for record in records} == {"layers.0:output", "layers.1:output"}
        training.step(2)
        assert len(monitor.step()) == 4  # where a second warning would be an error


def test_a_loop_that_forgets_to_step_is_told(tmp_path):
    training = Training()
    monitor = SpectrumMonitor(training.model, "layers.*", path=tmp_path / "log.jsonl")
    monitor.__enter__()
    training.step(1)
    with pytest.warns(UserWarning, match=r"no step was counted; call `monitor\.step\(\)`"):
        monitor.__exit__(None, None, None)


def test_labels_that_never_come_are_asked_for(tmp_path):
    training, selection = Training(), TokenSelection(labels=True)
    path = tmp_path / "log.jsonl"
    with SpectrumMonitor(training.model, "layers.0", 1, selection=selection, path=path) as monitor:
        training.step(1)
        with pytest.warns(UserWarning, match="by their labels, but none reached the model"):
            monitor.step()


def test_a_model_in_eval_mode_counts_on_request(tmp_path):
    training = Training()
    training.model.eval()
    _, _, log = run(tmp_path, training=training, last=1, train_mode_only=False, every_n_steps=1)
    assert by_key(log)[1, "layers.0:output", "all"].n_samples == 43


def test_rows_with_nan_are_left_out_and_counted(tmp_path):
    training = Training()
    with torch.no_grad():
        training.model.embed.weight[3, 2] = torch.inf
    ids = batch_of(1)["input_ids"][batch_of(1)["attention_mask"].bool()]
    bad = int((ids == 3).sum())
    assert bad
    _, _, log = run(tmp_path, training=training, last=1, every_n_steps=1)
    for record in log.records:
        if record.view == "all":
            assert (record.nonfinite, record.n_samples) == (bad, 43 - bad)


def test_a_window_that_began_with_nan_alone_goes_on_after_a_resume(tmp_path):
    model = Pooled()
    settings = {"sites": "site", "every_n_steps": 2, "window": 2, "path": tmp_path / "log.jsonl"}
    monitor = SpectrumMonitor(model, **settings)
    with monitor:
        model(torch.full((5, 4), torch.nan)).sum().backward()
        assert monitor.step() == []
    resumed = SpectrumMonitor(model, **settings)
    resumed.load_state_dict(monitor.state_dict())
    with resumed:
        model(torch.randn(8, 4)).sum().backward()
        (record, _) = resumed.step()
    assert (record.n_samples, record.nonfinite) == (8, 5)


def test_labels_that_the_forward_does_not_take_are_seen(tmp_path):
    training, selection = Training(), TokenSelection(labels=True)
    batch = batch_of(1)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[0, :4] = -100
    with SpectrumMonitor(
        training.model, "layers.0", 1, selection=selection, path=tmp_path / "l.jsonl"
    ) as monitor:
        training.model(**selection.split(batch | {"labels": labels}, training.model))
        (record, _) = monitor.step()
    assert record.n_samples == int((labels != -100).sum())
    assert record.tokens == {"padding": 5, "label": 4, "kept": 39}


class Failing:
    """A sink whose disk is full until it is not."""

    def __init__(self):
        self.full, self.written, self.closed = True, [], False

    def begin(self, run, step):
        self.run = run

    def write(self, records, alerts):
        if self.full:
            raise OSError(28, "No space left on device")
        self.written.append((records, alerts))

    def close(self):
        self.closed = True


def test_a_full_disk_does_not_end_training_and_loses_nothing(tmp_path):
    sink, training = Failing(), Training()
    with SpectrumMonitor(training.model, "layers.0", 5, path=tmp_path / "l.jsonl", sinks=[sink]) as monitor:
        for number in range(1, 11):
            training.step(number)
            sink.full = number < 10
            if number in {1, 5}:
                with pytest.warns(UserWarning, match="Failing could not write"):
                    monitor.step()
            else:
                monitor.step()
    assert [records[0].step for records, _ in sink.written] == [1, 5, 10]
    assert sink.closed


def test_a_sink_that_cannot_be_closed_keeps_nothing_from_the_others(tmp_path):
    class Broken(Failing):
        def close(self):
            raise OSError("no network")

    sinks, training = [Broken(), Failing()], Training()
    for sink in sinks:
        sink.full = False
    with SpectrumMonitor(training.model, "layers.0", 5, path=tmp_path / "l.jsonl", sinks=sinks) as monitor:
        training.step(1)
        monitor.step()
        with pytest.warns(UserWarning, match="Broken could not be closed"):
            monitor.stop()
    assert sinks[1].closed


def test_records_that_are_told_as_lost_do_not_come_back(tmp_path):
    sink, training = Failing(), Training()
    monitor = SpectrumMonitor(training.model, "layers.0", 1, path=tmp_path / "l.jsonl", sinks=[sink])
    with monitor:
        training.step(1)
        state = monitor.state_dict()
        with pytest.warns(UserWarning, match="could not write"):
            monitor.step()
        with pytest.warns(UserWarning, match="records of 1 logged steps are lost"):
            monitor.stop()
    monitor.load_state_dict(state)
    sink.full = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the log of the first start moves aside
        monitor.start()
    training.step(1)
    monitor.step()
    monitor.stop()
    assert [records[0].step for records, _ in sink.written] == [1]


def test_alarms_are_written_before_they_are_called_and_all_of_them_are(tmp_path):
    def fail(alert):
        told.append(alert)
        raise ArithmeticError(alert.rule)

    told, training, path = [], Training(), tmp_path / "log.jsonl"
    alarms = [Alarm("rank_50 > 1", fail), Alarm("rank_90 > 1", told.append)]
    with SpectrumMonitor(training.model, "layers.0", 1, path=path, alarms=alarms) as monitor:
        training.step(1)
        with pytest.raises(ArithmeticError, match="rank_50 > 1"):
            monitor.step()
        assert monitor.steps == 1
        training.step(2)
        monitor.step()  # the loop may go on
    assert [alert.to_dict() for alert in read_log(path).alerts] == [alert.to_dict() for alert in told]
    assert [alert.rule for alert in told] == ["rank_50 > 1", "rank_90 > 1"]
    assert [record.step for record in read_log(path).records] == [1, 1, 2, 2]


def test_the_log_of_another_run_is_left_alone_by_a_resumed_one(tmp_path):
    training, monitor, _ = run(tmp_path, last=10)
    state = monitor.state_dict()
    with pytest.warns(UserWarning, match="held the log of an earlier run"):
        run(tmp_path, last=15)  # on the same path
    other = (tmp_path / "log.jsonl").read_bytes()
    with pytest.warns(UserWarning, match="held the log of another run"):
        _, _, log = run(tmp_path, 11, 15, training, state)
    assert (tmp_path / "log.2.jsonl").read_bytes() == other
    assert {record.step for record in log.records} == {15}


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("resumed", [False, True], ids=["started_again", "resumed"])
def test_a_step_that_did_not_end_counts_once_when_it_is_done_again(tmp_path, window, resumed):
    training = Training()
    settings = {"sites": "layers.0", "every_n_steps": 4, "window": window, "path": tmp_path / "l.jsonl"}
    monitor = SpectrumMonitor(training.model, **settings)
    monitor.start()
    for number in range(1, 4):
        training.step(number)
        monitor.step()
    training.model(**batch_of(4))  # and then something raised
    state = monitor.state_dict()
    monitor.stop()
    if resumed:
        monitor = SpectrumMonitor(training.model, **settings)
        monitor.load_state_dict(state)
    with monitor:
        training.step(4)
        (record, _) = monitor.step()
    assert record.n_samples == 43 * window
    assert record.tokens == {"padding": 5 * window, "kept": 43 * window}


class Pooled(nn.Module):
    """A site of one row for each sequence, or of another width, at the will of a test."""

    def __init__(self):
        super().__init__()
        self.site, self.weight = nn.Identity(), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.site(x) * self.weight


def test_old_rows_weigh_less_with_every_window_whatever_that_holds(tmp_path):
    model, decay = Pooled(), 0.5
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (20, 0, 1, 9)]
    rows, weights = torch.empty(0, 4), torch.empty(0)
    with SpectrumMonitor(model, "site", 1, decay=decay, path=tmp_path / "l.jsonl") as monitor:
        for batch in batches:
            if len(batch):
                model(batch).sum().backward()
                monitor.step()
            else:
                with pytest.warns(UserWarning, match="no forward of the model counted"):
                    monitor.step()
            rows = torch.cat([rows.double(), batch])
            weights = torch.cat([weights.double() * decay, torch.ones(len(batch)).double()])
    record = next(record for record in monitor.latest if record.view == "all")
    want = weighted_spectrum(rows, weights)
    torch.testing.assert_close(torch.tensor(record.variance).double(), want, rtol=1e-6, atol=0)
    assert record.n_samples == 30
    assert record.n_effective == pytest.approx(
        weights.sum().item() ** 2 / weights.square().sum().item(), rel=1e-12
    )
    undiscounted = weighted_spectrum(rows, torch.where(weights < 0.2, weights * 2, weights))
    assert not torch.allclose(want, undiscounted, rtol=1e-3)


def test_rows_that_cannot_be_counted_end_no_training(tmp_path):
    model = Pooled()
    with SpectrumMonitor(model, "site", 1, path=tmp_path / "l.jsonl") as monitor:
        for x, told in (
            (torch.full((5, 4), 1e80, dtype=torch.float64), "beyond 1e"),
            (torch.full((5, 4), torch.nan), "no two rows without NaN or inf"),
        ):
            model(x).sum().backward()
            with pytest.warns(UserWarning, match=told):
                assert monitor.step() == []
        for width in (4, 6, 6):
            model(torch.randn(8, width)).sum().backward()
            if (width, monitor.steps) == (6, 3):
                with pytest.warns(UserWarning, match="site:output is not logged: .*features.*begin anew"):
                    assert monitor.step() == []
            else:
                assert [record.n_features for record in monitor.step()] == [width, width]


def test_a_selection_may_serve_two_monitors(tmp_path):
    training, selection = Training(), TokenSelection()
    monitors = [
        SpectrumMonitor(training.model, "layers.0", 1, selection=selection, path=tmp_path / f"{i}.jsonl")
        for i in range(2)
    ]
    with monitors[0], monitors[1]:
        training.step(1)
        for monitor in monitors:
            assert monitor.step()[0].tokens == {"padding": 5, "kept": 43}


def test_a_metric_that_fails_is_none_and_ends_no_training(tmp_path):
    def own(result):
        raise ZeroDivisionError("no such thing")

    training = Training()
    with SpectrumMonitor(
        training.model, "layers.0", 1, metrics=["rank_95", own], path=tmp_path / "l"
    ) as monitor:
        training.step(1)
        with pytest.warns(UserWarning, match="the metric `own` is not logged: no such thing"):
            (record, _) = monitor.step()
    assert record.metrics["own"] is None
    assert record.metrics["rank_95"] > 0


def test_an_alarm_may_ask_for_the_end_of_training(tmp_path):
    training, answers = Training(), iter([None, 1, True])
    alarms = [Alarm(f"rank_{share} > {1 / share}", lambda alert: next(answers)) for share in (50, 90, 95)]
    with SpectrumMonitor(
        training.model, "layers.0", 1, path=tmp_path / "l.jsonl", alarms=alarms[:2]
    ) as monitor:
        training.step(1)
        monitor.step()
        assert not monitor.should_stop  # only True itself asks, not what some function happens to return
    with SpectrumMonitor(
        training.model, "layers.0", 1, path=tmp_path / "m.jsonl", alarms=alarms[2:]
    ) as monitor:
        training.step(2)
        monitor.step()
        assert monitor.should_stop
        monitor.stop()
        monitor.reset()
        assert not monitor.should_stop


def test_a_reset_monitor_is_a_new_one(tmp_path):
    training, monitor, _ = run(tmp_path, last=9, window=2, decay=0.5)
    monitor.reset(30)
    fresh = SpectrumMonitor(training.model, "layers.*", 5, window=2, decay=0.5, path=tmp_path / "log.jsonl")
    fresh.reset(30)
    assert_same_state(monitor, fresh)
    assert (monitor.steps, monitor.latest) == (30, [])
    with pytest.raises(ValueError, match="`steps` must be an integer ≥ 0"):
        monitor.reset(-1)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be a positive integer"),
        ({"window": 60}, "`window` must be at most `every_n_steps`, 50"),
        ({"decay": 1.0}, "`decay` must be a number between 0 and 1"),
        ({"decay": 1}, "`decay` must be"),
        ({"n_components": 0}, "`n_components` must be"),
        ({"fit_range": (5, 5)}, "`fit_range` must be"),
        ({"sites": "layers.9"}, "layers.9"),
        ({"metrics": ["rank95"]}, "`metrics` must be among"),
        ({"metrics": ["rank_95"], "alarms": [Alarm("nesum < 3")]}, "'nesum' is not logged"),
        ({"train_mode_only": 2}, "`train_mode_only` must be True or False"),
        ({"precision": "half"}, "`precision` must be"),
        ({"selection": "attention_mask"}, "`selection` must be a `TokenSelection`"),
        ({"sinks": [3]}, "`sinks` must hold"),
        ({"sites": []}, "`sites` is empty"),
        ({"metrics": []}, "`metrics` is empty"),
    ],
)
def test_arguments_out_of_range_are_refused_before_training(tmp_path, settings, why):
    with pytest.raises((ValueError, TypeError), match=why):
        SpectrumMonitor(Net(), path=tmp_path / "log.jsonl", **{"sites": "layers.*"} | settings)
    assert not list(tmp_path.iterdir())


def test_steps_need_a_running_monitor(tmp_path):
    monitor = SpectrumMonitor(Net(), "layers.*", path=tmp_path / "log.jsonl")
    with pytest.raises(RuntimeError, match="is not running"):
        monitor.step()
    monitor.start()
    with pytest.raises(RuntimeError, match="is running"):
        monitor.start()
    with pytest.raises(RuntimeError, match="must come before `start`"):
        monitor.load_state_dict(monitor.state_dict())
    monitor.stop()
    monitor.stop()  # twice does no harm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an earlier log moves aside
        monitor.start()
    monitor.stop()
