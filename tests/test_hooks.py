"""Capture: which rows reach a sink, under what name, and what is left behind."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from pca_torch.hooks import canonical_name, capture, match_sites
from tests.cases.reported import compare
from tests.hooks.models import tiny
from tests.support import reported_case

LEFT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
RIGHT = LEFT.flip(1)


class Recorder:
    """A statistic that keeps what it was given."""

    def __init__(self):
        self.seen = []

    def update(self, x, *, mask=None):
        self.seen.append((x, mask))


class Refuses:
    """A statistic that refuses every batch."""

    def update(self, x, *, mask=None):
        raise ValueError("12 rows are NaN")


class Net(nn.Module):
    """Takes a padding mask like a transformer, and ignores it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))])

    def forward(self, x, attention_mask=None):
        for layer in self.layers:
            x = layer(x)
        return x


class Returns(nn.Module):
    """A root whose submodule `site` returns `make(x)`."""

    def __init__(self, make):
        super().__init__()
        self.site = nn.Module()
        self.site.forward = make

    def forward(self, x, attention_mask=None):
        self.site(x)
        return x


class Holder(nn.Module):
    """A wrapper with one child, called as DataParallel is: by position, names unknown."""

    def __init__(self, **child):
        super().__init__()
        for name, module in child.items():
            self.add_module(name, module)

    def forward(self, *args, **kwargs):
        return next(self.children())(*args, **kwargs)


@pytest.fixture(scope="module")
def llama():
    return tiny()


@pytest.fixture
def ids():
    return torch.randint(2, 50, LEFT.shape, generator=torch.Generator().manual_seed(1))


