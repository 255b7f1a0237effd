"""Which driver is the fastest for many small covariances?

`decompose_batch`, which checks every answer, with each of its drivers against `torch.linalg.eigh` of the
batch, which checks none.
"""

import pytest
import torch

import pca_torch as pt


@pytest.mark.parametrize("driver", ["eigh", "svd", "jacobi"])
@pytest.mark.parametrize("which", [0, 1], ids=["narrow", "wide"])
def test_driver_against_bare_eigh(versus, sized, device, driver, which):
    """Many narrow matrices and fewer wide ones."""
    many, width, n = sized(full=((256, 32, 512), (32, 64, 512)), tiny=((4, 6, 30), (2, 12, 30)))[which]
    generator = torch.Generator("cpu").manual_seed(0)
    spread = torch.arange(1, width + 1, dtype=torch.float64) ** -0.7
    z = torch.randn(many, n, width, generator=generator, dtype=torch.float64) * spread
    z -= z.mean(1, keepdim=True)
    z -= z.mean(1, keepdim=True)
    truth = torch.linalg.svdvals(z).square() / (n - 1)  # the samples themselves, never squared
    c = (z.mT @ z / (n - 1)).to(device)

    def bare() -> torch.Tensor:
        values, vectors = torch.linalg.eigh(c)
        del vectors
        return values.flip(-1)

    versus(
        f"{driver}, {many} of {width}×{width}",
        lambda: pt.decompose_batch(c, driver=driver).explained_variance,
        bare,
        against="bare eigh",
        what="of a variance, over the largest of its matrix",
        judge=lambda found: ((found.cpu() - truth).abs() / truth[:, :1]).max().item(),
    )
