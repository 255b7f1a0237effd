"""The contract of `PCA`: arguments, learning, streaming, state, dtypes, options, errors."""

import copy
import io
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

import pca_torch as pt
from pca_torch.estimator import BUFFERS, DERIVED
from tests.support import samples, truth

SOLVERS = ("full", "covariance_eigh")
N, D = 60, 5
X = samples(N, D, decay=0.6, offset=2.0)
EXACT = torch.finfo(torch.float64).eps


def solvers(test):
    return pytest.mark.parametrize("solver", SOLVERS)(test)


def variance_bound(x=X):
    """Largest error of a variance worked out in float64 by two routes.

    A sum of N products obeys |E| ≤ N·u·|X|ᵀ|X| (Higham 2002, §3.5), so ‖E‖₂ ≤ N·u·tr C; the
    factorisation adds a modest multiple of D·u·tr C; two routes, so eps = 2u in place of u.
    """
    rows = x.reshape(-1, x.shape[-1]).double()
    return (len(rows) + 4 * rows.shape[1]) * EXACT * rows.var(0, correction=0).sum().item() * 2


def turn_bound(x=X):
    """Largest error of an entry of a component: the perturbation over the smallest gap (Davis & Kahan)."""
    variance = truth(x)[1]
    return 2 * variance_bound(x) / (variance[:-1] - variance[1:]).min().item()


def close(have, want, atol):
    torch.testing.assert_close(
        torch.as_tensor(have, dtype=torch.float64),
        torch.as_tensor(want, dtype=torch.float64),
        rtol=0,
        atol=float(atol),
    )


def agree(a, b, x=X):
    """Two fits of the same samples are the same to the last digits."""
    assert a.n_samples_ == b.n_samples_
    close(a.mean_, b.mean_, len(x) * EXACT * x.abs().max())
    close(a.explained_variance_, b.explained_variance_, variance_bound(x))
    close(a.components_, b.components_, turn_bound(x))


def identical(a, b):
    """Two fits are bitwise the same."""
    for name in BUFFERS:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None and right is None) or (left.dtype == right.dtype and torch.equal(left, right))
    assert a.certificate_ == b.certificate_


# ---------------------------------------------------------------- arguments
def test_arguments_are_stored_untouched():
    given = {
        "n_components": np.int64(2),
        "svd_solver": "full",
        "whiten": True,
        "center": False,
        "standardize": True,
        "ddof": 0,
        "tol": 1e-3,
        "n_oversamples": 7,
        "n_iter": 2,
        "precision": "float64",
        "random_state": torch.Generator(),
        "nonfinite": "drop",
    }
    pca = pt.PCA(**given).fit(X)
    for name, value in given.items():
        assert getattr(pca, name) is value


def test_default_arguments_are_those_of_the_design():
    pca = pt.PCA()
    assert (pca.n_components, pca.svd_solver, pca.ddof, pca.n_oversamples, pca.n_iter) == (
        None,
        "auto",
        1,
        10,
        4,
    )
    assert (pca.whiten, pca.center, pca.standardize, pca.random_state) == (False, True, False, None)
    assert (pca.tol, pca.precision, pca.nonfinite) == (None, "auto", "raise")


@pytest.mark.parametrize("name", ["arpack", "gesvda", "FULL", None])
def test_unknown_solvers_name_those_that_exist(name):
    known = "'auto', 'full', 'covariance_eigh', 'tsqr', 'randomized', 'krylov'"
    message = f"`svd_solver` must be one of {known}, got "
    with pytest.raises(ValueError, match=message + repr(name)):
        pt.PCA(svd_solver=name)
    with pytest.raises(ValueError, match=message + repr(name)):
        pt.decompose(X, svd_solver=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": True}, "`n_components` must be .* got True"),
        ({"n_components": -1}, "`n_components` must be an integer ≥ 0.* got -1"),
        ({"n_components": 2.5}, r"a share in \(0, 1\] as a float, or None, got 2\.5"),
        ({"n_components": 0.0}, r"`n_components` must be .* got 0\.0"),
        ({"precision": "bf16"}, "`precision` must be one of 'auto', 'float32', 'float64', got 'bf16'"),
        ({"nonfinite": "ignore"}, "`nonfinite` must be one of 'raise', 'drop', got 'ignore'"),
        ({"ddof": -1}, "`ddof` must be a number ≥ 0, got -1"),
        ({"ddof": True}, "`ddof` must be a number ≥ 0, got True"),
        ({"ddof": float("nan")}, "`ddof` must be a number ≥ 0, got nan"),
    ],
)
def test_arguments_out_of_range_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        pt.PCA(**arguments)