def hooks_on(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def with_float32_weights(case, x, weight):
    """The case with room for its weights: rounded to float32, while its answer has them in float64.

    |x·δw| ≤ u Σ|x||w| with u = 2⁻²⁴; the float64 products add next to nothing.
    """
    bound = 2**-24 * (x.abs() @ weight.abs().mT).max().item()
    return {**case, "tol": (0, 1.001 * bound)}


def counted(x, mask):
    return x.shape[:-1].numel() if mask is None else int(mask.sum())


def gather(rows):
    return {"rows": torch.cat(rows).detach().numpy(), "n_rows": sum(map(len, rows))}


# ---------------------------------------------------------------- reported cases
@pytest.mark.parametrize("kind", ["tensor", "tuple", "list", "mapping"])
def test_output_types(kind):
    case = reported_case("hook_output_types")
    net, rows = case["x"]["modules"][kind], []
    with capture(net, {case["x"]["layer"]: rows.append}):
        net(case["x"]["input"])
    case = with_float32_weights(case, case["x"]["input"], net.block.lin.weight)
    assert compare(case, gather(rows)) == []


def test_generate_steps():
    case = reported_case("hook_generate_steps")
    net, calls, rows = case["x"]["module"], case["x"]["calls"], []
    with capture(net, {case["x"]["layer"]: rows.append}):
        for call in calls:
            net(call)
    case = with_float32_weights(case, torch.cat(calls, 1), net.lin.weight)
    assert compare(case, gather(rows)) == []


def test_compiled_model_that_has_run():
    case = reported_case("hook_compiled_silent")
    rows = []
    with torch.no_grad(), capture(case["x"]["module"], {case["x"]["layer"]: rows.append}):
        case["x"]["module"](case["x"]["input"])
    assert compare(case, gather(rows)) == []


def test_compiled_model_that_has_run_behind_the_back():
    case = reported_case("hook_compiled_silent")
    rows = []
    with torch.no_grad(), capture(case["x"]["eager"], {case["x"]["layer"]: rows.append}):
        case["x"]["module"](case["x"]["input"])
    assert compare(case, gather(rows)) == []


def test_checkpointing_counts_once():
    case = reported_case("hook_checkpoint_double")
    rows = []
    with capture(case["x"]["module"], {case["x"]["layer"]: rows.append}):
        case["x"]["module"](case["x"]["input"]).backward()
    assert compare(case, gather(rows)) == []


def test_exception_leaves_no_hook():
    case = reported_case("hook_leak_exception")
    net, x, rows = case["x"]["module"], case["x"]["input"], []
    with pytest.raises(RuntimeError, match=r"^boom$"), capture(net, {case["x"]["layer"]: Recorder()}):
        net(x)
    left = hooks_on(net)
    net[1].armed = False
    with capture(net, {case["x"]["layer"]: rows.append}):
        net(x)
    assert compare(case, {"hooks_left": left, "n_rows_second": len(rows[0])}) == []


# ---------------------------------------------------------------- names and patterns
def test_patterns_stay_inside_a_segment(llama):
    assert match_sites(llama, "model.layers.*") == ["model.layers.0", "model.layers.1"]
    assert match_sites(llama, "model.layers.?.mlp") == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert match_sites(llama, "model.layers.[1-9]") == ["model.layers.1"]
    assert match_sites(llama, "**.k_proj") == [f"model.layers.{i}.self_attn.k_proj" for i in (0, 1)]
    assert match_sites(llama, "model.**.mlp.**")[0] == "model.layers.0.mlp"
    assert match_sites(llama, "**") == [name for name, _ in llama.named_modules() if name]


def test_patterns_give_model_order_without_duplicates(llama):
    want = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert match_sites(llama, ["lm_head", "model.layers.1", "model.layers.*", "model.embed_tokens"]) == want


def test_a_shared_module_is_listed_once():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    net.add_module("tied", net[0])
    assert match_sites(net, "*") == ["0", "1"]
    assert match_sites(net, "tied") == ["tied"]


def test_unknown_pattern_names_the_nearest(llama):
    with pytest.raises(ValueError, match=r"'modle\.layers\.\*', which is no submodule.*'model\.layers"):
        match_sites(llama, "modle.layers.*")
    with pytest.raises(ValueError, match="no submodules"):
        match_sites(nn.Linear(2, 2), "*")


@pytest.mark.parametrize(
    ("wrap", "raw"),
    [
        (lambda net: torch.compile(net, backend="eager"), "_orig_mod.layers.0"),
        (lambda net: Holder(module=net), "module.layers.0"),
        (lambda net: torch.compile(Holder(module=net), backend="eager"), "_orig_mod.module.layers.0"),
        (lambda net: Holder(module=torch.compile(net, backend="eager")), "module._orig_mod.layers.0"),
        (lambda net: Holder(_fsdp_wrapped_module=net), "_fsdp_wrapped_module.layers.0"),
        (checkpoint_wrapper, "_checkpoint_wrapped_module.layers.0"),
        (lambda net: Holder(base_model=Holder(model=net)), "base_model.model.layers.0"),
    ],
    ids=["compile", "parallel", "compile_parallel", "parallel_compile", "fsdp", "checkpoint", "peft"],
)
def test_wrappers_do_not_change_names(wrap, raw):
    net = Net()
    model, x = wrap(net), torch.randn(2, 4, 3)
    assert raw in dict(model.named_modules())
    assert canonical_name(model, raw) == "layers.0"
    assert match_sites(model, "**") == match_sites(net, "**")
    assert match_sites(model, raw) == ["layers.0"]
    keep = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    for name in ("layers.0", raw):
        rows = []
        with torch.no_grad(), capture(model, {name: rows.append}):
            model(x, keep)  # by position: only the wrapped forward knows which argument is the mask
        assert torch.equal(rows[0], net.layers[0](x)[keep.bool()])


def test_a_wrapper_inside_hides_behind_its_name():
    net = Net()
    net.layers[1] = checkpoint_wrapper(net.layers[1])
    assert match_sites(net, "layers.*") == ["layers.0", "layers.1"]
    assert canonical_name(net, "layers.1._checkpoint_wrapped_module.0") == "layers.1.0"
    rows = []
    with capture(net, {"layers.1": rows.append}):
        net(torch.randn(4, 3, requires_grad=True)).sum().backward()
    assert sum(map(len, rows)) == 4


def test_module_is_a_name_like_any_other_where_nothing_is_wrapped():
    net = nn.Sequential(OrderedDict(module=nn.Linear(2, 2), head=nn.Linear(2, 2)))
    assert canonical_name(net, "module") == "module"
    assert match_sites(net, "*") == ["module", "head"]


def test_unknown_site_is_refused_before_the_model_is_touched():
    net = Net()
    with (
        pytest.raises(ValueError, match=r"names 'layer\.0', 'x', no submodule.*'layer\.0': 'layers\.0'"),
        capture(net, {"layer.0": Recorder(), "layers.0": Recorder(), "x": Recorder()}),
    ):
        pytest.fail("the block must not be entered")
    assert hooks_on(net) == 0


def test_a_pattern_as_key_must_match_one_site():
    net, rows = Net(), []
    with capture(net, {"layers.*.0": rows.append}):
        net(torch.randn(4, 3))
    assert len(rows) == 1
    with pytest.raises(
        ValueError, match=r"'layers\.\*' for 'layers\.0:output', 'layers\.1:output'.*find_sites"
    ):
        capture(net, {"layers.*": rows.append}).__enter__()


@pytest.mark.parametrize(
    ("sinks", "mask", "message"),
    [
        (
            {"layers.0": 3},
            None,
            r"`sinks\['layers\.0'\]` must be callable or have an `update` method, got int",
        ),
        ({"layers.0": print}, 3, "`mask` must be an argument's name, a callable or None, got int"),
    ],
)
def test_wrong_kinds(sinks, mask, message):
    with pytest.raises(TypeError, match=message):
        capture(Net(), sinks, mask=mask).__enter__()


# ---------------------------------------------------------------- masks
@pytest.mark.parametrize("padding", [LEFT, RIGHT], ids=["left", "right"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_padded_rows_never_count(llama, ids, padding, dtype):
    statistic, rows = Recorder(), []
    with torch.no_grad(), capture(llama, {"model.layers.0": statistic, "model.layers.1.mlp": rows.append}):
        llama(ids, attention_mask=padding.to(dtype))
        llama(ids, padding.to(dtype))
        llama(ids)
    masks = [mask for _, mask in statistic.seen]
    assert torch.equal(masks[0], padding.bool())
    assert torch.equal(masks[1], padding.bool())
    assert masks[2] is None
    assert [len(r) for r in rows] == [padding.sum(), padding.sum(), padding.numel()]


def test_kept_rows_are_the_right_ones(llama, ids):
    rows = []
    with torch.no_grad(), capture(llama, {"model.layers.0": rows.append}):
        hidden = llama(ids, attention_mask=LEFT, output_hidden_states=True).hidden_states[1]
    assert torch.equal(rows[0], hidden[LEFT.bool()])


def test_generate_counts_prefill_and_steps(llama, ids):
    statistic = Recorder()
    with capture(llama, {"model.layers.1": statistic}):
        llama.generate(ids, attention_mask=LEFT, max_new_tokens=4, do_sample=False)
    assert [tuple(x.shape) for x, _ in statistic.seen] == [(3, 5, 32), (3, 1, 32), (3, 1, 32), (3, 1, 32)]
    assert [counted(*one) for one in statistic.seen] == [LEFT.sum(), 3, 3, 3]


def test_generate_past_the_root_has_the_mask_too(llama, ids):
    statistic = Recorder()
    model = Holder(base_model=Holder(model=llama))
    with capture(model, {"model.layers.1": statistic}):
        llama.generate(ids, attention_mask=LEFT, max_new_tokens=2, do_sample=False)
        llama.model(ids, attention_mask=LEFT)
    assert [counted(*one) for one in statistic.seen] == [LEFT.sum(), 3, LEFT.sum()]


def test_embeddings_in_a_decoding_step(llama, ids):
    statistic = Recorder()
    embedded = llama.model.embed_tokens(ids)
    with torch.no_grad(), capture(llama, {"model.layers.0": statistic}):
        seen = llama(inputs_embeds=embedded[:, :3], attention_mask=RIGHT[:, :3], use_cache=True)
        llama(inputs_embeds=embedded[:, 3:], attention_mask=RIGHT, cache=seen.cache)
    assert torch.equal(torch.cat([mask for _, mask in statistic.seen], 1), RIGHT.bool())


@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: Holder(module=net)], ids=["bare", "wrapped"])
def test_a_step_by_position_and_by_name(wrap):
    model, statistic = wrap(Net()), Recorder()
    x = torch.randn(3, 2, 3)
    with capture(model, {"layers.0": statistic}):
        model(x, RIGHT)
        model(x, attention_mask=RIGHT)
    assert all(torch.equal(mask, RIGHT[:, -2:].bool()) for _, mask in statistic.seen)


def test_a_flat_output_takes_the_flat_mask_and_heads_the_mask_of_their_token():
    keep = RIGHT.bool()
    x = torch.randn(3, 5, 4)
    for make, want in (
        (lambda x: x.flatten(0, 1), x[keep]),
        (lambda x: x.unflatten(-1, (2, 2)), x[keep].reshape(-1, 2)),
    ):
        rows, statistic = [], Recorder()
        net = Returns(make)
        for sink in (rows.append, statistic):
            with capture(net, {"site:rows": sink}):
                net(x, attention_mask=RIGHT)
        seen, mask = statistic.seen[0]
        assert torch.equal(rows[0], want)
        assert torch.equal(seen[mask], want)


def test_other_masks():
    net, x = Net(), torch.randn(3, 5, 3)
    for mask in ("attention_mask", lambda module, args, kwargs: kwargs["attention_mask"]):
        rows = []
        with capture(net, {"layers.0": rows.append}, mask=mask):
            net(x, attention_mask=RIGHT)
        assert len(rows[0]) == RIGHT.sum()
    for mask in (None, "labels", lambda *_: None):
        rows = []
        with capture(net, {"layers.0": rows.append}, mask=mask):
            net(x, attention_mask=RIGHT)
        assert len(rows[0]) == RIGHT.numel()


def test_a_mask_among_keyword_arguments():
    class Loose(nn.Sequential):
        def forward(self, input, **kwargs):
            return super().forward(input)

    net, rows = Loose(nn.Linear(3, 3)), []
    with capture(net, {"0": rows.append}):
        net(torch.randn(3, 5, 3), attention_mask=RIGHT)
    assert len(rows[0]) == RIGHT.sum()


def test_the_mask_is_forgotten_after_the_forward():
    net, statistic = Net(), Recorder()
    x = torch.randn(3, 5, 3)
    with capture(net, {"layers.0": statistic}):
        net(x, RIGHT)
        net.layers[0](x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.randn(3, 5, 4), RIGHT)
        net.layers[0](x)
    assert [mask is None for _, mask in statistic.seen] == [False, True, True]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.ones(3, 1, 5, 5),
            r"`attention_mask` must be a 2-D tensor.*got shape \(3, 1, 5, 5\).*callable",
        ),
        ([[1] * 5] * 3, r"`attention_mask` must be a 2-D tensor.*got list"),
        (RIGHT * 0.5, "`attention_mask` must hold 0 and 1 only"),
        (torch.full((3, 5), torch.nan), "`attention_mask` must hold 0 and 1 only"),
        (
            torch.ones(2, 5),
            r"sites 'layers\.0': the activations of shape \(3, 5, 3\) do not fit the mask \(2, 5\)",
        ),
        (torch.ones(3, 4), r"sites 'layers\.0': .*do not fit the mask \(3, 4\)"),
    ],
)
def test_masks_that_select_nothing_certain_are_refused(mask, message):
    net = Net()
    with pytest.raises(ValueError, match=message), capture(net, {"layers.0": Recorder()}):
        net(torch.randn(3, 5, 3), mask)
    assert hooks_on(net) == 0


