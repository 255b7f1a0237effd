"""Forwards that do not count, and sites that need not fire."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pca_torch.hooks import capture


class Stack(nn.Module):
    """Three blocks, one of which runs on request alone."""

    def __init__(self, checkpointed=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x, attention_mask=None, with_last=True):
        x = self.layers[0](x)
        if self.checkpointed is None:
            x = self.layers[1](x)
        else:
            x = checkpoint(self.layers[1], x, use_reentrant=self.checkpointed)
        return self.layers[2](x) if with_last else x


def trains(model):
    return model.training and torch.is_grad_enabled()


def rows_of(model, run, **options):
    """What each layer was seen to put out while `run` calls the model."""
    seen = {f"layers.{i}": [] for i in range(3)}
    with capture(model, {name: rows.append for name, rows in seen.items()}, **options) as captured:
        run()
    return {name: torch.cat(rows) if rows else torch.empty(0, 8) for name, rows in seen.items()}, captured


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_only_forwards_that_count_are_fed(reentrant):
    model, x = Stack(reentrant), torch.randn(4, 5, 8)

    def run():
        model(x.requires_grad_()).sum().backward()
        with torch.no_grad():
            model(2 * x)
        model.eval()
        model(3 * x)
        with torch.inference_mode():
            model(4 * x)
        model.train()
        model(5 * x)

    seen, _ = rows_of(model, run, when=trains)
    everything, _ = rows_of(model, run)
    with torch.no_grad():
        want = torch.cat([model.layers[0](factor * x).flatten(0, 1) for factor in (1, 5)])
    assert torch.equal(seen["layers.0"], want)
    assert {len(rows) for rows in seen.values()} == {40}
    assert len(everything["layers.0"]) == 100  # the control: without `when` every forward counts


def test_the_outermost_module_decides_for_all_inside():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Stack()

        def forward(self, x):
            return self.module(x)

    model = Wrapper()
    model.module.eval()  # frozen inside, trained outside
    asked = []

    def when(module):
        asked.append(module)
        return module.training

    options = {"when": lambda module: module.training, "must_fire": False}
    seen, _ = rows_of(model.module, lambda: model(torch.randn(3, 8)), **options)
    assert not len(seen["layers.0"])  # nothing of the wrapper is known there
    with capture(model, {"module.layers.0": (rows := []).append}, when=when):
        model(torch.randn(3, 8))
    assert asked == [model]
    assert len(rows[0]) == 3


def test_masks_are_not_asked_for_forwards_that_do_not_count():
    model, calls = Stack(), []

    def mask(module, args, kwargs):
        calls.append(module)
        return torch.ones(args[0].shape[:2], dtype=torch.bool)

    def run():
        model(torch.randn(2, 3, 8))
        with torch.no_grad():
            model(torch.randn(2, 3, 8))

    seen, _ = rows_of(model, run, mask=mask, when=trains)
    assert calls == [model]
    assert len(seen["layers.2"]) == 6


def test_sites_that_need_not_fire_are_no_error():
    model = Stack()
    seen, _ = rows_of(model, lambda: model(torch.randn(2, 8), with_last=False), must_fire=False)
    assert [len(rows) for rows in seen.values()] == [2, 2, 0]
    with pytest.raises(RuntimeError, match=r"sites 'layers\.2' never fired"):
        rows_of(model, lambda: model(torch.randn(2, 8), with_last=False))


def test_sites_outside_of_the_model_are_told_and_ask_their_own_module():
    model = Stack()
    seen, captured = rows_of(model, lambda: model.layers[1](torch.randn(2, 8)), must_fire=False, when=trains)
    assert captured.rootless
    assert len(seen["layers.1"]) == 2
    model.layers[1].eval()
    seen, _ = rows_of(model, lambda: model.layers[1](torch.randn(2, 8)), must_fire=False, when=trains)
    assert not len(seen["layers.1"])
    assert not rows_of(model, lambda: model(torch.randn(2, 8)))[1].rootless


@pytest.mark.parametrize("before", [True, False], ids=["compiled_before", "compiled_inside"])
def test_compiled_models_are_asked_as_well(before):
    torch.compiler.reset()
    model = Stack()
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(3, 2, 8)
    if before:
        compiled(x)

    def run():
        compiled(x).sum().backward()
        with torch.no_grad():
            compiled(2 * x)
        model.eval()
        compiled(3 * x)
        model.train()
        compiled(4 * x)

    seen, _ = rows_of(model, run, when=trains)
    with torch.no_grad():
        want = torch.cat([model.layers[0](factor * x).flatten(0, 1) for factor in (1, 4)])
    torch.testing.assert_close(seen["layers.0"], want)
    torch.compiler.reset()


def test_what_a_failed_forward_held_back_is_not_said_of_the_next():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.fails = nn.Linear(8, 8), True

        def forward(self, x, attention_mask=None):
            y = self.layer(x)
            if self.fails:
                raise MemoryError("later, in the model")
            return y

    model, x = Fails(), torch.randn(2, 3, 8)
    seen = []
    with capture(model, {"layer": seen.append}):
        with pytest.raises(MemoryError, match="later"):
            model(x, attention_mask=torch.ones(4, 3))  # which does not fit
        model.fails = False
        model(x)
        with pytest.raises(ValueError, match="do not fit the mask"):
            model(x, attention_mask=torch.ones(4, 3))  # the control: it is said of a forward that returns
    assert len(seen) == 1