def test_it_prints_what_it_is():
    assert repr(pt.PCA(0.95, svd_solver="full")) == "PCA(n_components=0.95, svd_solver='full')"


# ---------------------------------------------------------------- learning
@solvers
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("n", [N, 4], ids=["tall", "wide"])
def test_learned_values_are_those_of_a_float64_svd(solver, ddof, n):
    x = X[:n]
    mean, variance, components = truth(x, ddof)
    pca = pt.PCA(svd_solver=solver, ddof=ddof).fit(x)
    kept = min(n, D)
    known = min(n - 1, D)  # directions of zero variance are arbitrary
    close(pca.mean_, mean, n * EXACT * x.abs().max())
    close(pca.explained_variance_, variance[:kept], 2 * variance_bound(x))
    close(pca.total_variance_, variance.sum(), 2 * variance_bound(x))
    signed = components * components.gather(1, components.abs().argmax(1, keepdim=True)).sign()
    gap = variance[:known].diff().abs().min().item()
    close(pca.components_[:known], signed[:known], 8 * variance_bound(x) / gap)
    close(pca.explained_variance_ratio_.sum(), 1, (n + 4 * D) * 2 * EXACT)
    close(pca.singular_values_[0], (variance[0] * (n - ddof)).sqrt(), 2 * variance_bound(x) * n)
    assert (pca.n_components_, pca.n_samples_, pca.n_features_in_) == (kept, n, D)


@solvers
def test_noise_variance_is_the_mean_of_what_was_dropped(solver):
    want = truth(X)[1][2:].mean()
    close(pt.PCA(2, svd_solver=solver).fit(X).noise_variance_, want, variance_bound())


def test_attributes_are_those_of_the_result():
    pca = pt.PCA(2).fit(X)
    for name, read in DERIVED.items():
        have, want = getattr(pca, name), read(pca.result_)
        assert torch.equal(have, want) if torch.is_tensor(want) else have == want
    for name in ("components", "mean", "total_variance"):
        assert torch.equal(getattr(pca, f"{name}_"), getattr(pca.result_, name))
    assert type(pca.n_samples_) is int


@solvers
def test_fit_starts_over(solver):
    once = pt.PCA(2, svd_solver=solver).fit(X)
    identical(pt.PCA(2, svd_solver=solver).fit(X + 1).fit(X), once)
    assert pt.PCA(2, svd_solver=solver).fit(X[:, :3]).fit(X).n_features_in_ == D


def test_fit_forgets_a_stream_and_a_stream_forgets_a_fit():
    streamed = pt.PCA(2).partial_fit(X)
    identical(streamed.fit(X[:20]), pt.PCA(2).fit(X[:20]))
    assert streamed.partial_fit(X[:7]).n_samples_ == 7
    identical(pt.PCA(2).fit(X).partial_fit(X[:20]), pt.PCA(2).partial_fit(X[:20]))


def test_a_failed_fit_leaves_what_was_learned():
    pca = pt.PCA(2).fit(X)
    before = copy.deepcopy(pca)
    with pytest.raises(ValueError, match="1 of 3 samples with NaN"):
        pca.fit(torch.tensor([[float("nan"), 1], [1, 2], [3, 4]]))
    identical(pca, before)


def test_fit_transform_scores_every_row():
    mask = torch.arange(N) % 2
    pca = pt.PCA(2)
    z = pca.fit_transform(X, None, mask=mask)
    assert pca.n_samples_ == N // 2
    assert torch.equal(z, pca.transform(X))


@pytest.mark.parametrize("read", [*DERIVED, *BUFFERS, "result_"])
def test_unfitted_attributes_say_so(read):
    with pytest.raises(AttributeError, match="this PCA is not fitted; call `fit` or `partial_fit` first"):
        getattr(pt.PCA(), read)


