import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from pca_torch.export import load, save
from pca_torch.head_moments import HeadMoments
from pca_torch.heads import decompose_heads
from pca_torch.layout import check_site, pack_site, unpack_site
from pca_torch.result import Certificate, PCAResult
from tests.support import samples, truth


def certificate(k: int, **changes) -> Certificate:
    values = {
        "captured_ratio": 0.1 + 0.2,
        "missed_ratio_bound": 5e-324,
        "bound_kind": "probability 1-η",
        "variance_error": tuple(1 / (i + 3) for i in range(k)),
        "rounding_floor": 1e-17,
        "trusted": k,
        "quantisation_floor": None,
        "residual_norms": (0.0,) * k,
        "gap": 0.25,
        "angle_bound": math.pi / 2,
        "unique": True,
        "solver": "full",
        "precision": "float64",
        "fallbacks": ("tried λ",),
    }
    return Certificate(**{**values, **changes})


def result(
    n=40, d=6, k=3, *, m=None, dtype=torch.float64, seed=0, standardised=False, centred=True, whiten=False
) -> PCAResult:
    """A decomposition by numpy's route, with K of the directions and M of the variances."""
    x = samples(n, d, offset=2.0, seed=seed)
    mean, scale = x.mean(0), x.std(0) if standardised else None
    rows = (x - mean) / (1.0 if scale is None else scale)
    if centred:
        _, variance, vh = truth(rows)
        divisor, total = n - 1, rows.var(0).sum()
    else:
        _, s, vh = torch.linalg.svd(x, full_matrices=False)
        variance, mean, divisor, total = s**2 / n, torch.zeros(d).double(), n, x.square().sum() / n
    return PCAResult(
        mean=mean,
        components=vh[:k].to(dtype).contiguous(),
        spectrum=variance[: d if m is None else m].clone(),
        total_variance=total,
        n_samples=n,
        divisor=divisor,
        certificate=certificate(k),
        scale=scale,
        centred=centred,
        whiten=whiten,
    )


def assert_same(got: PCAResult, want: PCAResult) -> None:
    for name in ("mean", "components", "spectrum", "total_variance", "scale"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None)
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), name
    for name in ("n_samples", "divisor", "centred", "whiten", "certificate"):
        a, b = getattr(got, name), getattr(want, name)
        assert (type(a), a) == (type(b), b), name


def uneven() -> list[PCAResult]:
    """Groups with other K and other M each."""
    return [result(k=2, m=4), result(k=5, seed=1), result(k=0, m=0, seed=2)]


def test_groups_are_padded_with_zeros_and_come_back_without():
    groups = uneven()
    tensors, facts = pack_site(groups)
    assert {kind: tuple(t.shape) for kind, t in tensors.items()} == {
        "components": (3, 5, 6),
        "explained_variance": (3, 6),
        "mean": (3, 6),
        "total_variance": (3,),
        "n_samples": (3,),
        "rank": (3,),
    }
    assert tensors["rank"].tolist() == [2, 5, 0]
    assert not tensors["components"][0, 2:].any()
    assert not tensors["explained_variance"][0, 4:].any()
    check_site(tensors, facts)
    for got, want in zip(unpack_site(tensors, facts), groups, strict=True):
        assert_same(got, want)


def test_equal_groups_need_no_rank():
    assert "rank" not in pack_site([result(), result(seed=1)])[0]


def test_neither_the_tensors_nor_the_results_share_memory():
    first = result()
    tensors, facts = pack_site([first])
    (got,) = unpack_site(tensors, facts)
    for tensor in tensors.values():
        tensor.zero_()
    assert_same(got, first)
    assert_same(first, result())


@pytest.mark.parametrize(
    "other",
    [result(d=7), result(dtype=torch.float32), result(standardised=True)],
    ids=["d", "dtype", "scale"],
)
def test_groups_that_do_not_fit_together_are_refused(other):
    with pytest.raises(ValueError, match="all groups must have the same features and dtype"):
        pack_site([result(), other])


def edit(kind: str, change: Callable[[torch.Tensor], object]) -> Callable:
    def apply(tensors, facts):
        changed = tensors[kind].clone()
        back = change(changed)
        tensors[kind] = back if isinstance(back, torch.Tensor) else changed

    return apply


def put(kind: str, place, value) -> Callable:
    return edit(kind, lambda t: t.__setitem__(place, value))


def fact(name: str, value) -> Callable:
    return lambda tensors, facts: facts[0].__setitem__(name, value)


