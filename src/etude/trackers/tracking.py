"""Reads a run's metrics from its event files and passes them to the run's trackers.

Every process of a run writes events, so metrics of mid-training are included. A tracker that raises, hangs, is slow or
dies delays nothing (`process`). What it misses is reported as `tracker` events and in the terminal; the event files
have every metric in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import Plugin
from etude.errors import PluginError
from etude.file_checksums import verify_line
from etude.run import RunFolder
from etude.seams import TrackedRun
from etude.telemetry import Telemetry
from etude.trackers.process import EVERY_METRIC, TrackerProcess
from etude.trackers.support import numbers, without_secrets

POLL_S, FINISH_S = 1.0, 30.0
PARTS = {"rl.step": "rl", "mid.step": "mid-training", "mid.eval": "mid-training", "eval.result": "eval"}
"""First part of a metric's name, by the kind of the events that contain it."""
_NOT_METRICS = ("t", "kind", "step", "name", "process")


@contextlib.asynccontextmanager
async def tracked(
    run: RunFolder, trackers: Sequence[Plugin], config: Mapping[str, Any], telemetry: Telemetry
) -> AsyncIterator[None]:
    """Pass the metrics of a run to its trackers while the block runs. Then finish the trackers within `FINISH_S`
    seconds.

    `config` has the effective settings as nested dicts; trackers get them without secrets. A tracker that fails is
    reported as a `tracker` event and raises nothing here."""
    if not trackers:
        yield
        return
    tracked_run = TrackedRun(
        name=run.path.name,
        run_id=str(run.identity()["run_id"]),
        folder=str(run.path.absolute()),
        resumed=bool(run.phases()),
        config=without_secrets(config),
        facts=run.identity(),
    )

    def report(plugin: Plugin, error: PluginError) -> None:
        telemetry.event("tracker", tracker=plugin.path, error=f"{error.what}: {error.facts}")
        print(f"warning: {error}", file=sys.stderr)

    metrics = MetricReader(run / "events")
    processes = []
    for plugin in trackers:
        try:
            processes.append(TrackerProcess(plugin, tracked_run, report, logs=run / "logs"))
        except OSError as error:  # no memory, a full disk
            facts = f"its process could not be started: {error}"
            report(plugin, PluginError(f"tracker {plugin} failed", facts, hint=EVERY_METRIC))
    polling = asyncio.create_task(_poll(metrics, processes), name="trackers")
    outcome = "failed"
    try:
        yield
        outcome = "finished"
    except asyncio.CancelledError:
        outcome = "stopped"
        raise
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        _pass_on(metrics, processes)
        await asyncio.to_thread(_finish, processes, outcome)


async def _poll(metrics: MetricReader, processes: list[TrackerProcess]) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        _pass_on(metrics, processes)


def _pass_on(metrics: MetricReader, processes: list[TrackerProcess]) -> None:
    for step, values in metrics.read_new():
        for process in processes:
            process.log(step, values)


def _finish(processes: list[TrackerProcess], outcome: str) -> None:
    end = time.monotonic() + FINISH_S
    for process in processes:
        process.finish(outcome, end)
    for process in processes:
        process.join(end, f"{FINISH_S:g} s")


class MetricReader:
    """Reads the metrics that the processes of a run append to their event files, from the time it is created."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._offsets = {path: path.stat().st_size for path in events.glob("*.jsonl")}

    def read_new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, metrics by name) for each event with metrics that was written since the last call."""
        for path in sorted(self._events.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(complete)
            for line in complete.splitlines():
                if (found := metrics_of(line)) is not None:
                    yield found


def metrics_of(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return (step, metrics by name) of a line of an event file, NaN and Inf included; None if it has no metrics.

    >>> metrics_of(b'{"t": 1.0, "kind": "rl.step", "step": 3, "loss": 0.5, "reward": {"mean": 0.25}}')
    (3, {'rl/loss': 0.5, 'rl/reward/mean': 0.25})
    """
    try:
        event = json.loads(line) if verify_line(line) is not False else None
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("kind") not in PARTS or not isinstance(event.get("step"), int):
        return None
    part = PARTS[event["kind"]]
    if part == "eval":
        part = f"eval/{event.get('name')}"
    others = {name: value for name, value in event.items() if name not in _NOT_METRICS}
    return event["step"], dict(numbers(others, part))