def test_unfitted_methods_say_so():
    for use in (lambda p: p.transform(X), lambda p: p.inverse_transform(X), lambda p: p(X)):
        with pytest.raises(AttributeError, match="this PCA is not fitted"):
            use(pt.PCA())
    assert not hasattr(pt.PCA(), "components_")
    assert pt.PCA().state_dict() == {}
    with pytest.raises(AttributeError, match="no attribute 'colour_'"):
        _ = pt.PCA().fit(X).colour_


# ---------------------------------------------------------------- streaming
def test_partial_fit_solves_once_when_read(monkeypatch):
    solved = []

    def counted(data, *args, **options):
        solved.append(data)
        return pt.decompose(data, *args, **options)

    monkeypatch.setattr("pca_torch.estimator.decompose", counted)
    pca = pt.PCA(2)
    for batch in X.split(9):
        pca.partial_fit(batch)
    assert len(solved) == 0
    _ = pca.components_, pca.explained_variance_, pca.transform(X), pca.state_dict(), pca.result_
    assert len(solved) == 1
    pca.partial_fit(X)
    assert pca.n_samples_ == 2 * N
    assert len(solved) == 2


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [1, 7, 52], [30, 0, 30]], ids=str)
def test_batches_do_not_matter(sizes):
    pca = pt.PCA(3)
    for batch in X.split(sizes):
        pca.partial_fit(batch)
    agree(pca, pt.PCA(3, svd_solver="full").fit(X))


def test_reading_between_batches_changes_nothing():
    read, silent = pt.PCA(2), pt.PCA(2)
    for batch in X.split(20):
        _ = read.partial_fit(batch).components_
        silent.partial_fit(batch)
    agree(read, silent)
    assert read.n_samples_ == N


def test_results_do_not_share_memory_with_the_statistic():
    pca = pt.PCA(2).partial_fit(X[:30])
    early = pca.result_
    names = ("mean", "components", "spectrum", "total_variance")
    kept = {name: getattr(early, name).clone() for name in names}
    pca.partial_fit(X[30:] * 5)
    assert not torch.equal(pca.mean_, kept["mean"])
    for name, value in kept.items():
        assert torch.equal(getattr(early, name), value)


@pytest.mark.parametrize("read", ["components_", "n_samples_", "result_"])
def test_too_few_rows_are_an_error_when_read_not_before(read):
    pca = pt.PCA().partial_fit(X[:1])
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        getattr(pca, read)
    for use in (lambda p: p.transform(X), lambda p: p.state_dict(), lambda p: p.half()):
        with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
            use(pca)
    assert pca.partial_fit(X[1:2]).n_samples_ == 2


def test_no_rows_at_all():
    pca = pt.PCA().partial_fit(X[:3], mask=[0, 0, 0])
    with pytest.raises(ValueError, match="no rows were counted; `update` with at least one row first"):
        _ = pca.components_
    with pytest.raises(ValueError, match="`x` has no rows that count"):
        pt.PCA().fit(X, mask=torch.zeros(N))


def test_full_cannot_stream():
    with pytest.raises(ValueError, match="`svd_solver` = 'full' needs all samples at once"):
        pt.PCA(svd_solver="full").partial_fit(X)


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        (X[:, :3], {}, r"`x` must end in 5 features, got shape \(60, 3\)"),
        (X.mT[:, :5], {"mask": torch.ones(4)}, "`mask` must have the leading shape"),
        (X, {"mask": torch.full((N,), 0.5)}, "fractional importance goes in `weights`"),
        (X, {"weights": torch.full((N,), -1.0)}, "`weights` must be finite and not negative"),
        (X / (X > 2), {}, "samples with NaN or inf"),
    ],
    ids=["features", "mask_shape", "mask_values", "weights", "nan"],
)
def test_a_refused_batch_leaves_the_stream_as_it_was(bad, options, message):
    pca = pt.PCA(2).partial_fit(X[:30])
    before = copy.deepcopy(pca)
    with pytest.raises(ValueError, match=message):
        pca.partial_fit(bad, **options)
    identical(pca, before)
    identical(pca.partial_fit(X[30:]), before.partial_fit(X[30:]))


# ---------------------------------------------------------------- state
def through_state_dict(pca):
    other = pt.PCA()
    other.load_state_dict(pca.state_dict())
    return other


