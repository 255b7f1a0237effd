"""What the sites of a model keep during one window of training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._checks import surely_fine
from pca_torch._state import Saved, State, prefixed
from pca_torch.hooks import capture
from pca_torch.hooks.context import Captured
from pca_torch.precision import Precision
from pca_torch.selection import TokenSelection
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site
from pca_torch.sites.names import listing
from pca_torch.statistic_kinds import Statistic, rebuilt
from pca_torch.tokens import TokenViews

__all__ = ["SiteWindow", "Window"]


class SiteWindow:
    """The sink of one site: both views of its rows, without those that hold NaN or inf.

    Mixed precision overflows now and then, and its loss scaler skips such a step: no reason to end a run.

    Args:
        site: where the rows come from.
        precision: arithmetic of the products.
    """

    def __init__(self, site: Site, precision: Precision) -> None:
        self.statistic = SiteStatistic(site.heads if site.per_head else None, precision=precision)
        self.nonfinite = 0

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Count the rows of one activation.

        Args:
            x: (..., D).
            mask: booleans in the leading shape, None for all.
        """
        rows = x.flatten(0, -2)
        self.update_rows(rows if mask is None else rows[mask.flatten()])

    def update_rows(self, rows: Tensor, positions: Tensor | None = None) -> None:
        """Count rows that were selected before.

        Args:
            rows: (n, D).
            positions: (n,) the place of each in its sequence.
        """
        if not surely_fine(rows):
            good = rows.isfinite().all(1)
            self.nonfinite += len(rows) - int(good.sum())
            rows = rows[good]
            positions = None if positions is None else positions[good]
        if len(rows):
            self.statistic.update_rows(rows, positions=positions)


class Window:
    """The tokens of the steps of one window, by site.

    Args:
        model: the module that is called.
        sites: where activations are taken.
        selection: which tokens count.
        precision: arithmetic of the products.
        train_mode_only: count forwards in training mode alone.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[Site],
        selection: TokenSelection,
        precision: Precision,
        train_mode_only: bool,
    ) -> None:
        self.model = model
        self.sites = {site.name: site for site in sites}
        self.selection = selection
        self.precision: Precision = precision
        self.train_mode_only = train_mode_only
        self.paused = False
        self.clear()

    def clear(self) -> None:
        """Begin a new window."""
        self.by_site = {name: SiteWindow(site, self.precision) for name, site in self.sites.items()}
        self.tokens_before = self.selection.counts
        self.tokens_restored: Counter[str] = Counter()
        self.skipped = 0  # forwards that did not count
        self.captured: list[Captured] = []  # of each step

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens that counted, as "kept", and those left out by reason; empty where none are known."""
        now = {
            name: n - self.tokens_before[name] + self.tokens_restored[name]
            for name, n in self.selection.counts.items()
        }
        return {name: n for name, n in now.items() if n or name == "kept"} if any(now.values()) else {}

    def open(self, stack: ExitStack, eager: bool) -> None:
        """Hook the sites until `stack` closes.

        Args:
            stack: that closes at the end of the step.
            eager: run compiled code eagerly, though nothing in the model shows that there is some.
        """
        if eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        sinks = {self.sites[name]: sink for name, sink in self.by_site.items()}
        hooked = capture(self.model, sinks, mask=self.selection, when=self.counts, must_fire=False)
        self.captured.append(stack.enter_context(hooked))

    def counts(self, model: nn.Module) -> bool:
        """Whether a forward is one of training: neither evaluation nor what a rollout generates.

        Args:
            model: that is called.
        """
        trains = torch.is_grad_enabled() and (model.training or not self.train_mode_only)
        if torch.compiler.is_compiling():
            return trains
        counts = trains and not self.paused
        self.skipped += not counts
        return counts

    def complaints(self) -> list[str]:
        """Why sites saw nothing, or not what they should: a log with holes explains nothing."""
        found: list[str] = []
        if any(captured.rootless for captured in self.captured):
            found.append(
                "sites fired while the monitored model was not running, so padding and labels were not seen; "
                "give `SpectrumMonitor` the module that is called, such as `lit.model`."
            )
        silent = [name for name, site in self.by_site.items() if not site.statistic.n_samples]
        silent = [name for name in silent if not self.sites[name].may_be_empty]
        if silent and self.skipped and len(silent) == len(self.by_site):
            found.append(
                f"no token counted: {self.skipped} forwards ran in eval mode or without autograd; call "
                "`model.train()`, or pass `train_mode_only=False`."
            )
        elif silent:
            found.append(f"no token reached {listing(silent)}; nothing is logged of them.")
        return found

    # --- as part of a checkpoint -------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts of a window under way."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"tokens": self.tokens, "sites": []}
        for name, site in self.by_site.items():
            if site.statistic.n_samples or site.nonfinite:
                part: dict[str, Any] = {"name": name, "nonfinite": site.nonfinite, "views": None}
                if site.statistic.views is not None:
                    mine, part["views"] = site.statistic.views.to_state()
                    tensors |= prefixed(str(len(facts["sites"])), mine)
                facts["sites"].append(part)
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over what `to_state` told of, for the sites that are still watched.

        Args:
            tensors: by name, on the device where the sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no window can be like that.
        """
        state, found = State(tensors, facts), {}
        tokens = state.fact("tokens", "counts by reason", _are_counts)
        for index, about in enumerate(state.fact("sites", "a list", lambda value: isinstance(value, list))):
            own = State({}, about)
            name = own.fact("name", "text", lambda value: isinstance(value, str))
            nonfinite = own.count("nonfinite")
            views = own.fact("views", "an object or None", lambda value: isinstance(value, dict | None))
            kept = None if views is None else _as_views(rebuilt(state.tensors(str(index)), views))
            found[name] = nonfinite, kept
        self.clear()
        self.tokens_restored.update(tokens)
        for name in found.keys() & self.by_site.keys():
            self.by_site[name].nonfinite, self.by_site[name].statistic.views = found[name]


def _as_views(statistic: Statistic) -> TokenViews[Any]:
    """A statistic that is one of views.

    Raises:
        ValueError: it is another.
    """
    if not isinstance(statistic, TokenViews):
        raise ValueError(f"a site must be saved as views, got {type(statistic).__name__}.")
    return statistic


def _are_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(type(n) is int and n >= 0 for n in value.values())
