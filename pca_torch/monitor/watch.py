"""The alarms of a run: when each comes true, and what it must remember for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pca_torch.monitor.alarms import Alarm, History
from pca_torch.monitor.record import Alert, SpectrumRecord

__all__ = ["Watch"]

Place = tuple[str, int | None]  # site and head


class Watch:
    """Alarms, and what each must remember: whether its rule is true where, and values of the last steps.

    Args:
        alarms: them.
    """

    def __init__(self, alarms: Iterable[Alarm]) -> None:
        self.alarms = tuple(alarms)
        self._histories: list[dict[Place, History]] = [{} for _ in self.alarms]
        self._true: list[set[Place]] = [set() for _ in self.alarms]

    def update(self, records: Iterable[SpectrumRecord]) -> list[tuple[Alarm, Alert]]:
        """Take what was measured at one step; nobody is called.

        Args:
            records: of that step, which is later than those before.

        Returns:
            The alarms whose rule came true now, in the order of the records.
        """
        told: list[tuple[Alarm, Alert]] = []
        for record in records:
            for i, alarm in enumerate(self.alarms):
                value = record.metrics.get(alarm.metric)
                if value is None or not alarm.follows(record):
                    continue
                place = (record.site, record.head)
                history = self._histories[i].get(place, [])
                since = record.step - (alarm.parsed.within or 0)
                history = [*(entry for entry in history if entry[0] >= since), (record.step, float(value))]
                self._histories[i][place] = history
                true, before = alarm.parsed.judge(history)
                if true and place not in self._true[i]:
                    told.append((alarm, _alert(alarm, record, float(value), before)))
                (self._true[i].add if true else self._true[i].discard)(place)
        return told

    def to_state(self) -> dict[str, Any]:
        """What a resumed run must know, in JSON types."""
        return {
            "alarms": [
                {
                    "alarm": _identity(alarm),
                    "places": [
                        {
                            "site": site,
                            "head": head,
                            "true": (site, head) in true,
                            "history": [list(seen) for seen in history],
                        }
                        for (site, head), history in histories.items()
                    ],
                }
                for alarm, histories, true in zip(self.alarms, self._histories, self._true, strict=True)
            ]
        }

    @classmethod
    def from_state(cls, alarms: Iterable[Alarm], state: Mapping[str, Any]) -> Watch:
        """Go on where another run was: an alarm that it had, by rule, sites and view, knows what it knew.

        Args:
            alarms: of this run; those that the other did not have start anew.
            state: what `to_state` gave, read back from JSON or not.

        Raises:
            ValueError: it is not that.
        """
        watch = cls(alarms)
        try:
            known = {_key(saved["alarm"]): _restored(saved["places"]) for saved in state["alarms"]}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"`state` must be what `Watch.to_state` gave, got {state!r:.80}.") from error
        for i, alarm in enumerate(watch.alarms):
            histories, true = known.get(_key(_identity(alarm)), ({}, set()))
            watch._histories[i], watch._true[i] = dict(histories), set(true)
        return watch


def _alert(alarm: Alarm, record: SpectrumRecord, value: float, before: tuple[int, float] | None) -> Alert:
    return Alert(
        step=record.step,
        site=record.site,
        view=record.view,
        head=record.head,
        rule=alarm.rule,
        metric=alarm.metric,
        value=value,
        before=before and before[1],
        before_step=before and before[0],
    )


def _identity(alarm: Alarm) -> list[Any]:
    """By what an alarm is known in another run, in JSON types."""
    sites = [alarm.sites] if isinstance(alarm.sites, str) else alarm.sites
    return [alarm.rule, None if sites is None else list(sites), alarm.view]


def _key(identity: Sequence[Any]) -> tuple[Any, ...]:
    rule, sites, view = identity
    return rule, None if sites is None else tuple(sites), view


def _restored(places: Iterable[Mapping[str, Any]]) -> tuple[dict[Place, History], set[Place]]:
    """Histories and true rules of one alarm, as they were saved.

    Raises:
        ValueError: a value is not what is saved there.
    """
    histories: dict[Place, History] = {}
    true: set[Place] = set()
    for saved in places:
        place = (saved["site"], saved["head"])
        histories[place] = [(int(step), float(value)) for step, value in saved["history"]]
        if type(place[0]) is not str or type(place[1]) not in {int, type(None)}:
            raise ValueError("not a place")
        if saved["true"]:
            true.add(place)
    return histories, true
