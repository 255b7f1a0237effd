"""A caller's default device and dtype decide nothing here: the same bits, on the CPU, as without them."""

import ast
import copy
import dataclasses
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

import pca_torch as pt
from pca_torch import kv, lora, spectrum, subspace
from pca_torch.kappa.shifts import shifted
from pca_torch.monitor.drift import Drift
from pca_torch.monitor.log_file import read_log
from pca_torch.norm_histogram import NormHistogram
from pca_torch.solvers import SOLVERS
from pca_torch.subspace.energy import captured_share
from pca_torch.texts import token_windows
from tests.monitor.net import batches, loss_of, net
from tests.support import samples

N, D = 90, 12
X = samples(N, D, offset=1.0, dtype=torch.float32)
X[7] *= 60  # a row that `TokenViews` finds extreme
MODEL, BATCHES, SITES = net(dropout=0.0), batches(4), ["blocks.0", "blocks.1.up"]
INDICES = torch.tensor([[0, 0, 3, 5, 4], [1, 1, 2, 0, 3]])  # one of them twice
TWICE = torch.sparse_coo_tensor(INDICES, X[0, :5], (6, 4), check_invariants=True)
POSITIONS = torch.arange(N) % 9
PACKAGE = Path(pt.__file__).parent
FACTORIES = {function.__name__ for function in _device_constructors()}


