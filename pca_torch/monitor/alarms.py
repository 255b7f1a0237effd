"""Rules over what is logged, and who is called when one comes true; `Watch` follows them."""

from __future__ import annotations

import difflib
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from pca_torch._checks import check_choice
from pca_torch.monitor.record import VIEWS, Alert, SpectrumRecord, View
from pca_torch.sites.names import find_hits, listing

__all__ = ["Alarm", "History", "check_alarms", "is_among", "sentence", "warn"]

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
BOUND = re.compile(rf"(?P<metric>[^\s<>=%]+)\s*(?P<verb><=|>=|<|>)\s*(?P<number>{NUMBER})")
CHANGE = re.compile(
    rf"(?P<metric>[^\s<>=%]+)\s+(?P<verb>drops|rises)\s+(?P<number>{NUMBER})\s*%"
    r"\s+within\s+(?P<within>\d{1,15})(?:\s+steps?)?"
)
FORMS = '"rank_95 < 8" (or <=, >, >=) or "rank_95 drops 50% within 200 steps" (or rises)'
BOUNDS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

History = list[tuple[int, float]]  # steps, ascending, and the values of a metric there


def sentence(alert: Alert) -> str:
    """What came true, as one sentence.

    Args:
        alert: it.
    """
    head = "" if alert.head is None else f", head {alert.head}"
    view = "" if alert.view == "typical" else ", all tokens"
    value = f"{alert.metric} is {alert.value:.6g}"
    if alert.before is not None:
        value += f", it was {alert.before:.6g} at step {alert.before_step}"
    return f"{alert.site}{head}{view} at step {alert.step}: {value} (alarm {alert.rule!r})."


def warn(alert: Alert) -> None:
    """Tell an alert as a warning.

    Args:
        alert: it.
    """
    warnings.warn(sentence(alert), stacklevel=2)


def is_among(site: str, patterns: str | Sequence[str] | None) -> bool:
    """Whether one of `patterns` means a logged site.

    Args:
        site: its name, a path and a point: "model.layers.3:output".
        patterns: paths or patterns over paths as in `find_sites`, "model.layers.*", for any point of them;
            with a point, "**.self_attn:k", for that one. None is all sites.
    """
    path, _, point = site.partition(":")
    for pattern in [patterns] if isinstance(patterns, str) else patterns or ():
        wanted, colon, points = pattern.partition(":")
        if find_hits(wanted, [path]) and (not colon or fnmatchcase(point, points)):
            return True
    return patterns is None


@dataclass(frozen=True)
class Rule:
    """What a rule says, read."""

    metric: str
    verb: str  # "<", "<=", ">", ">=", "drops" or "rises"
    number: float  # the bound, or percent
    within: int | None  # steps back that count; None for a bound

    @classmethod
    def read(cls, text: str) -> Rule:
        """A rule in one of the forms of `Alarm`.

        Args:
            text: it.

        Raises:
            ValueError: it has no such form, or numbers that make no sense.
        """
        found = BOUND.fullmatch(text.strip()) or CHANGE.fullmatch(text.strip())
        if not found:
            raise ValueError(f"`rule` must be like {FORMS}, got {text!r}.")
        within = found.groupdict().get("within")
        rule = cls(found["metric"], found["verb"], float(found["number"]), int(within) if within else None)
        if not math.isfinite(rule.number):
            raise ValueError(f"`rule` must have a number that float64 can hold, got {text!r}.")
        if rule.within == 0:
            raise ValueError(f"`rule` must look back over at least 1 step, got {text!r}.")
        if rule.within is not None and rule.number <= 0:
            raise ValueError(f"`rule` must have a percentage above 0, got {text!r}.")
        if rule.verb == "drops" and rule.number >= 100:
            raise ValueError(
                f"`rule` must have a percentage below 100, by which a value can drop, got {text!r}."
            )
        return rule

    def judge(self, history: History) -> tuple[bool, tuple[int, float] | None]:
        """Whether the rule is true, and the step and value that a change is measured from.

        Args:
            history: the last entry is now; none is older than `within` steps.
        """
        value = history[-1][1]
        if self.within is None:
            return BOUNDS[self.verb](value, self.number), None
        sign = 1 if self.verb == "drops" else -1
        # the latest of equal ones: the change came after it
        before = max(history, key=lambda entry: (sign * entry[1], entry[0]))
        # no quotient, which would round: counts are compared exactly
        return 100 * sign * (before[1] - value) > self.number * before[1] > 0, before


