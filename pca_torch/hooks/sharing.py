"""Sites that see the very same tensor: one statistic for all of them, recognised without looking at data.

A site whose first activation is the object that another site saw in the same forward, unchanged since,
follows that site, and its own sink stays empty. From then on the leader's activation waits until every
follower has seen the same object again, and is counted once. A follower that sees anything else gets a copy
of what the leader's sink held before, and goes its own way.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from pca_torch.hooks.masks import Rows
from pca_torch.hooks.targets import Target

__all__ = ["Sharing"]

Count = Callable[[Target, Tensor, Rows, int | None], object]  # the last: what `_version` must still be
Copy = Callable[[Target, Target], object]


@dataclass
class _Seen:
    """An activation as a site saw it; `x` is a weak reference where the tensor need not live on."""

    target: Target
    x: Callable[[], Tensor | None]
    version: int
    rows: Rows

    def is_same(self, x: Tensor, rows: Rows) -> bool:
        """Whether `x` is this object, holds what it held, and the same rows of it count."""
        return self.x() is x and x._version == self.version and rows is self.rows


class Sharing:
    """Who follows whom in one capture.

    Args:
        targets: the sites by label.
        count: counts rows of a site.
        copy: gives a site what another holds.
        leaders: leader by follower to begin with, where an earlier capture of these sinks ended.

    Raises:
        ValueError: `leaders` names a site that is not captured.
    """

    def __init__(
        self, targets: Mapping[str, Target], count: Count, copy: Copy, leaders: Mapping[str, str]
    ) -> None:
        strange = [label for pair in leaders.items() for label in pair if label not in targets]
        if strange:
            raise ValueError(f"`share` names {strange[0]!r}, which is not captured; give sites of `sinks`.")
        self.targets = targets
        self.count = count
        self.copy = copy
        self.leaders = dict(leaders)
        owners = Counter(id(target.sink) for target in targets.values())
        self.fresh = {  # may follow or lead, and have not fired yet
            label
            for label, target in targets.items()
            if target.site.only is None
            and hasattr(target.sink, "copy_from")
            and getattr(target.sink, "n_samples", 0) == 0
            and owners[id(target.sink)] == 1  # one that pools several sites counts the rows of each
        }
        self.firsts: dict[tuple[object, ...], _Seen] = {}  # first activations, in the forward under way
        self.waiting: dict[str, tuple[_Seen, set[str]]] = {}  # by leader: who has still to see the same

    def arrive(self, target: Target, x: Tensor, rows: Rows, inside: bool) -> None:
        """Take an activation of a site.

        Args:
            target: the site.
            x: its activation.
            rows: which rows count.
            inside: a root is running, so that the end of the forward will be told.
        """
        label, fresh = target.label, target.label in self.fresh
        self.fresh.discard(label)
        comparable = inside and not x.is_inference()  # inference tensors do not count their changes
        if label in self.leaders:
            if comparable and self._confirms(label, x, rows):
                return
            self._part(label)
        self._settle(label)
        followers = {follower for follower, leader in self.leaders.items() if leader == label}
        if followers and comparable:
            self.waiting[label] = _Seen(target, lambda: x, x._version, rows), followers
            return
        for follower in followers:
            self._part(follower)
        if fresh and comparable:
            kind = id(x), type(target.sink), target.site.heads
            first = self.firsts.get(kind)
            if first is not None and first.is_same(x, rows):
                self.leaders[label] = first.target.label
                return
            self.firsts[kind] = _Seen(target, weakref.ref(x), x._version, rows)
        else:  # has rows beside its first activation: nobody can follow it any more
            self.firsts = {kind: first for kind, first in self.firsts.items() if first.target is not target}
        self.count(target, x, rows, None)

    def settle(self) -> None:
        """The forward is over: followers that did not fire go their own way."""
        for label in list(self.waiting):
            self._settle(label)
        self.firsts.clear()

    def _settle(self, leader: str) -> None:
        for follower in list(self.waiting[leader][1]) if leader in self.waiting else ():
            self._part(follower)

    def _confirms(self, follower: str, x: Tensor, rows: Rows) -> bool:
        """Whether `follower` sees what its leader saw."""
        leader = self.leaders[follower]
        if leader not in self.waiting:
            return False
        seen, missing = self.waiting[leader]
        if follower not in missing or not seen.is_same(x, rows):
            return False
        self._seen_by(follower, leader)
        return True

    def _part(self, follower: str) -> None:
        """Let `follower` go its own way, with all that it has seen."""
        leader = self.leaders.pop(follower)
        self.copy(self.targets[follower], self.targets[leader])
        if leader in self.waiting:
            seen, missing = self.waiting[leader]
            if follower not in missing:  # it saw what is not counted yet
                self._count(self.targets[follower], seen)
            self._seen_by(follower, leader)

    def _seen_by(self, follower: str, leader: str) -> None:
        """Count what waits for the followers of `leader`, if this was the last."""
        seen, missing = self.waiting[leader]
        missing.discard(follower)
        if not missing:
            del self.waiting[leader]
            self._count(seen.target, seen)

    def _count(self, target: Target, seen: _Seen) -> None:
        x = seen.x()
        assert x is not None  # what waits is kept alive
        self.count(target, x, seen.rows, seen.version)
