"""What lies where: data on the device stay there, and what is on the CPU comes to them."""

import copy
import pickle

import pytest
import torch

import pca_torch as pt
from pca_torch._checks import free_memory
from pca_torch.solvers import SOLVERS
from tests.support import samples

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(device):
    return samples(600, 24, dtype=torch.float32).to(device)


def here(device, *tensors):
    return {t.device.type for t in tensors} == {device.type}


def pickled(statistic, device):
    """It once more, from its bytes; a device that is one in name only has none."""
    return [pickle.loads(pickle.dumps(statistic))] if device.type in {"cpu", "cuda"} else []


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_fit_lies_where_its_samples_are(solver, x, device):
    pca = pt.PCA(4, svd_solver=solver).fit(x)
    z = pca.transform(x)
    learned = (pca.components_, pca.mean_, pca.explained_variance_, pca.explained_variance_ratio_)
    assert here(device, *learned, pca.singular_values_, z, pca.inverse_transform(z))
    assert pca.result_.reconstruction_error(x, per="scalar") < 1
    moved = copy.deepcopy(pca).cpu()
    assert here(torch.device("cpu"), moved.components_, moved.transform(x.cpu()))
    torch.testing.assert_close(moved.transform(x.cpu()), z.cpu())


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_seed_gives_the_same_bits_again(solver, x):
    first, second = (pt.PCA(4, svd_solver=solver, random_state=3).fit(x) for _ in range(2))
    assert torch.equal(first.components_, second.components_)
    assert torch.equal(first.explained_variance_, second.explained_variance_)


@pytest.mark.parametrize("solver", ["randomized", "krylov"])
def test_a_generator_may_lie_on_the_device(solver, x, device):
    result = pt.decompose(x, 4, solver, random_state=torch.Generator(device).manual_seed(0))
    assert here(device, result.components)


@pytest.mark.parametrize("kind", [pt.Moments, pt.RFactor])
def test_a_statistic_takes_rows_from_anywhere(kind, x, device):
    mask = torch.arange(600) % 3 > 0
    weights = torch.rand(600, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    statistic = kind(24, device=device, precision="float64")
    statistic.update(x[:100].cpu()).update(x[100:], mask=mask[100:], weights=weights[100:])
    statistic.merge(kind(24).update(x[:50].cpu()))
    assert here(device, statistic.mean, statistic.covariance(), statistic.second_moment())
    want = kind(24).update(x[:100].cpu()).update(x[100:].cpu(), mask=mask[100:], weights=weights[100:])
    want.merge(kind(24).update(x[:50].cpu()))
    torch.testing.assert_close(statistic.covariance().cpu(), want.covariance(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [pt.Moments, pt.RFactor])
def test_a_statistic_goes_on_after_a_copy_and_a_pickle(kind, x, device):
    statistic = kind(24, precision="float64").update(x[:300])
    for again in (copy.deepcopy(statistic), *pickled(statistic, device)):
        assert here(device, again.update(x[300:]).mean)
        torch.testing.assert_close(again.mean, x.double().mean(0))
        assert again.n_samples == 600
    assert statistic.n_samples == 300


def test_files_are_the_same_from_any_device(x, tmp_path):
    result = pt.decompose(x, 4)
    pt.save(tmp_path / "basis.safetensors", {"site": result}, {})
    loaded = pt.load(tmp_path / "basis.safetensors")["site"]
    assert torch.equal(loaded.components, result.components.cpu())
    pca = pt.PCA(4).fit(x)
    other = pt.PCA()
    other.load_state_dict(pca.state_dict())
    assert torch.equal(other.components_.cpu(), pca.components_.cpu())


@pytest.mark.parametrize("driver", ["auto", "eigh", "svd", "jacobi"])
def test_one_covariance_per_head(driver, device):
    heads = samples(3 * 50, 40).reshape(3, 50, 40)
    c = heads.mT @ heads / 50
    result, want = pt.decompose_batch(c.to(device), 5, driver=driver), pt.decompose_batch(c, 5)
    assert here(device, result.components, result.spectrum, result.variance_error)
    off = (result.spectrum.cpu() - want.spectrum).abs()
    assert bool((off <= (result.variance_error.cpu() + want.variance_error)[:, None]).all())


def test_variance_along_directions(x, device):
    statistic = pt.Moments(24).update(x)
    along = pt.subspace.captured(statistic, torch.eye(24))
    assert here(device, along)
    torch.testing.assert_close(along, statistic.covariance().diagonal())


def test_layers_are_captured_where_the_model_is(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).to(device)
    batch = torch.randn(4, 300, 24, generator=torch.Generator().manual_seed(0)).to(device)
    views = pt.TokenViews(lambda: pt.Moments(32, device=device))
    mask = torch.ones(4, 300, dtype=torch.bool, device=device)
    mask[:, :7] = False
    with (
        torch.no_grad(),
        pt.capture(model, {"1": views, "2": (moments := pt.Moments(8))}, mask=lambda *_: mask),
    ):
        y = model(batch)
    everything, typical, _ = views.result()
    assert here(device, everything.mean, typical.mean, moments.mean)
    assert everything.n_samples == moments.n_samples == 4 * 293
    want = torch.cov(y[mask].double().mT)
    torch.testing.assert_close(moments.covariance(), want, rtol=1e-5, atol=1e-6)
    reports = pt.analyse(model, [batch], sites="*")
    assert here(device, *(report.typical.components for report in reports.values()))


def test_memory_that_is_not_there_is_refused_before_it_is_asked_for(device):
    if device.type != "cuda":
        pytest.skip("the memory of a host is another test's")
    with pytest.raises(ValueError, match=r"a 1000000 × 1000000 covariance needs .* GiB on cuda"):
        pt.Moments(1_000_000, device=device)


def test_memory_that_torch_keeps_for_itself_counts_as_free(device, monkeypatch):
    if device.type != "cuda":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 70)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
        assert free_memory(torch.device("cuda")) == 140
        return
    torch.empty(2**30, dtype=torch.uint8, device=device)  # kept for the next one that asks
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    assert kept >= 2**30
    torch.cuda.synchronize(device)
    assert free_memory(device) == torch.cuda.mem_get_info(device)[0] + kept