def test_a_pooled_output_is_no_decoding_step():
    net = Returns(lambda x: x[:, ::2])
    message = r"sites 'site': the activations of shape \(3, 3, 2\) do not fit the mask \(3, 5\)"
    with pytest.raises(ValueError, match=message), capture(net, {"site": Recorder()}):
        net(torch.randn(3, 5, 2), attention_mask=RIGHT)


# ---------------------------------------------------------------- outputs
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: (item for item in x), "must be or hold a floating tensor, got generator"),
        (lambda x: None, "got NoneType"),
        (lambda x: x.long(), r"got a tensor of torch\.int64"),
        (lambda x: (x.long(), [None]), "got tuple"),
        (lambda x: {"loss": x.sum()}, r"must have shape \(\.\.\., D\), two or more, got dict with \(\)"),
        (lambda x: x[0], r"got Tensor with \(2,\)"),
    ],
)
def test_outputs_without_samples(make, message):
    net = Returns(make)
    with pytest.raises(ValueError, match=f"sites 'site': .*{message}"), capture(net, {"site": Recorder()}):
        net(torch.randn(3, 2))


def test_the_first_floating_tensor_counts_one_container_deep():
    x = torch.randn(3, 2)
    for make in (lambda x: (x.long(), x), lambda x: [[x], x + 1], lambda x: {"a": None, "b": (x, 2 * x)}):
        rows, net = [], Returns(make)
        with capture(net, {"site": rows.append}):
            net(x)
        assert torch.equal(rows[0], x)


