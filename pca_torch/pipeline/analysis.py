"""A model and batches in; spectra and ranks of each site, in both views, out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from pca_torch._checks import as_components, check_number
from pca_torch.pipeline.counting import count_sites
from pca_torch.pipeline.keeping import Keeping
from pca_torch.pipeline.measuring import Batch, Progress
from pca_torch.pipeline.reports import Reports
from pca_torch.precision import Precision
from pca_torch.selection import TokenSelection
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site, find_sites

__all__ = ["analyse"]


def analyse(
    model: nn.Module,
    batches: Iterable[Batch],
    sites: str | Site | Sequence[str | Site] | None = None,
    *,
    n_components: float | None = 0.95,
    drop_first: int = 0,
    selection: TokenSelection | None = None,
    precision: Precision = "auto",
    keeping: Keeping | None = None,
    stop_early: bool | None = None,
    progress: Progress | None = None,
) -> Reports:
    """How many dimensions each site of a model uses: all tokens, and the tokens of typical norm.

    Activations are reduced inside the hook; per site it keeps two D×D sums and a bounded number of
    rows, however many batches come.

    Args:
        model: any module; it is put in eval mode while this runs.
        batches: arguments for the model, as keyword arguments or one tensor. `attention_mask` (B, T)
            of 0 and 1 says which tokens count.
        sites: what `find_sites` takes: "resid", "k", "model.layers.*:input"; None is every block's output.
        n_components: directions kept per site or head, a share of the variance as a float, or None for all.
        drop_first: leave out the first tokens of each sequence, this many, in every site.
        selection: which tokens count, where more than these two decide.
        precision: arithmetic of the products.
        keeping: where checkpoints and statistics go, and whether to go on with what is there, given the
            same batches.
        stop_early: end a forward when every site has fired as often as in the first; right if no module runs
            more often in one forward than in another. None is so for models of transformers.
        progress: called after each batch with its number of tokens.

    Returns:
        Per site a `SiteReport`, or a `HeadsReport` where it has heads, in the order of the model. A site
        that may be empty, such as an expert that no token reached, is left out with a warning.

    Raises:
        ValueError: no such site, no batch, too few tokens, or NaN in a site.
    """
    check_number(drop_first, "drop_first", "an integer ≥ 0", isinstance(drop_first, int) and drop_first >= 0)
    n_components = as_components(n_components)
    if selection is not None and drop_first:
        raise ValueError(
            f"`drop_first` must be 0 beside a `selection`, got {drop_first}; give it to the `TokenSelection`."
        )
    chosen = TokenSelection(drop_first=drop_first) if selection is None else selection
    found = find_sites(model, sites)
    settings = {"precision": precision, "n_components": n_components, **chosen.describe()}
    if keeping is not None:
        names = [site.name for site in found]
        keeping = keeping.begin({"model": type(model).__name__, "sites": names, "settings": settings})
    counted = count_sites(
        model,
        lambda: batches,
        [found],
        lambda site: SiteStatistic(
            site.heads if site.per_head else None, precision=precision, n_components=n_components
        ),
        lambda: chosen,
        n_components=n_components,
        keeping=keeping,
        metadata={"model": {"name": type(model).__name__}, "tokens": {}, "settings": settings},
        stop_early=stop_early,
        progress=progress,
    )
    if keeping is not None:
        keeping.clear()
    if counted.empty:
        told = ", ".join(counted.empty[:3]) + (", …" if len(counted.empty) > 3 else "")
        warnings.warn(f"no token, or a single one, reached {told}; the reports leave them out", stacklevel=2)
    return counted.reports
