"""Does computing half of a symmetric product take at most 0.62 of the time of all of it?

`add_gram` against the plain product of the same precision, both into memory that is there already, as in
a stream of batches. The other half is copied once per fit, not per batch, and is not timed.
"""

import math

import pytest
import torch
from spectra import samples
from torch import Tensor

from pca_torch.linalg import add_gram

ENTRIES = 64  # of the product that are compared with the exact sum


def exact_entries(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of entries of xᵀx, i ≤ j, spread over the triangle; exact to the last digit.

    Products of float32 numbers fit in float64, and `math.fsum` adds them without rounding.

    Args:
        x: (N, D) that hold float32 numbers, in any dtype.
        count: entries.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    pairs = torch.randint(x.shape[1], (count, 2), generator=generator).sort(1).values
    columns = x.double().cpu()
    values = [math.fsum((columns[:, i] * columns[:, j]).tolist()) for i, j in pairs.tolist()]
    return pairs[:, 0], pairs[:, 1], torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_half_of_the_product(versus, sized, device, dtype):
    """Upper block triangle against all blocks."""
    n, d = sized(full=(8192, 4096), tiny=(300, 520))
    data = samples("power", n, d, d)
    i, j, exact = exact_entries(data, ENTRIES)
    x = data.to(device, dtype)
    half, whole = (torch.zeros(d, d, dtype=dtype, device=device) for _ in range(2))

    def ours() -> Tensor:
        add_gram(half, x)
        return half

    versus(
        f"XᵀX of {n}×{d}, {str(dtype).removeprefix('torch.')}",
        ours,
        lambda: torch.mm(x.mT, x, out=whole),
        against="plain product",
        what=f"of an entry, the worst of {ENTRIES}",
        judge=lambda product: (product.cpu()[i, j].double() - exact).abs().max().item(),
        prepare=half.zero_,  # a stream adds, and so would the rounds
    )
