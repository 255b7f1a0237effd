"""What the statistics of a model's sites will take, told before they are made.

Bytes are those that live at once. The C library of Linux may keep up to a third more of what was freed, where
D is between 1000 and 2000 on a CPU.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pca_torch._checks import check_whole, free_memory
from pca_torch.intake import BUFFER_ROWS, chunk_rows
from pca_torch.norm_histogram import BINS
from pca_torch.precision import Precision, product_dtype
from pca_torch.scatter import PROBES

__all__ = ["MemoryPlan", "SiteMemory", "parse_size", "plan_memory", "size_text"]

UNITS = {"b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", 1)
    for ending, base in (("ib", 1024), ("b", 1000))
}
SHARE = 0.8  # of what is free, where no limit is given: the model's activations need some of it too
VIEWS = 2  # all rows and the typical ones
SOLVING = 10  # D×D float64 while a site is solved: three copies of its sums, the covariance, LAPACK's work
SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*|%)\s*")


class _Site(Protocol):
    """What a plan asks of a site."""

    @property
    def name(self) -> str: ...
    @property
    def heads(self) -> int: ...  # H
    @property
    def width(self) -> int | None: ...  # D, all heads together


@dataclass(frozen=True)
class SiteMemory:
    """Bytes that one site takes on its device."""

    kept: int  # as long as the run lasts: sums, rows held aside, rows that wait, counts of norms
    chunk: int  # while its rows are counted, beside what is kept; sites take turns
    solving: int  # while it is solved at the end; sites take turns


@dataclass(frozen=True)
class MemoryPlan:
    """What the statistics of all sites take at most, by device, and the passes in which they fit."""

    sites: Mapping[str, SiteMemory]  # by name
    devices: Mapping[str, str]  # by name of the site, where its statistics lie
    limits: Mapping[str, int | None]  # bytes by device; None where nobody says what is free
    passes: tuple[tuple[str, ...], ...]  # names of the sites counted in each pass over the tokens
    unknown: tuple[str, ...] = ()  # sites whose width only a forward tells; they are in no sum

    def total(self, device: str, names: Sequence[str] | None = None) -> int:
        """Bytes that sites take together on a device at the highest.

        Args:
            device: one of `limits`.
            names: of sites counted in one pass; None is the pass that takes most.
        """
        if names is None:
            return max(self.total(device, group) for group in self.passes)
        here = [self.sites[name] for name in names if name in self.sites and self.devices[name] == device]
        return _peak(here)

    def lines(self) -> list[str]:
        """The plan in lines of at most 80 columns."""
        found = []
        for device, limit in self.limits.items():
            names = [name for name in self.sites if self.devices[name] == device]
            text = f"statistics of {_sites(len(names))} on {device}: {size_text(self.total(device))} at most"
            found.append(text + ("" if limit is None else f", limit {size_text(limit)}"))
        if len(self.passes) > 1:
            sizes = ", ".join(str(len(group)) for group in self.passes)
            found.append(f"in {len(self.passes)} passes over the tokens, of {sizes} sites")
        if self.unknown:
            found.append(f"beside them {_sites(len(self.unknown))} whose width shows when the model runs")
        return [line for text in found for line in textwrap.wrap(text, 80, subsequent_indent="  ")]

    def to_dict(self) -> dict[str, Any]:
        """The plan in JSON types, for a report."""
        return {
            "bytes": {device: self.total(device) for device in self.limits},
            "limits": dict(self.limits),
            "passes": [list(group) for group in self.passes],
            "unknown": list(self.unknown),
        }


def plan_memory(
    sites: Sequence[_Site],
    *,
    device: torch.device | str | Mapping[str, torch.device | str] = "cpu",
    limit: int | str | None = None,
    available: int | None = None,
    max_passes: int | None = 1,
    batch_rows: int = 2048,
    rows_held: int = 256,
    dtype: torch.dtype = torch.float32,
    precision: Precision = "auto",
) -> MemoryPlan:
    """What the statistics of `sites` will take, refused before anything is allocated if it is too much.

    Args:
        sites: each with `name`, `width` (D) and `heads`. Those without a width are listed, not counted.
        device: where statistics lie, for all sites or by name of the site.
        limit: bytes that statistics may take on each device: a number, "2GiB" or "50%" of what is free.
            None is 80 % of what is free.
        available: bytes that are free on each device; None asks the system.
        max_passes: passes over the tokens that are allowed, each counting a part of the sites; None is any
            number. As few as possible are planned.
        batch_rows: tokens of one forward.
        rows_held: rows that a site may hold aside.
        dtype: of the activations.
        precision: arithmetic of the products.

    Returns:
        The plan, whose `passes` fit.

    Raises:
        ValueError: it does not fit; the error tells what would, each with its figure. Or an argument is out
            of range.
    """
    check_whole(batch_rows, "batch_rows", 1)
    check_whole(rows_held, "rows_held", 0)
    if max_passes is not None:
        check_whole(max_passes, "max_passes", 1)
    known = [site for site in sites if site.width is not None]
    where = {
        site.name: torch.device(device[site.name] if isinstance(device, Mapping) else device)
        for site in known
    }
    memory = {
        site.name: _site_memory(site, where[site.name], batch_rows, rows_held, dtype, precision)
        for site in known
    }
    limits = {str(place): _limit(limit, available, place) for place in dict.fromkeys(where.values())}
    devices = {name: str(place) for name, place in where.items()}
    unknown = tuple(site.name for site in sites if site.width is None)
    passes = _grouped(memory, devices, limits)
    whole = MemoryPlan(memory, devices, limits, (tuple(site.name for site in sites),), unknown)
    if passes is None or (max_passes is not None and len(passes) > max_passes):
        raise ValueError(_refusal(whole, passes, available))
    if len(passes) < 2:
        return whole
    return MemoryPlan(memory, devices, limits, (passes[0] + unknown, *passes[1:]), unknown)


def parse_size(text: str, available: int | None = None) -> int:
    """Bytes of "2GiB", "500 MB", a plain number, or "50%" of what is available.

    Args:
        text: a number and a unit: B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (of 1024) or %.
        available: what 100 % is.

    Raises:
        ValueError: it is no size, zero, more than 100 %, or a share of nothing known.
    """
    found = SIZE.fullmatch(text)
    number, unit = (float(found[1]), found[2].lower()) if found else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        if available is None:
            raise ValueError(
                f"`memory` is {text.strip()!r}, but nobody says what is free here; give bytes, as 2GiB."
            )
        return int(number / 100 * available)
    if number <= 0 or unit not in {"", *UNITS}:
        raise ValueError(f"`memory` must be a size such as 2GiB, 500MB or 50%, got {text!r}.")
    return int(number * UNITS[unit or "b"])


def size_text(size: float) -> str:
    """Bytes for people: "1.4 GiB".

    Args:
        size: bytes.
    """
    power = 0 if size < 1024 else min(4, int(math.log2(size) // 10))
    return f"{size:.0f} B" if not power else f"{size / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def _site_memory(
    site: _Site, device: torch.device, batch_rows: int, held: int, dtype: torch.dtype, precision: Precision
) -> SiteMemory:
    """Bytes of one site: two statistics, and what TokenViews keeps beside them."""
    d = site.width or 0
    square = 8 * d * (d // site.heads)  # the sums: of heads only the blocks on the diagonal
    measured = product_dtype(dtype, device, precision) == torch.float32
    rows = min(batch_rows, chunk_rows(d, device))
    vectors = 3 * 8 * d + (2 * 8 * PROBES * d if measured else 0)
    waiting = (
        BUFFER_ROWS * d * dtype.itemsize
    )  # of the extreme rows; of all rows only where batches are short
    waiting *= VIEWS if batch_rows < 2 * BUFFER_ROWS else 1
    kept = VIEWS * (square + vectors) + waiting + held * d * dtype.itemsize + 8 * (BINS + 1)
    copies = 3 if site.heads > 1 else 2  # of float64 rows, with what allocators keep of freed ones
    copies += 2 if measured else 0
    block = square // 4 if measured else 0
    return SiteMemory(kept, copies * 8 * rows * d + block, SOLVING * square)


def _peak(sites: Sequence[SiteMemory]) -> int:
    """Bytes of sites that are counted together, then solved in turn."""
    if not sites:
        return 0
    return sum(site.kept for site in sites) + max(max(site.chunk, site.solving) for site in sites)


def _limit(limit: int | str | None, available: int | None, device: torch.device) -> int | None:
    """Bytes that are allowed on a device."""
    free = available if available is not None else free_memory(device)
    if isinstance(limit, str):
        return parse_size(limit, free)
    if limit is None:
        return None if free is None else int(SHARE * free)
    check_whole(limit, "limit", 1)
    return limit


def _fits(
    sites: Mapping[str, SiteMemory], devices: Mapping[str, str], limits: Mapping[str, int | None]
) -> bool:
    """Whether sites fit together."""
    for device, limit in limits.items():
        here = [memory for name, memory in sites.items() if devices[name] == device]
        if limit is not None and _peak(here) > limit:
            return False
    return True


def _grouped(
    sites: Mapping[str, SiteMemory], devices: Mapping[str, str], limits: Mapping[str, int | None]
) -> list[tuple[str, ...]] | None:
    """Sites in passes that fit, in the order of the model; None where a site does not fit alone."""
    groups: list[dict[str, SiteMemory]] = [{}]
    for name, memory in sites.items():
        if not _fits({**groups[-1], name: memory}, devices, limits):
            if not _fits({name: memory}, devices, limits):
                return None
            groups.append({})
        groups[-1][name] = memory
    return [tuple(group) for group in groups]


def _sites(n: int) -> str:
    return "1 site" if n == 1 else f"{n} sites"


def _refusal(whole: MemoryPlan, passes: Sequence[tuple[str, ...]] | None, available: int | None) -> str:
    """Why not, and what fits instead, each with its figure."""
    over = [d for d, limit in whole.limits.items() if limit is not None and whole.total(d) > limit]
    what = " and ".join(
        f"{size_text(whole.total(one))} on {one}, where {size_text(whole.limits[one] or 0)} is allowed"
        for one in over
    )
    choices = []
    if passes:
        most = max(whole.total(device, group) for device in over for group in passes)
        n = len(passes)
        choices.append(
            f"count them in {n} passes over the tokens (`max_passes={n}` or `--passes {n}`, "
            f"{size_text(most)} at most)"
        )
    on_cpu = _on_cpu(whole, available)
    if on_cpu is not None:
        choices.append(f"keep them on the CPU (`--statistics-on cpu`, {size_text(on_cpu)} there)")
    largest = max(whole.sites.values(), key=lambda site: _peak([site]))
    if len(whole.sites) > 1:
        choices.append(f"capture fewer sites (the largest takes {size_text(_peak([largest]))} alone)")
    if not choices:
        choices.append("allow as much")
    return f"the statistics of {_sites(len(whole.sites))} need {what}; " + ", or ".join(choices) + "."


def _on_cpu(whole: MemoryPlan, available: int | None) -> int | None:
    """Bytes of all statistics on the CPU, if they lie elsewhere and fit there."""
    free = free_memory(torch.device("cpu"))
    need = _peak([*whole.sites.values()])
    if set(whole.limits) == {"cpu"} or free is None or need > SHARE * free or available is not None:
        return None
    return need
