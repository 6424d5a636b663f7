"""State, load and weights of each remote engine over time, as lanes of the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from etude.dashboard.plot import LaneRow
from etude.dashboard.run_view import Event, RunView, number, text

MAX_BARS = 400
GIVEN_WORK = ("serving", "draining")
Bar = tuple[float, float, float]
T = TypeVar("T")


@dataclass
class Engine:
    """A remote engine over time, read from the events of a run. Times are unix seconds.

    `states` are (start, state) and `steps` (start, training step of its weights). `running` are bars (start, end, share
    of its sequences that are in use)."""

    name: str
    region: str
    states: list[tuple[float, str]] = field(default_factory=list)
    running: list[Bar] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)

    def state_bars(self, end: float) -> list[Bar]:
        """Return bars (start, end, height) of its state until `end`.

        Bars have full height while the engine got work, and half height while it did not. There is no bar while it was
        gone."""
        heights = dict.fromkeys(GIVEN_WORK, 1.0) | {"catching-up": 0.5, "standby": 0.5}
        return [(a, b, heights[what]) for a, b, what in _spans(self.states, end) if what in heights]

    def version_bars(self, end: float, last: int) -> list[Bar]:
        """Return bars (start, end, height) of the training step of its weights until `end`; absent while it was gone.

        A full bar is step `last`."""
        alive = [(a, b) for a, b, what in _spans(self.states, end) if what not in ("lost", "left")]
        return [
            (max(a, low), min(b, high), step / max(1, last))
            for a, b, step in _spans(self.steps, end)
            for low, high in alive
            if min(b, high) > max(a, low)
        ]


def engines(view: RunView) -> list[Engine]:
    """Return all remote engines of a run, sorted by region and name."""
    found: dict[str, Engine] = {}
    for event in view.events("fleet.state"):
        name = text(event, "engine")
        engine = found.setdefault(name, Engine(name, text(event, "region")))
        engine.states.append((float(event["t"]), text(event, "state")))
    loads: dict[str, list[Event]] = defaultdict(list)
    for event in view.events("fleet.load"):
        if text(event, "engine") in found:
            loads[text(event, "engine")].append(event)
    for name, events in loads.items():
        found[name].running = list(_running(events))
        for event in events:
            step = number(event, "step")
            held = found[name].steps
            if step is not None and step >= 0 and (not held or held[-1][1] != step):
                held.append((float(event["t"]), int(step)))
    return sorted(found.values(), key=lambda engine: (engine.region, engine.name))


def rows(found: Sequence[Engine], began: float, end: float) -> list[LaneRow]:
    """Return three lanes per engine: state, running rollouts, and weights. `began` and `end` are unix seconds."""
    last = max((step for engine in found for _, step in engine.steps), default=0)
    made = []
    for i, engine in enumerate(found):
        colour = 1 + i % 5
        state = engine.states[-1][1] if engine.states else ""
        held = f"step {engine.steps[-1][1]}" if engine.steps else "none"
        busy = sum((b - a) * share for a, b, share in engine.running) / max(1e-9, end - began)
        lanes = (
            (engine.name, engine.state_bars(end), state),
            ("running", engine.running, f"{busy:.0%} of its capacity"),
            ("version", engine.version_bars(end, last), held),
        )
        for label, bars, note in lanes:
            made.append(LaneRow(label, [(a - began, b - began, h) for a, b, h in bars], note, colour))
    return made


def _running(events: Sequence[Event]) -> Iterator[Bar]:
    every = -(-len(events) // MAX_BARS)
    for at in range(0, len(events) - 1, every):
        part = events[at : at + every + 1]
        shares = [
            min(1.0, (number(e, "num_running") or 0.0) / max(1.0, number(e, "max_sequences") or 1.0))
            for e in part[:-1]
            if text(e, "state") in GIVEN_WORK
        ]
        if shares:
            yield float(part[0]["t"]), float(part[-1]["t"]), sum(shares) / (len(part) - 1)


def _spans(points: Sequence[tuple[float, T]], end: float) -> list[tuple[float, float, T]]:
    ends = [*(t for t, _ in points[1:]), end]
    return [(t, until, what) for (t, what), until in zip(points, ends, strict=False)]  # empty without points
