"""Publicly reported problems as tests: the right value passes, the reported wrong one would not."""

import copy
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import kv, lora, solvers
from pca_torch.solvers import krylov
from tests.cases import reported
from tests.support import reported_case

SOLVERS = tuple(solvers.SOLVERS)
STREAMING = ("covariance_eigh", "tsqr", "krylov")
ATTRIBUTES = (
    "mean_",
    "components_",
    "explained_variance_",
    "explained_variance_ratio_",
    "singular_values_",
    "noise_variance_",
)
ELSEWHERE = {  # part of the file → where it is tested
    "hooks": "tests/test_hooks.py",
    "export": "tests/test_export.py",
    "cli": "tests/test_cli.py",
}
LATER = {"dist"}  # parts of the package that do not exist yet


@pytest.fixture(autouse=True)
def krylov_iterates(monkeypatch):
    """The cases are small: without this `krylov` would hand all of them to a dense solver."""
    monkeypatch.setattr(krylov, "DENSE_UP_TO", 0)
    monkeypatch.setattr(krylov, "FEW", 1)
    monkeypatch.setattr(krylov, "BLOCK", 4)
    monkeypatch.setattr(krylov, "_narrow", lambda *_: None)


def learned(pca):
    """What `compare` understands, as numpy."""
    got = {name: np.asarray(torch.as_tensor(getattr(pca, name))) for name in ATTRIBUTES}
    return got | {
        "components_first": got["components_"],
        "components_shape": tuple(pca.components_.shape),
        "n_samples_seen_": pca.n_samples_,
        "total_variance": pca.total_variance_.item(),
    }


def check(found, got, tolerance=None):
    """The right answer, and the proof that the reported wrong one is told apart."""
    assert reported.compare(found, got, tolerance) == []
    for key, value in found.get("wrong", {}).items():
        if key in found["expect"]:
            assert reported.compare(found, {key: value}, tolerance), key


def streamed(batches, **params):
    pca = pt.PCA(**params)
    for batch in batches:
        pca.partial_fit(torch.as_tensor(batch))
    return pca


def fitted(solver, x, batches, **params):
    """By one solver, or batch by batch where its name says so."""
    way, _, by = solver.rpartition(" ")
    if way or by == "streaming":
        return streamed(batches, svd_solver=by if way else "auto", **params)
    return pt.PCA(svd_solver=solver, **params).fit(x)