def cert(name: str, value) -> Callable:
    return lambda tensors, facts: facts[0]["certificate"].__setitem__(name, value)


WRONG = [
    (lambda t, f: t.pop("mean"), r"lacks \['mean'\]"),
    (edit("components", lambda t: t[0]), r"`components` must be floating \(groups, K, features\)"),
    (edit("components", lambda t: t.long()), "`components` must be floating"),
    (edit("components", lambda t: t[:0]), "`components` must be floating"),
    (edit("components", lambda t: t[..., :0]), "`components` must be floating"),
    (edit("explained_variance", lambda t: t[:, :2]), "`explained_variance` must be between K = 5 and D = 6"),
    (edit("explained_variance", lambda t: torch.cat([t, t], 1)), "`explained_variance` must be between"),
    (edit("explained_variance", lambda t: t.sum()), "`explained_variance` must be between"),
    (edit("explained_variance", lambda t: t[:2]), r"`explained_variance` must be torch.float64 \(3, 6\)"),
    (edit("mean", lambda t: t[:, :5]), r"`mean` must be torch.float64 \(3, 6\), got torch.float64 \(3, 5\)"),
    (edit("mean", lambda t: t.float()), r"`mean` must be torch.float64 \(3, 6\), got torch.float32"),
    (edit("total_variance", lambda t: t[:, None]), r"`total_variance` must be torch.float64 \(3,\)"),
    (edit("n_samples", lambda t: t.double()), r"`n_samples` must be torch.int64 \(3,\)"),
    (put("components", (0, 0, 0), math.nan), "`components` holds NaN or inf"),
    (put("mean", (1, 1), math.inf), "`mean` holds NaN or inf"),
    (put("n_samples", 2, 0), "`n_samples` must be at least 1, got 0"),
    (put("total_variance", 0, -1.0), "`total_variance` must be at least 0, got -1.0"),
    (put("explained_variance", (0, 3), -1e-9), "`explained_variance` must be at least 0"),
    (lambda t, f: t.update(scale=torch.zeros(3, 6).double()), "`scale` must be positive"),
    (put("rank", 1, 4), "`rank` must be 5 at its largest, the components stored, got 4"),
    (put("rank", 1, 6), "`rank` must be 5 at its largest"),
    (put("rank", 2, -1), "`rank` must be at least 0"),
    (put("rank", 0, 1), "group 0: `variance_error` must have one value for each of 1 components, got 2"),
    (lambda t, f: f.pop(), "must have a list with the facts of its 3 groups"),
    (lambda t, f: f.__setitem__(1, [1]), "group 1: `facts` must have exactly the fields divisor"),
    (lambda t, f: f[0].pop("whiten"), "`facts` must have exactly the fields"),
    (fact("extra", 1), "`facts` must have exactly the fields"),
    (fact("divisor", "39"), "`divisor` must be float, got '39'"),
    (fact("divisor", True), "`divisor` must be float, got True"),
    (fact("divisor", 0), "`divisor` must be positive and finite, got 0"),
    (fact("divisor", math.nan), "`divisor` must be positive and finite"),
    (fact("centred", 1), "`centred` must be bool"),
    (fact("n_variances", 4.0), "`n_variances` must be int"),
    (fact("n_variances", 7), r"`n_variances` must be in 2\.\.6, got 7"),
    (fact("n_variances", 1), r"`n_variances` must be in 2\.\.6, got 1"),
    (fact("n_variances", 3), "what lies beyond `rank` and `n_variances` must be zero"),
    (lambda t, f: f[1].update(n_variances=5), "what lies beyond `rank` and `n_variances` must be zero"),
    (put("components", (0, 2, 0), 1e-300), "what lies beyond `rank` and `n_variances` must be zero"),
    (fact("certificate", None), "`certificate` must be dict"),
    (lambda t, f: f[0]["certificate"].pop("gap"), "`certificate` must have exactly the fields"),
    (cert("extra", 1), "`certificate` must have exactly the fields"),
    (cert("gap", "inf"), "`gap` must be float, got 'inf'"),
    (cert("unique", None), "`unique` must be bool"),
    (cert("solver", 3), "`solver` must be str"),
    (cert("fallbacks", ["a", 1]), "`fallbacks` must be tuple"),
    (cert("quantisation_floor", [1.0, "x"]), "`quantisation_floor` must be tuple"),
    (cert("quantisation_floor", [1.0]), "`quantisation_floor` must have one value for each of 2"),
    (cert("residual_norms", []), "`residual_norms` must have one value for each of 2 components, got 0"),
    (edit("explained_variance", lambda t: t[:, [1, 0, 2, 3, 4, 5]]), "must be in descending order"),
    (edit("total_variance", lambda t: t * 0.5), "must not add up to more than `total_variance`"),
    (edit("components", lambda t: t.mul_(1 + 1e-9)), "`components` must have orthonormal rows"),
    (put("components", (1, 4), torch.eye(6).double()[0]), "`components` must have orthonormal rows"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_whatever_is_wrong_with_a_site_is_named(wrong, message):
    tensors, facts = pack_site(uneven())
    check_site(tensors, facts)
    wrong(tensors, facts)
    with pytest.raises(ValueError, match=message):
        check_site(tensors, facts)


def test_all_variances_stored_must_be_counted():
    tensors, facts = pack_site([result(m=4)])
    tensors["explained_variance"][0, 3] = 0  # so that nothing but the count is wrong
    facts[0]["n_variances"] = 3
    with pytest.raises(
        ValueError, match="`n_variances` must be 4 at its largest, the variances stored, got 3"
    ):
        check_site(tensors, facts)


def test_a_null_direction_cannot_be_whitened():
    null = result(k=6)
    null.spectrum[-1] = 0
    check_site(*pack_site([null]))
    with pytest.raises(ValueError, match="must be positive where `whiten` divides by it"):
        check_site(*pack_site([replace(null, whiten=True)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("k", "d"), [(1, 1), (1, 300), (3, 4), (64, 64), (256, 512)])
def test_orthonormal_rows_of_the_working_dtype_pass_and_a_larger_error_does_not(k, d, dtype):
    """The tolerance is 100·u·√D; ten times that, in one row, must show in one of the eight probes."""
    v = torch.linalg.qr(torch.randn(d, k, generator=torch.Generator().manual_seed(1), dtype=dtype)).Q.mT
    ones, certified = torch.ones(k).double(), certificate(k)
    good = replace(result(), mean=torch.zeros(d).double(), components=v, spectrum=ones, certificate=certified)
    good = replace(good, total_variance=ones.sum())
    check_site(*pack_site([good]))
    off = 1000 * torch.finfo(dtype).eps / 2 * math.sqrt(d)
    bad = v.clone()
    bad[-1] *= 1 + off / 2  # its length squared is off by `off`
    with pytest.raises(ValueError, match="`components` must have orthonormal rows"):
        check_site(*pack_site([replace(good, components=bad)]))
    if k > 1:
        bad = v.clone()
        bad[-1] += off * v[0]
        with pytest.raises(ValueError, match="`components` must have orthonormal rows"):
            check_site(*pack_site([replace(good, components=bad)]))


def test_rounding_may_swap_neighbours_and_overshoot_the_total():
    r = result(k=2, dtype=torch.float32)
    u = torch.finfo(torch.float32).eps / 2
    r.spectrum[1] = r.spectrum[0] * (1 + 2 * u)  # two variances, each rounded by u of the largest
    r.spectrum[2:] = r.spectrum[0] * 0.5
    total = r.spectrum.sum()
    check_site(*pack_site([replace(r, total_variance=total * (1 - 6 * u))]))
    noise = max(r.certificate.variance_error) * len(r.spectrum)  # what clamping noise at zero may add
    with pytest.raises(ValueError, match="more than `total_variance`"):
        check_site(*pack_site([replace(r, total_variance=(total - noise) * 0.99)]))


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("n_components", [0.9, 2, None, 0])
def test_heads_of_one_layer_are_one_site(tmp_path, center, n_components):
    """G = heads: ranks that differ, a head that is constant, and either centring come back as they were."""
    x = torch.stack([samples(300, 6, decay=0.3 + 0.3 * i, offset=0.1, seed=i) for i in range(4)], 1)
    x[:, 3] = 2.0
    heads = HeadMoments(4, 6).update(x.float())
    with pytest.warns(UserWarning, match="total variance is zero") if center else nullcontext():
        results = decompose_heads(heads, n_components, center=center)
    if isinstance(n_components, float):
        assert len({one.n_components for one in results}) > 2
    save(tmp_path / "heads.safetensors", {"model.layers.0.self_attn:k": results})
    found = load(tmp_path / "heads.safetensors")["model.layers.0.self_attn:k"]
    assert isinstance(found, tuple)
    assert [one.centred for one in found] == [center] * 4
    for got, want in zip(found, results, strict=True):
        assert_same(got, want)
