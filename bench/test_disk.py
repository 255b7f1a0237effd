"""What does reading from a file cost against rows in memory?

`NpySource` through a `Moments`, from a file that the system has in its cache, against the same blocks.
"""

import numpy as np
import pytest
import torch
from spectra import samples
from truth import covariance

import pca_torch as pt


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_file_against_memory(versus, sized, device, tmp_path, dtype):
    """The same blocks, read or at hand."""
    n, d = sized(full=(16384, 2048), tiny=(300, 20))
    x = samples("power", n, d, d).to(getattr(torch, dtype))
    np.save(tmp_path / "x.npy", x.numpy())
    source = pt.NpySource(tmp_path / "x.npy")
    truth = covariance(x)

    def fit(blocks: object) -> pt.Moments:
        statistic = pt.Moments(d, device=device)
        for block in blocks:
            statistic.update(block)
        statistic.flush()
        return statistic

    def judge(statistic: pt.Moments) -> float:
        return (torch.linalg.norm(statistic.covariance().cpu() - truth) / torch.linalg.norm(truth)).item()

    versus(
        f"{dtype} file of {n}×{d}",
        lambda: fit(source),
        lambda: fit(x.split(source.block_rows)),
        against="rows in memory",
        what="of the covariance, relative (Frobenius norm)",
        judge=judge,
    )
