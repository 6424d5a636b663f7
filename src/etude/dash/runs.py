"""The runs that are shown, and what is read of them: each part alone, so that a missing or damaged one hides no other.

Nothing here is written, and no file stays open: a ledger or a file of releases is opened for each question and closed
after it. Numbers that need a pass over a whole ledger are kept for a while (`Aged`), the longer the more they cost.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from etude.dash.events import LiveView
from etude.dash.versions import Versions
from etude.dashboard.run_view import read_json
from etude.errors import EtudeError, NoRun
from etude.experience.groups import Row
from etude.experience.ledger import Ledger
from etude.records.view import RolloutView, TurnTokens
from etude.run import RunFolder, lock_holder
from etude.seams import BlobStore

T = TypeVar("T")
MAX_OPEN = 4
"""Runs whose events are kept in memory."""
_MIN_AGE_S, _COST_FACTOR = 5.0, 50.0
MARKS = ("run.json", "config.toml", "events", "ledger.sqlite", "phases.json")
"""Files of which a folder has at least one if it is a run."""


class ShownRollout(Protocol):
    """A rollout with its tokens; `etude.loop.rollout_views.ReadRollout` is one."""

    @property
    def view(self) -> RolloutView:
        """The rollout as text."""
        ...

    def tokens(self, turn: int, start: int, stop: int) -> TurnTokens | None:
        """Return the sampled tokens [start, stop) of a turn; None if they are not stored."""
        ...


@dataclass(frozen=True)
class Readers:
    """Functions that read parts of a run folder. All raise `EtudeError` for parts that are missing or damaged.

    `ledger` opens the ledger for reading. `weights` opens the store of its weights. `rollout` reads one rollout, given
    its row and its history. `trace_bytes` returns the size of the trace of a step in bytes; None: it is not there, or
    in a bucket."""

    ledger: Callable[[RunFolder], Ledger]
    weights: Callable[[RunFolder], BlobStore]
    rollout: Callable[[RunFolder, Ledger, Row, Sequence[Mapping[str, Any]]], ShownRollout]
    trace_bytes: Callable[[RunFolder, int], int | None]


@dataclass(frozen=True)
class Part(Generic[T]):
    """A part of a run: its value, or a sentence on why it cannot be shown."""

    value: T | None
    missing: str = ""


READ_ERRORS = (EtudeError, sqlite3.Error, OSError, ValueError, KeyError, TypeError, MemoryError)
"""What reading a part may raise, also where its bytes are damaged or were written by another version."""


def part(read: Callable[[], T]) -> Part[T]:
    """Read a part. Errors of missing and damaged parts become a sentence."""
    try:
        return Part(read())
    except EtudeError as error:
        return Part(None, error.what + (f": {error.facts}" if error.facts else ""))
    except READ_ERRORS as error:
        return Part(None, f"{type(error).__name__}: {error}"[:300])


class Aged(Generic[T]):
    """A cached value that is computed again when it is older than 5 seconds and than 50 times its computing time.

    So its computation takes at most 2 per cent of one thread, however long the run is. It runs in a thread of its own,
    never twice at once. Safe for many threads."""

    def __init__(self, compute: Callable[[], T]) -> None:
        self._compute, self._lock = compute, threading.Lock()
        self._found: Part[T] = Part(None)
        self._until = 0.0
        self._thread: threading.Thread | None = None

    def get(self, wait_s: float) -> Part[T]:
        """Return the newest value, or why it cannot be computed. If it is too old, begin to compute it, and wait for at
        most `wait_s` seconds; its value is None, without a reason, if it was never computed before."""
        with self._lock:
            if time.monotonic() < self._until:
                return self._found
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._work, name="counting", daemon=True)
                self._thread.start()
            thread = self._thread
        thread.join(wait_s)
        return self._found

    def _work(self) -> None:
        began = time.monotonic()
        self._found = part(self._compute)
        now = time.monotonic()
        self._until = now + max(_MIN_AGE_S, _COST_FACTOR * (now - began))


class ShownRun:
    """One run folder: its events, and access to its other parts. `name` is its name in URLs."""

    def __init__(self, name: str, path: Path, readers: Readers) -> None:
        self.name, self.path, self._readers = name, path, readers
        self.folder = RunFolder(path)
        self.view = LiveView(path)
        self._refreshing = threading.Lock()
        self.counts = Aged(self._counts)
        self.versions = Versions(lambda: readers.weights(self.folder))

    def refresh(self, budget_s: float = 0.05) -> None:
        """Read new events for about `budget_s` seconds. If another thread does it already, return at once."""
        if self._refreshing.acquire(blocking=False):
            try:
                self.view.refresh(budget_s)
            finally:
                self._refreshing.release()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[LiveView]:
        """The events, which no other thread changes during the block."""
        with self._refreshing:
            yield self.view

    @contextlib.contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """The ledger, opened for reading. Raises `EtudeError`."""
        ledger = self._readers.ledger(self.folder)
        try:
            yield ledger
        finally:
            ledger.close()

    def rollout(self, ledger: Ledger, row: Row) -> ShownRollout:
        """Read a rollout with its turns. Raises `EtudeError`."""
        return self._readers.rollout(self.folder, ledger, row, ledger.history(row.rollout_id))

    def trace_bytes(self, step: int) -> int | None:
        """Return the size of the trace of a step; None: it is not there, or in a bucket."""
        return self._readers.trace_bytes(self.folder, step)

    def _counts(self) -> dict[str, int]:
        with self.ledger() as ledger:
            return ledger.states()

    def holder(self) -> int | None:
        """Return the pid of the process that runs it; None if nobody does, or the file cannot be read."""
        try:
            return lock_holder(self.path / "lock")
        except (OSError, ValueError):
            return None

    def identity(self) -> dict[str, Any]:
        """Return the content of run.json; {} if it cannot be read."""
        return read_json(self.path / "run.json", dict)


class Runs:
    """The runs at a path: the run itself, or the runs in a folder. Raises `NoRun` if it is not a folder.

    A run is found by comparing its name with those of the folder; no path is made of a name."""

    def __init__(self, path: Path, readers: Readers) -> None:
        if not path.is_dir():
            raise NoRun(f"{path} is not a folder", hint="give the folder of a run, or a folder of runs")
        self.path, self._readers = path.resolve(), readers
        self.is_single = any((self.path / name).exists() for name in MARKS)
        self._open: OrderedDict[str, ShownRun] = OrderedDict()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """Return the names of all runs, the one that changed last first, at most 500."""
        if self.is_single:
            return [self.path.name or "run"]
        found = list[tuple[float, str]]()
        with contextlib.suppress(OSError):
            for path in self.path.iterdir():
                with contextlib.suppress(OSError):
                    if path.is_dir() and any((path / name).exists() for name in MARKS):
                        changed = max((path / name).stat().st_mtime for name in MARKS if (path / name).exists())
                        found.append((changed, path.name))
        return [name for _, name in sorted(found, reverse=True)[:500]]

    def get(self, name: str) -> ShownRun | None:
        """Return the run of this name; None if there is none."""
        with self._lock:
            known = self._open.get(name)
            if known is not None and known.path.is_dir():
                self._open.move_to_end(name)
                return known
            self._open.pop(name, None)
            if name not in self.names():
                return None
            path = self.path if self.is_single else self.path / name
            try:
                found = ShownRun(name, path, self._readers)
            except NoRun:  # deleted a moment ago
                return None
            self._open[name] = found
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
            return found