def through_a_file(pca):
    file = io.BytesIO()
    torch.save(pca.state_dict(), file)
    file.seek(0)
    other = pt.PCA()
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def through_safetensors(pca):
    other = pt.PCA()
    other.load_state_dict(load_safetensors(save_safetensors(pca.state_dict())))
    return other


WAYS = [
    through_state_dict,
    through_a_file,
    through_safetensors,
    copy.deepcopy,
    lambda pca: pickle.loads(pickle.dumps(pca)),
]


@pytest.mark.parametrize("way", WAYS, ids=["state_dict", "torch.save", "safetensors", "deepcopy", "pickle"])
@pytest.mark.parametrize(
    "options", [{}, {"whiten": True}, {"standardize": True}, {"center": False, "ddof": 0}], ids=str
)
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_state_survives(way, options, how):
    pca = getattr(pt.PCA(3, **options), how)(X.float())
    other = way(pca)
    identical(other, pca)
    assert torch.equal(other.transform(X), pca.transform(X))
    assert torch.equal(other.inverse_transform(X[:, :3]), pca.inverse_transform(X[:, :3]))
    for name in ("n_samples_", "noise_variance_"):
        assert getattr(other, name) == getattr(pca, name)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pca: pickle.loads(pickle.dumps(pca))])
def test_copies_stream_on_by_themselves(way):
    pca = pt.PCA(2).partial_fit(X[:30])
    other = way(pca).partial_fit(X[30:])
    assert (pca.n_samples_, other.n_samples_) == (30, N)
    agree(other, pt.PCA(2).fit(X))


def test_state_loads_over_another_fit():
    want, other = pt.PCA(3).fit(X), pt.PCA(3, standardize=True).fit(X[:, :2].repeat(1, 2))
    early = other.result_
    mean = early.mean.clone()
    other.load_state_dict(want.state_dict())
    identical(other, want)
    assert other.scale_ is None
    assert torch.equal(early.mean, mean)  # a result that was handed out stays


def test_loading_ends_a_stream():
    other = pt.PCA(2).partial_fit(X * 3)
    other.load_state_dict(pt.PCA(2).fit(X).state_dict())
    assert other.n_samples_ == N
    assert other.partial_fit(X[:7]).n_samples_ == 7


@pytest.mark.parametrize("name", [name for name in BUFFERS if name != "scale_"])
@pytest.mark.parametrize("fitted", [False, True])
def test_an_incomplete_state_is_refused_whole(name, fitted):
    state = pt.PCA(2).fit(X + 1).state_dict()
    del state[name]
    pca = pt.PCA(2).fit(X) if fitted else pt.PCA()
    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        pca.load_state_dict(state)
    if fitted:
        identical(pca, pt.PCA(2).fit(X))
    else:
        assert not hasattr(pca, "mean_")


@pytest.mark.parametrize("change", [lambda p: p.half(), lambda p: p.to(torch.bfloat16), lambda p: p.double()])
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_a_change_of_dtype_leaves_statistics_and_counts(change, how):
    x = X.float()
    pca, before = (getattr(pt.PCA(2, standardize=True), how)(x) for _ in range(2))
    assert change(pca) is pca
    assert pca.components_.dtype != torch.float32
    for name in ("mean_", "scale_", "spectrum_", "total_variance_"):
        assert torch.equal(getattr(pca, name), getattr(before, name))
        assert getattr(pca, name).dtype == torch.float64
    assert pca.n_samples_ == N
    assert pca.certificate_ == before.certificate_
    assert pca.transform(x).dtype == torch.float32
    # D products of z-scores below 4 with rounded components, in float32 at best
    coarser = max(torch.finfo(dtype).eps for dtype in (torch.float32, pca.components_.dtype))
    close(pca.transform(x), before.transform(x), (D + 2) * coarser * D * 4)


def test_a_stream_follows_a_change_of_device():
    assert pt.PCA(2).partial_fit(X).to("meta").mean_.device.type == "meta"


def test_it_stands_in_a_sequential():
    net = torch.nn.Sequential(torch.nn.Linear(3, D), pt.PCA(2).fit(X.float()), torch.nn.Linear(2, 1))
    x = torch.randn(4, 3)
    assert net(x).shape == (4, 1)
    assert torch.equal(net[1](net[0](x)), net[1].transform(net[0](x)))
    fresh = torch.nn.Sequential(torch.nn.Linear(3, D), pt.PCA(), torch.nn.Linear(2, 1))
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(x), net(x))
    assert not list(net[1].parameters())


