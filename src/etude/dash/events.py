"""Reads the events of a run of any length in bounded memory and in slices of time.

`RunView` keeps every event, which a report needs. A server that shows a run for days keeps, of each kind that its pages
use, a bounded number: of metrics by step a sample that is thinner for older steps, and of all other kinds the newest.
The ends of the files are read first, so that the present is known at once, whatever the length of the past.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from etude.dashboard.run_view import Event, RunView, parse_event, text

BLOCK_BYTES = 1 << 20
FIRST_BYTES = 1 << 18
"""Bytes from the end of each file that are read before any file is read further."""

THINNED = {
    "rl.step": 1000,
    "weights.publish": 1000,
    "eval.result": 400,
    "mid.step": 400,
    "mid.eval": 400,
    "engine.probe": 400,
}
"""Kinds of which a sample over the whole run is kept, and the largest number of it."""
NEWEST = {
    "session": 200,
    "phase": 200,
    "process": 500,
    "lineage": 200,
    "eval.progress": 20,
    "eval.baselines": 20,
    "engine.adopt": 500,
    "engine.load": 2000,
    "engine.settings": 200,
    "engine.trouble": 200,
    "fleet.listen": 20,
    "fleet.state": 1000,
    "fleet.load": 500,
    "parity.alarm": 200,
    "weights.mend": 200,
    "rewards.changed": 200,
    "rewards.drift": 200,
    "rewards.unknown": 200,
    "rollout.signs": 200,
    "usage": 30,
    "tracker": 50,
}
"""Kinds of which the newest events are kept, and how many."""
KINDS = THINNED | NEWEST

_T, _KIND = b'{"t": ', b'"kind": "'


@dataclass
class _File:
    """How far a file is read: bytes [`low`, `high`) are. Bytes below `low` are older, and are read backwards."""

    low: int
    high: int


class LiveView(RunView):
    """A `RunView` for a server that shows a run for days. It keeps a bounded number of events (`THINNED`, `NEWEST`).

    Call `refresh` to read what was written since, and then older events. `num_dropped`: number of blocks (1 MiB) of the
    files that were skipped because they have no line break. Use an object in one thread at a time. A run folder without
    events is valid."""

    def __init__(self, path: Path) -> None:
        self._files: dict[Path, _File] = {}
        self._num_bytes = 0
        self._oldest: dict[str, float] = {}  # of a kind of which older events were let go: the time of the oldest kept
        self.num_dropped = 0
        super().__init__(path)

    @property
    def share_read(self) -> float:
        """Share of the event files' bytes that was read, from 0 to 1."""
        behind = sum(one.low for one in self._files.values())
        return 1.0 if not self._num_bytes else 1.0 - behind / self._num_bytes

    def refresh(self, budget_s: float = 0.0) -> None:
        """Read new lines, then older ones, until all is read or `budget_s` seconds have passed."""
        end, touched = time.monotonic() + budget_s, set[str]()
        for path in self._paths():
            self._read_new(path, touched)
        while time.monotonic() < end:
            waiting = [(one.low, path) for path, one in self._files.items() if one.low]
            if not waiting:
                break
            self._read_older(max(waiting)[1], touched)  # the longest first
        for kind in touched:
            self._trim(kind)

    def _paths(self) -> list[Path]:
        """The event files, the conductor's first: it has the metrics of every step."""
        try:
            found = sorted((self.path / "events").glob("*.jsonl"), key=lambda path: (path.stem != "conductor", path))
        except OSError:
            return []
        sizes = dict[Path, int]()
        for path in found:
            try:
                sizes[path] = path.stat().st_size
            except OSError:
                continue
            known = self._files.setdefault(path, _File(*[max(0, sizes[path] - FIRST_BYTES)] * 2))
            if sizes[path] < known.high:  # replaced by another file
                self._files[path] = _File(*[max(0, sizes[path] - FIRST_BYTES)] * 2)
        self._num_bytes = sum(sizes.values())
        return list(sizes)

    def _read_new(self, path: Path, touched: set[str]) -> None:
        """Read the lines after those that were read, at most 64 blocks; the next call goes on there."""
        file = self._files[path]
        for _ in range(64):
            data = _read(path, file.high, BLOCK_BYTES)
            stop = data.rfind(b"\n") + 1
            if not stop:
                if len(data) == BLOCK_BYTES:  # no event is so long
                    file.high += len(data)
                    self.num_dropped += 1
                    continue
                (self._cut.add if data else self._cut.discard)(path.name)
                return
            at_start = file.high == file.low > 0
            start = data.find(b"\n", 0, stop) + 1 if at_start else 0  # the first line may have begun before
            if at_start:
                file.low += start
            self._add(path, data[start:stop], touched)
            file.high += stop
            if len(data) < BLOCK_BYTES:
                (self._cut.add if stop < len(data) else self._cut.discard)(path.name)
                return

    def _read_older(self, path: Path, touched: set[str]) -> None:
        file = self._files[path]
        first = max(0, file.low - BLOCK_BYTES)
        data = _read(path, first, file.low - first)
        start = 0 if first == 0 else data.find(b"\n") + 1
        if start or first == 0:
            self._add(path, data[start:], touched)
            # the bytes before the first newline belong to a line of the block before
            file.low = first + start if start < len(data) or first == 0 else first
        else:
            self.num_dropped += 1
            file.low = first
        if first == 0:
            file.low = 0

    def _add(self, path: Path, data: bytes, touched: set[str]) -> None:
        for line in data.split(b"\n"):
            at = line.find(_KIND)
            if at < 0:
                self._unreadable[path.name] += bool(line)
                continue
            kind = line[at + len(_KIND) : line.find(b'"', at + len(_KIND))].decode("ascii", "replace")
            if kind not in KINDS or (kind in self._oldest and _is_older(line, self._oldest[kind])):
                continue
            event = parse_event(line)
            if event is None or text(event, "kind") != kind:
                self._unreadable[path.name] += 1
                continue
            self._events.setdefault(kind, []).append({sys.intern(str(key)): event[key] for key in event})
            touched.add(kind)
            if len(self._events[kind]) > 4 * KINDS[kind]:
                self._trim(kind)

    def _trim(self, kind: str) -> None:
        events = self._events[kind]
        events.sort(key=_time)
        limit = KINDS[kind]
        if kind in NEWEST:
            if len(events) > limit:
                del events[:-limit]
                self._oldest[kind] = _time(events[0])
            return
        while len(events) > limit:
            recent = limit // 4
            events[:-recent] = events[:-recent:2]


def _time(event: Event) -> float:
    return float(event["t"])


def _is_older(line: bytes, than: float) -> bool:
    """Whether the time of an event, with which its line begins, is before `than`; False if it does not begin so."""
    try:
        return line.startswith(_T) and float(line[len(_T) : line.find(b",")]) < than
    except ValueError:
        return False


def _read(path: Path, start: int, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)
    except OSError:
        return b""
