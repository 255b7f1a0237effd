"""Compiled models: in the graph, without a break, where hooks came first; eagerly where they came after."""

import gc
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from tests.hooks.models import IDS, LEFT, Net, Recorder, hooks_on, seeded, tiny

X = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))


def fresh():
    """A net, and graphs of no other."""
    torch.compiler.reset()
    return seeded(Net)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # of inductor
@pytest.mark.parametrize(
    ("backend", "grad"), [("eager", False), ("aot_eager", False), ("aot_eager", True), ("inductor", True)]
)
def test_hooks_set_before_are_in_one_graph(backend, grad):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    net = fresh()
    masked, plain = Recorder(), Recorder()
    compiled = torch.compile(net, backend=backend, fullgraph=True)  # fullgraph: a break is an error
    keep = LEFT.bool()
    with torch.set_grad_enabled(grad), capture(net, {"first": masked, "second.0": plain}):
        for attention_mask in (LEFT, LEFT, LEFT.flip(1)):
            out = compiled(X, attention_mask)
            if grad:
                out.sum().backward()
        out = compiled(X + 1, attention_mask=LEFT)
    first = [net.first(X), net.first(X), net.first(X), net.first(X + 1)]
    masks = [keep, keep, keep.flip(1), keep]
    want = torch.cat([x[mask] for x, mask in zip(first, masks, strict=True)])
    torch.testing.assert_close(masked.rows, want)  # inductor may contract products
    want = torch.cat([net.second[0](x)[mask] for x, mask in zip(first, masks, strict=True)])
    assert want.min() < 0  # what the ReLU in place behind it would have overwritten
    torch.testing.assert_close(plain.rows, want)
    torch.testing.assert_close(out, net(X + 1))


def counting(graphs):
    """A backend that keeps the graphs it is given and runs them as they are."""

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    return backend


def taps(graph):
    return [node for node in graph.graph.nodes if "pca_torch" in str(node.target)]


def test_a_graph_is_traced_once_and_serves_the_next_capture():
    net, graphs = fresh(), []
    compiled = torch.compile(net, backend=counting(graphs), fullgraph=True)
    for _ in range(10):  # more often than Dynamo would trace anew
        sinks = {"first": Recorder(), "second": Recorder()}
        with torch.no_grad(), capture(net, sinks):
            for i in range(2):
                compiled(X + i, LEFT)
        assert torch.equal(sinks["first"].rows, torch.cat([net.first(X + i)[LEFT.bool()] for i in range(2)]))
    # PyTorch traces hooks of the model itself apart from its forward: entered, two sites, left
    assert [len(taps(graph)) for graph in graphs] == [1, 2, 1]


def test_a_graph_does_not_serve_a_capture_of_other_sites():
    net = fresh()
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    want = {"first": net.first(X), "second.0": net.second[0](net.first(X)), "second": net(X)}
    keep = LEFT.bool()
    for names in (["first"], ["second.0"], ["second", "first"], ["first", "second"], ["first"]):
        sinks = {name: Recorder() for name in names}
        with torch.no_grad(), capture(net, sinks):
            compiled(X, LEFT)
        assert all(torch.equal(sinks[name].rows, want[name][keep]) for name in names)
    with (
        torch.no_grad(),
        capture(net, {"first": (outer := Recorder())}),
        capture(net, {"first": (inner := Recorder())}),
    ):
        compiled(X, LEFT)
    assert torch.equal(outer.rows, want["first"][keep])
    assert torch.equal(inner.rows, want["first"][keep])


def test_a_model_of_transformers_in_one_graph():
    torch.compiler.reset()
    model = tiny()
    sinks = {
        "resid@1": Recorder(),
        "model.layers.0.self_attn:k": Recorder(),
        "model.layers.0.mlp:input": Recorder(),
    }
    eager = {name: Recorder() for name in sinks}
    with torch.no_grad():
        with capture(model, eager):
            model(IDS, attention_mask=LEFT, use_cache=False)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with capture(model, sinks):
            for _ in range(2):
                compiled(IDS, attention_mask=LEFT, use_cache=False)
    for name, sink in sinks.items():
        assert len(sink.batches) == 2
        torch.testing.assert_close(sink.batches[1], eager[name].rows)