def test_model_outputs_and_attention_tuples(llama, ids):
    logits, base, attention = [], [], []
    sinks = {"": logits.append, "model": base.append, "model.layers.0.self_attn": attention.append}
    with torch.no_grad(), capture(llama, sinks):
        out = llama(ids, output_hidden_states=True)
    assert torch.equal(logits[0], out.logits.flatten(0, 1))
    assert torch.equal(base[0], out.hidden_states[-1].flatten(0, 1))
    assert attention[0].shape == (ids.numel(), 32)


def test_capturing_changes_nothing(llama, ids):
    sites = match_sites(llama, ["model.embed_tokens", "model.layers.**", "model.norm", "lm_head"])
    sites.remove("model.layers")  # a ModuleList is never called
    sinks, hooks = {name: Recorder() for name in sites}, hooks_on(llama)
    with torch.no_grad():
        want = llama(ids, attention_mask=LEFT).logits
        with capture(llama, sinks):
            got = llama(ids, attention_mask=LEFT).logits
        assert torch.equal(got, want)
        assert torch.equal(llama(ids, attention_mask=LEFT).logits, want)
    assert all(len(sink.seen) == 1 for sink in sinks.values())
    assert hooks_on(llama) == hooks  # transformers keeps some of its own


def test_rows_outlive_in_place_operations():
    net, rows = Net(), []
    x = torch.randn(50, 3)
    with torch.no_grad(), capture(net, {"layers.1.0": rows.append}):
        net(x)
    want = net.get_submodule("layers.1.0")(net.layers[0](x))
    assert want.min() < 0  # what the ReLU in place behind it would have overwritten
    assert torch.equal(rows[0], want)