def test_gradients_flow_through_transform_and_back():
    pca = pt.PCA(2).fit(X)
    x = X.clone().requires_grad_()
    pca.transform(x).sum().backward()
    close(x.grad, pca.components_.sum(0).expand(N, D), 4 * EXACT)
    z = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    pca.inverse_transform(z)[0, 0].backward()
    close(z.grad[0], pca.components_[:, 0], 4 * EXACT)


@pytest.mark.parametrize("how", ["fit", "partial_fit"])
def test_learning_is_not_differentiated(how):
    pca = getattr(pt.PCA(2), how)(X.clone().requires_grad_())
    assert not any(b.requires_grad for b in pca.state_dict().values())


# ---------------------------------------------------------------- surroundings
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize(
    "around",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    ],
    ids=["inference_mode", "no_grad", "autocast"],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_what_stands_around_a_fit_changes_nothing(how, around, precision):
    x = X.float()
    want = getattr(pt.PCA(2, precision=precision, svd_solver="covariance_eigh"), how)(x)
    with around():
        pca = getattr(pt.PCA(2, precision=precision, svd_solver="covariance_eigh"), how)(x)
        if how == "partial_fit":
            pca.partial_fit(x)  # and is carried on outside
        else:
            _ = pca.components_
    if how == "partial_fit":
        pca, want = pca.partial_fit(x), want.partial_fit(x).partial_fit(x)
    identical(pca, want)
    assert not any(b.is_inference() for b in pca.state_dict().values())
    y = x.clone().requires_grad_()
    pca.transform(y).sum().backward()
    assert y.grad is not None


@solvers
def test_the_global_generators_are_left_as_found(solver):
    torch.manual_seed(3)
    np.random.seed(3)
    before, legacy = torch.get_rng_state(), np.random.get_state()[1].copy()
    pt.PCA(2, svd_solver=solver, precision="float32").fit(X).transform(X)
    pt.PCA(2, precision="float32").partial_fit(X.float()).transform(X)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], legacy)


@pytest.mark.parametrize("precision", ["float32", "float64"])
@solvers
def test_fits_are_bitwise_repeatable(solver, precision):
    x = samples(700, 40, seed=1).float()
    first, second = (pt.PCA(5, svd_solver=solver, precision=precision).fit(x) for _ in range(2))
    identical(first, second)


@solvers
def test_inputs_are_not_changed(solver):
    x, mask, weights = X.clone(), torch.ones(N, dtype=torch.int64), torch.linspace(0, 1, N)
    z = X[:, :2].clone()
    copies = [t.clone() for t in (x, mask, weights, z)]
    pca = pt.PCA(2, svd_solver=solver, standardize=True, whiten=True).fit(x, mask=mask, weights=weights)
    pca.transform(x)
    pca.inverse_transform(z)
    pca.result_.reconstruction_error(x)
    pt.PCA(2).partial_fit(x, mask=mask, weights=weights).transform(x)
    for now, then in zip((x, mask, weights, z), copies, strict=True):
        assert torch.equal(now, then)


def test_a_batch_that_waits_is_a_copy():
    x = X.clone()
    pca = pt.PCA(2).partial_fit(x)
    x.zero_()
    agree(pca, pt.PCA(2).fit(X))


