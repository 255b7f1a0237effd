"""What PyTorch and its relatives do to modules, and what must come of it."""

import copy
import io
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from pca_torch.moments import Moments
from tests.hooks.models import (
    IDS,
    LEFT,
    Net,
    Recorder,
    checkpointed,
    hooks_on,
    seeded,
    seen_by_plain_hooks,
    tiny,
)

X = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- training
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_each_token_once(reentrant):
    model = tiny()
    names = ["model.layers.0", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    with torch.no_grad():
        want = {name: seen_by_plain_hooks(model, name, lambda: model(IDS)) for name in names}
    checkpointed(model, reentrant)
    fired = []
    handle = model.get_submodule(names[1]).register_forward_hook(lambda *_: fired.append(1))
    sinks = {name: Recorder() for name in names} | {"model.layers.1:input": (before := Recorder())}
    with capture(model, sinks):
        model(IDS, use_cache=False).logits.sum().backward()
    handle.remove()
    assert len(fired) == 2  # it was computed again, or this test tests nothing
    assert all(torch.equal(sinks[name].rows, want[name]) for name in names)
    assert torch.equal(before.rows, want["model.layers.0"])


def test_gradients_are_those_without_hooks():
    def gradients(model):
        model(IDS).logits.sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    want, model = gradients(tiny()), tiny()
    with capture(model, {"model.layers.0": Recorder(), "model.layers.1.self_attn:k_rope": Recorder()}):
        got = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_autocast_does_not_reach_the_sums():
    net, sums = seeded(Net), Moments(3)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rows = seen_by_plain_hooks(net, "first", lambda: net(X))
        with capture(net, {"first": sums}):
            net(X)
    assert rows.dtype == torch.bfloat16
    centred = rows.double() - rows.double().mean(0)
    want = centred.mT @ centred / (len(rows) - 1)
    n, u = len(rows), torch.finfo(torch.float64).eps / 2
    bound = 4 * n * u * want.trace()  # a sum of n products and the mean, Higham 2002, 3.5
    assert (sums.covariance() - want).abs().max() <= bound
    coarse = (centred.bfloat16().mT @ centred.bfloat16()).double() / (len(rows) - 1)  # as inside autocast
    assert (coarse - want).abs().max() > bound


def test_inference_mode_leaves_statistics_that_can_be_updated():
    net, sums, again = seeded(Net), Moments(3), Moments(3)
    with torch.inference_mode(), capture(net, {"first": sums}):
        net(X)
    with torch.no_grad(), capture(net, {"first": sums}):
        net(X + 1)
    with torch.no_grad(), capture(net, {"first": again}):
        net(X)
        net(X + 1)
    assert torch.equal(sums.covariance(), again.covariance())


# ---------------------------------------------------------------- modules
def test_a_shared_module_counts_each_call_under_one_name():
    shared = nn.Linear(3, 3)
    net, before, after = nn.Sequential(shared, nn.Tanh(), shared), Recorder(), Recorder()
    with torch.no_grad(), capture(net, {"0:input": before, "0": after}):
        net(X)
    first = shared(X)
    second = shared(first.tanh())
    assert torch.equal(after.rows, torch.cat([first, second]).flatten(0, 1))
    assert torch.equal(before.rows, torch.cat([X, first.tanh()]).flatten(0, 1))


def test_the_silent_projection_of_multihead_attention():
    net = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    x = torch.randn(2, 3, 4)
    message = r"'self_attn\.out_proj' never fired.*out_proj.*never fires: capture the parent"
    with pytest.raises(RuntimeError, match=message), capture(net, {"self_attn.out_proj": Recorder()}):
        net(x)
    with torch.no_grad(), capture(net, {"self_attn": (parent := Recorder())}):
        net(x)
    assert len(parent.rows) == 6


@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_an_encoder_layer_is_left(padded):
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0))
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, sink = torch.randn(2, 3, 4), Recorder()
    padding = {"src_key_padding_mask": torch.tensor([[False] * 3, [False, False, True]])} if padded else {}
    with torch.no_grad():
        want = net(x, **padding)
        with capture(net, {"layers.0.linear2": sink, "layers.1.self_attn": Recorder()}, mask=None):
            got = net(x, **padding)
    keep = torch.ones(2, 3, dtype=torch.bool) if not padded else ~padding["src_key_padding_mask"]
    torch.testing.assert_close(got[keep], want[keep])  # another kernel: not to the last bit
    assert len(sink.rows) == 6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused():
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0))
    net, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval(), torch.randn(2, 3, 4)
    padding = torch.tensor([[False] * 3, [False, False, True]])
    for site, side in (("layers.0", "output"), ("layers.1:input", "input")):
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=rf"the {side} must be .* nested .* enable_nested_tensor=False"),
            capture(net, {site: Recorder()}, mask=None),
        ):
            net(x, src_key_padding_mask=padding)