def test_a_callable_mask_and_narrowed_rows_work_in_a_graph():
    from dataclasses import replace

    from pca_torch.sites import find_sites

    net, calls = fresh(), []

    def last(module, args, kwargs):
        calls.append(sorted(kwargs))
        keep = torch.zeros(args[0].shape[:2], dtype=torch.bool)
        keep[:, -1] = True
        return keep

    site = find_sites(net, "first")[0]
    positive = replace(
        site, name="first:positive", only=lambda module, args, kwargs, output: output[..., 0] > 0.5
    )
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    sinks = {site: Recorder(), positive: Recorder()}
    with torch.no_grad(), capture(net, sinks, mask=last):
        compiled(X, attention_mask=LEFT)
        compiled(X, attention_mask=LEFT)
    want = net.first(X)[:, -1]
    assert calls == [["attention_mask"]] * 2
    assert torch.equal(sinks[site].rows, want.repeat(2, 1))
    kept = want[want[:, 0] > 0.5]
    assert 0 < len(kept) < len(want)
    assert torch.equal(sinks[positive].rows, kept.repeat(2, 1))


@pytest.mark.parametrize("backend", ["own", "aot_eager"])
def test_without_operators_that_have_effects_a_graph_breaks_and_all_is_counted(backend, monkeypatch):
    monkeypatch.setattr("pca_torch.hooks.compiled._define_operator", lambda: False)
    net, sink, graphs = fresh(), Recorder(), []
    compiled = torch.compile(net, backend=counting(graphs) if backend == "own" else backend)
    with torch.no_grad(), capture(net, {"first": sink}):
        for attention_mask in (LEFT, LEFT.flip(1)):
            out = compiled(X, attention_mask)
    torch.compiler.reset()
    first, keep = net.first(X), LEFT.bool()
    assert torch.equal(sink.rows, torch.cat([first[keep], first[keep.flip(1)]]))
    assert torch.equal(out, net(X))
    assert not any(taps(graph) for graph in graphs)


CAPTURE_ALONE = """
    import torch
    import torch._higher_order_ops.effects as effects
    from torch import nn

    from pca_torch.hooks import capture
    from pca_torch.hooks.compiled import _define_operator

    {change}
    net, rows = nn.Sequential(nn.Linear(3, 3)), []
    with torch.no_grad(), capture(net, {{"0": rows.append}}):
        net(torch.ones(2, 3))
    assert not hasattr(torch.ops.pca_torch, "tap"), "nothing was compiled"
    model = torch.compile(net, backend="eager")
    with torch.no_grad(), capture(net, {{"0": rows.append}}):
        model(torch.ones(2, 3))
    assert torch.equal(rows[1], rows[0])
    assert hasattr(torch.ops.pca_torch, "tap") is _define_operator() is {works}
"""


@pytest.mark.parametrize(
    ("change", "works"),
    [("pass", True), ("del effects._register_effectful_op", False), ("del effects._EffectType", False)],
)
def test_private_names_of_pytorch_are_for_graphs_alone(change, works):
    source = textwrap.dedent(CAPTURE_ALONE).format(change=change, works=works)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


def test_errors_in_a_graph_are_raised_after_the_forward():
    net = fresh()

    class Refuses:
        def update(self, x, *, mask=None):
            raise ValueError("12 rows are NaN")

    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="sites 'first': 12 rows are NaN"),
        capture(net, {"first": Refuses()}),
    ):
        compiled(X)
    assert hooks_on(net) == 0


def test_leaving_the_block_leaves_the_graph():
    net, sink = fresh(), Recorder()
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad():
        with capture(net, {"first": sink}):
            compiled(X)
        want = compiled(X)
        assert torch.equal(want, net(X))
        again = Recorder()
        with capture(compiled, {"first": again}):  # handed over as compiled: it runs eagerly
            compiled(X)
    assert len(sink.batches) == 1
    assert torch.equal(again.rows, net.first(X).flatten(0, 1))


def test_a_graph_without_hooks_does_not_serve_a_capture_of_the_bare_model():
    net, sinks = fresh(), [Recorder(), Recorder()]
    compiled = torch.compile(net, backend="aot_eager")
    with torch.no_grad():
        for sink in sinks:
            with capture(net, {"first": sink}):
                compiled(X)
            compiled(X)  # now there is a graph without hooks
    assert all(torch.equal(sink.rows, net.first(X).flatten(0, 1)) for sink in sinks)


