"""Records for Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pca_torch._extras import require
from pca_torch.monitor.alarms import sentence
from pca_torch.monitor.histogram import log_histogram
from pca_torch.monitor.record import Alert, SpectrumRecord
from pca_torch.monitor.series import GROUP, SPECTRUM, metric_names, path, scalars, step_of

__all__ = ["WandbSink"]

STEP = "pca/step"
TABLE = ("step", "site", "view", "head", "n_samples", "n_effective", "n_features", "trusted")
ALARMS_SENT = 20  # sentences of one message


class WandbSink:
    """Logs records to a W&B run.

    Keys are `pca/{site}/{metric}`, for a head `pca/{site}/head{h}/{metric}`; all tokens stand apart under
    `pca_all/…`. W&B sorts and filters by letters, digits and underscores alone, so any other character of a
    site or metric becomes an underscore: `pca/model_layers_3_output/rank_95`. `pca/table` has the names as
    they are. `…/spectrum_log10` is a histogram of log10 of the variances above the rounding floor,
    `…/below_rounding` says how many are not. Alarms stand in `pca/alarms`, and are sent as one alert a step.

    The x-axis is `pca/step`, the optimizer step: W&B's own step is left to the training loop, and goes up by
    one at each step logged here. W&B takes nothing back: resuming its run from an earlier checkpoint logs
    the steps between once more, unless W&B rewinds it.

    Args:
        run: a W&B run; None takes the active one, and where there is none starts one that `close` finishes.
        **init: arguments of `wandb.init` for a run started here, as `project="…"`.

    Raises:
        ImportError: wandb is not installed.
        TypeError: `run` is not a W&B run.
        ValueError: `run` came together with arguments for another.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        self._wandb: Any = require("wandb", "wandb", "`WandbSink`")
        if run is not None and not hasattr(run, "define_metric"):
            raise TypeError(
                f"`run` must be a W&B run, got {type(run).__name__}. "
                'To start one, give arguments of `wandb.init` by name, as `project="…"`.'
            )
        if run is not None and init:
            raise ValueError(
                f"`run` is started already, so {sorted(init)} cannot apply. Pass one or the other."
            )
        self._given, self._init = run, init
        self._run: Any = None
        self._started = False  # whether the run is ours to finish
        self._sites: dict[str, str] = {}  # of a key, the site that has it

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Find or start the W&B run, and keep the settings in its config; see `Sink.begin`."""
        active = self._given or self._wandb.run
        self._started = active is None
        self._run = self._wandb.init(**self._init) if active is None else active
        self._run.config.update({"pca_monitor": dict(run)}, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        for group in GROUP.values():
            self._run.define_metric(f"{group}/*", step_metric=STEP)

    def write(self, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> None:
        """Log one step; see `Sink.write`."""
        if not records and not alerts:
            return
        step = step_of(records, alerts)
        row: dict[str, Any] = {STEP: step}
        for record in records:
            row |= self._row(record)
        if records:
            row["pca/table"] = self._table(records)
        if alerts:
            row["pca/alarms"] = "\n".join(map(sentence, alerts))
        self._run.log(row)  # once: each call moves W&B's own step, which the training loop may count
        if alerts:
            # one message: W&B drops the next one under the same title within a minute
            self._run.alert(f"pca_torch: {len(alerts)} alarms at step {step}", _message(alerts), level="WARN")

    def close(self) -> None:
        """Finish the W&B run, if it was started here."""
        if self._started and self._run is not None:
            self._run.finish()
        self._run = None

    def _row(self, record: SpectrumRecord) -> dict[str, Any]:
        start = self._key(record)
        row: dict[str, Any] = {f"{start}/{_plain(name)}": value for name, value in scalars(record).items()}
        if (histogram := log_histogram(record)) is not None:
            counts, edges = histogram.counts, histogram.edges
            row[f"{start}/{SPECTRUM}"] = self._wandb.Histogram(np_histogram=(counts, edges))
        return row

    def _key(self, record: SpectrumRecord) -> str:
        """What W&B calls a record; two sites that differ in dots and underscores alone stay apart."""
        name = path(record)
        key = "/".join(map(_plain, name.split("/")))
        while self._sites.setdefault(key.lower(), name) != name:  # keys differ in more than case
            key += "_"
        return key

    def _table(self, records: Sequence[SpectrumRecord]) -> Any:
        names = metric_names(records)
        rows = [
            [*(getattr(record, fact) for fact in TABLE), *(record.metrics.get(name) for name in names)]
            for record in records
        ]
        return self._wandb.Table(columns=[*TABLE, *names], data=rows)


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _message(alerts: Sequence[Alert]) -> str:
    lines = [sentence(alert) for alert in alerts[:ALARMS_SENT]]
    if len(alerts) > ALARMS_SENT:
        lines.append(f"and {len(alerts) - ALARMS_SENT} more")
    return "\n".join(lines)
