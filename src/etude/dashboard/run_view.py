"""Reads a run folder: events of all files merged, phases, newest numbers. Writes nothing.

Files may be incomplete, left by a killed process, or written by a later etude. Events that cannot be read are skipped,
missing values are None, and no content of a run folder raises an error."""

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
from etude.file_checksums import verify_line

Event = Mapping[str, Any]
T = TypeVar("T")

PHASES = ("corpus", "mid-training", "eval-before", "rl", "eval-after", "report")
"""The phases of a run, in order."""


def number(facts: Mapping[str, Any], key: str) -> float | None:
    """Return the finite number under `key`; None if there is none.

    >>> number({"loss": 1}, "loss"), number({"loss": "1"}, "loss"), number({"loss": float("nan")}, "loss")
    (1.0, None, None)
    """
    value = facts.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or math.isnan(value):
        return None
    return float(value)


def text(facts: Mapping[str, Any], key: str) -> str:
    """Return the string under `key`; "" if there is none."""
    value = facts.get(key)
    return value if isinstance(value, str) else ""


def counts(facts: Mapping[str, Any], key: str) -> dict[str, float]:
    """Return the finite numbers in the object under `key`, by name. Other values are skipped."""
    value = facts.get(key)
    if not isinstance(value, Mapping):
        return {}
    return {str(name): n for name in value if (n := number(value, name)) is not None}


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of a run that has started. If it was interrupted and resumed it has several parts, one per session.

    `start` is when its last part started, in unix seconds. `end` is when it ended; None if it is running or was killed.
    `wall_s` is the seconds of all its parts; None until it has ended."""

    name: str
    start: float
    end: float | None
    wall_s: float | None


class RunView:
    """The events of a run folder by kind, in order of time.

    Creating it reads the files; keep it and call `refresh` to read only new lines. Raises `NoRun` when the folder does
    not exist."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise NoRun(f"no run at {self.path}", hint="give the folder of a run, such as runs/NAME")
        self._events: dict[str, list[Event]] = {}
        self._offsets: dict[Path, int] = {}
        self._unreadable: Counter[str] = Counter()  # lines, by file
        self._cut: set[str] = set()  # files that end within a line
        self.refresh()

    def refresh(self) -> None:
        """Read the lines written since the last call. An incomplete last line is left for the next call."""
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
        found = [event for line in lines if (event := parse_event(line)) is not None]
        self._unreadable[path.name] += len(lines) - len(found)
        return found

    def unreadable(self) -> list[str]:
        """List a sentence for each event file with unreadable lines or an incomplete last line.

        An incomplete last line is normal while a process writes."""
        counts = sorted((name, count) for name, count in self._unreadable.items() if count)
        found = [f"events/{name}: {count} line{'s' * (count > 1)} cannot be read" for name, count in counts]
        return found + [f"events/{name} ends within a line" for name in sorted(self._cut)]

    def events(self, kind: str) -> list[Event]:
        """Return the events of a kind, in order of time."""
        return self._events.get(kind, [])

    def latest(self, kind: str) -> Event | None:
        """Return the newest event of a kind; None if there is none."""
        return self._events[kind][-1] if kind in self._events else None

    def by_step(self, kind: str) -> list[Event]:
        """Return the events of a kind that have a `step`, one per step, ascending.

        If a step was repeated after a restart, the newest event is returned."""
        found = {int(step): event for event in self.events(kind) if (step := number(event, "step")) is not None}
        return [found[step] for step in sorted(found)]

    @property
    def began(self) -> float | None:
        """Unix seconds of the first event; None if there is no event."""
        return min((float(events[0]["t"]) for events in self._events.values()), default=None)

    @property
    def now(self) -> float | None:
        """Unix seconds of the newest event; None if there is no event.

        It is used as the present time, so that times no longer change when the run has died."""
        return max((float(events[-1]["t"]) for events in self._events.values()), default=None)

    @property
    def wall_s(self) -> float:
        """Seconds of all sessions of the run so far, without the time between sessions."""
        if self.began is None or self.now is None:
            return 0.0
        starts = {_time(event) for event in self.events("session")}
        return self.now - self.began - sum(t - self._last_before(t) for t in starts)

    def phases(self) -> list[PhaseSpan]:
        """Return the phases that have started, in the order of their last starts."""
        ended = {
            text(one, "phase"): number(one, "wall_s")
            for one in read_json(self.path / "phases.json", list)
            if isinstance(one, Mapping)
        }
        spans: dict[str, PhaseSpan] = {}
        interrupted: dict[str, float] = {}  # seconds of the earlier parts, by phase
        for event in self.events("phase"):
            name, t = text(event, "phase"), float(event["t"])
            if text(event, "state") == "start":
                before = spans.pop(name, None)
                if before is not None and before.end is None:
                    part_s = self._interrupted_at(before.start) - before.start
                    interrupted[name] = interrupted.get(name, 0.0) + part_s
                spans[name] = PhaseSpan(name, t, None, ended.get(name))
            elif name in spans:
                part = number(event, "wall_s")
                part_s = t - spans[name].start if part is None else part
                spans[name] = PhaseSpan(name, spans[name].start, t, interrupted.get(name, 0.0) + part_s)
        return list(spans.values())

    def _interrupted_at(self, start: float) -> float:
        """The time of the last event of the session that was running at `start`; `start` if no session followed."""
        after = min((t for event in self.events("session") if (t := _time(event)) > start), default=None)
        if after is None:
            return start
        return self._last_before(after)

    def _last_before(self, t: float) -> float:
        """The time of the last event before `t`; `t` if there is none."""
        before = ((events, bisect.bisect_left(events, t, key=_time)) for events in self._events.values())
        return max((_time(events[i - 1]) for events, i in before if i), default=t)

    def phase(self, name: str) -> PhaseSpan | None:
        """Return the phase of this name; None if it has not started."""
        return next((span for span in self.phases() if span.name == name), None)

    def evaluation(self, name: str) -> Event | None:
        """Return the newest result event of an evaluation, such as "before" or "after"; None if there is none."""
        found = [event for event in self.events("eval.result") if text(event, "name") == name]
        return found[-1] if found else None

    def evaluations_during(self) -> list[Event]:
        """Return the result events of evaluations during RL, one per step, ascending."""
        found = {
            int(step): event
            for event in self.events("eval.result")
            if text(event, "name") == "during" and (step := number(event, "step")) is not None
        }
        return [found[step] for step in sorted(found)]

    def identity(self) -> dict[str, Any]:
        """Return the content of run.json; {} when it cannot be read."""
        return read_json(self.path / "run.json", dict)


def _time(event: Event) -> float:
    return float(event["t"])


def parse_event(line: bytes) -> Event | None:
    """Parse one line of an event file; None if it is damaged, or no event."""
    try:
        event = json.loads(line) if verify_line(line) is not False else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and number(event, "t") is not None and text(event, "kind") else None


def read_json(path: Path, kind: type[T]) -> T:
    """Read a JSON file whose value has the type `kind`; returns an empty `kind()` when it is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return kind()
    return value if isinstance(value, kind) else kind()