def call_compiled(net):
    """A wrapper of compilation, which the net does not hold."""
    return torch.compile(net, backend="eager")


def call_in_function(net):
    """A compiled function that calls the net."""
    return torch.compile(lambda *args: net(*args) + 1, backend="eager")


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("make", [Net, lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh())])
@pytest.mark.parametrize("how", [call_compiled, call_in_function])
def test_graphs_from_before_the_block_ignore_no_call(how, make, private, monkeypatch):
    torch.compiler.reset()
    if not private:  # a PyTorch that does not tell which graphs there are
        monkeypatch.delattr("torch._C._dynamo.eval_frame._debug_get_cache_entry_list")
    net, sink = seeded(make), Recorder()
    call, shorter = how(net), X[:, :2]
    first = next(name for name, _ in net.named_children())
    with torch.no_grad():
        call(X)
        with capture(net, {first: sink}):
            for x in (X, X, shorter, X):
                call(x)
        want = [net.get_submodule(first)(x).flatten(0, 1) for x in (X, X, shorter, X)]
    assert torch.equal(sink.rows, torch.cat(want))


def test_graphs_of_another_instance_ignore_no_call():
    other, net, sink = fresh(), seeded(Net), Recorder()
    with torch.no_grad():
        torch.compile(other, backend="eager")(X)
        with capture(net, {"first": sink}):
            compiled = torch.compile(net, backend="eager")
            compiled(X)
            compiled(X[:, :2])
        want = [net.first(x).flatten(0, 1) for x in (X, X[:, :2])]
    assert torch.equal(sink.rows, torch.cat(want))


class Scale(nn.Module):
    """A module of no class that `Net` holds."""

    def forward(self, x):
        return 2 * x


def test_graphs_of_other_classes_leave_the_graph_whole():
    net, graphs, sink = fresh(), [], Recorder()
    torch.compile(Scale(), backend="eager")(X)
    compiled = torch.compile(net, backend=counting(graphs), fullgraph=True)
    with torch.no_grad(), capture(net, {"first": sink}):
        compiled(X)
        compiled(X)
    assert [len(taps(graph)) for graph in graphs] == [1, 1, 1]  # entered, the site, left
    assert torch.equal(sink.rows, net.first(X).flatten(0, 1).repeat(2, 1))


def test_a_graph_that_outlives_its_capture_is_an_error():
    net, graphs = fresh(), []
    compiled = torch.compile(net, backend=counting(graphs))
    with torch.no_grad(), capture(net, {"first": Recorder()}):
        compiled(X)
    gc.collect()
    body = next(graph for graph in graphs if len(taps(graph)) == 1)
    with pytest.raises(
        RuntimeError, match="compiled inside a `capture` that is over; compile the model again"
    ):
        body(X)


@pytest.mark.parametrize("when", ["never run", "run before"])
@pytest.mark.parametrize("how", ["compile(model)", "model.compile()", "part.compile()"])
def test_hooks_set_after_compiling_run_eagerly(how, when):
    net = fresh()
    model = net
    if how == "compile(model)":
        model = torch.compile(net, backend="eager")
    elif how == "model.compile()":
        net.compile(backend="eager")
    else:
        net.second.compile(backend="eager")
    sink = Recorder()
    with torch.no_grad():
        if when == "run before":
            model(X, LEFT)
        with capture(model, {"second.0": sink}):
            for _ in range(2):
                model(X, LEFT)
        model(X, LEFT)  # and compiled again
        assert len(sink.batches) == 2
        want = nn.functional.linear(net.first(X), net.second[0].weight, net.second[0].bias)[LEFT.bool()]
    assert torch.equal(sink.batches[0], want)
    assert torch.equal(sink.batches[1], want)


def test_a_cache_site_runs_compiled_code_eagerly():
    torch.compiler.reset()
    model, sink, eager = tiny(), Recorder(), Recorder()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        with capture(model, {"model.layers.0.self_attn:k_rope": eager}):
            model(IDS, attention_mask=LEFT)
        with capture(model, {"model.layers.0.self_attn:k_rope": sink}):
            compiled(IDS, attention_mask=LEFT)
    assert torch.equal(sink.rows, eager.rows)
