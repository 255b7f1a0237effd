"""`pca-torch run`: a language model and text in, the report and the results behind it out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pca_torch._checks import as_components, check_number
from pca_torch.memory_plan import MemoryPlan
from pca_torch.models import LanguageModel, load_model
from pca_torch.pipeline.counting import Counted, count_sites
from pca_torch.pipeline.keeping import Keeping
from pca_torch.pipeline.measuring import Progress
from pca_torch.pipeline.planning import Budget, plan_run
from pca_torch.pipeline.reading import Data, Reading
from pca_torch.pipeline.reports import Reports
from pca_torch.precision import Precision
from pca_torch.selection import TokenSelection, special_ids_of
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site, find_sites

__all__ = ["run"]


def run(
    model: str = "smollm2",
    reading: Reading | None = None,
    *,
    sites: Sequence[str] | None = None,
    batch_size: int = 4,
    n_components: float | None = 0.95,
    drop_first: int = 0,
    drop_special: bool = False,
    precision: Precision = "auto",
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    budget: Budget | None = None,
    keeping: Keeping | None = None,
    announce: Callable[[list[str]], object] | None = None,
    progress: Callable[[str, int], Progress] | None = None,
) -> tuple[dict[str, Any], Reports]:
    """Load a language model, read tokens, analyse; the report and the results behind it.

    Args:
        model: "smollm2", a local folder, a `.gguf` file, or a hub id.
        reading: what it reads; None is the embedded text.
        sites: what `find_sites` takes; None is the output of every decoder layer.
        batch_size: sequences per forward pass.
        n_components: directions kept per site or head.
        drop_first: tokens left out at the start of each sequence.
        drop_special: leave out the tokenizer's special tokens.
        precision: arithmetic of the products.
        device: "auto" or a torch device.
        dtype: "auto" or a torch dtype by name.
        revision: of a hub model.
        budget: what the statistics may take.
        keeping: what stays on disk, and whether to go on with it.
        announce: told the memory plan in lines, before anything is captured.
        progress: makes, from a description and a total of tokens, what is told each step.

    Raises:
        ValueError: an argument or a file is at fault, in one sentence.
    """
    check_number(batch_size, "batch_size", "an integer ≥ 1", batch_size >= 1)
    n_components = as_components(n_components)
    reading, budget, keeping = reading or Reading(), budget or Budget(), keeping or Keeping()
    reading.check_drop(drop_first)
    with_tokenizer = reading.ids is None or drop_special
    loaded = load_model(model, device=device, dtype=dtype, revision=revision, with_tokenizer=with_tokenizer)
    data = reading.data(loaded)
    special_ids = special_ids_of(loaded.tokenizer) if drop_special else ()
    selection = TokenSelection(
        special_ids=special_ids, drop_first=drop_first, roles=reading.keep_roles or None
    )
    job = _Job(loaded, data, find_sites(loaded.model, sites), selection, batch_size, precision, n_components)
    plan = plan_run(loaded.model, job.sites, budget, batch_rows=job.batch_rows, precision=precision)
    if announce is not None:
        announce(plan.lines())
    about = job.about(sites, plan)
    counted = job.count(plan, budget, keeping.begin(job.fingerprint()), about, progress)
    if drop_special and not counted.excluded.get("special"):
        warnings.warn(
            "`drop_special` left nothing out: the tokens hold no special ones. Where sequences begin with an "
            "ordinary token, `drop_first` leaves that out.",
            stacklevel=2,
        )
    return counted.summary(about), counted.reports


@dataclass(frozen=True)
class _Job:
    """All that decides what is counted."""

    loaded: LanguageModel
    data: Data
    sites: list[Site]
    selection: TokenSelection
    batch_size: int
    precision: Precision
    n_components: float | None

    @property
    def batch_rows(self) -> int:
        """Tokens of one forward."""
        return min(self.batch_size, self.data.tokens.n_sequences) * self.data.tokens.seq_len

    def fingerprint(self) -> dict[str, Any]:
        """What decides every bit of the statistics; how many components are kept does not."""
        return {
            "model": self.loaded.provenance,
            "data": self.data.digest(),
            "sites": [site.name for site in self.sites],
            "selection": self.selection.describe(),
            "batch_size": self.batch_size,
            "precision": self.precision,
        }

    def about(self, sites: Sequence[str] | None, plan: MemoryPlan) -> dict[str, Any]:
        """What files say of the run, in JSON types; limits of memory change by the minute."""
        settings = {
            "sites": list(sites) if sites else None,
            "batch_size": self.batch_size,
            "n_components": self.n_components,
            "precision": self.precision,
            **self.selection.describe(),
            "memory": {"bytes": plan.to_dict()["bytes"], "passes": len(plan.passes)},
        }
        tokens = self.data.tokens.counts() | {"text": self.data.source}
        return {"model": self.loaded.provenance, "tokens": tokens, "settings": settings}

    def count(
        self,
        plan: MemoryPlan,
        budget: Budget,
        keeping: Keeping,
        about: Mapping[str, Any],
        progress: Callable[[str, int], Progress] | None,
    ) -> Counted:
        """Run the model as often as the plan asks for."""
        by_name = {site.name: site for site in self.sites}
        where = next(self.loaded.model.parameters()).device
        passes = keeping.grouped(plan.passes)
        tokens = (self.data.tokens.seen + self.data.tokens.padding) * len(passes)

        def make(site: Site) -> SiteStatistic:
            return SiteStatistic(
                site.heads if site.per_head else None,
                precision=self.precision,
                device=budget.device,
                n_components=self.n_components,
            )

        return count_sites(
            self.loaded.model,
            lambda: self.data.batches(self.batch_size, where),
            [[by_name[name] for name in group] for group in passes],
            make,
            lambda: replace(self.selection),
            n_components=self.n_components,
            keeping=keeping,
            metadata=about,
            progress=None if progress is None else progress("capturing", tokens),
        )
