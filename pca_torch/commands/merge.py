"""`pca-torch merge`: statistics of several runs as those of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pca_torch.commands.common import AsJson

__all__ = ["merge"]


def merge(
    files: Annotated[list[Path], typer.Argument(help="Files that --save-statistics wrote.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    as_json: AsJson = False,
) -> None:
    """Merge statistics of runs over different data into one file, as if one run had seen them all."""
    from pca_torch.statistic_file import save_statistics
    from pca_torch.statistic_merge import merge_statistics

    merged = merge_statistics(files)
    save_statistics(out, merged, merged.metadata)
    rows = {site: merged.n_samples(site) for site in merged}
    if as_json:
        print(json.dumps({"files": list(map(str, files)), "out": str(out), "sites": rows}))
        return
    least, most = min(rows.values()), max(rows.values())
    each = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    counted = [f"{n} {what}{'s' * (n != 1)}" for n, what in ((len(files), "file"), (len(rows), "site"))]
    told = f"merged {counted[0]}: {counted[1]} of {each} rows\nwrote {out}"
    Console().print(told, markup=False, highlight=False, soft_wrap=True)
