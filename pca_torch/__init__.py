"""PCA for neural activations: how many dimensions a layer uses, which ones, and how sure that is."""

from importlib.metadata import PackageNotFoundError, version

from pca_torch import kappa, spectrum, subspace
from pca_torch.covariances import batch_covariance
from pca_torch.estimator import PCA
from pca_torch.export import load, save
from pca_torch.hooks import capture, match_sites
from pca_torch.moments import Moments
from pca_torch.pipeline import analyse
from pca_torch.result import Certificate, ExtremeRows, PCAResult, SiteReport
from pca_torch.rfactor import RFactor
from pca_torch.solvers import BatchedResult, choose_solver, decompose, decompose_batch
from pca_torch.sources import NpySource
from pca_torch.tokens import TokenViews

__all__ = [
    "PCA",
    "BatchedResult",
    "Certificate",
    "ExtremeRows",
    "Moments",
    "NpySource",
    "PCAResult",
    "RFactor",
    "SiteReport",
    "TokenViews",
    "analyse",
    "batch_covariance",
    "capture",
    "choose_solver",
    "decompose",
    "decompose_batch",
    "kappa",
    "load",
    "match_sites",
    "save",
    "spectrum",
    "subspace",
]

try:
    __version__ = version("pca-torch")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
