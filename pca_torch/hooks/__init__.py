"""Hooks: feed the activations of sites to statistics while a model runs."""

from pca_torch.hooks.context import Captured, capture
from pca_torch.sites.names import canonical_name, match_sites

__all__ = ["Captured", "canonical_name", "capture", "match_sites"]
