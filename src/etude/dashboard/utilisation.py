"""CPU shares, idle shares and memory from the `usage` events. Pure functions of a view.

CPU time comes from the kernel, so waiting does not count as work. The counter of a restarted process starts at zero
again, which is recognised by its decrease.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from etude.dashboard.run_view import RunView, number


@dataclass(frozen=True)
class Lane:
    """One process over time."""

    name: str
    samples: list[tuple[float, float, float]] = field(default_factory=list)  # (from, to, CPU seconds in between)

    def cpu_s(self, start: float | None = None, end: float | None = None) -> float:
        """CPU seconds between two unix times; samples that cross an end count proportionally."""
        return sum(cpu * share for _, share, cpu in self._within(start, end))

    def share(self, start: float | None = None, end: float | None = None) -> float | None:
        """Mean number of cores in use over the sampled time; None without samples."""
        covered = sum(seconds for seconds, _, _ in self._within(start, end))
        return self.cpu_s(start, end) / covered if covered > 0 else None

    def _within(self, start: float | None, end: float | None) -> Iterator[tuple[float, float, float]]:
        for a, b, cpu in self.samples:
            low, high = max(a, start if start is not None else a), min(b, end if end is not None else b)
            if high > low:
                yield high - low, (high - low) / (b - a), cpu


def lanes(view: RunView) -> dict[str, Lane]:
    """A lane for each process, in the order of their first events."""
    found: dict[str, Lane] = {}
    last: dict[str, tuple[float, float]] = {}
    for event in view.events("usage"):
        t, processes = float(event["t"]), event.get("processes")
        if not isinstance(processes, Mapping):
            continue
        for name, facts in processes.items():
            cpu = number(facts, "cpu_s") if isinstance(facts, Mapping) else None
            if cpu is None:
                continue
            lane = found.setdefault(name, Lane(name))
            before, at = last.get(name, (t, 0.0))
            if t > before:
                lane.samples.append((before, t, cpu - at if cpu >= at else cpu))
            last[name] = (t, cpu)
    return found


def cpu_s(view: RunView) -> dict[str, float]:
    """CPU seconds of each process over all its restarts."""
    total: dict[str, float] = defaultdict(float)
    last: dict[str, float] = {}
    for event in view.events("usage"):
        processes = event.get("processes")
        for name, facts in processes.items() if isinstance(processes, Mapping) else ():
            cpu = number(facts, "cpu_s") if isinstance(facts, Mapping) else None
            if cpu is not None:
                before = last.get(name, 0.0)
                total[name] += cpu - before if cpu >= before else cpu
                last[name] = cpu
    return dict(total)


def idle(view: RunView) -> dict[str, float | None]:
    """Idle shares of the learner and of the engines (mean) over the RL phase, where one core is full use. None before
    RL and without samples."""
    span = view.phase("rl")
    if span is None:
        return {"learner": None, "engines": None}
    shares = {name: lane.share(span.start, span.end) for name, lane in lanes(view).items()}
    engines = [share for name, share in shares.items() if name.startswith("engine") and share is not None]
    learner = shares.get("learner")
    return {
        "learner": None if learner is None else max(0.0, 1 - learner),
        "engines": sum(max(0.0, 1 - share) for share in engines) / len(engines) if engines else None,
    }


def peak_memory_bytes(view: RunView) -> int | None:
    """The maximum over time of the sum of the processes' proportional set sizes; None if it was never sampled."""
    sums = []
    for event in view.events("usage"):
        processes = event.get("processes")
        found = [
            pss
            for facts in (processes.values() if isinstance(processes, Mapping) else ())
            if isinstance(facts, Mapping) and (pss := number(facts, "pss_bytes")) is not None
        ]
        if found:
            sums.append(int(sum(found)))
    return max(sums, default=None)
