"""What the sites of a model keep during one window of training steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pca_torch._state import Saved, State, prefixed
from pca_torch.hooks import capture
from pca_torch.monitor.tally import Tally
from pca_torch.precision import Precision
from pca_torch.selection import TokenSelection
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site
from pca_torch.statistic_kinds import Statistic, rebuilt
from pca_torch.tokens import TokenViews

__all__ = ["SiteWindow", "Window"]


class SiteWindow:
    """The sink of one site: both views of its rows, without those that hold NaN or inf.

    Mixed precision overflows now and then, and its loss scaler skips such a step: no reason to end a run. Nor
    is anything else that keeps rows from being counted; what it was is told at the end of the window.

    Args:
        site: where the rows come from.
        precision: arithmetic of the products.
    """

    def __init__(self, site: Site, precision: Precision) -> None:
        self.statistic = SiteStatistic(site.heads if site.per_head else None, precision=precision)
        self.nonfinite = 0
        self.trouble: str | None = None

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
        if self.trouble is not None or not len(rows):
            return
        try:
            self._count(rows, positions)
        except Exception as error:  # memory too
            self.trouble = " ".join(str(error).split()) or type(error).__name__

    def _count(self, rows: Tensor, positions: Tensor | None) -> None:
        try:
            self.statistic.update_rows(rows, positions=positions)
        except (
            ValueError
        ):  # and nothing of the batch was counted: it has seen NaN or inf, or values too large
            good = rows.isfinite().all(1)
            if bool(good.all()):
                raise
            self.nonfinite += len(rows) - int(good.sum())
            if bool(good.any()):
                at = None if positions is None else positions[good]
                self.statistic.update_rows(rows[good], positions=at)

    def merge(self, other: SiteWindow) -> None:
        """Absorb what another step counted.

        Args:
            other: of the same site, which is given up.
        """
        self.nonfinite += other.nonfinite
        self.trouble = self.trouble or other.trouble
        mine, theirs = self.statistic.views, other.statistic.views
        if mine is None or theirs is None:
            self.statistic.views = theirs if mine is None else mine
            return
        try:
            mine.merge(theirs)  # pyright: ignore[reportArgumentType]
        except ValueError as error:  # another width
            self.trouble = str(error)


class _Counting:
    """A selection, and how many tokens it has kept and left out for this window alone.

    Args:
        selection: which tokens count; others may ask it too.
    """

    def __init__(self, selection: TokenSelection) -> None:
        self.selection = selection
        self.counts: Counter[str] = Counter()

    @property
    def positions(self) -> Tensor | None:
        """(B, T) places of the last forward."""
        return self.selection.positions

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        before = self.selection.counts
        keep = self.selection(module, args, kwargs)
        self.counts.update({name: n - before[name] for name, n in self.selection.counts.items()})
        return keep


class Window:
    """The tokens of the steps of one window, by site; those of a step count once it is over.

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
        self.by_site = self._empty()  # of the steps that are over
        self.counts: Counter[str] = Counter()
        self.skipped = 0  # forwards that did not count
        self.rootless = False

    @property
    def tally(self) -> Tally:
        """What was counted beside the rows."""
        known = {name: n for name, n in self.counts.items() if n or name == "kept"}
        sites = self.by_site.items()
        return Tally(
            tokens=known if self.counts.total() else {},
            nonfinite={name: site.nonfinite for name, site in sites if site.nonfinite},
            troubled=dict.fromkeys(self.troubles, 1),
            forwards={
                "skipped": self.skipped,
                "rootless": int(self.rootless),
                "unlabelled": int(self.selection.labels and not self.selection.saw_labels and bool(known)),
            },
        )

    @property
    def troubles(self) -> dict[str, str]:
        """Why rows could not be counted, by site."""
        return {name: site.trouble for name, site in self.by_site.items() if site.trouble is not None}

    @property
    def statistics(self) -> dict[str, SiteStatistic]:
        """The rows of the steps that are over, by site; of one in trouble none, since some are missing."""
        return {
            name: SiteStatistic() if site.trouble is not None else site.statistic
            for name, site in self.by_site.items()
        }

    @contextmanager
    def step(self, eager: bool) -> Generator[Callable[[], None]]:
        """Hook the sites for one step.

        Args:
            eager: run compiled code eagerly, though nothing in the model shows that there is some.

        Yields:
            What adds the step to the window, once it is over and the hooks are gone.
        """
        rows, asked = self._empty(), _Counting(self.selection)

        def add() -> None:
            self.rootless |= captured.rootless
            self.counts.update(asked.counts)
            for name, site in rows.items():
                self.by_site[name].merge(site)

        sinks = {self.sites[name]: sink for name, sink in rows.items()}
        with ExitStack() as stack:
            if eager:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            captured = stack.enter_context(
                capture(self.model, sinks, mask=asked, when=self.is_counted, must_fire=False)
            )
            yield add

    def is_counted(self, model: nn.Module) -> bool:
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

    def _empty(self) -> dict[str, SiteWindow]:
        return {name: SiteWindow(site, self.precision) for name, site in self.sites.items()}

    # --- as part of a checkpoint -------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts of the steps of a window that are over."""
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"tokens": dict(self.counts), "sites": []}
        for name, site in self.by_site.items():
            if site.statistic.n_samples or site.nonfinite or site.trouble is not None:
                part = {"name": name, "nonfinite": site.nonfinite, "trouble": site.trouble, "views": None}
                if site.statistic.views is not None:
                    mine, part["views"] = site.statistic.views.to_state()
                    tensors |= prefixed(str(len(facts["sites"])), mine)
                facts["sites"].append(part)
        return tensors, facts

    def restored(self, tensors: Mapping[str, Tensor], facts: Any) -> Window:
        """The window that `to_state` told of, of the sites that are still watched.

        Args:
            tensors: by name, on the device where the sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no window can be like that.
        """
        state = State(tensors, facts)
        window = Window(
            self.model, [*self.sites.values()], self.selection, self.precision, self.train_mode_only
        )
        window.counts.update(state.fact("tokens", "counts by reason", _are_counts))
        for index, about in enumerate(state.fact("sites", "a list", lambda value: isinstance(value, list))):
            own = State({}, about)
            name = own.fact("name", "text", lambda value: isinstance(value, str))
            nonfinite = own.count("nonfinite")
            trouble = own.fact("trouble", "text or None", lambda value: isinstance(value, str | None))
            views = own.fact("views", "an object or None", lambda value: isinstance(value, dict | None))
            kept = None if views is None else _as_views(rebuilt(state.tensors(str(index)), views))
            if name in window.by_site:
                site = window.by_site[name]
                site.nonfinite, site.trouble, site.statistic.views = nonfinite, trouble, kept
        state.done()
        return window


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
