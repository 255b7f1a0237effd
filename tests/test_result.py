"""The frozen result: derived numbers, scores, reconstruction and what it costs."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from pca_torch import Certificate, PCAResult, result

CERTIFICATE = Certificate(
    captured_ratio=0.9,
    missed_ratio_bound=0.0,
    bound_kind="deterministic",
    variance_error=(1e-15, 1e-15),
    rounding_floor=1e-15,
    trusted=2,
    quantisation_floor=None,
    residual_norms=(0.0, 0.0),
    gap=1.0,
    angle_bound=0.0,
    unique=True,
    solver="full",
    precision="float64",
)
MEAN = [10.0, -3.0, 0.5]
# two axes of a turned frame: every number below can be worked out by hand
COMPONENTS = [[0.6, 0.8, 0.0], [-0.8, 0.6, 0.0]]
X = torch.tensor([[11.0, -3, 0.5], [10, -1, 1.5], [9, -4, 0]], dtype=torch.float64)
U = torch.finfo(torch.float64).eps / 2


def make(**changes):
    """K=2 of D=3 with spectrum 9, 4, 1 from 11 rows."""
    values = {
        "mean": torch.tensor(MEAN, dtype=torch.float64),
        "components": torch.tensor(COMPONENTS, dtype=torch.float64),
        "spectrum": torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64),
        "total_variance": torch.tensor(16.0, dtype=torch.float64),
        "n_samples": 11,
        "divisor": 10.0,
        "certificate": CERTIFICATE,
    }
    return PCAResult(**(values | changes))


def scores_of(x, mean=MEAN, components=COMPONENTS):
    return (np.asarray(x, dtype=float) - np.asarray(mean)) @ np.asarray(components).T


def bound(x, dtype):
    """Forward error of a product of D=3 terms of this size, and of storing it: D + 2 roundings."""
    size = float(torch.as_tensor(x).double().abs().max()) + max(map(abs, MEAN))
    return (3 + 2) * torch.finfo(dtype).eps * 3 * size


def test_derived_numbers():
    found = make()
    assert (found.n_components, found.n_features) == (2, 3)
    assert found.explained_variance.tolist() == [9, 4]
    assert found.explained_variance_ratio.tolist() == [9 / 16, 4 / 16]  # of the total, not of 9 + 4 + 1
    np.testing.assert_allclose(found.singular_values, [math.sqrt(90), math.sqrt(40)], rtol=4 * U)


def test_ratios_of_a_total_of_zero_are_zero():
    zero = torch.zeros(3, dtype=torch.float64)
    assert make(spectrum=zero, total_variance=zero.sum()).explained_variance_ratio.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, 1.0),  # the one that was dropped is known
        ({"spectrum": torch.tensor([9.0, 4.0]).double()}, 3.0),  # unknown: what is left of the total
        ({"n_samples": 2}, 0.0),  # min(N, D) = 2 are all kept
        ({"spectrum": torch.tensor([9.0, 7.0 + 2**-20]).double()}, 0.0),  # rounding is not negative
    ],
    ids=["known", "rest_of_total", "none_dropped", "rounding"],
)
def test_noise_variance(changes, want):
    assert make(**changes).noise_variance == want


def test_the_result_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().n_samples = 3


def test_to_moves_every_tensor():
    moved = make(scale=torch.ones(3).double()).to("meta")
    tensors = {f.name: getattr(moved, f.name) for f in dataclasses.fields(moved)}
    tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    assert len(tensors) == 5
    assert all(t.device.type == "meta" for t in tensors.values())
    assert make().to("cpu").scale is None


def test_a_certificate_survives_json():
    certificate = dataclasses.replace(CERTIFICATE, quantisation_floor=(0.1, 0.2), fallbacks=("tried",))
    for one in (certificate, CERTIFICATE):
        assert Certificate.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Certificate.from_dict(CERTIFICATE.to_dict() | {"colour": 1})


# ---------------------------------------------------------------- transform
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_have_the_dtype_of_the_input(dtype):
    found = make(components=torch.tensor(COMPONENTS))
    x = X.to(dtype)  # exact in all four
    z = found.transform(x)
    assert z.dtype == dtype
    coarser = dtype if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps else torch.float32
    np.testing.assert_allclose(z.double(), scores_of(X), rtol=0, atol=bound(X, coarser))


@pytest.mark.parametrize("x", [[[11, -3, 1], [9, 0, 2]], np.array([[1, 0, 1]], bool)], ids=["int", "bool"])
def test_integers_give_scores_in_the_dtype_of_the_components(x):
    z = make().transform(x)
    assert z.dtype == torch.float64
    np.testing.assert_allclose(z, scores_of(x), rtol=0, atol=bound(np.asarray(x, float), torch.float64))


TURN = torch.tensor([[0.6, 0.8, 0.0], [0.8, -0.6, 0.0]])  # float32
KINDS = [torch.int32, torch.uint32, torch.int64, torch.uint64]


@pytest.mark.parametrize("dtype", KINDS)
def test_scores_of_integers_beyond_float32_keep_their_last_digit(dtype):
    found = make(components=TURN, mean=torch.tensor([0.0, 6 * 2**24, 0.0], dtype=torch.float64))
    x = torch.tensor([[4 * 2**24 + 3, 3 * 2**24 + 1, 0]])  # the first score nearly cancels
    z = found.transform(x.to(dtype))
    want = (x.double() - found.mean).numpy() @ TURN.double().numpy().T
    size = float((x - found.mean).abs().max())
    allowed = torch.finfo(torch.float32).eps * np.abs(want) + 5 * U * 3 * size  # stored, and the product
    assert bool((np.abs(z.double().numpy() - want) <= allowed).all())
    narrow = ((x - found.mean).float() @ TURN.mT).double().numpy()  # control: float32 on the way
    assert not bool((np.abs(narrow - want) <= allowed).all())


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("dtype", KINDS)
def test_integer_scores_beyond_float32_keep_their_last_digit(dtype, whiten):
    mean = torch.tensor([-(2.0**24) * (3 if whiten else 1), 0, 0], dtype=torch.float64)
    found = make(components=torch.eye(3)[:2], mean=mean, whiten=whiten)
    z = torch.tensor([[2**24 + 1, 2]])
    assert found.inverse_transform(z.to(dtype)).tolist() == [[3, 4, 0] if whiten else [1, 2, 0]]
    assert found.inverse_transform(z.float())[0, 0] == 0  # control: 2²⁴ + 1 has no float32


@pytest.mark.parametrize("dtype", [*KINDS, torch.uint16])
def test_the_reconstruction_error_of_integers_is_exact(dtype):
    found = make(components=torch.eye(3)[:2], mean=torch.zeros(3, dtype=torch.float64))
    x = torch.tensor([[1, 2, 60001]])
    assert found.reconstruction_error(x.to(dtype)) == 60001**2  # above 2²⁴, below 2⁵³


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 5, 3), (0, 3), (2, 0, 3)])
def test_leading_dimensions_stay(shape):
    z = make().transform(torch.ones(shape))
    assert z.shape == (*shape[:-1], 2)
    assert make().inverse_transform(z).shape == shape


def test_a_large_mean_is_subtracted_before_rounding():
    offset = torch.tensor([1e6, 1e6, 1e6], dtype=torch.float64)
    found = make(mean=offset + 0.03, components=torch.tensor(COMPONENTS))
    x = (offset + torch.tensor([[1.0, 2, 3]])).float()  # exact
    want = scores_of(x, found.mean)
    np.testing.assert_allclose(found.transform(x), want, rtol=0, atol=bound([1.0, 2, 3], torch.float32))
    rounded = (x - found.mean.float()) @ found.components.mT  # 1e6 + 0.03 has no float32
    assert np.abs(rounded.numpy() - want).max() > bound([1.0, 2, 3], torch.float32)


def test_chunks_do_not_show(monkeypatch):
    want = make().transform(X), make().reconstruction_error(X)
    monkeypatch.setattr(result, "CHUNK_ROWS", 2)
    assert torch.equal(make().transform(X), want[0])
    assert make().reconstruction_error(X) == pytest.approx(want[1], rel=8 * U)


def test_scale_and_whitening():
    scale = torch.tensor([2.0, 0.5, 4.0], dtype=torch.float64)
    found = make(scale=scale, whiten=True)
    z = found.transform(X)
    want = ((X.numpy() - MEAN) / scale.numpy()) @ np.array(COMPONENTS).T / [3, 2]
    np.testing.assert_allclose(z, want, rtol=0, atol=bound(X / scale, torch.float64))
    back = (want * [3, 2]) @ np.array(COMPONENTS) * scale.numpy() + MEAN
    np.testing.assert_allclose(found.inverse_transform(z), back, rtol=0, atol=4 * bound(X * 4, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_inverse_has_the_dtype_of_the_scores(dtype):
    z = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=dtype)
    x = make().inverse_transform(z)
    assert x.dtype == dtype
    want = z.double().numpy() @ np.array(COMPONENTS) + MEAN
    np.testing.assert_allclose(x.double(), want, rtol=0, atol=bound(want, dtype))


def test_no_components_rebuild_the_mean():
    none = make(components=torch.empty(0, 3).double())
    z = none.transform(X)
    assert z.shape == (3, 0)
    assert none.inverse_transform(z).tolist() == [MEAN] * 3


def test_autocast_does_not_round_the_scores():
    found = make(components=torch.tensor(COMPONENTS))
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) * 30
    z = found.transform(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(found.transform(x), z)
        assert torch.equal(found.inverse_transform(z), make(components=found.components).inverse_transform(z))
        assert (x @ found.components.mT).dtype == torch.bfloat16  # what autocast does when it is let
    same = found.inverse_transform(z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(found.inverse_transform(z), same)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda r: r.transform(torch.ones(3, 7)),
            r"`x` must end in 3 features, got shape \(3, 7\)\. If features come first, pass `x\.mT`",
        ),
        (
            lambda r: r.inverse_transform(torch.ones(2, 5)),
            r"`z` must end in 2 scores, got shape \(2, 5\)\. If scores come first, pass `z\.mT`",
        ),
        (lambda r: r.reconstruction_error(torch.ones(4, 2)), r"`x` must end in 3 features"),
        (
            lambda r: r.reconstruction_error(X, per="row"),
            r"`per` must be one of \['sample', 'scalar', 'table'\], got 'row'",
        ),
        (lambda r: r.reconstruction_error(X[:0]), "`x` has no rows; give at least one sample"),
    ],
    ids=["transform", "inverse", "error_features", "error_per", "error_empty"],
)
def test_wrong_calls_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(make())


# ---------------------------------------------------------------- reconstruction error, storage
def test_reconstruction_error_is_what_the_third_axis_loses():
    lost = [0.0, 1.0, -0.5]  # the components span the first two axes
    total = sum(v * v for v in lost)
    for per, count in (("table", 1), ("sample", 3), ("scalar", 9)):
        assert make().reconstruction_error(X, per) == pytest.approx(
            total / count, abs=bound(X, torch.float64)
        )


def test_reconstruction_error_is_in_the_units_of_the_samples():
    scaled = make(scale=torch.tensor([1.0, 1.0, 7.0]).double())
    assert scaled.reconstruction_error(X) == pytest.approx(1.25, abs=bound(X, torch.float64))


@pytest.mark.parametrize("whiten", [False, True])
def test_reconstruction_error_is_that_of_the_round_trip(whiten):
    turned = torch.linalg.qr(torch.arange(9.0).reshape(3, 3).double() + torch.eye(3)).Q[:2]
    found = make(components=turned, whiten=whiten)
    rebuilt = found.inverse_transform(found.transform(X))
    want = (X - rebuilt).square().sum().item()
    assert found.reconstruction_error(X) == pytest.approx(want, abs=4 * bound(X, torch.float64) * want**0.5)


def test_storage_counts_scores_directions_mean_and_scale():
    assert make().storage(100) == {"scores": 200, "directions": 6, "mean": 3, "total": 209, "original": 300}
    scaled = make(scale=torch.ones(3).double()).storage(100)
    assert (scaled["scale"], scaled["total"]) == (3, 212)
