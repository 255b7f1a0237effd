"""What can be captured: names of modules, points of them, and shortcuts over model families."""

from pca_torch.sites.names import canonical_name, match_sites
from pca_torch.sites.site import Site

__all__ = ["Site", "canonical_name", "match_sites"]
