"""Writes telemetry events to one append-only JSON-lines file per process. Readers merge the files by time.

There is no global state: code that writes events gets a `Telemetry` as an argument. Once the file is open, writing
never raises: on a full disk events are dropped and counted, and the run continues. `docs/formats/run.md` lists the
kinds of events."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.file_checksums import sealed_line, verify_line


class Telemetry:
    """Appends the events of one process to the file `path`, one JSON object per line.

    A line has "t" (unix seconds), "process", "kind", and the facts of the event. `dropped` counts events that could not
    be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = Telemetry(Path(folder) / "events" / "learner.jsonl", process="learner")
    ...     with log.span("learner.step", step=3):
    ...         pass
    ...     log.close()
    ...     event = json.loads(log.path.read_text())
    >>> event["kind"], event["step"], event["wall_s"] >= 0
    ('learner.step', 3, True)
    """

    def __init__(self, path: Path, *, process: str) -> None:
        self.path, self.process, self.dropped = path, process, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def event(self, kind: str, **facts: Any) -> None:
        """Write one event with these facts as one line. Lines of several writers never mix, since it is a single
        write call."""
        line = json.dumps({"t": round(time.time(), 4), "process": self.process, "kind": kind, **facts}, default=str)
        try:
            os.write(self._file, sealed_line(line.encode()) + b"\n")
        except OSError:
            self.dropped += 1

    @contextmanager
    def span(self, kind: str, **facts: Any) -> Iterator[dict[str, Any]]:
        """Write one event when the block ends, with the block's duration `wall_s` and CPU time `cpu_s` in seconds.

        Yields the event's dict of facts, to which the block may add. If the block raises, the event has the fact
        `error`."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield facts
        except BaseException as error:
            facts["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            facts["wall_s"] = round(time.perf_counter() - wall, 6)
            facts["cpu_s"] = round(time.process_time() - cpu, 6)
            self.event(kind, **facts)

    def close(self) -> None:
        os.close(self._file)


def read_events(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the events of all files of a folder, sorted by time. Lines that cannot be read are skipped."""
    events = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            try:
                event = json.loads(line) if verify_line(line) is not False else None
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("t"), int | float):
                events.append(event)
    return iter(sorted(events, key=lambda e: float(e["t"])))
