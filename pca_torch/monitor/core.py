"""`SpectrumMonitor`: the spectra of a model's activations while it is trained."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pca_torch._checks import check_choice, check_flag, check_number, check_whole
from pca_torch._safetensors import libraries
from pca_torch._state import State, prefixed
from pca_torch.distributed import merge_on_first, place_in, sum_counts
from pca_torch.monitor.alarms import Alarm, check_alarms
from pca_torch.monitor.ledger import Ledger
from pca_torch.monitor.log_file import JsonlSink
from pca_torch.monitor.metrics import METRICS, Metric, check_metrics, logged_names
from pca_torch.monitor.record import Sink, SpectrumRecord
from pca_torch.monitor.schedule import Schedule
from pca_torch.monitor.state import pack, unpack
from pca_torch.monitor.track import Settings
from pca_torch.monitor.window import Window
from pca_torch.precision import Precision
from pca_torch.selection import TokenSelection
from pca_torch.sites import Site, find_sites
from pca_torch.spectrum import FIT_RANGE, check_fit_range

__all__ = ["SpectrumMonitor", "check_monitor"]


class SpectrumMonitor:
    """Logs how many dimensions each site of a model uses, every so many steps of its training.

        with pt.SpectrumMonitor(model, "resid", every_n_steps=50) as monitor:
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()

    Modules are hooked in sampled steps alone: the last `window` of every `every_n_steps`, and, to begin
    with a spectrum, the first `window` of the run where they do not meet those. All forwards of such a step
    count (gradient accumulation), if the model is in training mode and autograd is on; what activation
    checkpointing computes again does not. At the end of a window every site is decomposed in two views,
    with every token and with those of typical norm, in O(D³) each, and records go to the sinks. Nothing the
    model computes is changed, but that compiled code runs eagerly in sampled steps: hand over the compiled
    model, not the one inside it.

    Where torch.distributed is initialised, the ranks of `process_group` must call `step` alike; their
    statistics are merged on the first, which alone logs and calls alarms.

    Args:
        model: the module that is called, or one that data-parallel wrappers call.
        sites: what `find_sites` takes: "resid", "k", "layers.*"; None is the output of every block.
        every_n_steps: optimizer steps from one record to the next.
        metrics: by name, see `METRICS`; "rank_80" and the like too, or a function of a `PCAResult`.
        window: steps whose tokens make one spectrum.
        decay: None logs every window by itself. Otherwise the rows of the window before weigh `decay` times
            as much as those of this one, the rows before those `decay`² times, and so on. Which rows are
            extreme is decided inside their window.
        n_components: K of the V_k whose drift is followed.
        fit_range: first and last index of the fit of alpha-ReQ, from 1.
        selection: which tokens count; None leaves out those with 0 in the argument `attention_mask`.
        path: the log, JSON lines.
        sinks: where records go besides, see `TensorBoardSink` and `WandbSink`.
        alarms: rules about metrics that call a function.
        precision: arithmetic of the products.
        process_group: ranks that see other tokens of the same batches; None is all.
        train_mode_only: count forwards in training mode alone; turn it off for a model trained in eval mode.

    Attributes:
        steps: optimizer steps done.
        should_stop: the function of an alarm has returned True, on any rank; callbacks then end the training.
        compiled: the model is called through a compiled one that it does not know of.
        running: between `start` and `stop`.

    Raises:
        ValueError: an argument is out of range, or there is no such site.
        TypeError: one is of the wrong kind.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: str | Site | Sequence[str | Site] | None = None,
        every_n_steps: int = 50,
        *,
        metrics: Sequence[Metric] = METRICS,
        window: int = 1,
        decay: float | None = None,
        n_components: int = 8,
        fit_range: tuple[int, int] = FIT_RANGE,
        selection: TokenSelection | None = None,
        path: str | os.PathLike[str] = "spectra.jsonl",
        sinks: Iterable[Sink] = (),
        alarms: Iterable[Alarm] = (),
        precision: Precision = "auto",
        process_group: Any = None,
        train_mode_only: bool = True,
    ) -> None:
        check_whole(n_components, "n_components", least=1)
        check_flag(train_mode_only, "train_mode_only")
        check_choice(precision, "precision", ("auto", "float32", "float64"))
        is_share = decay is None or (isinstance(decay, float) and 0 < decay < 1)
        check_number(decay, "decay", "a number between 0 and 1, or None", is_share)
        self._schedule = Schedule(every_n_steps, window)
        self._settings = Settings(check_metrics(metrics), n_components, check_fit_range(fit_range), decay)
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got {model!r:.60}.")
        if not (selection is None or isinstance(selection, TokenSelection)):
            got = type(selection).__name__
            raise TypeError(f"`selection` must be a `TokenSelection` or None, got {got}; make one of it.")
        self.model = model
        self.selection = TokenSelection() if selection is None else selection
        found = find_sites(model, sites)
        if not found:
            raise ValueError("`sites` is empty; give at least one, or None for the output of every block.")
        self._window = Window(model, found, self.selection, precision, train_mode_only)
        names = logged_names(self._settings.metrics)
        rules = check_alarms(alarms, names, list(self._window.sites), every_n_steps)
        self._ledger = Ledger(found, self._settings, rules, [JsonlSink(path), *_check_sinks(sinks)])
        self._group = process_group
        self._step_hooks: ExitStack | None = None  # of the step under way, where it is sampled
        self._add_step: Callable[[], None] | None = None
        self._id = secrets.token_hex(8)  # no other run goes on in its log
        self._stepped = False  # since it was started
        self.compiled = False
        self.running = False
        self.steps = 0
        self.should_stop = False

    # --- the run -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        never = kind is None and self.running and not self._stepped
        self.stop()
        if never:
            warnings.warn(
                "no step was counted; call `monitor.step()` after each optimizer step.", stacklevel=2
            )

    def start(self) -> None:
        """Before the first step: open the sinks, and hook the model if the step to come is sampled.

        Raises:
            RuntimeError: it is running already.
            ValueError: the rank is not in the group, or a sink refuses.
        """
        if self.running:
            raise RuntimeError("this monitor is running; call `stop` before it is started again.")
        if place_in(self._group)[0] < 0:
            raise ValueError("`process_group` must hold this rank; make a monitor on its members alone.")
        if self._is_first:
            self._ledger.begin(self._about(), self.steps)
        self.running, self.should_stop, self._stepped = True, False, False
        self._hook()

    def stop(self) -> None:
        """After the last step, or when training has failed: unhook the model and close the sinks."""
        try:
            self._unhook()
        finally:
            was_running, self.running = self.running, False
            if was_running and self._is_first:
                self._ledger.close()

    def step(self) -> list[SpectrumRecord]:
        """After every step of the optimizer.

        Returns:
            What was logged at this step, on the first rank; mostly nothing.

        Raises:
            RuntimeError: the monitor is not running.
            ValueError: activations could not be counted.
        """
        if not self.running:
            raise RuntimeError(
                "this monitor is not running; call `step` inside `with monitor:` or after `start`."
            )
        self.steps += 1
        self._stepped = True
        try:
            add = self._unhook()
            if add is not None:
                add()
            return self._log() if self._schedule.ends_window(self.steps) else []
        finally:  # an alarm may raise, and its caller may go on
            if self._schedule.ends_window(self.steps):
                self._window.clear()
            self._hook()

    def reset(self, steps: int = 0) -> None:
        """Forget all that was seen, for a run that begins after so many optimizer steps.

        Args:
            steps: done before it.

        Raises:
            RuntimeError: the monitor is running.
        """
        check_whole(steps, "steps", least=0)
        self._refuse_while_running("reset")
        self._window.clear()
        self._ledger.reset()
        self.steps, self.should_stop = int(steps), False
        self._id = secrets.token_hex(8)

    @property
    def latest(self) -> list[SpectrumRecord]:
        """Records of the last logged step, on the first rank."""
        return self._ledger.latest

    def _refuse_while_running(self, verb: str) -> None:
        if self.running:
            raise RuntimeError(f"`{verb}` must come before `start`; call `stop` first.")

    @contextmanager
    def pause(self) -> Generator[None]:
        """Forwards inside the block do not count."""
        before, self._window.paused = self._window.paused, True
        try:
            yield
        finally:
            self._window.paused = before

    @property
    def _is_first(self) -> bool:
        """Whether this rank logs."""
        return place_in(self._group)[0] == 0

    def _hook(self) -> None:
        if self._schedule.is_sampled(self.steps + 1):
            with ExitStack() as stack:
                self._add_step = stack.enter_context(self._window.step(self.compiled))
                self._step_hooks = stack.pop_all()

    def _unhook(self) -> Callable[[], None] | None:
        """Take the hooks off; what adds the step to its window, where it was sampled."""
        hooks, self._step_hooks = self._step_hooks, None
        add, self._add_step = self._add_step, None
        if hooks is not None:
            hooks.close()
        return add

    # --- the end of a window -----------------------------------------------------------------------

    def _log(self) -> list[SpectrumRecord]:
        """Merge what the ranks counted, and have the first measure it.

        Raises:
            Exception: what the function of an alarm raised, on the first rank.
            RuntimeError: likewise, on the others: they do not wait for a rank that has left.
        """
        tally = self._window.tally.over_ranks(self._group)
        merged = merge_on_first(self._window.statistics, self._group)
        stop, error = False, None
        if merged is not None:
            try:
                stop, error = self._ledger.enter(self.steps, merged, tally, self._window.troubles)
            except Exception as caught:  # a warning that is an error here
                error = caught
        told = sum_counts({"stop": int(stop), "failed": int(error is not None)}, self._group)
        self.should_stop |= told["stop"] > 0
        if error is not None:
            raise error
        if told["failed"]:
            raise RuntimeError(f"an alarm ended the run at step {self.steps}; the first rank has its error.")
        return self.latest if merged is not None else []

    def _about(self) -> dict[str, Any]:
        """What the log says of the run."""
        settings = self._settings
        return {
            "model": type(self.model).__name__,
            "sites": list(self._window.sites),
            "every_n_steps": self._schedule.every_n_steps,
            "window": self._schedule.window,
            "id": self._id,
            "weighting": "window" if settings.decay is None else "exponential",
            "decay": settings.decay,
            "metrics": [m if isinstance(m, str) else m.__name__ for m in settings.metrics],
            "n_components": settings.n_components,
            "fit_range": list(settings.fit_range),
            "selection": self.selection.describe(),
            "precision": self._window.precision,
            "train_mode_only": self._window.train_mode_only,
            "alarms": [alarm.rule for alarm in self._ledger.watch.alarms],
            "ranks": place_in(self._group)[1],
            "versions": libraries(),
        }

    # --- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What a resumed run needs to log what this one would, as tensors for the trainer's checkpoint.

        A step under way is not part of it: it is done again.
        """
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {"kind": "monitor", "id": self._id, "steps": self.steps}
        facts["rank"] = place_in(self._group)[0]
        for name, part in (("window", self._window), ("ledger", self._ledger)):
            mine, facts[name] = part.to_state()
            tensors |= prefixed(name, mine)
        return pack(tensors, facts)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where the run was that `state_dict` was called in; sites that it did not watch start anew.

        A window that was under way goes on if this is the rank whose state it is.

        Args:
            state: what that gave.

        Raises:
            RuntimeError: the monitor is running.
            ValueError: it is no such state; the monitor stays as it was.
        """
        self._refuse_while_running("load_state_dict")
        tensors, facts = unpack(state)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        saved = State({name: tensor.to(device) for name, tensor in tensors.items()}, facts)
        saved.choice("kind", ["monitor"])
        steps, rank = saved.count("steps"), saved.count("rank")
        run = saved.fact("id", "text", lambda value: isinstance(value, str))
        window, ledger = saved.part("window"), saved.part("ledger")
        saved.done()
        counted = self._window.restored(*window)
        self._ledger.restore(*ledger)
        self._window.clear()
        if rank == place_in(self._group)[0]:
            self._window = counted
        self.steps, self._id, self.should_stop = steps, run, False


def check_monitor(monitor: Any) -> None:
    """Refuse what is no monitor where a callback needs one.

    Args:
        monitor: what was given.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(monitor, SpectrumMonitor):
        raise TypeError(f"`monitor` must be a `SpectrumMonitor`, got {monitor!r:.60}; make one of the model.")


def _check_sinks(sinks: Any) -> list[Sink]:
    """`sinks` as a list.

    Raises:
        TypeError: one of them can take nothing.
    """
    found = list(sinks) if isinstance(sinks, Iterable) else [sinks]
    for sink in found:
        if isinstance(sink, type) or not all(hasattr(sink, verb) for verb in ("begin", "write", "close")):
            raise TypeError(f"`sinks` must hold objects with `begin`, `write` and `close`, got {sink!r:.60}.")
    return found
