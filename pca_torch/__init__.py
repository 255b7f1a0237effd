"""PCA for neural activations: how many dimensions a layer uses, which ones, and how sure that is."""

from importlib.metadata import PackageNotFoundError, version

from pca_torch import kappa, kv, lora, monitor, spectrum, subspace
from pca_torch.activation_writer import ActivationWriter
from pca_torch.checkpoint import Checkpoint
from pca_torch.comparison import compare, open_side
from pca_torch.conversion import convert
from pca_torch.covariances import batch_covariance
from pca_torch.estimator import PCA
from pca_torch.export import load, save
from pca_torch.head_moments import HeadMoments
from pca_torch.heads import HeadsReport, decompose_heads
from pca_torch.hooks import capture
from pca_torch.memory_plan import plan_memory
from pca_torch.moments import Moments
from pca_torch.monitor import SpectrumMonitor
from pca_torch.pipeline import Keeping, analyse
from pca_torch.result import Certificate, ExtremeRows, PCAResult, SiteReport
from pca_torch.rfactor import RFactor
from pca_torch.selection import TokenSelection, special_ids_of
from pca_torch.sites import Site, find_sites, match_sites
from pca_torch.sites.describe import describe_sites
from pca_torch.solvers import BatchedResult, choose_solver, decompose, decompose_batch
from pca_torch.sources import NpySource, SafetensorsSource, TorchSource, open_sources
from pca_torch.statistic_file import load_statistics, save_statistics
from pca_torch.statistic_merge import merge_statistics
from pca_torch.tokens import TokenViews

__all__ = [
    "PCA",
    "ActivationWriter",
    "BatchedResult",
    "Certificate",
    "Checkpoint",
    "ExtremeRows",
    "HeadMoments",
    "HeadsReport",
    "Keeping",
    "Moments",
    "NpySource",
    "PCAResult",
    "RFactor",
    "SafetensorsSource",
    "Site",
    "SiteReport",
    "SpectrumMonitor",
    "TokenSelection",
    "TokenViews",
    "TorchSource",
    "analyse",
    "batch_covariance",
    "capture",
    "choose_solver",
    "compare",
    "convert",
    "decompose",
    "decompose_batch",
    "decompose_heads",
    "describe_sites",
    "find_sites",
    "kappa",
    "kv",
    "load",
    "load_statistics",
    "lora",
    "match_sites",
    "merge_statistics",
    "monitor",
    "open_side",
    "open_sources",
    "plan_memory",
    "save",
    "save_statistics",
    "special_ids_of",
    "spectrum",
    "subspace",
]

try:
    __version__ = version("pca-torch")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
