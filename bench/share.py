"""How much faster than an SVD is a share of the variance, and is the K it finds the right one?

`n_components` is a share whose answer lies below D / 8, on the power law, against `torch.linalg.svd` of
the centred float32 samples and a cumulative sum.
"""

from pairs import interleaved, parser, report
from spectra import samples
from truth import covariance, eigenvalues, plain_svd, rank

import pca_torch as pt


def main() -> None:
    """Time every share."""
    options = parser(__doc__, n=8192, d=4096)
    options.add_argument("--solver", default="auto", help="svd_solver of `decompose` (%(default)s)")
    options.add_argument("--share", type=float, nargs="+", default=[0.8, 0.9, 0.95])
    args = options.parse_args()
    x = samples("power", args.n, args.d, min(128, args.d)).to(args.device)
    spectrum = eigenvalues(covariance(x))
    for share in args.share:
        timing = interleaved(
            lambda share=share: pt.decompose(x, share, args.solver).n_components,
            lambda share=share: rank(plain_svd(x)[0], share),
            args.pairs,
            device=args.device,
        )
        found, by_svd = timing.answers
        errors = {"k": found, "svd_k": by_svd, "true_k": rank(spectrum, share), "limit_k": args.d // 8}
        report("share", f"{share:g}", timing, args, rival="svd", errors=errors)


if __name__ == "__main__":
    main()