@dataclass(frozen=True, eq=False)
class Alarm:
    """A rule over one metric, and what to call when it comes true.

    A rule is one of
      - "rank_95 < 8": a bound, with <, <=, > or >=;
      - "rank_95 drops 50% within 200 steps": the value is more than 50 % below the largest one logged in the
        last 200 steps, those at both ends included; "rises" likewise, above the smallest one. Values of 0
        and below have no percentage: measured from one of them, nothing has dropped or risen.

    Each site, view and head is followed by itself, and told once: again only after the rule was false in
    between. Where the metric is not defined, nothing is told and nothing forgotten.

        pt.SpectrumMonitor(model, alarms=[Alarm("rank_95 drops 50% within 200 steps", page_me)])

    Args:
        rule: in one of these forms.
        call: gets the `Alert`, once it is in the log; may return True to ask for the end of the training,
            which `SpectrumMonitor.should_stop` then tells.
        sites: patterns of the sites that are followed, as `is_among` takes them; None is all.
        view: of which tokens, "typical" or "all".

    Raises:
        ValueError: the rule has no such form, or numbers that make no sense.
        TypeError: an argument of another type.
    """

    rule: str
    call: Callable[[Alert], object] = warn
    sites: str | Sequence[str] | None = field(default=None, kw_only=True)
    view: View = field(default="typical", kw_only=True)
    parsed: Rule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str):
            raise TypeError(f"`rule` must be text like {FORMS}, got {type(self.rule).__name__}.")
        if not callable(self.call):
            raise TypeError(f"`call` must be a function of an `Alert`, got {self.call!r:.60}.")
        several = isinstance(self.sites, Sequence) and all(isinstance(one, str) for one in self.sites)
        if self.sites is not None and not several:
            raise TypeError(f"`sites` must be a pattern, several, or None for all, got {self.sites!r:.60}.")
        check_choice(self.view, "view", VIEWS)
        object.__setattr__(self, "parsed", Rule.read(self.rule))

    @property
    def metric(self) -> str:
        """What the rule is about."""
        return self.parsed.metric

    def follows(self, record: SpectrumRecord) -> bool:
        """Whether a record is of a site and a view that this alarm is for.

        Args:
            record: of any.
        """
        return record.view == self.view and is_among(record.site, self.sites)


def check_alarms(
    alarms: Iterable[Alarm],
    metrics: Collection[str] | None = None,
    sites: Collection[str] | None = None,
    every: int | None = None,
) -> tuple[Alarm, ...]:
    """Alarms that can ring: what they are about is logged.

    Args:
        alarms: them.
        metrics: names of the metrics that a record has; None where they are not known yet.
        sites: names of the sites that are logged; None where they are not known yet.
        every: steps from one spectrum to the next; None where it is not known yet.

    Raises:
        TypeError: something else than alarms.
        ValueError: a metric is not logged, no site that is logged is meant, or a change would be looked
            for between one spectrum and itself.
    """
    found = tuple(alarms) if isinstance(alarms, Iterable) else (alarms,)
    for alarm in found:
        if not isinstance(alarm, Alarm):
            raise TypeError(f"`alarms` must hold `Alarm` objects, got {alarm!r:.60}; write Alarm(rule).")
        if metrics is not None and alarm.metric not in metrics:
            close = difflib.get_close_matches(alarm.metric, metrics, n=3, cutoff=0)
            raise ValueError(
                f"`alarms` has the rule {alarm.rule!r}, but {alarm.metric!r} is not logged; "
                f"add it to `metrics`, or take one that is: {', '.join(map(repr, close))}."
            )
        if sites is not None and not any(is_among(site, alarm.sites) for site in sites):
            raise ValueError(
                f"`alarms` has the rule {alarm.rule!r} for `sites` {alarm.sites!r}, which match no site that "
                f"is logged: {listing(sites)}."
            )
        within = alarm.parsed.within
        if within is not None and every is not None and within < every:
            raise ValueError(
                f"`alarms` has the rule {alarm.rule!r}, but spectra are logged every {every} steps; "
                f"look back over at least {every} steps."
            )
    return found
