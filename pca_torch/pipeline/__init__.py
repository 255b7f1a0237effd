"""The main job: from a model, or from files, to reports and the files of a report."""

from pca_torch.pipeline.analysis import analyse
from pca_torch.pipeline.files import fit_files, report_statistics
from pca_torch.pipeline.keeping import Keeping
from pca_torch.pipeline.outputs import write_outputs
from pca_torch.pipeline.planning import Budget
from pca_torch.pipeline.reading import Reading
from pca_torch.pipeline.running import run

__all__ = [
    "Budget",
    "Keeping",
    "Reading",
    "analyse",
    "fit_files",
    "report_statistics",
    "run",
    "write_outputs",
]
