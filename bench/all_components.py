"""Are all components at least 1.3 times faster than an SVD, with no variance further off?

`covariance_eigh` against `torch.linalg.svd` of the centred float32 samples. The truth is the float64 SVD
of the float64-centred samples; errors are in units of the largest variance.
"""

import torch
from pairs import interleaved, parser, report
from spectra import SPECTRA, samples
from torch import Tensor
from truth import centred, plain_svd

import pca_torch as pt

TARGET = 1 / 1.3


def main() -> None:
    """Time one spectrum."""
    options = parser(__doc__, n=8192, d=4096)
    options.add_argument("--spectrum", choices=SPECTRA, default="power")
    options.add_argument("--solver", default="covariance_eigh", help="svd_solver (%(default)s)")
    args = options.parse_args()
    x = samples(args.spectrum, args.n, args.d, min(128, args.n, args.d)).to(args.device)
    timing = interleaved(
        lambda: pt.decompose(x, None, args.solver), lambda: plain_svd(x), args.pairs, device=args.device
    )
    result, (variance, _) = timing.answers
    errors = compare(x, result.spectrum, variance)
    report("all_components", args.spectrum, timing, args, rival="svd", target=TARGET, errors=errors)


def compare(x: Tensor, ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How far each side is off, and how many of our variances are further off than theirs.

    The truth itself is a float64 SVD: an advantage smaller than its error N·u·λ₁ is none.

    Args:
        x: samples (N, D).
        ours: (M,) variances, descending.
        theirs: (M,) variances, descending.
    """
    z = centred(x)
    square = torch.linalg.qr(z, mode="r").R if len(z) > z.shape[1] else z
    truth = torch.linalg.svdvals(square).square() / (len(x) - 1)
    off, svd_off = (ours.double() - truth).abs(), (theirs.double() - truth).abs()
    allowance = len(x) * torch.finfo(torch.float64).eps / 2 * truth[0]
    return {
        "error": (off.max() / truth[0]).item(),
        "svd_error": (svd_off.max() / truth[0]).item(),
        "further_off": int((off > svd_off + allowance).sum()),
        "largest": truth[0].item(),
    }


if __name__ == "__main__":
    main()
