"""What do small batches cost against one big fit?

`update` of every batch, flushed at the end, against one `update` of all rows.
"""

import pytest
import torch
from spectra import samples
from truth import covariance

import pca_torch as pt


@pytest.mark.parametrize("kind", [pt.Moments, pt.RFactor], ids=["Moments", "RFactor"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["small", "medium", "large"])
def test_batches_against_one_fit(versus, sized, device, kind, which):
    """The same rows, cut differently."""
    n, d = sized(full=(8192, 1024), tiny=(300, 20))
    batch = sized(full=(64, 512, 4096), tiny=(7, 32, 100))[which]
    x = samples("power", n, d, d).to(device)
    truth = covariance(x)

    def fit(size: int) -> pt.Moments | pt.RFactor:
        statistic = kind(d)
        for rows in x.split(size):
            statistic.update(rows)
        statistic.flush()
        return statistic

    versus(
        f"{kind.__name__}, {n}×{d}, by {batch}",
        lambda: fit(batch),
        lambda: fit(n),
        against="one update",
        what="of the covariance, relative (Frobenius norm)",
        judge=lambda s: (torch.linalg.norm(s.covariance() - truth) / torch.linalg.norm(truth)).item(),
    )
