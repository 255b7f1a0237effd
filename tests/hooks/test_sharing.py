"""Sites that see the same tensor share one statistic until they part: no row is lost, none doubled."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pca_torch.hooks import capture
from pca_torch.sites import find_sites
from tests.hooks.models import IDS, LEFT, Copying, CopyingMoments, Recorder, tiny

QKV = [f"model.layers.0.self_attn.{name}_proj:input" for name in "qkv"]


class Fork(nn.Module):
    """Two branches that see what the caller says, in the order that the caller says."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, *calls):
        for name, x in calls:
            getattr(self, name)(x)


def rows_of(name, calls):
    """What a site of `Fork` sees of the calls of several forwards."""
    seen = [x for forward in calls for site, x in forward if site == name]
    return torch.cat(seen) if seen else torch.empty(0, 2)


def run(calls, sinks, **options):
    """Capture the forwards of `calls`; who shares with whom at the end of each."""
    net, shared = Fork(), []
    with (
        torch.no_grad(),
        capture(net, {f"{name}:input": sink for name, sink in sinks.items()}, **options) as captured,
    ):
        for forward in calls:
            net(*forward)
            shared.append({k[0]: v[0] for k, v in captured.shared.items()})
    return shared


def held(sinks, shared, name):
    """Rows that the capture has for a site: in its sink, or in that of its leader."""
    batches = sinks[shared.get(name, name)].batches
    return torch.cat(batches) if batches else torch.empty(0, 2)


