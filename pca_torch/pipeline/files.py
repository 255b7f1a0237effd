"""`pca-torch fit` and `report`: the same report for arrays and for statistics on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from pca_torch import report
from pca_torch._checks import as_components
from pca_torch.pipeline.keeping import Keeping
from pca_torch.pipeline.measuring import Progress
from pca_torch.pipeline.reports import Facts, Reports, solve_sites
from pca_torch.precision import Precision
from pca_torch.site_statistic import SiteStatistic
from pca_torch.sources import Source, open_sources
from pca_torch.statistic_file import StatisticFile

__all__ = ["fit_files", "report_statistics"]

NAME = "data"  # of the one site of files, whatever they are called: files of two fits can be merged


def fit_files(
    files: Sequence[str | Path],
    *,
    tensor: str | None = None,
    n_components: float | None = 0.95,
    precision: Precision = "auto",
    keeping: Keeping | None = None,
    progress: Callable[[str, int], Progress] | None = None,
) -> tuple[dict[str, Any], Reports]:
    """The report for arrays on disk, read by blocks: rows are samples, all files are one site.

    Args:
        files: `.npy`, `.safetensors` and `.pt` files (..., D), or folders of them, in natural order
            whatever the order given.
        tensor: which tensor of files that hold several.
        n_components: directions kept.
        precision: arithmetic of the products.
        keeping: what stays on disk, and whether to go on with it.
        progress: makes, from a description and a total of rows, what is told each step.

    Raises:
        ValueError: a file is not an array of numbers, or the files differ in D.
    """
    n_components = as_components(n_components)
    sources = open_sources(list(map(Path, files)), tensor)
    n_rows = sum(source.n_rows for source in sources)
    names = [source.path.name for source in sources]
    settings = {"n_components": n_components, "precision": precision, "tensor": tensor, "files": names}
    model = {"name": ", ".join(names[:3]) + (" …" if len(names) > 3 else "")}
    stats = [(source.path.name, source.path.stat()) for source in sources]
    keeping = (keeping or Keeping()).begin({
        "files": [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats],
        "settings": {"precision": precision, "tensor": tensor},
    })
    sink = SiteStatistic(precision=precision, n_components=n_components)
    _count(sources, sink, keeping, None if progress is None else progress("reading", n_rows))
    assert sink.views is not None  # sources hold rows
    rows = {"rows": n_rows}
    views: dict[str, Any] = {NAME: sink.views}
    keeping.save(views, {"model": model, "tokens": rows, "settings": settings})
    results = solve_sites(views, {}, n_components)
    return report.report_dict(results, model, rows, settings), results


def report_statistics(
    path: str | Path, *, n_components: float | None = 0.95
) -> tuple[dict[str, Any], Reports]:
    """The report of a statistic file: what `run` or `fit` would say that had counted all of it.

    Args:
        path: what `--save-statistics` or `merge` wrote.
        n_components: directions kept.

    Raises:
        ValueError: it is no statistic file, or anything in it is wrong.
    """
    n_components = as_components(n_components)
    file = StatisticFile(path)
    about = file.metadata
    facts = {name: Facts.from_dict(fact) for name, fact in _mapping(about.get("sites")).items()}
    results = Reports()
    few = [name for name in file if file.n_samples(name) < 2 and facts.get(name, Facts()).kind == "expert"]
    for name in (name for name in file if name not in few):  # one site in memory at a time
        results |= solve_sites({name: file[name]}, facts, n_components)
    shared = {
        follower: leader for follower, leader in _mapping(about.get("shared")).items() if leader in results
    }
    for follower, leader in shared.items():
        results[follower] = results[leader]
    listed = about.get("empty")
    empty = [str(name) for name in listed] if isinstance(listed, list) else []
    settings = _mapping(about.get("settings")) | {
        "n_components": n_components,
        "points": {name: asdict(fact) for name, fact in facts.items()},
    }
    summary = report.report_dict(
        results,
        _mapping(about.get("model")),
        _mapping(about.get("tokens")),
        settings,
        empty=[name for name in dict.fromkeys([*empty, *few]) if name not in results],
        shared=shared,
    )
    return summary, results


def _count(sources: Sequence[Source], sink: SiteStatistic, keeping: Keeping, step: Progress | None) -> None:
    """Read all blocks, from where the checkpoint is.

    Raises:
        ValueError: a block was refused, with the name of its file.
    """
    checkpoint = keeping.checkpoint(0, [NAME])
    if checkpoint is not None and keeping.resume:
        sink.views = checkpoint.load().get(NAME)  # pyright: ignore[reportAttributeAccessIssue]
    blocks = _blocks(sources)
    for path, block in blocks if checkpoint is None else checkpoint.remaining(blocks):
        try:
            sink.update(block)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        if checkpoint is not None:
            checkpoint.tick({NAME: sink.views})  # pyright: ignore[reportArgumentType]
        if step is not None:
            step(len(block))


def _blocks(sources: Sequence[Source]) -> Iterator[tuple[Path, Tensor]]:
    for source in sources:
        for block in source:
            yield source.path, block


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}
