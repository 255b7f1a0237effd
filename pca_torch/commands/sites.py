"""`pca-torch sites`: what can be captured in a model."""

from __future__ import annotations

import json
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from pca_torch.sites.describe import SiteGroup

__all__ = ["sites"]


def sites(
    model: Annotated[
        str, typer.Argument(help="smollm2, a local folder, a .gguf file, or a hub id.")
    ] = "smollm2",
    sites: Annotated[
        list[str] | None, typer.Option(help="Shortcuts, modules or patterns: k, 'resid@0-5', 'a.*:input'.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Revision of a hub model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every site as JSON.")] = False,
) -> None:
    """List what can be captured in a language model, with shapes."""
    from pca_torch.models import load_model
    from pca_torch.sites.describe import describe_sites

    loaded = load_model(model, device="cpu", revision=revision, with_tokenizer=False)
    groups = describe_sites(loaded.model, sites or None)
    if as_json:
        print(json.dumps(_as_dict(loaded.provenance, groups), allow_nan=False))
        return
    console = Console()
    console.print(_table(loaded.source, groups))
    console.print(
        "Any module by path or pattern as well: 'model.layers.3.mlp', its ':input'; some layers: 'k@0-5,10'.",
        markup=False,
        highlight=False,
    )


def _table(source: str, groups: list[SiteGroup]) -> Table:
    """A line for each place, layers together; the word that names it once."""
    table = Table(title=escape(source), title_justify="left", box=None, pad_edge=False, header_style="bold")
    by_word = any(group.shortcut for group in groups)
    if by_word:
        table.add_column("--sites", no_wrap=True)
    table.add_column("name in files", overflow="fold")
    table.add_column("layers", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for word, found in groupby(groups, key=lambda group: group.shortcut):
        for i, group in enumerate(found):
            first = [(word or "") if not i else ""] if by_word else []
            table.add_row(*first, group.name, group.layers, group.shape)
    return table


def _as_dict(provenance: dict[str, Any], groups: list[SiteGroup]) -> dict[str, Any]:
    return {
        "model": provenance,
        "sites": [
            {
                "name": site.name,
                "shortcut": group.shortcut,
                "path": site.path,
                "kind": site.kind,
                "point": site.point,
                "rope": site.rope,
                "layer": site.layer,
                "heads": site.heads,
                "shape": group.shape,
            }
            for group in groups
            for site in group.sites
        ],
    }
