"""`pca-torch export`: a part of a basis file, or its tensors for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from pca_torch.commands.common import OUT

__all__ = ["export"]


def export(
    source: Annotated[
        Path, typer.Argument(help="A folder that `run` or `fit` wrote, or a basis file.")
    ] = OUT,
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")] = Path("exported.safetensors"),
    sites: Annotated[
        list[str] | None, typer.Option(help="Names or patterns, such as '*layers.1?:*'; none is all.")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Components kept; none is all.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        typer.Option(help="Of the components; none leaves it."),
    ] = None,
    layout: Annotated[
        Literal["pca_torch", "columns", "eva"],
        typer.Option(help="A basis file; V (D, K) per site; or the state that PEFT's EVA takes."),
    ] = "pca_torch",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Write chosen sites, components, dtype and layout of a basis to a new file."""
    from pca_torch.conversion import convert

    shapes = convert(source, out, sites=sites or None, k=k, dtype=dtype, layout=layout)
    size = out.stat().st_size
    if as_json:
        written = {name: list(shape) for name, shape in shapes.items()}
        print(json.dumps({"file": str(out), "bytes": size, "layout": layout, "sites": written}))
        return
    each = sorted({" × ".join(map(str, shape)) for shape in shapes.values()})
    listed = ", ".join(each[:3]) + (", …" if len(each) > 3 else "")
    count = "1 site" if len(shapes) == 1 else f"{len(shapes)} sites"
    print(f"wrote {out}: {count}, components {listed}, {size:,} bytes, layout {layout}")
