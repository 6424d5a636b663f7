"""A run folder as it stands: its events merged, its phases, its newest numbers. Reads, never writes.

Everything here may be half-written, from a killed process, or of a later etude: what cannot be read is skipped, what
is missing is None, and no look at a run ever fails for what the run wrote. Knows nothing of how anything is drawn.
"""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etude.errors import NoRun
from etude.sums import proven_line

Event = Mapping[str, Any]
T = TypeVar("T")

PHASES = ("corpus", "mid-training", "eval-before", "rl", "eval-after", "report")
"""The phases of a run, in order."""


def number(facts: Mapping[str, Any], key: str) -> float | None:
    """A finite number under `key`, or None.

    >>> number({"loss": 1}, "loss"), number({"loss": "1"}, "loss"), number({"loss": float("nan")}, "loss")
    (1.0, None, None)
    """
    value = facts.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or math.isnan(value):
        return None
    return float(value)


def text(facts: Mapping[str, Any], key: str) -> str:
    """A string under `key`, or the empty one."""
    value = facts.get(key)
    return value if isinstance(value, str) else ""


def counts(facts: Mapping[str, Any], key: str) -> dict[str, float]:
    """An object of numbers under `key`; what is not one is left out."""
    value = facts.get(key)
    if not isinstance(value, Mapping):
        return {}
    return {str(name): n for name in value if (n := number(value, name)) is not None}


@dataclass(frozen=True)
class PhaseSpan:
    """A phase that has begun. One that was broken off and gone on with has several parts, one a session."""

    name: str
    start: float  # unix seconds, of its last part
    end: float | None  # None: under way, or killed
    wall_s: float | None  # of all its parts, once it has ended


class RunView:
    """The events of a run folder by kind, in order of time.

    Keep one view and `refresh` it: only new lines are read. Raises `NoRun` where there is no such folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise NoRun(f"no run at {self.path}", hint="see runs/ for what there is")
        self._events: dict[str, list[Event]] = {}
        self._offsets: dict[Path, int] = {}
        self._unreadable: Counter[str] = Counter()  # lines, by file
        self._cut: set[str] = set()  # files that end within a line
        self.refresh()

    def refresh(self) -> None:
        """Read what was written since. A line without its end is left for the next time."""
        touched: set[str] = set()
        for path in sorted((self.path / "events").glob("*.jsonl")):
            for event in self._new_events(path):
                self._events.setdefault(text(event, "kind"), []).append(event)
                touched.add(text(event, "kind"))
        for kind in touched:
            self._events[kind].sort(key=lambda event: float(event["t"]))

    def _new_events(self, path: Path) -> list[Event]:
        start = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[path] = start + len(whole)
        (self._cut.discard if len(whole) == len(data) else self._cut.add)(path.name)
        lines = whole.splitlines()
        found = [event for line in lines if (event := _event(line)) is not None]
        self._unreadable[path.name] += len(lines) - len(found)
        return found

    def unreadable(self) -> list[str]:
        """What of the events cannot be read. The last line of a process that writes now may be cut off, too."""
        counts = sorted((name, count) for name, count in self._unreadable.items() if count)
        found = [f"events/{name}: {count} line{'s' * (count > 1)} cannot be read" for name, count in counts]
        return found + [f"events/{name} ends within a line" for name in sorted(self._cut)]

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return self._events.get(kind, [])

    def latest(self, kind: str) -> Event | None:
        """The newest event of a kind."""
        return self._events[kind][-1] if kind in self._events else None

    def by_step(self, kind: str) -> list[Event]:
        """Events of a kind with a `step`, one a step, by step. A step done again after a restart counts once."""
        found = {int(step): event for event in self.of(kind) if (step := number(event, "step")) is not None}
        return [found[step] for step in sorted(found)]

    @property
    def began(self) -> float | None:
        """Unix seconds of the first event."""
        return min((float(events[0]["t"]) for events in self._events.values()), default=None)

    @property
    def now(self) -> float | None:
        """Unix seconds of the last event: a view needs no clock, and that of a dead run stands still."""
        return max((float(events[-1]["t"]) for events in self._events.values()), default=None)

    @property
    def wall_s(self) -> float:
        """Seconds of all sessions so far. What lay between one's last sign of life and the next is not among them."""
        if self.began is None or self.now is None:
            return 0.0
        starts = {_time(event) for event in self.of("session")}
        return self.now - self.began - sum(t - self._last_before(t) for t in starts)

    def phases(self) -> list[PhaseSpan]:
        """The phases that have begun, in the order of their last starts."""
        ended = {
            text(one, "phase"): number(one, "wall_s")
            for one in read_json(self.path / "phases.json", list)
            if isinstance(one, Mapping)
        }
        spans: dict[str, PhaseSpan] = {}
        broken_off: dict[str, float] = {}  # seconds of the parts before
        for event in self.of("phase"):
            name, t = text(event, "phase"), float(event["t"])
            if text(event, "state") == "start":
                before = spans.pop(name, None)
                if before is not None and before.end is None:
                    part_s = self._broken_off_at(before.start) - before.start
                    broken_off[name] = broken_off.get(name, 0.0) + part_s
                spans[name] = PhaseSpan(name, t, None, ended.get(name))
            elif name in spans:
                part = number(event, "wall_s")
                part_s = t - spans[name].start if part is None else part
                spans[name] = PhaseSpan(name, spans[name].start, t, broken_off.get(name, 0.0) + part_s)
        return list(spans.values())

    def _broken_off_at(self, start: float) -> float:
        """The last sign of life of the session that was under way at `start`; `start` where no session came after."""
        after = min((t for event in self.of("session") if (t := _time(event)) > start), default=None)
        if after is None:
            return start
        return self._last_before(after)

    def _last_before(self, t: float) -> float:
        """The time of the last event before `t`; `t` where there is none."""
        before = ((events, bisect.bisect_left(events, t, key=_time)) for events in self._events.values())
        return max((_time(events[i - 1]) for events, i in before if i), default=t)

    def phase(self, name: str) -> PhaseSpan | None:
        """A phase that has begun, by name."""
        return next((span for span in self.phases() if span.name == name), None)

    def evaluation(self, name: str) -> Event | None:
        """The newest result of an evaluation: "before", "after"."""
        found = [event for event in self.of("eval.result") if text(event, "name") == name]
        return found[-1] if found else None

    def evaluations_during(self) -> list[Event]:
        """Evaluations during RL, one a step."""
        found = {
            int(step): event
            for event in self.of("eval.result")
            if text(event, "name") == "during" and (step := number(event, "step")) is not None
        }
        return [found[step] for step in sorted(found)]

    def identity(self) -> dict[str, Any]:
        """run.json; empty when it cannot be read."""
        return read_json(self.path / "run.json", dict)


def _time(event: Event) -> float:
    return float(event["t"])


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line) if proven_line(line) is not False else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and number(event, "t") is not None and text(event, "kind") else None


def read_json(path: Path, kind: type[T]) -> T:
    """A JSON file that holds a `kind`; an empty one of it when it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return kind()
    return value if isinstance(value, kind) else kind()