X = [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for i in range(6)]
SAME = [("a", X[0]), ("b", X[0]), ("c", X[0])]
SCENES = {
    "always the same": ([SAME, [("a", X[1]), ("b", X[1]), ("c", X[1])]], [{"b": "a", "c": "a"}] * 2),
    "never the same": ([[("a", X[0]), ("b", X[1]), ("c", X[0].clone())]], [{}]),
    "one parts": ([SAME, [("a", X[1]), ("b", X[2]), ("c", X[1])]], [{"b": "a", "c": "a"}, {"c": "a"}]),
    "the last parts after one agreed": (
        [SAME, [("a", X[1]), ("b", X[1]), ("c", X[2])]],
        [{"b": "a", "c": "a"}, {"b": "a"}],
    ),
    "one stays away": ([SAME, [("a", X[1]), ("c", X[1])], SAME], [{"b": "a", "c": "a"}] + [{"c": "a"}] * 2),
    "the leader stays away": ([SAME, [("b", X[1]), ("c", X[1])]], [{"b": "a", "c": "a"}, {}]),
    "only the leader comes": ([SAME, [("a", X[1])]], [{"b": "a", "c": "a"}, {}]),
    "the leader comes late": (
        [SAME, [("b", X[1]), ("a", X[1]), ("c", X[1])]],
        [{"b": "a", "c": "a"}, {"c": "a"}],
    ),
    "all come twice": (
        [[*SAME, ("a", X[1]), ("b", X[1]), ("c", X[1])], SAME],
        [{"b": "a", "c": "a"}] * 2,
    ),
    "the leader comes twice before": (
        [SAME, [("a", X[1]), ("a", X[2]), ("b", X[1]), ("c", X[2])]],
        [None, None],
    ),
    "a follower comes twice": (
        [SAME, [("a", X[1]), ("b", X[1]), ("c", X[1]), ("b", X[1])]],
        [None, {"c": "a"}],
    ),
    "the leader comes twice at first": ([[("a", X[0]), ("a", X[1]), ("b", X[0])], [("c", X[2])]], [{}, {}]),
    "a follower agrees, comes again, and the leader waits": (
        [SAME, [("a", X[1]), ("b", X[1]), ("b", X[2]), ("c", X[1])], SAME],
        [None, {"c": "a"}, {"c": "a"}],
    ),
    "one is new in a later forward": (
        [[("a", X[0])], [("a", X[1]), ("b", X[1]), ("c", X[1])]],
        [{}, {"c": "b"}],
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_site_has_its_own_rows_once(scene):
    calls, want = SCENES[scene]
    sinks = {name: Copying() for name in "abc"}
    shared = run(calls, sinks, share=True)
    for name in "abc":
        got, truth = held(sinks, shared[-1], name), rows_of(name, calls)
        assert got.shape == truth.shape
        assert torch.equal(got, truth)
    for seen, expected in zip(shared, want, strict=True):
        assert expected is None or seen == expected
    for follower in shared[-1]:
        assert not sinks[follower].batches  # counted once, not copied


def test_random_scenes():
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    parted = 0
    for _ in range(300):
        calls = []
        for _ in range(4):
            x, forward = X[draw(6)], []
            for name in "abc":
                forward += [(name, x if draw(8) else X[draw(6)])] * (1 if draw(8) else draw(3))
            if not draw(6):
                forward.reverse()
            calls.append(forward)
        if any(not any(name == site for forward in calls for site, _ in forward) for name in "abc"):
            continue
        sinks = {name: Copying() for name in "abc"}
        shared = run(calls, sinks, share=True)
        parted += len(shared[-1]) < len(shared[0])
        for name in "abc":
            got, truth = held(sinks, shared[-1], name), rows_of(name, calls)
            order = [t[t[:, 0].argsort()] for t in (got, truth)]  # one that waited may be counted late
            assert torch.equal(*order)
    assert parted > 20


@pytest.mark.parametrize("mask", ["attention_mask", None])
def test_projections_of_one_input_share(mask):
    model = tiny()
    names = [*QKV, "model.layers.0.mlp.gate_proj:input", "model.layers.0.mlp.up_proj:input"]
    names += ["model.layers.0", "model.layers.1:input"]
    sinks, alone = ({name: CopyingMoments(32) for name in names} for _ in range(2))
    with torch.no_grad():
        with capture(model, alone, mask=mask):
            for ids in (IDS, IDS.flip(0)):
                model(ids, attention_mask=LEFT)
        with capture(model, sinks, mask=mask, share=True) as captured:
            for ids in (IDS, IDS.flip(0)):
                model(ids, attention_mask=LEFT)
    assert captured.shared == {names[1]: names[0], names[2]: names[0], names[4]: names[3], names[6]: names[5]}
    for name in names:
        mine = sinks[captured.shared.get(name, name)]
        assert mine.n_samples == alone[name].n_samples > 0
        assert torch.equal(mine.covariance(), alone[name].covariance())  # the same rows in the same batches
    assert all(sinks[follower].n_samples == 0 for follower in captured.shared)


def test_a_later_capture_goes_on():
    model = tiny()
    sinks, alone = ({name: CopyingMoments(32) for name in QKV} for _ in range(2))
    shared = True
    for ids in (IDS, IDS.flip(0)):
        with torch.no_grad(), capture(model, sinks, share=shared) as captured:
            model(ids)
        with torch.no_grad(), capture(model, alone):
            model(ids)
        shared = captured.shared
    assert shared == {QKV[1]: QKV[0], QKV[2]: QKV[0]}
    assert torch.equal(sinks[QKV[0]].covariance(), alone[QKV[2]].covariance())
    assert sinks[QKV[2]].n_samples == 0


def test_sinks_that_hold_rows_already_do_not_share():
    x = X[0]
    for filled in "ab":
        sinks = {name: CopyingMoments(2) for name in "ab"}
        sinks[filled].update(X[1])
        assert run([[("a", x), ("b", x)]], sinks, share=True) == [{}]
        assert [sinks[name].n_samples for name in "ab"] == [4 + 4 * (name == filled) for name in "ab"]


def test_what_must_not_share():
    x = X[0]
    both = [[("a", x), ("b", x)]]
    one = Copying()
    assert run(both, {"a": one, "b": one}, share=True) == [{}]  # one sink that pools two sites
    assert len(one.rows) == 8
    for sinks in ({"a": Copying(), "b": Recorder()}, {"a": CopyingMoments(2), "b": Copying()}):
        assert run(both, sinks, share=True) == [{}]
    sinks = {"a": Copying(), "b": Copying()}
    assert run(both, sinks) == [{}]
    assert [len(sink.rows) for sink in sinks.values()] == [4, 4]
    with torch.inference_mode():  # whose tensors do not count changes
        hidden = x + 0
        sinks = {"a": Copying(), "b": Copying()}
        assert run([[("a", hidden), ("b", hidden)]], sinks, share=True) == [{}]
    with capture(
        net := Fork(), {"a:input": (sink := Copying()), "b:input": (other := Copying())}, share=True
    ) as c:
        net.a(x)  # no forward of the model: when it ends is not known
        net.b(x)
        assert c.shared == {}
    assert len(sink.rows) == len(other.rows) == 4


def test_other_rows_of_the_same_tensor_do_not_share():
    model = tiny()
    q, k = find_sites(model, QKV[:2])
    narrowed = replace(k, only=lambda module, args, kwargs, output: args[0][..., 0] > 0)
    sinks = {q: Copying(), narrowed: Copying()}
    with torch.no_grad(), capture(model, sinks, share=True) as captured:
        model(IDS)
    assert captured.shared == {}
    assert 0 < len(sinks[narrowed].rows) < len(sinks[q].rows)


def test_a_change_in_place_between_two_sites_parts_them():
    class Net(Fork):
        def forward(self, x):
            x = self.a(x)
            x += 1
            self.b(x)

    net, sinks, x = Net(), {"a:input": Copying(), "b:input": Copying()}, X[0].clone()
    with torch.no_grad(), capture(net, sinks, share=True) as captured:
        net(x)
    assert captured.shared == {}
    assert torch.equal(sinks["b:input"].rows, sinks["a:input"].rows + 1)


def test_a_change_in_place_that_comes_later_is_an_error():
    class Net(Fork):
        def forward(self, x, change):
            x = self.a(x)
            if change:
                x += 1
            self.b(x)

    net, sinks = Net(), {"a:input": Copying(), "b:input": Copying()}
    with torch.no_grad(), capture(net, sinks, share=True):
        net(X[0], False)
        with pytest.raises(ValueError, match=r"sites 'a:input': .* changed in place .* `share=False`"):
            net(X[1].clone(), True)


def test_a_tensor_that_is_gone_is_not_mistaken_for_its_successor():
    class Net(Fork):
        def forward(self):
            places = []
            for i, site in enumerate((self.a, self.b)):
                x = torch.full((3, 2), float(i))
                places.append(id(x))
                site(x)
                del x
            return places

    net, sinks, again = Net(), {"a:input": Copying(), "b:input": Copying()}, 0
    for _ in range(20):
        sinks = {"a:input": Copying(), "b:input": Copying()}
        with torch.no_grad(), capture(net, sinks, share=True) as captured:
            first, second = net()
        again += first == second  # the successor has the identity of the one before
        assert captured.shared == {}
        assert [sink.rows.mean().item() for sink in sinks.values()] == [0, 1]
    assert again


def test_an_exception_in_a_forward_leaves_each_site_its_rows():
    class Net(Fork):
        def forward(self, x, fail):
            self.a(x)
            if fail:
                raise ArithmeticError("boom")
            self.b(x)

    net, sinks = Net(), {"a:input": Copying(), "b:input": Copying()}
    with torch.no_grad(), capture(net, sinks, share=True) as captured:
        net(X[0], False)
        assert captured.shared == {"b:input": "a:input"}
        with pytest.raises(ArithmeticError):
            net(X[1], True)
        assert captured.shared == {}
        net(X[2], False)
    assert torch.equal(sinks["a:input"].rows, torch.cat(X[:3]))
    assert torch.equal(sinks["b:input"].rows, torch.cat([X[0], X[2]]))


def test_leaders_of_sites_that_are_not_captured_are_refused():
    with (
        pytest.raises(ValueError, match="`share` names 'x', which is not captured"),
        capture(Fork(), {"a": Copying()}, share={"a": "x"}),
    ):
        pytest.fail("the block must not be entered")