def test_a_forward_that_is_a_generator_is_refused():
    class Streams(nn.Module):
        def forward(self, x):
            yield from x

    net = nn.Sequential(Streams())
    with (
        pytest.raises(ValueError, match=r"sites '0': the output must be .* got generator"),
        capture(net, {"0": Recorder()}),
    ):
        assert len(list(net(X))) == 3


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning")
def test_quantised_linear_layers():
    class Packed(nn.Module):
        """A linear layer of a kind of its own, as quantisation libraries have."""

        def __init__(self, linear):
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            scale = linear.weight.abs().max() / 127
            self.register_buffer("packed", (linear.weight / scale).round().to(torch.int8))
            self.scale, self.bias = scale.detach(), linear.bias

        def forward(self, x):
            return nn.functional.linear(x, self.packed * self.scale, self.bias)

    net = seeded(Net).eval()
    net.first = Packed(net.first)
    dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(net), {nn.Linear})
    assert not isinstance(dynamic.second[0], nn.Linear)
    for model in (net, dynamic):
        sinks = {"first": Recorder(), "first:input": Recorder(), "second.0": Recorder()}
        with torch.no_grad(), capture(model, sinks):
            model(X, LEFT)
        keep = LEFT.bool()
        assert torch.equal(sinks["first:input"].rows, X[keep])
        assert torch.equal(sinks["first"].rows, model.first(X)[keep])
        assert torch.equal(sinks["second.0"].rows, model.second[0](model.first(X))[keep])


# ---------------------------------------------------------------- copies
def test_a_copy_of_a_hooked_model_is_not_captured():
    net, sums = seeded(Net), Moments(3)
    with torch.no_grad(), capture(net, {"first": sums, "second:input": Recorder()}):
        net(X)
        average = copy.deepcopy(net)
        for parameter in average.parameters():
            parameter.mul_(0.5)
        average(X)
        file = io.BytesIO()
        torch.save(net, file)
    assert sums.n_samples == 15
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for model in (average, loaded):
        model(X)
        with torch.no_grad(), capture(model, {"first": (again := Recorder())}):
            model(X)
        assert len(again.rows) == 15
    assert torch.equal(loaded(X), net(X))
    assert sums.n_samples == 15


def test_an_averaged_model_goes_on_beside_the_hooked_one():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    net, sink = seeded(Net), Recorder()
    with capture(net, {"first": sink}):
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for _ in range(2):
            net(X).sum().backward()
            average.update_parameters(net)
            average(X)
    assert len(sink.rows) == 30


def test_a_copy_with_a_cache_site_forwards():
    model, sink = tiny(), Recorder()
    with torch.no_grad(), capture(model, {"model.layers.0.self_attn:k_rope": sink}):
        want = model(IDS).logits
        got = copy.deepcopy(model)(IDS).logits
    assert torch.equal(got, want)
    assert len(sink.batches) == 1


