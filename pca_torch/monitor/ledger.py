"""What is made of the windows of a run, one after the other: records, alarms, and words where they lack."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pca_torch._state import Saved, State, prefixed
from pca_torch.monitor.alarms import Alarm
from pca_torch.monitor.outlet import Outlet
from pca_torch.monitor.record import Sink, SpectrumRecord
from pca_torch.monitor.tally import Tally
from pca_torch.monitor.track import Counted, Settings, SiteTrack
from pca_torch.monitor.watch import Watch
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sites import Site
from pca_torch.sites.names import listing

__all__ = ["Ledger"]


class Ledger:
    """Measures each window of a run on the first rank, and hands on what it finds.

    Args:
        sites: that are watched.
        settings: what is measured of them.
        alarms: rules about it.
        sinks: where it goes.
    """

    def __init__(
        self, sites: Sequence[Site], settings: Settings, alarms: Iterable[Alarm], sinks: Iterable[Sink]
    ) -> None:
        self.sites = {site.name: site for site in sites}
        self.settings = settings
        self.outlets = [Outlet(sink) for sink in sinks]
        self.watch = Watch(alarms)
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.tracks = {name: SiteTrack(name, self.settings) for name in self.sites}
        self.watch = Watch(self.watch.alarms)
        self.latest: list[SpectrumRecord] = []
        self._told: set[str] = set()  # complaints; each once

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Open the sinks, or none of them.

        Args:
            run: settings of the run.
            step: optimizer steps done.
        """
        opened: list[Outlet] = []
        try:
            for outlet in self.outlets:
                outlet.begin(run, step)
                opened.append(outlet)
        except BaseException:
            for outlet in opened:
                outlet.close()
            raise

    def close(self) -> None:
        """Close the sinks."""
        for outlet in self.outlets:
            outlet.close()

    def enter(
        self, step: int, statistics: Mapping[str, SiteStatistic], tally: Tally, troubles: Mapping[str, str]
    ) -> tuple[bool, Exception | None]:
        """Measure a window, write it down, and ring the alarms.

        Args:
            step: optimizer steps done.
            statistics: of all ranks, by site.
            tally: likewise.
            troubles: why rows could not be counted on this rank, by site.

        Returns:
            Whether an alarm asks to stop, and what the function of one raised, once all of them were called.
        """
        self.latest, faults = [], {}
        for name, track in self.tracks.items():
            views = statistics[name].views
            if views is None or not views.n_samples:  # nothing came, or nothing that is finite
                track.age()
                continue
            try:
                counted = Counted(views, tally.nonfinite.get(name, 0), tally.tokens)
                self.latest += track.records(step, counted)
            except Exception as error:  # training goes on
                why = " ".join(str(error).split()).rstrip(".") or type(error).__name__
                faults[name] = f"{why}; drift and averages begin anew"
                self.tracks[name] = SiteTrack(name, self.settings)
        for name in tally.troubled:
            faults[name] = troubles.get(name, "rows could not be counted on another rank")
        self._complain(step, tally, faults)
        rung = self.watch.update(self.latest)
        for outlet in self.outlets:
            outlet.write(tuple(self.latest), tuple(alert for _, alert in rung))
        stop, failed = False, None
        for alarm, alert in rung:
            try:
                stop |= alarm.call(alert) is True
            except Exception as error:
                failed = failed or error
        return stop, failed

    def _complain(self, step: int, tally: Tally, faults: Mapping[str, str]) -> None:
        """Warn of what lacks and why, each time in other words only: a log with holes explains nothing."""
        logged = {record.site for record in self.latest}
        found = [f"{name} is not logged: {fault.rstrip('.')}" for name, fault in faults.items()]
        missing = [name for name in self.sites if name not in logged and name not in faults]
        bad = [name for name in missing if tally.nonfinite.get(name)]
        silent = [name for name in missing if name not in bad and not self.sites[name].may_be_empty]
        if tally.forwards.get("rootless"):
            found.append(
                "sites fired while the monitored model was not running, so padding and labels were not seen; "
                "give `SpectrumMonitor` the module that is called, such as `lit.model`"
            )
        if tally.forwards.get("unlabelled"):
            found.append(
                "`selection` leaves out tokens by their labels, but none reached the model; call it on "
                "`selection.split(batch, model)`, where the batch holds them"
            )
        if bad:
            found.append(f"{listing(bad)}: no two rows without NaN or inf, so nothing is logged")
        if silent and len(silent) == len(self.sites) and tally.forwards.get("skipped"):
            found.append(
                "no token counted: all forwards ran in eval mode or without autograd; call `model.train()`, "
                "or pass `train_mode_only=False`"
            )
        elif silent and len(silent) == len(self.sites):
            found.append("no forward of the model counted; is it the one that is trained?")
        elif silent:
            found.append(f"fewer than two tokens reached {listing(silent)}, so nothing is logged")
        for complaint in found:
            if complaint not in self._told:
                self._told.add(complaint)
                warnings.warn(f"step {step}: {complaint}.", stacklevel=5)

    # --- as part of a checkpoint -------------------------------------------------------------------

    def to_state(self) -> Saved:
        """Tensors and facts of what outlasts a window."""
        tensors: dict[str, Tensor] = {}
        tracks: list[dict[str, Any]] = []
        for number, (site, track) in enumerate(self.tracks.items()):
            mine, about = track.to_state()
            tensors |= prefixed(str(number), mine)
            tracks.append({"site": site, "track": about})
        return tensors, {"tracks": tracks, "alarms": self.watch.to_state()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Any) -> None:
        """Take over what `to_state` told of, for the sites that are still watched.

        Args:
            tensors: by name, on the device where sums shall lie.
            facts: as JSON gave them.

        Raises:
            ValueError: no ledger can be like that; this one stays as it was.
        """
        state = State(tensors, facts)
        tracks = {name: SiteTrack(name, self.settings) for name in self.sites}
        known: set[str] = set()
        for number, about in enumerate(state.fact("tracks", "a list", lambda value: isinstance(value, list))):
            own = State({}, about)
            site = own.fact("site", "text", lambda value: isinstance(value, str))
            mine = own.fact("track", "an object", lambda value: isinstance(value, dict))
            known.add(site)
            if site in tracks:
                tracks[site].restore(state.tensors(str(number)), mine)
        alarms = state.fact("alarms", "an object", lambda value: isinstance(value, dict))
        watch = Watch.from_state(self.watch.alarms, alarms)
        self.reset()
        self.tracks, self.watch = tracks, watch
        if new := sorted(tracks.keys() - known):
            warnings.warn(f"`state` does not know {listing(new)}; these begin anew.", stacklevel=4)
