"""The files of a report."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pca_torch import export, plots, report
from pca_torch._checks import check_choice
from pca_torch.heads import HeadsReport
from pca_torch.result import PCAResult, SiteReport

__all__ = ["write_outputs"]


def write_outputs(
    out: str | Path,
    summary: Mapping[str, Any],
    results: Mapping[str, SiteReport | HeadsReport],
    view: Literal["typical", "all"] = "typical",
) -> list[Path]:
    """Write `report.json`, `basis.safetensors` and, where matplotlib is there, `spectra.png`.

    Each file is written whole or not at all.

    Args:
        out: the folder; made if need be.
        summary: the report.
        results: the results behind it.
        view: which tokens the basis is of.

    Returns:
        The files written.

    Raises:
        ValueError: `view` is neither, or `out` is a file.
    """
    check_choice(view, "view", ("typical", "all"))
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`out` must be a folder, {folder} is a file; give another.")
    folder.mkdir(parents=True, exist_ok=True)
    bases: dict[str, PCAResult | Sequence[PCAResult]] = {
        name: site.typical if view == "typical" else site.all_tokens for name, site in results.items()
    }
    metadata = {key: summary[key] for key in ("model", "tokens", "settings")} | {"view": view}
    written = [folder / "report.json", folder / "basis.safetensors"]
    report.write_report(written[0], summary)
    export.save(written[1], bases, metadata)
    try:
        plots.plot_spectra(summary, folder / "spectra.png")
        written.append(folder / "spectra.png")
    except ImportError as error:  # the picture is an extra; the numbers are not
        warnings.warn(f"{folder / 'spectra.png'} is not written: {error}", stacklevel=2)
    return written
