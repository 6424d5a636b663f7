"""The overview of a run: its phase, its newest numbers, its plots, and what went wrong, from the events alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.dash.events import LiveView
from etude.dashboard import formatting, panels
from etude.dashboard.glossary import meaning
from etude.dashboard.panels import Panel
from etude.dashboard.plot import Series, legend, line_chart
from etude.dashboard.problems import recovered_failures
from etude.dashboard.progress import current_phase, progress
from etude.dashboard.run_view import PHASES, Event, counts, number, text
from etude.dashboard.summary import PRODUCTION, SIMULATED, is_delta, lag, lag_by_origin, of_origin
from etude.experience.transitions import HOLDING

LOAD_S = 60.0
"""Seconds over which the throughput is averaged."""


@dataclass(frozen=True)
class Tile:
    """One number of the overview.

    `title`: its name. `value`: the number as text. `remark`: a note below it. `tone`: "warn" to highlight it, or ""."""

    title: str
    value: str
    remark: str = ""
    tone: str = ""

    @property
    def help(self) -> str:
        """The definitions of the glossary terms in the tile."""
        return meaning(f"{self.title} {self.remark}")


@dataclass(frozen=True)
class PhaseState:
    """A phase of a run: `state` is "done", "now", "stopped" or "later"; `note` is its duration or progress."""

    name: str
    state: str
    note: str = ""


@dataclass(frozen=True)
class Overview:
    """What the overview shows. `percent` is the progress of the current phase, 0 to 100; None if unknown."""

    status: str
    tone: str
    phases: Sequence[PhaseState]
    percent: int | None
    left: str
    tiles: Sequence[Tile]
    warnings: Sequence[str] = ()
    plots: Sequence[Panel] = field(default_factory=tuple)


def overview(
    view: LiveView, *, holder: int | None, states: Mapping[str, int] | None, missing: Sequence[str]
) -> Overview:
    """Make the overview of a run.

    `holder`: pid of the process that runs it; None: nobody does. `states`: numbers of rollouts by state; None: not
    counted yet. `missing`: sentences on parts that cannot be read, which are added to the warnings."""
    at, running = progress(view), holder is not None
    phases = list(_phases(view, running))
    finished = bool(phases) and all(one.state == "done" for one in phases if one.name in ("rl", "eval-after"))
    if running:
        status, tone = "running", "good"
    elif finished:
        status, tone = "finished", ""
    else:
        status, tone = ("stopped" if view.now else "no events yet"), "warn"
    left = formatting.duration(at.left_s) + " left" if running and at and at.left_s and at.phase.end is None else ""
    return Overview(
        status=status,
        tone=tone,
        phases=phases,
        percent=round(100 * at.share) if at is not None else None,
        left=left,
        tiles=list(_tiles(view, states)),
        warnings=[*missing, *_warnings(view, running, finished)],
        plots=[panel for make in PLOTS if (panel := make(view)) is not None],
    )


def _phases(view: LiveView, running: bool) -> Iterator[PhaseState]:
    spans, now, at = {span.name: span for span in view.phases()}, current_phase(view), progress(view)
    for name in PHASES:
        span = spans.get(name)
        if span is None:
            yield PhaseState(name, "later")
        elif span.end is not None:
            yield PhaseState(name, "done", formatting.duration(span.wall_s or span.end - span.start))
        else:
            count = f"{at.done}/{at.total}" if at and now and now.name == name else ""
            yield PhaseState(name, "now" if running else "stopped", count)


def _tiles(view: LiveView, states: Mapping[str, int] | None) -> Iterator[Tile]:
    steps = view.by_step("rl.step")
    rewards = [value for event in steps if (value := number(event, "reward_mean")) is not None]
    if steps:
        total = number(steps[-1], "num_steps")
        yield Tile("step", f"{number(steps[-1], 'step'):.0f}", f"of {total:.0f}" if total else "")
    if rewards:
        recent = rewards[-20:]
        yield Tile("reward", f"{rewards[-1]:.3f}", f"mean of the last {len(recent)}: {sum(recent) / len(recent):.3f}")
    yield from _solve_rate(view)
    yield from _loss(view)
    if steps:
        for origin, lags in lag_by_origin(steps[-1:]).items():
            name = "lag" if origin == SIMULATED else f"lag of {origin}"
            yield Tile(name, f"{lags['mean']:.2f}", f"steps, mean of the last step; at most {lags['max']}")
    yield from _speed(view, steps)
    sent = [event for event in view.by_step("weights.publish") if is_delta(event)]
    if sent and (num_bytes := number(sent[-1], "object_bytes")) is not None:
        share = number(sent[-1], "changed_share")
        changed = f"{formatting.percent(share)} of values changed" if share else ""
        yield Tile("delta", formatting.size(num_bytes), changed)
    engines = engine_states(view)
    if engines:
        others = {state: count for state, count in Counter(engines.values()).items() if state != "serving"}
        remark = ", ".join(f"{count} {state}" for state, count in others.items()) or "all serve"
        serving = sum(state == "serving" for state in engines.values())
        yield Tile("engines", f"{serving}/{len(engines)}", remark, "warn" if others.get("lost") else "")
    if states is not None:
        total_rollouts = sum(states.values())
        open_now = sum(states.get(state, 0) for state in HOLDING)
        trained = states.get("trained", 0) + states.get("no-signal", 0)
        yield Tile("rollouts", f"{total_rollouts:,}", f"{trained:,} consumed, {open_now:,} open")
    if steps:
        invalid = counts(steps[-1], "invalid")
        listed = ", ".join(f"{n:.0f} {name}" for name, n in invalid.items()) or "none"
        yield Tile("invalid", listed, "of the last step", "warn" if invalid else "")


def _solve_rate(view: LiveView) -> Iterator[Tile]:
    found = [*view.evaluations_during()[-1:], *filter(None, [view.evaluation("before"), view.evaluation("after")])]
    if not found:
        return
    event = max(found, key=lambda one: float(one["t"]))
    rate, low, high = (number(event, name) for name in ("rate", "low", "high"))
    if rate is None:
        return
    what = "validation" if text(event, "name") == "during" else f"held-out, {text(event, 'name')} RL"
    interval = f" [{low:.2f}, {high:.2f}]" if low is not None and high is not None else ""
    yield Tile("solve rate", f"{rate:.3f}", f"{what}{interval}{formatting.cheats_note(event)}")


def _loss(view: LiveView) -> Iterator[Tile]:
    event, phase = view.latest("mid.step"), current_phase(view)
    loss = number(event, "loss") if event else None
    if event is not None and loss is not None and phase is not None and phase.name == "mid-training":
        speed = number(event, "tokens_per_s")
        yield Tile("loss", f"{loss:.3f}", f"{formatting.significant(speed)} tokens/s" if speed else "")


def _speed(view: LiveView, steps: Sequence[Event]) -> Iterator[Tile]:
    now = view.now or 0.0
    tokens = throughput(view)
    if tokens is not None:
        yield Tile("throughput", f"{tokens:,.0f}", "sampled tokens/s, mean of the last minute")
    recent = steps[-20:]
    if len(recent) > 1:
        seconds = float(recent[-1]["t"]) - float(recent[0]["t"])
        done = (number(recent[-1], "step") or 0.0) - (number(recent[0], "step") or 0.0)
        if seconds > 0 and done > 0 and now - float(recent[-1]["t"]) < 20 * seconds / done + 600:
            yield Tile("time of a step", formatting.duration(seconds / done), "mean of the last steps")


def throughput(view: LiveView) -> float | None:
    """Return the tokens per second that all engines sampled, over the last minute of events; None if unknown."""
    now = view.now
    loads = [event for event in view.events("engine.load") if now is not None and float(event["t"]) > now - LOAD_S]
    if not loads or now is None:
        return None
    seconds = max(1.0, now - min(float(event["t"]) for event in loads))
    return sum(number(event, "tokens") or 0.0 for event in loads) / seconds


def engine_states(view: LiveView) -> dict[str, str]:
    """Return the newest state of each engine by name, from those of remote engines and of processes."""
    found: dict[str, str] = {}
    for event in view.events("process"):
        name = text(event, "name")
        if name.startswith("engine"):
            state = text(event, "state")
            found[name] = "serving" if state == "ready" else state
    for event in view.events("fleet.state"):
        found[text(event, "engine")] = text(event, "state")
    return found


def _warnings(view: LiveView, running: bool, finished: bool) -> Iterator[str]:
    if not running and not finished and view.now is not None:
        phase = current_phase(view)
        where = f" in the phase {phase.name}" if phase is not None else ""
        yield f"nobody runs it: it was stopped or killed{where}; continue it with etude run --resume"
    if not running:
        yield from view.unreadable()
    if view.num_dropped:
        yield f"events: {view.num_dropped} blocks have no end of a line, and were skipped"
    for sentence, times in recovered_failures(view)[-12:]:
        yield sentence + (f" ({times} times)" if times > 1 else "")
    alarm = view.latest("rewards.drift")
    if alarm is not None:
        yield f"the audit of rewards {text(alarm, 'audit')} is over its threshold, at step {alarm.get('step')}"


def _lags(view: LiveView) -> Panel | None:
    """Plot the mean lag of each step, and the largest, of rollouts of tasks and of users' episodes."""
    series, steps = list[Series](), view.by_step("rl.step")
    for origin, colour in ((SIMULATED, 1), (PRODUCTION, 3)):
        mean, most = list[tuple[float, float]](), list[tuple[float, float]]()
        for event in steps:
            found, step = lag(of_origin([event], origin)), number(event, "step")
            if found["mean"] is not None and step is not None:
                mean.append((step, found["mean"]))
                most.append((step, float(found["max"])))
        of = "" if origin == SIMULATED else f" of {origin}"
        series += [Series(f"mean{of}", mean, colour), Series(f"largest{of}", most, colour + 1)] if mean else []
    if not series:
        return None
    note = "Age of a rollout's oldest token when its step trained on it, in steps."
    svg = line_chart(series, title="Lag by step", x_label="step", x_format=lambda value: f"{value:.0f}")
    return Panel("Lag", note, svg, legend([(one.label, one.colour) for one in series]))


PLOTS = (panels.learning, panels.mid_training, _lags, panels.waiting, panels.deltas, panels.parity, panels.entropy)


def evaluations(view: LiveView) -> list[dict[str, Any]]:
    """Return all results of evaluations during the run, the newest first, with the fields that the pages show."""
    names = ("step", "num_tasks", "solved", "rate", "low", "high", "turns_mean", "dollars_per_solved", "cheats")
    return [
        {"t": float(event["t"]), "name": text(event, "name"), "split": text(event, "split")}
        | {name: number(event, name) for name in names}
        for event in reversed(view.events("eval.result"))
    ]
