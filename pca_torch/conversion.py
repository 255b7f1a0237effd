"""A basis file with fewer sites or components, in another dtype, or as the plain tensors that others read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pca_torch import export
from pca_torch._checks import check_choice, check_whole
from pca_torch._dtypes import FLOATING
from pca_torch._safetensors import as_text, write_tensors
from pca_torch.bounds import UNIQUE_BELOW
from pca_torch.precision import unit_roundoff
from pca_torch.result import Certificate, PCAResult
from pca_torch.subspace.energy import share_within
from pca_torch.subspace.spans import angles_between

__all__ = ["LAYOUTS", "convert", "narrowed", "select_sites"]

LAYOUTS = ("pca_torch", "columns", "eva")
PEFT = "base_model.model."  # before every name in an EVA state; keys without it are passed over in silence

Layout = Literal["pca_torch", "columns", "eva"]
Groups = Sequence[PCAResult]  # at least one


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    sites: Sequence[str] | None = None,
    k: int | None = None,
    dtype: str | None = None,
    layout: Layout = "pca_torch",
) -> dict[str, tuple[int, ...]]:
    """Write chosen sites of a basis file to another file.

    Layouts: "pca_torch" is a basis file again. "columns" has the tensors `{site}.V` (D, K), or (G, D, K) of
    G heads, `{site}.mean`, `{site}.explained_variance`, and `{site}.scale` where standardised; where not,
    x ≈ mean + (x - mean) V Vᵀ. "eva" is what PEFT takes as `eva_state_dict`: rows (K, in) by the name of
    each module whose input is a site.

    Args:
        source: a basis file, or a folder with `basis.safetensors`.
        out: the file to write; an old one is replaced once the new one is complete.
        sites: names, or patterns in which * stands for any characters; None is all.
        k: components kept of each; None is all.
        dtype: of the components, "float32", "bfloat16", "float16" or "float64"; None leaves it.
        layout: "pca_torch", "columns" or "eva".

    Returns:
        For each site that was written the shape of its components: (K, D), or (G, K, D).

    Raises:
        ValueError: no such site, more components than the file holds, or a layout that cannot hold a site.
    """
    check_choice(layout, "layout", LAYOUTS)
    if dtype is not None:
        check_choice(dtype, "dtype", tuple(FLOATING))
    if k is not None:
        check_whole(k, "k", 1)
    path = Path(source)
    path = path / "basis.safetensors" if path.is_dir() else path
    file = export.load(path)
    chosen: dict[str, Groups] = {}
    for name in select_sites(tuple(file), sites, path):
        found = file[name]
        groups = (found,) if isinstance(found, PCAResult) else found
        for result in groups:
            if k is not None and k > result.n_components:
                raise ValueError(
                    f"`k` must be at most {result.n_components}, the components of site {name!r} in {path}, "
                    f"got {k}; run again with more `--n-components`."
                )
        chosen[name] = tuple(
            narrowed(result, k, None if dtype is None else FLOATING[dtype]) for result in groups
        )
    facts = {"source": path.name, "k": k, "dtype": dtype, "layout": layout}
    if layout == "pca_torch":
        export.save(out, chosen, {**file.metadata, "exported": facts})
    else:
        _check_together(chosen, layout, path)
        tensors = _columns(chosen) if layout == "columns" else _eva(chosen, path)
        text = as_text({**file.metadata, "exported": facts})
        write_tensors(out, {"format": "pt", "pca_torch": text}, tensors)
    return {name: _shape(groups) for name, groups in chosen.items()}


def select_sites(names: Sequence[str], patterns: Sequence[str] | None, path: Path) -> list[str]:
    """The sites of a file that match any of `patterns`, in the order of the file.

    Args:
        names: the sites there are.
        patterns: names, or patterns in which * stands for any characters; None is all.
        path: the file, for errors.

    Raises:
        ValueError: a pattern matches none.
    """
    if patterns is None:
        return list(names)
    found: set[str] = set()
    for pattern in patterns:
        hits = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
        if not hits:
            listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise ValueError(f"`sites` has {pattern!r}, which is none of {path}: {listed}.")
        found |= hits
    return [name for name in names if name in found]


def narrowed(result: PCAResult, k: int | None = None, dtype: torch.dtype | None = None) -> PCAResult:
    """The k leading components of a result in another dtype, with what is known of them as they are stored.

    All variances stay. A finer dtype adds no digits, but rows that are orthonormal to it.

    Args:
        result: with K ≥ k components.
        k: None is all.
        dtype: a floating one; None is that of the result.

    Raises:
        ValueError: k is out of range.
    """
    k = result.n_components if k is None else k
    if not 0 <= k <= result.n_components:
        raise ValueError(f"`k` must be in 0..{result.n_components}, the components of the result, got {k}.")
    dtype = result.components.dtype if dtype is None else dtype
    if k == result.n_components and dtype == result.components.dtype:
        return result
    old = result.components[:k].detach()
    rows = old.double()
    if unit_roundoff(dtype) < unit_roundoff(old.dtype):
        u, _, vh = torch.linalg.svd(rows, full_matrices=False)
        rows = u @ vh  # the nearest orthonormal rows
    stored = rows.to(dtype).contiguous()
    return replace(result, components=stored, certificate=_recertified(result, stored))


def _recertified(result: PCAResult, stored: Tensor) -> Certificate:
    """What the certificate of a result says of its k leading components, moved by their new rounding.

    The k leading true variances sum to at most Σ(λ̂ + e), and the new span holds what lies within the old
    components, less an error e for each. Its angle to the leading k-subspace is at most that of the old
    components, by their residuals over the gap (Davis & Kahan, 1970), and the turn from there.
    """
    c, (k, d) = result.certificate, stored.shape
    total, variance = result.total_variance.item(), result.explained_variance[:k]
    moved = torch.linalg.vector_norm(stored.double() - result.components[:k].double(), dim=1)
    top = result.spectrum[0].item() if len(result.spectrum) else 0.0
    residuals = [old + top * step for old, step in zip(c.residual_norms[:k], moved.tolist(), strict=True)]
    # the span of the rows as they are, noise or not: `trusted` says which of them mean something
    new, before = (torch.linalg.qr(rows.double().mT).Q.mT for rows in (stored, result.components[:k]))
    share = share_within(result, new).low
    best = (variance.sum().item() + 2 * sum(c.variance_error[:k])) / total if total > 0 else 0.0
    missed = max(0.0, min(1.0, best) - share)
    turn = angles_between(before, new).max().item() if k else 0.0
    gap, angle = _separation(result, k, math.sqrt(sum(r * r for r in c.residual_norms[:k])))
    angle = 0.0 if k in {0, d} else min(math.pi / 2, angle + turn)
    cut = f"export: the first {k} of {result.n_components} components"
    dtype = str(stored.dtype).removeprefix("torch.")
    same = stored.dtype == result.components.dtype
    return replace(
        c,
        captured_ratio=share,
        missed_ratio_bound=missed,
        variance_error=c.variance_error[:k],
        quantisation_floor=None if c.quantisation_floor is None else c.quantisation_floor[:k],
        residual_norms=tuple(residuals),
        gap=gap,
        angle_bound=angle,
        unique=angle < UNIQUE_BELOW,
        precision=c.precision if same else f"{c.precision}, components in {dtype}",
        fallbacks=c.fallbacks if k == result.n_components else (*c.fallbacks, cut),
    )


def _separation(result: PCAResult, k: int, residual: float) -> tuple[float, float]:
    """The gap behind the k-th variance, and the angle that the residuals allow for across it."""
    c = result.certificate
    if k == result.n_components:
        return c.gap, c.angle_bound
    if k == 0:
        return 0.0, 0.0
    error = max(c.variance_error)
    gap = (result.spectrum[k - 1] - result.spectrum[k]).item()
    room = gap - 2 * error
    return gap, math.asin(min(1.0, (residual + error) / room)) if room > 0 else math.pi / 2


def _shape(groups: Groups) -> tuple[int, ...]:
    k, d = max(result.n_components for result in groups), groups[0].n_features
    return (k, d) if len(groups) == 1 else (len(groups), k, d)


def _check_together(chosen: Mapping[str, Groups], layout: str, path: Path) -> None:
    """Refuse heads with different K, which plain tensors have no place for.

    Raises:
        ValueError: there are some.
    """
    for name, groups in chosen.items():
        counts = {result.n_components for result in groups}
        if len(counts) > 1:
            raise ValueError(
                f"`layout` = {layout!r} needs one `k` for all heads of site {name!r} in {path}, which keep "
                f"{min(counts)} to {max(counts)}; pass `k` up to {min(counts)}."
            )


def _columns(chosen: Mapping[str, Groups]) -> dict[str, Tensor]:
    tensors = {}
    for name, groups in chosen.items():
        dtype = groups[0].components.dtype
        wide = dtype if dtype.itemsize >= 4 else torch.float32  # a mean in 16 bits would shift every score
        parts = {
            "V": [result.components.mT for result in groups],
            "mean": [result.mean.to(wide) for result in groups],
            "explained_variance": [result.explained_variance for result in groups],
        }
        if groups[0].scale is not None:
            parts["scale"] = [result.scale.to(wide) for result in groups if result.scale is not None]
        for kind, values in parts.items():
            tensors[f"{name}.{kind}"] = values[0] if len(groups) == 1 else torch.stack(values)
    return tensors


def _eva(chosen: Mapping[str, Groups], path: Path) -> dict[str, Tensor]:
    """Rows (K, in) by the names of PEFT.

    Raises:
        ValueError: a site that is no input of a module, has heads, or is standardised.
    """
    tensors = {}
    for name, groups in chosen.items():
        module, _, point = name.rpartition(":")
        if point != "input" or len(groups) > 1 or groups[0].scale is not None:
            raise ValueError(
                f"`layout` = 'eva' takes the plain inputs of modules, {name!r} in {path} is none; "
                "capture 'PATTERN:input', and choose by `sites`."
            )
        tensors[PEFT + module] = groups[0].components
    return tensors