@contextmanager
def elsewhere() -> Generator[None]:
    """New tensors go to a device that holds no numbers, in a dtype of eight bits of precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def told(value: Any) -> Any:
    """`value` as text that is equal for equal bits alone, with dtypes and devices."""
    match value:
        case Tensor():
            return f"{value.dtype} {value.device} {tuple(value.shape)} {value.tolist()}"
        case Mapping():
            return {str(key): told(one) for key, one in value.items()}
        case list() | tuple():
            return [told(one) for one in value]
        case _ if dataclasses.is_dataclass(value):
            return {field.name: told(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def statistic(make, *, finish=lambda whole: pt.decompose(whole, 4)):
    """Two of a kind, one of which was saved, merged; what they hold, and what comes of it."""

    def run(_folder):
        first, second = make().update(X[:50]), make().update(X[50:])
        whole = type(first).from_state(*first.to_state()).merge(second)
        return whole.to_state(), finish(whole)

    return run


def views(_folder):
    first, second = (pt.TokenViews(lambda: pt.Moments(D), max_held=4) for _ in range(2))
    first.update(X[:50], positions=POSITIONS[:50])
    second.update(X[50:], positions=POSITIONS[50:])
    state = first.to_state()
    whole = pt.TokenViews.from_state(*state, pt.Moments.from_state).merge(second)
    typical, extreme, rows = whole.result()
    assert extreme.n_samples > 0
    return state, whole.to_state(), typical.to_state(), rows


def solved(solver):
    def run(_folder):
        options = {} if solver == "auto" else {"svd_solver": solver}
        return pt.decompose(X, 3, whiten=True, **options), pt.decompose(X[:8], 3, **options)

    return run


def files(folder):
    results = {"a": pt.decompose(X, 3), "b": [pt.decompose(X, 3), pt.decompose(2 * X, 4)]}
    pt.save(folder / "bases.safetensors", results)
    read = pt.load(folder / "bases.safetensors")
    pt.save_statistics(folder / "sums.safetensors", {"a": pt.Moments(D).update(X)})
    sums = pt.load_statistics(folder / "sums.safetensors")
    return [read[name] for name in read], sums["a"].to_state()


def rows_on_disk(folder):
    with pt.ActivationWriter(folder / "written", origins=True) as writer:
        writer.sink("a").update(X)
    torch.save(X, folder / "x.pt")
    np.save(folder / "x.npy", X.numpy())
    found = [pt.open_sources(folder / name) for name in ("written/a", "x.pt", "x.npy")]
    blocks = [[block.clone() for source in sources for block in source] for sources in found]
    each = [pt.decompose(sources, 3, svd_solver="krylov") for sources in found]
    return blocks, each, [shard.read_bytes() for shard in sorted(folder.rglob("*.safetensors"))]


def sparse(_folder):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    whole = scipy_sparse.random(50, 9, 0.4, "csc", random_state=0)
    unsorted = scipy_sparse.csr_matrix(([1.0, 2.0, 3.0], [2, 0, 1], [0, 2, 3, 3]), shape=(3, 3))
    return [pt.decompose(data, 2) for data in (TWICE, whole, unsorted)]


def functions_of_spectra(_folder):
    result = pt.decompose(X)
    given = {"rank": {"share": 0.9, "error": 1e-7}, "alpha_req": {"fit_range": (2, 9)}}
    return {
        name: getattr(spectrum, name)(one, **given.get(name, {}))
        for name in set(spectrum.__all__) - {"PowerLaw", "rankme"}
        for one in (result, result.spectrum.tolist())
    } | {"rankme": spectrum.rankme(result.spectrum)}


def functions_of_subspaces(_folder):
    a, b, sums = pt.decompose(X, 3), pt.decompose(X[:60], 4), pt.Moments(D).update(X[20:])
    return [
        subspace.overlap(a, b),
        subspace.principal_angles(a, b.components.numpy()),
        subspace.captured(sums, b.components),
        captured_share(a, b),
        captured_share(sums, b),
        subspace.random_overlap(3, 4, D),
    ]


def caches_and_adapters(_folder):
    keys = X[:80].reshape(2, 2, 20, D)
    pair = X[:3], X[3:6].mT
    heads = pt.decompose_heads(pt.HeadMoments(3, D // 3).update(X))
    return [
        kv.cache_spectra([(keys, keys)], 3, mask=np.arange(40).reshape(2, 20) % 3 > 0),
        lora.adapter_spans(pair),
        lora.adapter_spans(pair[1] @ pair[0]),
        *(lora.overlap(pair, (X[6:9], pair[1]), side=side) for side in ("input", "output")),
        pt.batch_covariance(keys),
        heads,
    ]


def estimator(_folder):
    pca = pt.PCA(3).partial_fit(X[:50]).partial_fit(X[50:])
    again = pt.PCA(3)
    state = pca.state_dict()
    again.load_state_dict(state)
    return state, again.transform(X), pca.inverse_transform(again.transform(X))


def captured(_folder):
    selection, model = pt.TokenSelection(special_ids=[1, 2]), MODEL
    sums, batch = pt.Moments(16), BATCHES[0]
    with pt.capture(model, {"blocks.0": sums}, mask=selection), torch.no_grad():
        model(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    return sums.to_state(), selection.counts, pt.describe_sites(model)


def monitored(folder):
    model, turned = copy.deepcopy(MODEL), Drift(2)
    turned.update(pt.decompose(X, 3))
    monitor = pt.SpectrumMonitor(model, SITES, 2, path=folder / "spectra.jsonl", decay=0.5)
    with monitor:
        for batch in BATCHES:
            loss_of(model(batch["input_ids"], batch["attention_mask"]), batch).backward()
            monitor.step()
    again = pt.SpectrumMonitor(model, SITES, 2, path=folder / "again.jsonl", decay=0.5)
    again.load_state_dict(monitor.state_dict())
    records = read_log(folder / "spectra.jsonl").records
    state = again.state_dict()
    del state["facts"]  # they name the run, which is another
    return records, state, Drift.from_state(*turned.to_state()).to_state()


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = 0

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) for letter in text]}


def small_parts(_folder):
    norms = NormHistogram().update(X.norm(dim=1))
    windows = token_windows(["abcdef", "ghijk"], Letters(), 4, 8)
    return norms.median(), norms.mad(), windows, shifted(X.double(), lambda _: None)


RUNS = {
    "Moments": statistic(lambda: pt.Moments(D)),
    "Moments, standardised": statistic(
        lambda: pt.Moments(D, precision="float32"), finish=lambda m: pt.decompose(m, 0.9, standardize=True)
    ),
    "HeadMoments": statistic(lambda: pt.HeadMoments(3, D // 3), finish=pt.decompose_heads),
    "HeadMoments, float32": statistic(
        lambda: pt.HeadMoments(3, D // 3, precision="float32"), finish=pt.decompose_heads
    ),
    "RFactor": lambda _: pt.decompose(pt.RFactor(D).update(X[:50]).merge(pt.RFactor(D).update(X[50:])), 4),
    "TokenViews": views,
    **{f"decompose, {solver}": solved(solver) for solver in ("auto", *SOLVERS)},
    "files": files,
    "rows on disk": rows_on_disk,
    "sparse": sparse,
    "spectrum": functions_of_spectra,
    "subspace": functions_of_subspaces,
    "kv, lora, heads": caches_and_adapters,
    "PCA": estimator,
    "capture": captured,
    "SpectrumMonitor": monitored,
    "small parts": small_parts,
}


@pytest.mark.parametrize("name", RUNS)
def test_the_same_bits_whatever_the_caller_has_set(name, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    here = told(RUNS[name](tmp_path / "here"))
    with elsewhere():
        assert told(RUNS[name](tmp_path / "there")) == here


def test_the_control_moves_what_names_no_device_and_no_dtype():
    with elsewhere():
        assert torch.zeros(1).device.type == "meta"
        assert torch.ones(1, device="cpu").dtype == torch.bfloat16
        assert told(torch.ones(1, device="cpu")) != told(torch.ones(1, dtype=torch.float64, device="cpu"))


def unplaced(source):
    """Lines that call a factory of torch without a device."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in FACTORIES
        and "device" not in {word.arg for word in call.keywords}
    ]


def test_every_new_tensor_says_where_it_lies():
    found = {str(path.relative_to(PACKAGE)): unplaced(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_tensor_that_does_not_say_it_is_found():
    lines = ["torch.zeros(2)", "torch.eye(2, device=x.device)", "torch.tensor([1]).to(x)", "x.zeros(1)"]
    assert unplaced("\n".join(lines)) == [1, 3]
