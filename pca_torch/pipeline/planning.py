"""How the statistics of a run will lie in memory, before anything of them is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pca_torch._checks import check_choice
from pca_torch.memory_plan import MemoryPlan, plan_memory
from pca_torch.precision import Precision
from pca_torch.site_statistic import HELD
from pca_torch.sites import Site
from pca_torch.sites.names import modules_by_name

__all__ = ["Budget", "plan_run"]

StatisticsOn = Literal["auto", "cpu"]


@dataclass(frozen=True)
class Budget:
    """What statistics may take, and where they lie."""

    memory: int | str | None = None  # on each device: bytes, "2GiB", "50%"; None is 80 % of what is free
    max_passes: int = 1  # over the tokens, each counting a part of the sites
    statistics_on: StatisticsOn = "auto"  # "auto" is beside the activations

    def __post_init__(self) -> None:
        check_choice(self.statistics_on, "statistics_on", ("auto", "cpu"))

    @property
    def device(self) -> torch.device | None:
        """Where the sums lie; None is the device of the rows."""
        return torch.device("cpu") if self.statistics_on == "cpu" else None


def plan_run(
    model: nn.Module, sites: Sequence[Site], budget: Budget, *, batch_rows: int, precision: Precision
) -> MemoryPlan:
    """The plan, or the refusal of what does not fit.

    Args:
        model: whose parameters tell where its activations are.
        sites: where to capture.
        budget: what is allowed.
        batch_rows: tokens of one forward.
        precision: arithmetic of the products.
    """
    modules, first = modules_by_name(model), next(model.parameters())
    device = {}
    for site in sites:
        place = next(modules[site.path].parameters(), first).device
        if place.type == "meta":  # offloaded: it runs where its hook says
            hook = getattr(modules[site.path], "_hf_hook", None)
            place = torch.device(getattr(hook, "execution_device", None) or "cpu")
        device[site.name] = budget.device or place
    return plan_memory(
        sites,
        device=device,
        limit=budget.memory,
        max_passes=budget.max_passes,
        batch_rows=batch_rows,
        rows_held=HELD,
        dtype=first.dtype,
        precision=precision,
    )
