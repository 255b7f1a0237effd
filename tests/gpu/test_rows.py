"""Each row of `scripts/gpu_check` on the device: its route and its judge run there, and agree."""

import pytest
import torch

from bench.gpu import solvers
from bench.gpu.data import Data
from bench.gpu.samples import samples, truth_of

pytestmark = pytest.mark.gpu

PARTS = (
    solvers.leading,
    solvers.iterations,
    solvers.sums,
    solvers.wrong,
    solvers.everything,
    solvers.eigenproblem,
    solvers.factorised,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_row_is_right_unless_it_is_wrong_on_purpose(part, dtype, device):
    n, d = solvers.SMALL.sizes[0]
    x = samples("power", n, d, solvers.SMALL.k, dtype=dtype, device=torch.device("cpu")).to(device)
    data = Data(x, truth_of(x), solvers.SMALL.k, "power")
    rows = [(row, row.judge(row.run())) for row in part(data)]
    assert rows
    for row, verdict in rows:
        assert verdict.ok is not row.control, (row.case, verdict)
