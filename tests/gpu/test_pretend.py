"""The device that is one in name only tells mistakes from what CUDA allows; see tests/test_gpu_check.py."""

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def x(device):
    if device.type != "pretend":
        pytest.skip("about another device")
    return torch.arange(12.0).reshape(4, 3).to(device)


MISTAKES = {
    "a sum": lambda x, cpu: x + cpu,
    "a product": lambda x, cpu: x @ cpu[:, None],
    "in place": lambda x, cpu: x.sub_(cpu),
    "a list": lambda x, cpu: torch.cat([x, cpu[None]]),
    "an index from there": lambda x, cpu: cpu[x[:, 0].long().clamp(0, 2)],
    "numpy": lambda x, cpu: x.numpy(),
    "a source of numbers": lambda x, cpu: torch.randn(3, generator=torch.Generator(), device=x.device),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_two_devices_in_one_operation_are_refused(mistake, x):
    message = "to be on one device|can't convert pretend|expected a 'pretend' device type"
    with pytest.raises((RuntimeError, TypeError), match=message):
        MISTAKES[mistake](x, torch.ones(3))


def test_what_cuda_allows_works(x, device):
    assert x.device.type == "pretend"
    assert (x + torch.tensor(1.0)).device.type == "pretend"
    assert x[torch.tensor([True, False, True, False])].shape == (2, 3)
    assert x[:, 0].tolist() == [0, 3, 6, 9]
    x[1:3] -= 1
    x.diagonal().zero_()
    assert x.cpu().tolist() == [[0, 1, 2], [2, 0, 4], [5, 6, 0], [9, 10, 11]]
    assert torch.tensor([1.0, 2.0], device=device).sum().item() == 3
    assert torch.linalg.svd(x, driver="gesvdj")[1].device.type == "pretend"
