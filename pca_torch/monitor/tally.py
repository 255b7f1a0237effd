"""What is counted of a window beside its statistics, on one rank or on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from pca_torch.distributed import sum_counts

__all__ = ["Tally"]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts by name; names that one rank alone has are those of all once they are added up."""

    tokens: Mapping[str, int]  # that counted, "kept", or were left out, by reason
    nonfinite: Mapping[str, int]  # rows with NaN or inf, by site
    troubled: Mapping[str, int]  # ranks that could not count rows, by site
    forwards: Mapping[str, int]  # "skipped": of no training; ranks that are "rootless" or "unlabelled"

    def over_ranks(self, group: Any) -> Self:
        """The sums over all ranks, on each of them.

        Args:
            group: of torch.distributed; None is all.
        """
        total = sum_counts({f"{part} {name}": n for part, name, n in self._flat()}, group)
        parts: dict[str, dict[str, int]] = {field.name: {} for field in fields(self)}
        for key, n in total.items():
            part, _, name = key.partition(" ")
            parts[part][name] = n
        return type(self)(**parts)

    def _flat(self) -> Iterator[tuple[str, str, int]]:
        for field in fields(self):
            for name, n in getattr(self, field.name).items():
                yield field.name, name, n
