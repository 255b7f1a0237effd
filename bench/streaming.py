"""Is one exact pass over batches as fast as the two passes of TorchDR, and as right?

`partial_fit` and the solve against `torchdr.ExactIncrementalPCA` (`pip install --no-deps torchdr`; it
needs scikit-learn), both from the same list of float32 batches in memory, both until the components are
there. Errors are the share of the variance that the best K directions capture and these do not.
"""

import sys
import warnings

import torch
from pairs import interleaved, parser, report
from spectra import SPECTRA, samples
from truth import captured, covariance, eigenvalues

import pca_torch as pt

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of FAISS, which this class does not use
        from torchdr import ExactIncrementalPCA
except ImportError as error:
    sys.exit(f"streaming.py needs torchdr and scikit-learn: `pip install --no-deps torchdr` ({error}).")


def main() -> None:
    """Time one spectrum."""
    options = parser(__doc__, n=16384, d=2048, k=128)
    options.add_argument("--batch", type=int, default=2048, help="rows of a batch (%(default)s)")
    options.add_argument("--solver", default="auto", help="svd_solver of `PCA` (%(default)s)")
    options.add_argument("--precision", default="auto", help="products of `PCA` (%(default)s)")
    options.add_argument("--spectrum", choices=SPECTRA, default="power")
    args = options.parse_args()
    x = samples(args.spectrum, args.n, args.d, args.k).to(args.device)
    batches = list(x.split(args.batch))

    def ours() -> torch.Tensor:
        pca = pt.PCA(args.k, svd_solver=args.solver, precision=args.precision)
        for batch in batches:
            pca.partial_fit(batch)
        return pca.result_.components  # solved for here

    def theirs() -> torch.Tensor:
        pca = ExactIncrementalPCA(n_components=args.k)
        pca.compute_mean(batches)
        components = pca.fit(batches).components_
        assert components is not None  # it starts as None, for the type checker
        return components

    timing = interleaved(ours, theirs, args.pairs, device=args.device)
    c = covariance(x)
    variance = eigenvalues(c)
    best = (variance[: args.k].sum() / variance.sum()).item()
    missed, torchdr_missed = (best - captured(c, components) for components in timing.answers)
    errors = {"missed": missed, "torchdr_missed": torchdr_missed, "true_share": best}
    report("streaming", args.spectrum, timing, args, rival="torchdr", target=1.0, errors=errors)


if __name__ == "__main__":
    main()
