"""Does computing half of a symmetric product take at most 0.62 of the time of all of it?

`add_gram` against the plain product of the same precision, both into memory that is there already, as in
a stream of batches. The other half is copied once per fit, not per batch, and is not timed.
"""

import math

import torch
from pairs import interleaved, parser, report
from spectra import samples
from torch import Tensor

from pca_torch.linalg import add_gram

TARGET = 0.62
ENTRIES = 64  # of the product that are compared with the exact sum


def exact_entries(x: Tensor, count: int) -> tuple[Tensor, Tensor, list[float]]:
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
    return pairs[:, 0], pairs[:, 1], values


def main() -> None:
    """Time both precisions."""
    args = parser(__doc__, n=8192, d=4096).parse_args()
    data = samples("power", args.n, args.d, min(128, args.d)).to(args.device)
    i, j, exact = exact_entries(data, ENTRIES)
    truth = torch.tensor(exact, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        x = data.to(dtype)
        half, whole = (torch.zeros(args.d, args.d, dtype=dtype, device=args.device) for _ in range(2))

        def ours(x: Tensor = x, half: Tensor = half) -> Tensor:
            add_gram(half, x)
            return half

        def theirs(x: Tensor = x, whole: Tensor = whole) -> Tensor:
            return torch.mm(x.mT, x, out=whole)

        timing = interleaved(ours, theirs, args.pairs, device=args.device)
        half.zero_()  # every run above added to it
        sums = {"error": ours(), "plain_error": theirs()}
        errors = {name: (s.cpu()[i, j].double() - truth).abs().max().item() for name, s in sums.items()}
        case = str(dtype).removeprefix("torch.")
        report("symmetric_product", case, timing, args, rival="plain", target=TARGET, errors=errors)


if __name__ == "__main__":
    main()
