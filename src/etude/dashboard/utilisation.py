"""CPU shares, idle shares and memory, computed from the `usage` events of a run.

CPU time comes from the kernel, so waiting does not count as work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from etude.dashboard.run_view import RunView, number


@dataclass(frozen=True)
class Lane:
    """The CPU time of one process over time. A sample is (start, end, CPU seconds in between), with unix times."""

    name: str
    samples: list[tuple[float, float, float]] = field(default_factory=list)

    def cpu_s(self, start: float | None = None, end: float | None = None) -> float:
        """Return the CPU seconds between two unix times; None is no limit. A sample that crosses a limit counts with
        the part of its time that is inside."""
        return sum(cpu * share for _, share, cpu in self._within(start, end))

    def share(self, start: float | None = None, end: float | None = None) -> float | None:
        """Return the mean number of cores in use between two unix times (None: no limit); None without samples."""
        covered = sum(seconds for seconds, _, _ in self._within(start, end))
        return self.cpu_s(start, end) / covered if covered > 0 else None

    def _within(self, start: float | None, end: float | None) -> Iterator[tuple[float, float, float]]:
        for a, b, cpu in self.samples:
            low, high = max(a, start if start is not None else a), min(b, end if end is not None else b)
            if high > low:
                yield high - low, (high - low) / (b - a), cpu


def lanes(view: RunView) -> dict[str, Lane]:
    """Return a lane for each process by name, in the order of their first events."""
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
            used, at = _used(at, cpu)
            if t > before:
                lane.samples.append((before, t, used))
            last[name] = (t, at)
    return found


def cpu_s(view: RunView) -> dict[str, float]:
    """Return the CPU seconds of each process by name, over all its restarts."""
    total: dict[str, float] = defaultdict(float)
    last: dict[str, float] = {}
    for event in view.events("usage"):
        processes = event.get("processes")
        for name, facts in processes.items() if isinstance(processes, Mapping) else ():
            cpu = number(facts, "cpu_s") if isinstance(facts, Mapping) else None
            if cpu is not None:
                used, last[name] = _used(last.get(name, 0.0), cpu)
                total[name] += used
    return dict(total)


def _used(before: float, now: float) -> tuple[float, float]:
    """Return the CPU seconds between two readings of a counter, and the reading from which the next ones are counted.

    A counter below half of its last reading is that of a restarted process, which began at zero. One that is a little
    lower missed processes that ended while the kernel was read; the next reading has them again."""
    if now < before / 2:
        return now, now
    return max(0.0, now - before), max(before, now)


def idle(view: RunView) -> dict[str, float | None]:
    """Return the idle shares in the RL phase of the "learner" and of the "engines" (their mean).

    A process that uses one core fully has the share 0. None before RL and without samples."""
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
    """Return the largest sum of the processes' proportional set sizes at one time; None if it was never sampled."""
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