def test_statistics_get_the_output_itself_detached():
    net, statistic = Net(), Recorder()
    x = torch.randn(4, 3)
    with capture(net, {"layers.1": statistic}):
        out = net(x)
    assert out.requires_grad
    assert not statistic.seen[0][0].requires_grad
    assert statistic.seen[0][0].data_ptr() == out.data_ptr()


def test_sinks_run_without_autograd_autocast_or_inference_mode():
    net, products = nn.Linear(3, 3), []

    def product(rows):
        assert not torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        products.append(rows.float().mT @ rows.float())

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), capture(net, {"": product}):
        assert net(torch.randn(4, 3)).dtype == torch.bfloat16
    assert products[0].dtype == torch.float32
    products[0] += 1  # an inference tensor would refuse


# ---------------------------------------------------------------- errors and order of events
def test_errors_of_sinks_are_raised_once_after_the_forward():
    net, last = Net(), Recorder()
    x = torch.randn(4, 3)
    with capture(net, {"layers.0": Refuses(), "layers.1.0": Refuses(), "layers.1": last}):
        with pytest.raises(
            ValueError, match=r"^sites 'layers\.0', 'layers\.1\.0': 12 rows are NaN$"
        ) as caught:
            net(x)
        assert str(caught.value.__cause__) == "12 rows are NaN"
    assert torch.equal(last.seen[0][0], net(x))
    assert hooks_on(net) == 0


