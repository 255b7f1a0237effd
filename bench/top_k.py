"""Do the top K directions with their certificate, sums included, take at most 0.35 of an SVD?

Against `torch.linalg.svd` of the centred float32 samples, which has no certificate, on four spectra.
Errors are shares of the total variance; those in "dir" are in units of λ_K, directions' worth.
"""

import torch
from pairs import interleaved, parser, report
from spectra import SPECTRA, samples
from truth import captured, covariance, eigenvalues, plain_svd

import pca_torch as pt

TARGET = 0.35


def main() -> None:
    """Time every spectrum."""
    options = parser(__doc__, n=8192, d=4096, k=128)
    options.add_argument("--solver", default="krylov", help="svd_solver of `decompose` (%(default)s)")
    options.add_argument("--spectrum", nargs="+", choices=SPECTRA, default=list(SPECTRA))
    args = options.parse_args()
    for spectrum in args.spectrum:
        x = samples(spectrum, args.n, args.d, args.k).to(args.device)

        def ours(x: torch.Tensor = x) -> pt.PCAResult:
            return pt.decompose(x, args.k, args.solver)

        def theirs(x: torch.Tensor = x) -> torch.Tensor:
            return plain_svd(x)[1][: args.k].clone()  # not a view: all D directions would stay in memory

        timing = interleaved(ours, theirs, args.pairs, device=args.device)
        result, components = timing.answers
        c = covariance(x)
        variance = eigenvalues(c)
        best = (variance[: args.k].sum() / variance.sum()).item()
        direction = (variance[args.k - 1] / variance.sum()).item()
        missed = best - captured(c, result.components)
        bound = result.certificate.missed_ratio_bound
        errors = {
            "bound": bound,
            "bound_dir": bound / direction,
            "missed": missed,
            "missed_dir": missed / direction,
            "svd_missed": best - captured(c, components),
            "true_share": best,
        }
        report("top_k", spectrum, timing, args, rival="svd", target=TARGET, errors=errors)


if __name__ == "__main__":
    main()
