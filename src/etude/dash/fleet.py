"""The processes of a run with their newest numbers, from its events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.dash.events import LiveView
from etude.dash.overview import engine_states
from etude.dashboard.run_view import Event, number, text

LOAD_S = 60.0
MAX_SHOWN = 300


@dataclass(frozen=True)
class EngineRow:
    """An engine and its newest numbers.

    `step`: the version step of its weights. `running`, `waiting`: numbers of requests. `tokens_per_s`: sampled tokens
    per second over the last minute. `busy`: share of the time in which it computed. `pause_ms`: how long it
    paused to load these weights. `age_s`: how old the numbers are, in seconds. None: unknown."""

    name: str
    state: str
    region: str
    step: float | None
    running: float | None
    waiting: float | None
    tokens_per_s: float | None
    busy: float | None
    pause_ms: float | None
    age_s: float | None


@dataclass(frozen=True)
class ProcessRow:
    """A process that is no engine. `restarts`: how often it was restarted, among the newest events."""

    name: str
    state: str
    pid: float | None
    restarts: int
    reason: str
    cpu_s: float | None
    pss_bytes: float | None


@dataclass(frozen=True)
class Fleet:
    """All processes of a run. `head`: the step of the newest published version; None before the first."""

    engines: list[EngineRow]
    processes: list[ProcessRow]
    head: float | None
    num_more: int


def fleet(view: LiveView) -> Fleet:
    """Make the tables of a run's processes from its newest events."""
    now = view.now or 0.0
    loads: dict[str, list[Event]] = {}
    for event in view.events("engine.load"):
        loads.setdefault(text(event, "process"), []).append(event)
    for event in view.events("fleet.load"):
        loads.setdefault(text(event, "engine"), []).append(event)
    adopted = {text(event, "process"): event for event in view.events("engine.adopt")}
    regions = {text(event, "engine"): text(event, "region") for event in view.events("fleet.state")}
    engines = [
        _engine(name, state, regions.get(name, ""), loads.get(name, []), adopted.get(name, {}), now)
        for name, state in sorted(({name: "" for name in loads} | engine_states(view)).items(), key=_by_number)
    ]
    published = view.latest("weights.publish")
    return Fleet(
        engines=engines[:MAX_SHOWN],
        processes=_processes(view)[:MAX_SHOWN],
        head=None if published is None else number(published, "step"),
        num_more=max(0, len(engines) - MAX_SHOWN),
    )


def _engine(name: str, state: str, region: str, loads: list[Event], adopted: Event, now: float) -> EngineRow:
    newest: Event = loads[-1] if loads else {}
    recent = [event for event in loads if float(event["t"]) > now - LOAD_S and number(event, "tokens") is not None]
    seconds = max(1.0, now - float(recent[0]["t"])) if recent else 1.0
    step = number(adopted, "step") if adopted else number(newest, "step")
    pause = number(adopted, "pause_s")
    return EngineRow(
        name=name,
        state=state,
        region=region,
        step=step if step is None or step >= 0 else None,
        running=number(newest, "num_running"),
        waiting=number(newest, "num_waiting"),
        tokens_per_s=sum(number(event, "tokens") or 0.0 for event in recent) / seconds if recent else None,
        busy=number(newest, "busy_share"),
        pause_ms=None if pause is None else 1000 * pause,
        age_s=max(0.0, now - float(newest["t"])) if newest else None,
    )


def _processes(view: LiveView) -> list[ProcessRow]:
    newest: dict[str, Event] = {}
    restarts: dict[str, int] = {}
    for event in view.events("process"):
        name = text(event, "name")
        newest[name] = event
        restarts[name] = restarts.get(name, 0) + (text(event, "state") == "restart")
    used: Mapping[str, object] = {}
    memory: dict[str, float] = {}
    for event in view.events("usage"):
        found = event.get("processes")
        if isinstance(found, Mapping):
            used = found
            for name, facts in found.items():
                if isinstance(facts, Mapping) and (pss := number(facts, "pss_bytes")) is not None:
                    memory[name] = pss
    rows = list[ProcessRow]()
    for name in sorted({*newest, *used}):
        facts, event = used.get(name), newest.get(name, {})
        rows.append(
            ProcessRow(
                name=name,
                state=text(event, "state"),
                pid=number(event, "pid"),
                restarts=restarts.get(name, 0),
                reason=text(event, "reason"),
                cpu_s=number(facts, "cpu_s") if isinstance(facts, Mapping) else None,
                pss_bytes=memory.get(name),
            )
        )
    return rows


def _by_number(item: tuple[str, str]) -> tuple[str, int, str]:
    name = item[0]
    head, _, digits = name.rpartition("-")
    return (head, int(digits), name) if digits.isdecimal() and len(digits) < 10 else (name, 0, name)
