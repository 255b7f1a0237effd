"""Statistics of all ranks of a `torch.distributed` group, merged on the first of them.

Every rank calls, with the same sites; a rank that saw no row of a site has no views of it. Sites go one after
the other up a binary tree: ⌈log₂ W⌉ rounds merge W ranks, always in the same order, and a rank holds one site
beside its own. What travels are the tensors and JSON facts of `to_state`, checked when they are read; nothing
is pickled.

What fails on one rank fails on all, at the end of the call. A rank that does not call at all, or dies, is
noticed by the backend alone, after the timeout of the group.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pca_torch._dtypes import STORED
from pca_torch._safetensors import as_text, decode
from pca_torch.site_statistic import SiteStatistic
from pca_torch.statistic_kinds import Statistic, rebuilt

__all__ = ["merge_on_first", "place_in", "sum_counts"]

Kept = TypeVar("Kept", bound="SiteStatistic | Statistic | None")

ALIGNED = 8  # bytes: where any dtype may begin
NAMES = {dtype: name for name, dtype in STORED.items()}


def merge_on_first(
    statistics: Mapping[str, Kept], group: dist.ProcessGroup | None = None
) -> Mapping[str, Kept] | None:
    """What all ranks counted, merged on the first rank of the group; each keeps its own.

    Args:
        statistics: by site, the same sites on every rank; None, like a `SiteStatistic` without views, stands
            for no row.
        group: of the ranks; None is all of them.

    Returns:
        On the first rank new statistics of the rows of all; its own, where no other rank has rows, and where
        there is no other rank. None on the other ranks.

    Raises:
        ValueError: a rank has other sites, or this one is not in the group.
        RuntimeError: a rank could not send or merge a site: it was interrupted, has other features, or no
            memory is left.
    """
    ranks = _Ranks.of(group)
    if ranks is None:
        return statistics
    sites = sorted(statistics)
    told = ranks.tell({site: _counted(statistics[site]) is not None for site in sites})
    _check_sites(told)
    merged: dict[str, Kept] = {}
    faults: dict[str, str] = {}
    for site in sites:
        found, fault = ranks.merge_up(_counted(statistics[site]), [has[site] for has in told])
        merged[site] = _holding(statistics[site], found)
        if fault is not None:
            faults[site] = fault
    _check_merged(ranks.tell(faults))
    return {site: merged[site] for site in statistics} if ranks.rank == 0 else None


def place_in(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Rank in a group, and how many there are; a process alone is the first of one, a stranger has rank -1.

    Args:
        group: of the ranks; None is all of them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def sum_counts(counts: Mapping[str, int], group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """Counts of all ranks by name, added up; every rank calls, and has the answer.

    Args:
        counts: of this rank; others may have other names.
        group: of the ranks; None is all of them.

    Raises:
        ValueError: this rank is not in the group.
    """
    ranks = _Ranks.of(group)
    total: Counter[str] = Counter()
    for part in [counts] if ranks is None else ranks.tell(counts):
        total.update(part)
    return dict(total)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a group, as this one sees them."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device  # what its backend sends from

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Ranks | None:
        """The ranks, or None where this is the only one.

        Raises:
            ValueError: this one is not among them.
        """
        rank, size = place_in(group)
        if rank < 0:
            raise ValueError("`group` must hold this rank, got one that does not; call on its members alone.")
        if size == 1:
            return None
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
        device = torch.device("cpu" if "cpu" in kinds else kinds[0])
        return cls(group, rank, size, device)

    def tell(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank tells, in their order; all of them call."""
        mine = _bytes_of(as_text({"told": dict(told)}), self.device)
        lengths = [mine.new_zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], device=self.device), group=self.group)
        counts = [int(length) for length in lengths]
        texts = [mine.new_empty(max(counts)) for _ in counts]
        padded = torch.nn.functional.pad(mine, (0, max(counts) - len(mine)))
        dist.all_gather(texts, padded, group=self.group)
        return [decode(_text_of(text[:count]))["told"] for text, count in zip(texts, counts, strict=True)]

    def merge_up(self, mine: Statistic | None, has: Sequence[bool]) -> tuple[Statistic | None, str | None]:
        """What this rank and those below it in the tree counted, sent on unless it is the first.

        Whatever happens, no message is left out: others wait for it.

        Args:
            mine: of one site.
            has: whether each rank has rows of it.

        Returns:
            The statistic, which is `mine` where no other came, and what went wrong.
        """
        found, fault = mine, None
        for level in range((self.size - 1).bit_length()):
            width = 2**level  # ranks that were merged so far, here and in the partner
            if self.rank % (2 * width):
                if any(has[self.rank : self.rank + width]):
                    fault = self._send(found, self.rank - width) or fault
                break
            partner = self.rank + width
            if any(has[partner : partner + width]):
                message = self._receive(partner)
                try:
                    found = _joined(found, message)
                except Exception as error:  # the others must hear of it, whatever it is
                    fault = f"{type(error).__name__}: {error}"
        return found, fault

    def _send(self, statistic: Statistic | None, to: int) -> str | None:
        """Send a statistic, or an empty message and return what is wrong with it."""
        fault = None
        try:
            head, message = _packed(statistic, self.device)
        except Exception as error:  # the receiver waits, whatever it is
            fault = f"{type(error).__name__}: {error}"
            head, message = 0, torch.empty(0, dtype=torch.uint8, device="cpu")
        sizes = torch.tensor([head, len(message)], device=self.device)
        dist.send(sizes, group=self.group, group_dst=to)
        if len(message):
            dist.send(message, group=self.group, group_dst=to)
        return fault

    def _receive(self, source: int) -> tuple[int, Tensor]:
        """What `_send` sent: the length of the header, and the message."""
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        dist.recv(sizes, group=self.group, group_src=source)
        head, length = sizes.tolist()
        message = torch.empty(length, dtype=torch.uint8, device=self.device)
        if length:
            dist.recv(message, group=self.group, group_src=source)
        return head, message


