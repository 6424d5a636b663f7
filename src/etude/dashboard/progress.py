"""Computes the progress of a run from its `RunView`."""

from __future__ import annotations

from dataclasses import dataclass

from etude.dashboard.run_view import PhaseSpan, RunView, number

_COUNTED = {  # what counts in a phase: the event, how far, of how much
    "mid-training": ("mid.step", "step", "num_steps"),
    "rl": ("rl.step", "step", "num_steps"),
    "eval-before": ("eval.progress", "done", "total"),
    "eval-after": ("eval.progress", "done", "total"),
}


@dataclass(frozen=True)
class Progress:
    """Progress of the current phase of a run: `done` of `total` steps or rollouts.

    `left_s` is the estimated time left in seconds; None until two steps are known."""

    phase: PhaseSpan
    done: int
    total: int
    left_s: float | None

    @property
    def share(self) -> float:
        """Completed share of the phase, from 0 to 1."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


def current_phase(view: RunView) -> PhaseSpan | None:
    """Return the running phase, or else the last one that ran; None before the first."""
    spans = view.phases()
    return next((span for span in reversed(spans) if span.end is None), spans[-1] if spans else None)


def progress(view: RunView) -> Progress | None:
    """Compute the progress of the current phase; None for a phase without a count, or before its first count.

    In a phase with several evaluations it is the progress of the current one. The time left is estimated from the speed
    since the phase last started. The pause before a resumption, and steps that are repeated after it, do not count."""
    phase = current_phase(view)
    kind, done_key, total_key = _COUNTED.get(phase.name, ("", "", "")) if phase else ("", "", "")
    event = view.latest(kind)
    if phase is None or event is None:
        return None
    done, total = number(event, done_key), number(event, total_key)
    since = [e for e in view.events(kind) if float(e["t"]) >= phase.start and e.get("name") == event.get("name")]
    if done is None or not total or (kind != "rl.step" and not since):
        return None
    first = number(since[0], done_key) if since else None
    steps = done - first if first is not None else 0
    left_s = None
    if steps > 0:
        left_s = max(0.0, (total - done) * (float(since[-1]["t"]) - float(since[0]["t"])) / steps)
    return Progress(phase, int(done), int(total), left_s)
