"""Forwards that end after the last captured site: the same rows, fewer modules."""

from collections import Counter

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from pca_torch.moments import Moments
from tests.hooks.models import IDS, LEFT, Recorder, hooks_on, tiny


def counted(model):
    """Counts of calls by path, from now on."""
    calls = Counter()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, path=path: calls.update([path]))
    return calls


@pytest.mark.parametrize(
    "key", ["model.layers.0", "model.layers.1.mlp:input", "model.layers.0.self_attn:k_rope"]
)
def test_the_same_rows_with_fewer_modules(key):
    model = tiny()
    whole, part = Recorder(), Recorder()
    batches = [IDS, IDS.flip(1), IDS.flip(0)]
    with torch.no_grad(), capture(model, {key: whole}):
        for ids in batches:
            model(ids, attention_mask=LEFT)
    calls = counted(model)
    with torch.no_grad(), capture(model, {key: part}, stop_early=True) as captured:
        outputs = [captured.run(model, ids, attention_mask=LEFT) for ids in batches]
    assert torch.equal(part.rows, whole.rows)
    assert outputs[0] is not None  # the first forward shows which site is the last
    assert outputs[1:] == [None, None]
    assert calls["lm_head"] == calls["model.norm"] == 1
    assert calls["model.layers.0"] == 3
    assert calls["model.layers.1"] == (3 if "layers.1" in key else 1)
    hooks = hooks_on(model)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert hooks_on(model) == hooks


def test_the_same_statistic_of_several_sites():
    model = tiny()
    sums = {}
    for early in (False, True):
        sinks = {
            name: Moments(width) for name, width in (("model.layers.0.mlp", 32), ("model.embed_tokens", 32))
        }
        with torch.no_grad(), capture(model, sinks, stop_early=early) as captured:
            for ids in (IDS, IDS.flip(1), IDS.flip(0)):
                captured.run(model, ids, attention_mask=LEFT)
        sums[early] = {name: sink.covariance() for name, sink in sinks.items()}
    assert all(torch.equal(sums[True][name], sums[False][name]) for name in sums[True])


def test_a_call_that_does_not_go_through_run_is_whole():
    model, sink = tiny(), Recorder()
    with torch.no_grad(), capture(model, {"model.layers.0": sink}, stop_early=True) as captured:
        captured.run(model, IDS)
        assert model(IDS).logits.shape[-1] == 50
        assert captured.run(model, IDS) is None
        assert captured.run(model.model, IDS) is None  # what `model` calls inside, called alone
    assert len(sink.batches) == 4


def test_without_stop_early_run_only_calls():
    model = tiny()
    with torch.no_grad(), capture(model, {"model.layers.0": Recorder()}) as captured:
        assert all(captured.run(model, IDS).logits is not None for _ in range(3))


class Skips(nn.Module):
    """Leaves out its first layer at times, and calls the second twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.finished = 0

    def forward(self, x, skip=False):
        x = x if skip else self.first(x)
        x = self.last(self.second(self.second(x)))
        self.finished += 1
        return x


def test_a_module_called_twice_and_one_left_out():
    net, sinks = Skips(), {"first": Recorder(), "second": Recorder()}
    x = torch.randn(4, 3)
    with torch.no_grad(), capture(net, sinks, stop_early=True) as captured:
        captured.run(net, x, skip=True)
        assert net.finished == 1
        captured.run(net, x)  # `first` has not fired so far: where it stands is not known
        assert net.finished == 2
        captured.run(net, x, skip=True)  # it does not come: the forward is whole
        assert net.finished == 3
        assert captured.run(net, x) is None
    assert net.finished == 3
    assert {name: len(sink.batches) for name, sink in sinks.items()} == {"first": 2, "second": 8}


def test_errors_held_are_raised_by_a_forward_that_is_stopped():
    model, n = tiny(), 0

    def refuse_the_second(rows):
        nonlocal n
        n += 1
        if n == 2:
            raise ValueError("12 rows are NaN")

    with torch.no_grad(), capture(model, {"model.layers.0": refuse_the_second}, stop_early=True) as captured:
        captured.run(model, IDS)
        with pytest.raises(ValueError, match=r"sites 'model\.layers\.0': 12 rows are NaN"):
            captured.run(model, IDS)
        assert captured.run(model, IDS) is None


def test_masks_are_right_after_a_forward_that_was_stopped():
    model, sink = tiny(), Recorder()
    with torch.no_grad(), capture(model, {"model.layers.0": sink}, stop_early=True) as captured:
        captured.run(model, IDS)
        captured.run(model, IDS, attention_mask=LEFT)
        captured.run(model, IDS)
    assert [len(batch) for batch in sink.batches] == [15, int(LEFT.sum()), 15]