def _packed(statistic: Statistic | None, device: torch.device) -> tuple[int, Tensor]:
    """The length of a header in JSON, and that header and all tensors as bytes on `device`.

    Raises:
        RuntimeError: there is no statistic, because what should have been merged into it failed.
    """
    if statistic is None:
        raise RuntimeError("nothing came from the ranks below.")
    tensors, facts = statistic.to_state()
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # all are aligned then
    places = {str(tensor.device.type) for tensor in tensors.values()} - {"cpu"}
    shapes = {name: [NAMES[tensors[name].dtype], *tensors[name].shape] for name in names}
    text = as_text({"tensors": shapes, "facts": facts, "device": min(places, default="cpu")})
    header = _bytes_of(text, device)
    parts = [torch.nn.functional.pad(header, (0, -len(header) % ALIGNED))]
    parts += [tensors[name].to(device).reshape(-1).view(torch.uint8) for name in names]
    return len(header), torch.cat(parts)


def _joined(mine: Statistic | None, message: tuple[int, Tensor]) -> Statistic | None:
    """The statistic of a message, with what is here merged into it: that stays as it is, uncopied."""
    head, data = message
    if not head:
        return mine  # the sender will tell why
    body = decode(_text_of(data[:head]))
    start = head + -head % ALIGNED
    tensors = {}
    for name, (dtype, *shape) in body["tensors"].items():
        stop = start + STORED[dtype].itemsize * math.prod(shape)
        tensors[name] = data[start:stop].view(STORED[dtype]).reshape(shape).to(body["device"])
        start = stop
    found: Any = rebuilt(tensors, body["facts"])
    return found if mine is None else found.merge(mine)


def _counted(kept: SiteStatistic | Statistic | None) -> Statistic | None:
    """The statistic of a site; None where it has seen no row."""
    return kept.views if isinstance(kept, SiteStatistic) else kept


def _holding(kept: Kept, found: Statistic | None) -> Kept:
    """What was kept of a site, with `found` in place of its statistic."""
    if found is _counted(kept):
        return kept
    if not isinstance(kept, SiteStatistic):
        return found  # pyright: ignore[reportReturnType]
    holder = copy.copy(kept)
    holder.views = found  # pyright: ignore[reportAttributeAccessIssue]
    return holder


def _bytes_of(text: str, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _text_of(data: Tensor) -> str:
    return data.cpu().numpy().tobytes().decode()


def _check_sites(told: Sequence[Mapping[str, Any]]) -> None:
    """Refuse ranks that have other sites than the first.

    Raises:
        ValueError: there is one.
    """
    for rank, sites in enumerate(told):
        if differ := sorted(sites.keys() ^ told[0].keys()):
            lacks, has = (rank, 0) if differ[0] in told[0] else (0, rank)
            raise ValueError(
                f"`statistics` must hold the same sites on every rank, got {differ[0]!r} on rank {has} and "
                f"not on rank {lacks} of the group; capture the same sites everywhere."
            )


def _check_merged(told: Sequence[Mapping[str, str]]) -> None:
    """Refuse what is not merged whole.

    Raises:
        RuntimeError: a rank failed.
    """
    for rank, faults in enumerate(told):
        for site, fault in faults.items():
            raise RuntimeError(f"rank {rank} of the group could not merge site {site!r}: {fault}")
