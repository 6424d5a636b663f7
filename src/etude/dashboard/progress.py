"""How far a run is. Pure functions of a view."""

from __future__ import annotations

from dataclasses import dataclass

from etude.dashboard.read import PhaseSpan, RunView, number

_COUNTED = {"mid-training": "mid.step", "rl": "rl.step"}


@dataclass(frozen=True)
class Progress:
    """Where the current phase stands."""

    phase: PhaseSpan
    done: int
    total: int
    left_s: float | None  # None until two steps are seen

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


def current_phase(view: RunView) -> PhaseSpan | None:
    """The phase under way, or the last one that was."""
    spans = view.phases()
    return next((span for span in reversed(spans) if span.end is None), spans[-1] if spans else None)


def progress(view: RunView) -> Progress | None:
    """The current phase's progress; None for a phase that is not counted in steps, or has made none yet.

    The time left follows the pace since the phase last began, so that a resumed run does not count its rest.
    """
    phase = current_phase(view)
    event = view.latest(_COUNTED.get(phase.name, "")) if phase else None
    if phase is None or event is None:
        return None
    done, total = number(event, "step"), number(event, "num_steps")
    if done is None or not total:
        return None
    since = [e for e in view.of(_COUNTED[phase.name]) if float(e["t"]) >= phase.start]
    first = number(since[0], "step") if since else None
    steps = done - first if first is not None else 0
    left_s = None
    if steps > 0:
        left_s = max(0.0, (total - done) * (float(since[-1]["t"]) - float(since[0]["t"])) / steps)
    return Progress(phase, int(done), int(total), left_s)