def test_the_first_error_of_a_site_is_the_one_told():
    shared, messages = nn.Linear(3, 3), iter(["first", "second"])

    def refuse(rows):
        raise ValueError(next(messages))

    net = nn.Sequential(shared, shared)
    with pytest.raises(ValueError, match=r"^sites '0': first$"), capture(net, {"0": refuse}):
        net(torch.randn(4, 3))
    assert next(messages, None) is None


def test_errors_of_sinks_are_raised_on_leaving_when_a_submodule_was_called():
    net = Net()
    with pytest.raises(ValueError, match=r"sites '1': 12 rows"), capture(net.layers, {"1": Refuses()}):
        net(torch.randn(4, 3))
    assert hooks_on(net) == 0


def test_the_error_of_the_block_comes_before_those_held():
    layers = Net().layers
    with pytest.raises(IndexError), capture(layers, {"0": Refuses(), "1": Recorder()}):
        layers[layers[0](torch.randn(4, 3)).numel()]
    assert hooks_on(layers) == 0


def test_sites_that_never_fired_are_named():
    net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(12)])
    context = capture(net, {str(i): Recorder() for i in range(12)})
    with pytest.raises(RuntimeError, match=r"sites '0', .*'9' and 2 more never fired"), context:
        pass
    net, hint = nn.MultiheadAttention(4, 2), r"'out_proj' never fired.*MultiheadAttention.*capture the parent"
    with pytest.raises(RuntimeError, match=hint), capture(net, {"out_proj": Recorder()}):
        net(*[torch.randn(3, 1, 4)] * 3)


def test_contexts_nest_and_repeat():
    net, outer, inner = Net(), Recorder(), Recorder()
    x = torch.randn(3, 5, 3)
    with capture(net, {"layers.0": outer}):
        net(x, RIGHT)
        for _ in range(2):
            with capture(net, {"layers.0": inner, "layers.1": Recorder()}):
                net(x, LEFT)
        net(x)
    assert [int(mask.sum()) for _, mask in outer.seen[:3]] == [RIGHT.sum(), LEFT.sum(), LEFT.sum()]
    assert outer.seen[3][1] is None
    assert len(inner.seen) == 2


def test_a_mask_refused_in_one_context_does_not_unsettle_the_other():
    net, statistic = Net(), Recorder()
    x = torch.randn(3, 5, 3)
    with capture(net, {"layers.0": statistic}, mask=None), capture(net, {"layers.0": Recorder()}):
        with pytest.raises(ValueError, match="must hold 0 and 1"):
            net(x, RIGHT * 0.5)
        net(x, RIGHT)
    assert len(statistic.seen) == 1


def test_reentrant_checkpointing_counts_once():
    net, rows = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []
    x = torch.randn(4, 3, requires_grad=True)
    with capture(net, {"0": rows.append}):
        checkpoint(net, x, use_reentrant=True).sum().backward()
    assert sum(map(len, rows)) == 4


def test_modules_compiled_in_place_are_captured():
    net, rows = Net(), []
    net.layers[1].compile(backend="eager")
    x = torch.randn(4, 3)
    with torch.no_grad():
        net(x)
        with capture(net, {"layers.1.0": rows.append}):
            net(x)
    assert torch.equal(rows[0], net.get_submodule("layers.1.0")(net.layers[0](x)))


def test_compiling_inside_the_block_keeps_the_mask():
    net, rows = Net(), []
    compiled = torch.compile(net, backend="eager")
    x = torch.randn(3, 5, 3)
    with torch.no_grad(), capture(net, {"layers.0": rows.append}):
        for _ in range(3):
            compiled(x, RIGHT)
    assert [len(r) for r in rows] == [RIGHT.sum()] * 3


def test_a_module_is_no_sink():
    import pca_torch as pt

    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="pass its `partial_fit`"), capture(model, {"0": pt.PCA()}):
        pass
    pca = pt.PCA()
    with capture(model, {"0": pca.partial_fit}):
        model(torch.randn(5, 2, generator=torch.Generator().manual_seed(0)))
    assert pca.n_samples_ == 5