# ---------------------------------------------------------------- streaming
STREAMS = [
    "stream_minor_direction",
    "stream_single_rows",
    "stream_last_batch_short",
    "stream_one_pass_offset",
]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("solver", ["auto", *STREAMING])
def test_streaming(solver, name, reverse):
    found = reported_case(name)
    batches = found["x"]["batches"][:: -1 if reverse else 1]
    check(found, learned(streamed(batches, svd_solver=solver, **found["x"]["params"])))


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_pass_offset_in_memory(solver):
    found = reported_case("stream_one_pass_offset")
    check(found, learned(pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"]["X"])))


@pytest.mark.parametrize("solver", SOLVERS)
def test_fit_starts_over(solver):
    found = reported_case("stream_refit_accumulates")
    pca = pt.PCA(svd_solver=solver, **found["x"]["params"])
    for _ in found["x"]["calls"]:
        pca.fit(found["x"]["X"])
    check(found, learned(pca))


@pytest.mark.parametrize("solver", ["auto", *STREAMING])
def test_a_bad_batch_leaves_no_trace(solver):
    found = reported_case("stream_nan_batch")
    pca = pt.PCA(svd_solver=solver, **found["x"]["params"])
    good, bad, more = found["x"]["batches"]
    pca.partial_fit(good)
    with pytest.raises(ValueError, match="1 of 10 samples with NaN or inf"):
        pca.partial_fit(bad)
    pca.partial_fit(more)
    check(found, learned(pca) | {"raises_at_batch": 1})


# ---------------------------------------------------------------- solvers
@pytest.mark.parametrize("solver", SOLVERS)
def test_offset_two_points(solver):
    found = reported_case("offset_two_points")
    for offset, x in found["x"]["X_by_offset"].items():
        pca = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(x)
        check(found, learned(pca) | {"mean_offset": (pca.mean_ - offset).mean().item()})


@pytest.mark.parametrize(
    ("solver", "precision", "tolerance"),
    [
        ("full", "float64", "full"),
        ("full", "float32", "full"),
        ("covariance_eigh", "float64", "cov_fp64"),
        ("covariance_eigh", "float32", "cov_fp32"),
        ("tsqr", "float64", "full"),
        ("tsqr", "float32", "full"),
        ("randomized", "float64", "randomized"),
        ("krylov", "float64", "cov_fp64"),
        ("krylov", "float32", "cov_fp32"),
    ],
)
def test_small_eigenvalues(solver, precision, tolerance):
    found = reported_case("cond_small_eigenvalues")
    pca = pt.PCA(svd_solver=solver, precision=precision, **found["x"]["params"]).fit(found["x"]["X"])
    smallest = pca.explained_variance_[-1].item()
    check(found, learned(pca) | {"smallest_ev_at_least": smallest}, tolerance)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("key", ["X", "X_const"])
def test_zero_matrix(solver, key):
    found = reported_case("zero_matrix")
    with pytest.warns(UserWarning, match="total variance is zero"):
        pca = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"][key])
    got = learned(pca)
    finite = all(np.isfinite(got[name]).all() for name in ATTRIBUTES)
    square = pca.components_ @ pca.components_.mT
    straight = bool((square - torch.eye(4)).abs().max() < 1e-6)
    check(found, got | {"all_finite": finite, "orthonormal": straight})


WIDE = """
import resource, sys
import torch
import pca_torch as pt
from tests.support import reported_case
x = torch.from_numpy(reported_case("wide_no_dxd")["x"]["X"])
pt.PCA(2).fit(torch.randn(5, 6))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pt.PCA(3, svd_solver=sys.argv[1]).fit(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.parametrize("solver", ["auto", "full", "randomized", "krylov"])
def test_wide_data_never_make_a_square_of_features(solver):
    found = reported_case("wide_no_dxd")
    check(found, learned(pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"]["X"])))
    run = subprocess.run([sys.executable, "-c", WIDE, solver], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 200  # MiB


@pytest.mark.parametrize("solver", ["covariance_eigh", "tsqr"])
def test_wide_data_are_refused_with_the_size_where_a_square_is_made(solver):
    x = reported_case("wide_no_dxd")["x"]["X"]
    size = {"covariance_eigh": r"298\.0", "tsqr": r"2,086\.2"}[solver]
    with pytest.raises(ValueError, match=rf"200000 × 200000 .*needs {size} GiB"):
        pt.PCA(3, svd_solver=solver).fit(x)


@pytest.mark.parametrize("solver", ["streaming", *(f"streaming {solver}" for solver in STREAMING), *SOLVERS])
def test_ratio_is_of_the_total_variance(solver):
    found = reported_case("evr_total_variance")
    x, params = found["x"]["X"], found["x"]["params"]
    check(found, learned(fitted(solver, x, np.array_split(x, 7), **params)))


@pytest.mark.parametrize("solver", ["streaming", *(f"streaming {solver}" for solver in STREAMING), *SOLVERS])
@pytest.mark.parametrize("key", ["X_nan", "X_inf"])
def test_nan_and_inf_are_refused(solver, key):
    found = reported_case("nan_inf_input")
    x = found["x"][key]
    with pytest.raises(ValueError, match="1 of 20 samples with NaN or inf") as caught:
        fitted(solver, x, [x], n_components=2)
    check(found, {"raises": caught.type.__name__})


@pytest.mark.parametrize("solver", ["streaming", *(f"streaming {solver}" for solver in STREAMING), *SOLVERS])
def test_bfloat16_mean(solver):
    found = reported_case("bf16_mean")
    x = torch.tensor(found["x"]["X"]).bfloat16()
    check(found, learned(fitted(solver, x, x.split(1), **found["x"]["params"])))


def test_signs_agree_across_routes():
    found = reported_case("sign_tie")
    x = torch.as_tensor(found["x"]["X"])
    fits = [pt.PCA(1, svd_solver=s).fit(x.to(t)) for s in SOLVERS for t in (torch.float32, torch.float64)]
    fits += [streamed(x.split(7), n_components=1, svd_solver=solver) for solver in STREAMING]
    first = np.sign(np.asarray(fits[0].components_))[0, :2]
    same = all((np.sign(np.asarray(fit.components_))[0, :2] == first).all() for fit in fits)
    for fit in fits:
        check(found, learned(fit) | {"same_sign_across_solvers": same})
        assert fit.components_[0, 0] > 0  # tied with the second: the first decides


@pytest.mark.parametrize("solver", SOLVERS)
def test_flat_spectrum(solver):
    found = reported_case("randomized_flat_spectrum")
    params = found["x"]["params"] | {"svd_solver": solver}
    pca = pt.PCA(**params).fit(found["x"]["X"])
    variance = pca.explained_variance_
    got = {
        "explained_variance_at_most": variance.numpy(),
        "explained_variance_sum_at_least": variance.sum().item(),
    }
    check(found, learned(pca) | got)
    off = np.abs(variance.numpy() - found["expect"]["explained_variance_"])
    assert (off <= pca.certificate_.variance_error).all()


@pytest.mark.parametrize("solver", ["randomized", "krylov"])
def test_seeds(solver):
    found = reported_case("randomized_rng")
    x, params = found["x"]["X"], found["x"]["params"] | {"svd_solver": solver}
    before = torch.get_rng_state()
    first, second = (pt.PCA(**params).fit(x) for _ in range(2))
    same = all(torch.equal(getattr(first, name), getattr(second, name)) for name in ATTRIBUTES[:5])
    unchanged = torch.equal(torch.get_rng_state(), before)
    check(found, {"bitwise_equal": same, "global_rng_unchanged": unchanged})
    other = pt.PCA(**params | {"random_state": 1}).fit(x)
    assert not torch.equal(other.components_, first.components_)


# ---------------------------------------------------------------- estimator
@pytest.mark.parametrize("solver", SOLVERS)
def test_whitened_scores_have_unit_variance(solver):
    found = reported_case("whiten_unit_variance")
    x = torch.as_tensor(found["x"]["X"])
    z = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(x).transform(x)
    check(found, {"score_var_ddof1": z.var(0).numpy(), "score_var_ddof0": z.var(0, correction=0).numpy()})


@pytest.mark.parametrize("solver", SOLVERS)
def test_ddof_of_standardised_data(solver):
    found = reported_case("ddof_zscore")
    pca = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"]["X"])
    check(found, learned(pca) | {"explained_variance_sum": pca.explained_variance_.sum().item()})


@pytest.mark.parametrize("solver", SOLVERS)
def test_fewer_samples_than_components(solver):
    found = reported_case("fewer_samples_than_components")
    pca = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"]["X"])
    with pytest.raises(
        ValueError, match=r"0\.\.4, the smaller of 4 samples and 25 features, got 15"
    ) as caught:
        pt.PCA(svd_solver=solver, **found["x"]["bad_params"]).fit(found["x"]["X"])
    check(found, learned(pca) | {"raises_with_bad_params": caught.type.__name__})


@pytest.mark.parametrize("solver", SOLVERS)
def test_three_dimensions_are_rows(solver):
    found = reported_case("three_d_input")
    check(found, learned(pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(found["x"]["X"])))


def test_state_survives():
    found = reported_case("state_dict_roundtrip")
    x = torch.as_tensor(found["x"]["X"])
    pca = pt.PCA(**found["x"]["params"]).fit(x)
    fresh = pt.PCA()
    fresh.load_state_dict(pca.state_dict())
    for other in (fresh, copy.deepcopy(pca), pickle.loads(pickle.dumps(pca))):
        check(found, learned(other) | {"scores_abs": other.transform(x).abs().numpy()})


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_transform_returns_the_dtype_of_its_input(dtype):
    found = reported_case("transform_dtype")
    x = torch.as_tensor(found["x"]["X"])
    pca = pt.PCA(**found["x"]["params"]).fit(x)
    z = pca.transform(x.to(getattr(torch, dtype)))
    got = {"scores_abs": z.double().abs().numpy(), "dtype_out_equals_in": z.dtype == getattr(torch, dtype)}
    check(found, got, dtype)


@pytest.mark.parametrize("solver", SOLVERS)
def test_input_is_not_changed(solver):
    found = reported_case("input_not_mutated")
    x = found["x"]["X"].copy()
    pca = pt.PCA(svd_solver=solver, **found["x"]["params"]).fit(x)
    before = pca.components_.clone()
    first, second = pca.transform(x), pca.transform(x)
    pca.inverse_transform(first)
    streamed([x], **found["x"]["params"])
    got = {
        "X_after": x,
        "transforms_equal": torch.equal(first, second),
        "components_unchanged": torch.equal(before, pca.components_),
    }
    check(found, got)


# ---------------------------------------------------------------- spectrum
def test_rank_for_all_the_variance():
    found = reported_case("rank_threshold_one")
    x, rounded = found["x"]["X"], found["x"]["evr_rounded"]
    for spectrum in (pt.PCA().fit(x).result_, pt.PCA().fit(x.astype(np.float32)).result_, rounded):
        got = {
            "rank_at_1": pt.spectrum.rank(spectrum, 1.0),
            "rank_at_0999999": pt.spectrum.rank(spectrum, 0.999999),
        }
        check(found, got)
    assert pt.PCA(1.0).fit(x).n_components_ == 64
    assert pt.PCA(1).fit(x).n_components_ == 1


def test_massive_token_in_both_views():
    found = reported_case("massive_token")
    views = pt.TokenViews(lambda: pt.Moments(16)).update(found["x"]["X"][None])
    everything, typical, extreme = views.result()
    assert dict(extreme.positions) == dict.fromkeys(found["x"]["drop"], 1)
    a, b = pt.decompose(everything), pt.decompose(typical)
    got = {
        "evr1_all": pt.spectrum.top_share(a),
        "rank95_all": pt.spectrum.rank(a, 0.95),
        "evr1_dropped": pt.spectrum.top_share(b),
        "rank95_dropped": pt.spectrum.rank(b, 0.95),
    }
    assert set(got) == set(found["expect"])
    check(found, got)


# ---------------------------------------------------------------- masks
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dtype", ["int64", "bool", "float32"])
def test_padding_does_not_count(side, dtype):
    found = reported_case("pad_mask_left_right")
    h, mask = torch.as_tensor(found["x"][f"h_{side}"]), torch.as_tensor(found["x"][f"mask_{side}"])
    mask = mask.to(getattr(torch, dtype))
    check(found, learned(pt.PCA().fit(h, mask=mask)))
    check(found, learned(pt.PCA().partial_fit(h, mask=mask)))


def test_nan_in_padding_does_not_count():
    found = reported_case("pad_rows_nan")
    check(found, learned(pt.PCA().fit(found["x"]["h"], mask=found["x"]["mask"])))
    check(found, learned(pt.PCA().partial_fit(found["x"]["h"], mask=found["x"]["mask"])))


# ---------------------------------------------------------------- keys and adapters
@pytest.mark.parametrize("form", ["legacy", "old", "new", "new_lazy"])
def test_every_cache_container_gives_the_same_bases(form):
    found = reported_case("kv_cache_containers")
    spectra = kv.cache_spectra(found["x"]["caches"][form])
    assert list(spectra) == [0, 1]
    variance = torch.stack([layer.explained_variance for layer in spectra.values()])
    check(found, {"explained_variance_layers_heads": variance.numpy()})


@pytest.mark.parametrize("name", ["k", "k_repeated"])
def test_heads_are_not_mixed_and_repeats_do_not_count(name):
    found = reported_case("kv_head_layout")
    heads = kv.head_spectra(found["x"][name], num_key_value_heads=found["x"]["num_key_value_heads"])
    got = {
        "explained_variance_heads": heads.explained_variance.numpy(),
        "first_component_abs_argmax": heads.components[:, 0].abs().argmax(-1).numpy(),
        "distinct_bases": len(heads.components),
    }
    check(found, got)


def test_adapters_with_the_same_span():
    found = reported_case("lora_same_span")
    a, p, q = found["x"]["A1"], found["x"]["P"].T, found["x"]["Q"].T
    angles = pt.subspace.principal_angles(p, q)
    got = {
        "overlap_A": pt.subspace.overlap(lora.input_basis(a), lora.input_basis(found["x"]["A2"])),
        "cosines_PQ": angles.cos().numpy(),
        "angles_PQ": angles.numpy(),
        "overlap_PQ": pt.subspace.overlap(p, q),
    }
    check(found, got)


def test_an_untrained_adapter_has_no_span():
    found = reported_case("lora_zero_B")
    fresh, trained = [(found["x"][f"A{i}"], found["x"][f"B{i}"]) for i in (1, 2)]
    assert lora.overlap(fresh, trained, "output") in found["expect"]["overlap_output_allowed"]
    assert found["wrong"]["overlap_output"] not in found["expect"]["overlap_output_allowed"]
    for rank in (lora.adapter_spans(fresh).rank, len(lora.output_basis(fresh[1]))):
        check(found, {"rank1": rank})


@pytest.mark.parametrize("form", ["pair", "delta", "delta_conv1d"])
def test_the_sides_of_an_adapter(form):
    found = reported_case("lora_sides")
    x = found["x"]
    first, second = [(x[f"A{i}"], x[f"B{i}"]) if form == "pair" else x[f"delta{i}{form[5:]}"] for i in (1, 2)]
    transposed = form == "delta_conv1d"
    got = {
        f"overlap_{side}": lora.overlap(first, second, side, fan_in_fan_out=transposed)
        for side in ("input", "output")
    }
    check(found, got)


def test_every_case_is_tested_or_has_its_place():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = {name: build()["part"] for name, build in reported.CASES.items()}
    here = {name for name, part in parts.items() if part not in ELSEWHERE and part not in LATER}
    source = Path(__file__).read_text()
    assert {name for name in here if f'"{name}"' not in source} == set()