# ---------------------------------------------------------------- kinds of input
INTEGERS = (X * 20).round().long()
KINDS = {
    "int64": INTEGERS,
    "int8": INTEGERS.to(torch.int8),
    "lists": INTEGERS.tolist(),
    "numpy": INTEGERS.numpy(),
    "float32": INTEGERS.float(),
    "bfloat16": INTEGERS.bfloat16(),
    "float16": INTEGERS.half(),
    "three_axes": INTEGERS.reshape(4, 15, D),
    "strided": INTEGERS.repeat_interleave(2, 0)[::2],
    "transposed": INTEGERS.mT.contiguous().mT,
    "numpy_backwards": np.ascontiguousarray(INTEGERS.numpy()[::-1])[::-1],
    "big_endian": INTEGERS.numpy().astype(">i4"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_every_kind_of_input_gives_the_same(kind, solver):
    assert INTEGERS.abs().max() < 127  # exact in every dtype above
    x = KINDS[kind]
    pca = pt.PCA().partial_fit(x) if solver == "streaming" else pt.PCA(svd_solver=solver).fit(x)
    mean, variance, _ = truth(INTEGERS)
    close(pca.mean_, mean, N * EXACT * 127)
    close(pca.explained_variance_, variance, variance_bound(INTEGERS))
    small = getattr(x, "dtype", None) in {torch.float32, torch.bfloat16, torch.float16}
    assert pca.components_.dtype == (torch.float32 if small else torch.float64)
    for name in ("mean_", "explained_variance_", "total_variance_"):
        assert getattr(pca, name).dtype == torch.float64


@solvers
def test_booleans(solver):
    x = X.mean(0) < X
    pca = pt.PCA(svd_solver=solver).fit(x)
    close(pca.explained_variance_, truth(x)[1], variance_bound(x.double()))


def test_read_only_arrays():
    x = X.numpy().copy()
    x.flags.writeable = False
    pca = pt.PCA(2).fit(x)  # a warning would be an error
    identical(pca, pt.PCA(2).fit(X))
    assert torch.equal(pca.transform(x), pca.transform(X))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fitted", [torch.float64, torch.float32])
def test_transform_returns_the_dtype_of_its_input(dtype, fitted):
    pca = pt.PCA(2).fit(X.to(fitted))
    z = pca.transform(X.to(dtype))
    assert z.dtype == dtype
    assert pca.inverse_transform(z).dtype == dtype
    assert pca.transform(INTEGERS).dtype == fitted
    assert pca.transform(X.numpy()).dtype == torch.float64


def test_transform_hints_at_a_transpose():
    message = r"`x` must end in 5 features, got shape \(5, 60\)\. If features come first, pass `x\.mT`"
    with pytest.raises(ValueError, match=message):
        pt.PCA(2).fit(X).transform(X.mT)


# ---------------------------------------------------------------- which rows count
@pytest.mark.parametrize("how", ["fit", "partial_fit"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_selects_rows(how, dtype):
    mask = (torch.arange(N) % 3 > 0).reshape(4, 15)
    pca = getattr(pt.PCA(), how)(X.reshape(4, 15, D), mask=mask.to(dtype))
    identical(pca, getattr(pt.PCA(), how)(X[mask.flatten()]))
    assert pca.n_samples_ == mask.sum()


COUNTS = torch.arange(N) % 4


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_weights_are_repeated_rows(solver):
    repeated = X.repeat_interleave(COUNTS, 0)
    pca = pt.PCA(ddof=0, svd_solver="auto" if solver == "streaming" else solver)
    (pca.partial_fit if solver == "streaming" else pca.fit)(X, weights=COUNTS)
    mean, variance, _ = truth(repeated, ddof=0)
    close(pca.mean_, mean, N * EXACT * X.abs().max())
    close(pca.explained_variance_, variance, variance_bound(repeated))
    assert pca.n_samples_ == (COUNTS > 0).sum()
    assert (truth(X, ddof=0)[1] - variance).abs().max() > variance_bound(repeated)  # weights matter


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_the_divisor_of_weights(solver):
    """Σw - Σw²/Σw, as `numpy.cov` has it for `aweights`; a common factor cancels."""
    want = np.linalg.eigvalsh(np.cov(X.numpy().T, aweights=COUNTS.numpy(), ddof=1))[::-1].copy()
    for factor in (1, 0.01):
        pca = pt.PCA(svd_solver="auto" if solver == "streaming" else solver)
        (pca.partial_fit if solver == "streaming" else pca.fit)(X, weights=COUNTS * factor)
        close(pca.explained_variance_, want, variance_bound())


@solvers
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_rows_are_refused_or_dropped(solver, bad):
    x = X.clone()
    x[3, 2], x[7, 0] = bad, bad
    good = torch.ones(N)
    good[[3, 7]] = 0
    with pytest.raises(ValueError, match="`x` has 2 of 60 samples with NaN or inf"):
        pt.PCA(svd_solver=solver).fit(x)
    want = pt.PCA(svd_solver=solver).fit(X, mask=good)
    identical(pt.PCA(svd_solver=solver, nonfinite="drop").fit(x), want)
    streamed = pt.PCA(nonfinite="drop").partial_fit(x)
    identical(streamed, pt.PCA().partial_fit(X, mask=good))
    assert streamed.n_samples_ == N - 2


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_the_order_of_samples_does_not_matter(solver):
    shuffled = X[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    fits = []
    for x in (X, shuffled, X.flip(0)):
        pca = pt.PCA(svd_solver="auto" if solver == "streaming" else solver)
        fits.append((pca.partial_fit if solver == "streaming" else pca.fit)(x))
    agree(fits[1], fits[0])
    agree(fits[2], fits[0])


# ---------------------------------------------------------------- how many components
@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
@pytest.mark.parametrize(
    ("n_components", "want"),
    [(0, 0), (1, 1), (np.int64(3), 3), (None, 5), (1.0, 4), (0.9, 2), (0.90001, 3), (0.5, 1), (5, 5)],
)
def test_how_many_components(solver, n_components, want):
    spread = torch.tensor([6.0, 3.0, 0.75, 0.25, 0.0]).double()  # shares 0.6, 0.9, 0.975, 1, 1
    white = torch.linalg.qr(X - X.mean(0)).Q  # (N, D) orthonormal columns of mean zero
    x = white * (spread * (N - 1)).sqrt()
    pca = pt.PCA(n_components, svd_solver="auto" if solver == "streaming" else solver)
    (pca.partial_fit if solver == "streaming" else pca.fit)(x)
    assert pca.n_components_ == want
    assert pca.components_.shape == (want, D)
    close(pca.explained_variance_, spread[:want], 2 * variance_bound(x))
    assert pca.transform(x).shape == (N, want)


@pytest.mark.parametrize("n", [N, 3])
@solvers
def test_more_components_than_there_are_is_an_error_with_both_numbers(solver, n):
    most = min(n, D)
    message = rf"must be in 0\.\.{most}, the smaller of {n} samples and 5 features, got {most + 1}"
    with pytest.raises(ValueError, match=message):
        pt.PCA(most + 1, svd_solver=solver).fit(X[:n])
    pca = pt.PCA(most + 1).partial_fit(X[:n])
    with pytest.raises(ValueError, match=message):
        _ = pca.components_


@solvers
def test_a_single_sample(solver):
    with pytest.raises(ValueError, match=r"`ddof` = 1 needs more than 1 samples, got 1; .* pass ddof=0"):
        pt.PCA(svd_solver=solver).fit(X[:1])
    with pytest.warns(UserWarning, match="total variance is zero"):
        pca = pt.PCA(ddof=0, svd_solver=solver).fit(X[:1])
    assert torch.equal(pca.mean_, X[0])
    assert pca.explained_variance_.tolist() == [0]
    assert pca.inverse_transform(pca.transform(X[:1])).tolist() == X[:1].tolist()


# ---------------------------------------------------------------- options
@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
@pytest.mark.parametrize("ddof", [0, 1, 2.5])
def test_whitened_scores_have_unit_covariance(solver, ddof):
    pca = pt.PCA(whiten=True, ddof=ddof, svd_solver="auto" if solver == "streaming" else solver)
    z = (pca.partial_fit if solver == "streaming" else pca.fit)(X).transform(X)
    smallest = truth(X)[1][-1].item()
    close(z.mT @ z / (N - ddof), torch.eye(D), 8 * variance_bound() / smallest)
    close(pca.inverse_transform(z), X, 8 * turn_bound() * X.abs().max())


@solvers
def test_whitening_drops_null_directions(solver):
    x = torch.cat([X[:, :3], X[:, :1] + X[:, 1:2]], 1)  # rank 3 of 4
    pca = pt.PCA(whiten=True, svd_solver=solver).fit(x)
    assert pca.n_components_ == 3
    assert pt.PCA(svd_solver=solver).fit(x).n_components_ == 4
    assert pca.transform(x).abs().max() < N**0.5  # a unit variance cannot reach further


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_standardized_is_the_pca_of_z_scores(solver, ddof):
    x = X * torch.tensor([1.0, 10, 100, 1e-3, 5])
    pca = pt.PCA(standardize=True, ddof=ddof, svd_solver="auto" if solver == "streaming" else solver)
    (pca.partial_fit if solver == "streaming" else pca.fit)(x)
    scale = x.numpy().std(0, ddof=ddof)
    z = (x - x.mean(0)) / torch.from_numpy(scale)
    _, variance, components = truth(z, ddof)
    np.testing.assert_allclose(pca.scale_, scale, rtol=2 * N * EXACT)
    close(pca.explained_variance_, variance, 4 * variance_bound(z))
    close(pca.total_variance_, D, 4 * variance_bound(z))
    scores = (z @ components.mT).abs()
    close(pca.transform(x).abs(), scores, 8 * turn_bound(z) * z.abs().max() * D)
    close(pca.inverse_transform(pca.transform(x)), x, 8 * turn_bound(z) * x.abs().max() * D)


@solvers
def test_constant_columns_stay_and_are_reported(solver):
    x = X.clone()
    x[:, 1] = 0.1
    with pytest.warns(UserWarning, match="1 of 5 columns are constant; their scale stays 1"):
        pca = pt.PCA(standardize=True, svd_solver=solver).fit(x)
    assert pca.scale_[1] == 1
    close(pca.total_variance_, D - 1, 4 * (N + 4 * D) * EXACT * D)
    assert bool(pca.transform(x).isfinite().all())


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_uncentred_is_the_second_moment(solver):
    pca = pt.PCA(center=False, ddof=0, svd_solver="auto" if solver == "streaming" else solver)
    (pca.partial_fit if solver == "streaming" else pca.fit)(X)
    s, vh = np.linalg.svd(X.numpy(), full_matrices=False)[1:]
    second = 2 * (N + 4 * D) * EXACT * (s**2).sum() / N  # as `variance_bound`, of the second moment
    assert pca.mean_.tolist() == [0] * D
    close(pca.explained_variance_, s**2 / N, second)
    close(pca.total_variance_, (s**2).sum() / N, second)
    turn = 4 * second / np.abs(np.diff(s**2 / N)).min()
    close(pca.transform(X).abs(), np.abs(X.numpy() @ vh.T), turn * X.abs().max() * D)


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
def test_a_total_variance_of_zero_warns_once(solver):
    x = torch.full((4, 3), 0.1, dtype=torch.float64)
    pca = pt.PCA(svd_solver="auto" if solver == "streaming" else solver)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        (pca.partial_fit if solver == "streaming" else pca.fit)(x)
        _ = pca.components_, pca.explained_variance_ratio_, pca.transform(x), pca.result_
    assert ["total variance is zero" in str(w.message) for w in seen] == [True]
    assert pca.explained_variance_ratio_.tolist() == [0, 0, 0]
    assert pca.total_variance_ == 0


# ---------------------------------------------------------------- signs
@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_entry_of_each_component_is_positive(solver, dtype):
    for x in (X, -X, X * torch.tensor([1, -1, 1, -1, 1])):
        pca = pt.PCA(svd_solver="auto" if solver == "streaming" else solver)
        (pca.partial_fit if solver == "streaming" else pca.fit)(x.to(dtype))
        largest = pca.components_.abs().argmax(1, keepdim=True)
        assert bool((pca.components_.gather(1, largest) > 0).all())


@pytest.mark.parametrize("solver", [*SOLVERS, "streaming"])
@pytest.mark.parametrize(
    ("direction", "positive"),
    [
        ([1.0, -1.0, 0.0], 0),  # tied: the first decides
        ([-1.0, 1.0005, 0.0], 0),  # within 1e-3 of the largest: still tied
        ([-1.0, 1.002, 0.0], 1),  # beyond it the largest decides
        ([0.1, -1.0, 1.0], 1),  # the first of the tied, not of all
    ],
)
def test_ties_of_sign(solver, direction, positive):
    t = torch.linspace(-1, 1, 20, dtype=torch.float64)
    for flip in (1, -1):
        x = torch.outer(t, flip * torch.tensor(direction, dtype=torch.float64)) + 7
        pca = pt.PCA(1, svd_solver="auto" if solver == "streaming" else solver)
        (pca.partial_fit if solver == "streaming" else pca.fit)(x)
        assert pca.components_[0, positive] > 0.5
