"""The reported cases on the device: the tests of tests/test_reported.py with a PCA that computes there."""

import types

import pytest
import torch

import pca_torch as pt
from tests import test_reported as cases
from tests.test_reported import krylov_iterates  # ruff: ignore[unused-import]

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("device")]

LEFT_OUT = {
    "test_every_case_is_tested_or_has_its_place",  # about a file
    "test_wide_data_never_make_a_square_of_features",  # about the memory of a host
    "test_rank_for_all_the_variance",  # about numbers alone
    "test_massive_token_in_both_views",  # below
}
globals().update({
    name: test for name, test in vars(cases).items() if name.startswith("test_") and name not in LEFT_OUT
})


def there(x):
    return torch.as_tensor(x).to(OnDevice.place)


class OnDevice(pt.PCA):
    """A PCA that takes its samples to the device, where what it learns has to lie, and answers from there."""

    place = torch.device("cpu")

    def fit(self, x, y=None, **rows):
        return super().fit(there(x), **{name: there(value) for name, value in rows.items()})

    def partial_fit(self, x, y=None, **rows):
        return super().partial_fit(there(x), **{name: there(value) for name, value in rows.items()})

    def transform(self, x):
        return brought(super().transform(there(x)))

    def inverse_transform(self, z):
        return brought(super().inverse_transform(there(z)))

    def __getattr__(self, name):
        value = super().__getattr__(name)
        return brought(value) if isinstance(value, torch.Tensor) else value


def brought(tensor):
    assert tensor.device.type == OnDevice.place.type
    return tensor.cpu()


@pytest.fixture(autouse=True)
def on_device(monkeypatch, device):
    monkeypatch.setattr(OnDevice, "place", device)
    monkeypatch.setattr(cases, "pt", types.SimpleNamespace(**{**vars(pt), "PCA": OnDevice}))


@pytest.mark.parametrize("solver", cases.SOLVERS)
def test_an_answer_that_lies_elsewhere_would_be_noticed(solver, monkeypatch):
    """Control: the samples go where the class says, and an answer from another place is refused."""
    pca = OnDevice(2, svd_solver=solver).fit(torch.randn(30, 4, generator=torch.Generator().manual_seed(0)))
    assert pca.components_.device.type == "cpu"
    assert pca.transform(torch.zeros(1, 4)).shape == (1, 2)
    monkeypatch.setattr(OnDevice, "place", torch.device("meta"))
    with pytest.raises(AssertionError, match=r"== 'meta'"):
        _ = pca.components_


def test_massive_token_in_both_views(device):
    found = cases.reported_case("massive_token")
    x = torch.as_tensor(found["x"]["X"][None]).to(device)
    everything, typical, extreme = pt.TokenViews(lambda: pt.Moments(16, device=device)).update(x).result()
    assert {everything.mean.device.type, typical.mean.device.type} == {device.type}
    assert dict(extreme.positions) == dict.fromkeys(found["x"]["drop"], 1)
    a, b = pt.decompose(everything), pt.decompose(typical)
    got = {
        "evr1_all": pt.spectrum.top_share(a),
        "rank95_all": pt.spectrum.rank(a, 0.95),
        "evr1_dropped": pt.spectrum.top_share(b),
        "rank95_dropped": pt.spectrum.rank(b, 0.95),
    }
    cases.check(found, got)