# ---------------------------------------------------------------- ways out of a forward
def test_an_exception_in_the_middle_counts_what_was_reached():
    net, first, second = seeded(Net), Recorder(), Recorder()
    hooks = hooks_on(net)
    with torch.no_grad(), capture(net, {"first": first, "second": second}):
        handle = net.second[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net(X, LEFT)
        handle.remove()
        net(X)
    assert [len(batch) for batch in first.batches] == [int(LEFT.sum()), 15]
    assert [len(batch) for batch in second.batches] == [15]
    assert hooks_on(net) == hooks


def test_an_early_exit_of_the_caller():
    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    net, sink = seeded(Net), Recorder()
    with torch.no_grad(), capture(net, {"first": sink}):
        handle = net.first.register_forward_hook(stop)  # behind ours
        with pytest.raises(Stop):
            net(X, LEFT)
        handle.remove()
        net(X)
    assert [len(batch) for batch in sink.batches] == [int(LEFT.sum()), 15]


# ---------------------------------------------------------------- placement
def test_models_that_accelerate_dispatched(tmp_path):
    from accelerate import cpu_offload, disk_offload, dispatch_model

    reference = tiny()
    with torch.no_grad():
        want = seen_by_plain_hooks(reference, "model.layers.0.mlp", lambda: reference(IDS))
        keys = Recorder()
        with capture(reference, {"model.layers.1.self_attn:k_rope": keys}):
            reference(IDS)
    placed = [
        dispatch_model(tiny(), {"": "cpu"}, force_hooks=True),
        cpu_offload(tiny(), execution_device="cpu"),
        disk_offload(tiny(), tmp_path, execution_device="cpu"),
    ]
    for model in placed:
        sink, again = Recorder(), Recorder()
        with (
            torch.no_grad(),
            capture(model, {"model.layers.0.mlp": sink, "model.layers.1.self_attn:k_rope": again}),
        ):
            model(IDS, attention_mask=torch.ones_like(IDS))
        assert torch.equal(sink.rows, want)
        assert torch.equal(again.rows, keys.rows)


def test_activations_of_tensor_parallelism():
    from pca_torch.hooks.tensors import whole

    class Placement:
        def __init__(self, replicated):
            self.replicated = replicated

        def is_replicate(self):
            return self.replicated

        def __repr__(self):
            return "Replicate()" if self.replicated else "Shard(dim=2)"

    class Spread:
        def __init__(self, *placements):
            self.placements = placements

        def to_local(self):
            return X

    assert whole(X) is X
    assert whole(Spread(Placement(True))) is X
    with pytest.raises(
        ValueError, match=r"DTensor placed as \(Replicate\(\), Shard\(dim=2\)\); capture a site"
    ):
        whole(Spread(Placement(True), Placement(False)))


DISTRIBUTED = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn

    from pca_torch.hooks import capture
    from tests.hooks.models import LEFT, Net, Recorder, seeded

    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0))
    keep = LEFT.bool()


    def check(model, want, x=x):
        sinks = {"first": Recorder(), "second:input": Recorder(), "module.first": Recorder()}
        if type(model).__name__ != "DistributedDataParallel":
            del sinks["module.first"]
        with capture(model, sinks):
            model(x, attention_mask=LEFT).sum().backward()
        for name, sink in sinks.items():
            assert torch.equal(sink.rows, want[keep]), name


    from torch.nn.parallel import DistributedDataParallel
    check(DistributedDataParallel(seeded(Net)), seeded(Net).first(x))

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (1,))
    net = seeded(Net)
    fully_shard(net.first, mesh=mesh)
    fully_shard(net, mesh=mesh)
    check(net, seeded(Net).first(x))

    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    for layout, fits in ((Shard(-1), False), (Replicate(), True)):
        net = nn.Sequential(seeded(Net).first)
        parallelize_module(net, mesh, {"0": ColwiseParallel(output_layouts=layout, use_local_output=False)})
        sink = Recorder()
        try:
            with torch.no_grad(), capture(net, {"0": sink}):
                out = net(x)
        except ValueError as error:
            assert not fits
            assert "sites '0': the activations are spread over ranks, a DTensor" in str(error), error
        else:
            assert fits
            assert torch.equal(sink.rows, seeded(Net).first(x).flatten(0, 1))
    dist.destroy_process_group()
    print("all is well")
"""


def test_distributed_wrappers(tmp_path):
    command = [
        sys.executable,
        "-W",
        "error::UserWarning:pca_torch",
        "-c",
        textwrap.dedent(DISTRIBUTED),
        str(tmp_path / "store"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.endswith("all is well\n"), done.stderr
