"""Records for TensorBoard."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pca_torch._extras import require
from pca_torch.monitor.alarms import sentence
from pca_torch.monitor.histogram import log_histogram
from pca_torch.monitor.record import Alert, SpectrumRecord
from pca_torch.monitor.series import GROUP, SPECTRUM, metric_names, path, scalars, step_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardSink"]

TABLE = ("rank_95", "effective_rank", "participation_ratio", "alpha_req", "drift_start", "total_variance")


class TensorBoardSink:
    """Writes records as TensorBoard events.

    Tags, for the typical tokens of a window:

    - `pca/{site}/{metric}`, for a head `pca/{site}/head{h}/{metric}`: scalars. A metric that is not
      defined at a step has no point there. Beside the metrics, `n_samples` and `below_rounding`, how
      many variances are zero or at most the rounding floor.
    - `pca/{site}/spectrum_log10`: histogram of log10 of the variances above that floor.
    - `pca/table`, `pca/alarms`, `pca/run`: texts, of the step, its alarms, and the settings.

    All tokens stand apart under `pca_all/{site}/…`, with their `extreme_share`. The tab "Custom
    Scalars" has one chart a metric, with a line for each site.

    A folder of its own is best: what it holds of later steps than the one resumed from is hidden, so that
    a run that was killed shows one curve. A writer that is passed in stays open and keeps its layout of
    charts; to resume, make it with `purge_step=step + 1`.

    Args:
        log_dir: folder for the event files, or a SummaryWriter to write with.

    Raises:
        ImportError: `log_dir` is a folder and tensorboard is not installed.
        TypeError: `log_dir` is neither.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | SummaryWriter) -> None:
        self._folder: str | None = None
        self._writer: SummaryWriter | None = None
        self._charted = False
        if isinstance(log_dir, str | os.PathLike):
            require("tensorboard", "tensorboard", "`TensorBoardSink`")
            self._folder = os.fspath(log_dir)
        elif hasattr(log_dir, "add_histogram_raw"):
            self._writer = log_dir
        else:
            raise TypeError(f"`log_dir` must be a folder or a SummaryWriter, got {type(log_dir).__name__}.")

    def begin(self, run: Mapping[str, Any], step: int) -> None:
        """Open the event file and write down the settings; see `Sink.begin`."""
        self._charted = self._folder is None  # one layout of charts replaces another: a user's stays
        settings = json.dumps(dict(run), indent=2, ensure_ascii=False)
        self._open(step + 1).add_text("pca/run", f"```json\n{settings}\n```", step)

    def write(self, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]) -> None:
        """Write the events of one step to the disk; see `Sink.write`.

        Args:
            records: of all sites.
            alerts: that they set off.

        Raises:
            OSError: the disk failed; the same step can be written again, to a new file.
        """
        if not records and not alerts:
            return
        step = step_of(records, alerts)
        try:
            writer = self._open(step)
            self._add(writer, step, records, alerts)
            writer.flush()
        except OSError:
            self._abandon()
            raise

    def close(self) -> None:
        """Close the event file; a writer that was passed in is left open."""
        if self._writer is None:
            return
        if self._folder is None:
            self._writer.flush()
        else:
            self._writer.close()
            self._writer = None

    def _open(self, purge_step: int) -> SummaryWriter:
        """The writer; a new one hides the events of `purge_step` and later."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            assert self._folder is not None
            # read in the order of their names, which begin with the second: the last one must purge
            while any(Path(self._folder).glob(f"events.out.tfevents.{int(time.time())}.*")):
                time.sleep(0.05)
            self._writer = SummaryWriter(self._folder, purge_step=purge_step)
        return self._writer

    def _abandon(self) -> None:
        """Leave a file whose disk failed: its writer fails for good, a new one may not."""
        if self._folder is not None and self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None

    def _add(
        self, writer: SummaryWriter, step: int, records: Sequence[SpectrumRecord], alerts: Sequence[Alert]
    ) -> None:
        for record in records:
            for name, value in scalars(record).items():
                writer.add_scalar(f"{path(record)}/{name}", value, step)
            _add_histogram(writer, record)
        if records:
            writer.add_text("pca/table", _markdown(records), step)
        if alerts:
            writer.add_text("pca/alarms", "\n".join(f"- {_escaped(sentence(a))}" for a in alerts), step)
        if records and not self._charted:
            writer.add_custom_scalars(_charts(metric_names(records)))
            self._charted = True


def _charts(metrics: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """One chart a metric and view, with a line for each site, heads left out."""
    return {
        group: {name: ["Multiline", [f"^{group}/[^/]+/{re.escape(name)}$"]] for name in metrics}
        for group in GROUP.values()
    }


def _add_histogram(writer: SummaryWriter, record: SpectrumRecord) -> None:
    histogram = log_histogram(record)
    if histogram is None:
        return
    values = histogram.values
    writer.add_histogram_raw(
        f"{path(record)}/{SPECTRUM}",
        min=float(values[-1]),
        max=float(values[0]),
        num=len(values),
        sum=float(values.sum()),
        sum_squares=float((values**2).sum()),
        bucket_limits=histogram.edges[1:].tolist(),
        bucket_counts=histogram.counts.tolist(),
        global_step=record.step,
    )


def _markdown(records: Sequence[SpectrumRecord]) -> str:
    """Sites down, and across what says most about them."""
    there = metric_names(records)
    names = [name for name in TABLE if name in there] or there
    titles = ["site", "tokens", "N", "D", "above rounding", *names]
    rows = [
        [
            _escaped(path(record).partition("/")[2]),
            record.view,
            str(record.n_samples),
            str(record.n_features),
            str(record.trusted),
            *(_number(record.metrics.get(name)) for name in names),
        ]
        for record in records
    ]
    lines = [[_escaped(title) for title in titles], ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _escaped(text: str) -> str:
    """Markdown that shows `text` as it is written."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", html.escape(text, quote=False)).replace("|", "&#124;")
