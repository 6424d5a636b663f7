"""Hands the numbers of a run to its trackers: plug-ins such as TensorBoard or W&B.

The numbers are those of the run's event files, which every process writes, so that mid-training's are among them. Each
tracker has a thread of its own and a bounded queue: one that is slow, hangs or raises delays nothing. What it misses is
reported as `tracker` events and once on the terminal; the run folder has every number in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.config import Plugin, to_plain
from etude.errors import EtudeError, PluginError
from etude.file_checksums import verify_line
from etude.loop.config import RunConfig
from etude.plugins import Kind, called, make
from etude.run import RunFolder
from etude.seams import TrackedRun, Tracker
from etude.telemetry import Telemetry

POLL_S, FINISH_S, MAX_WAITING = 1.0, 30.0, 10_000
PARTS = {"rl.step": "rl", "mid.step": "mid-training", "mid.eval": "mid-training", "eval.result": "eval"}
"""The part of a run, by the kind of the events that have its numbers."""
Report = Callable[[Plugin, PluginError], None]


@contextlib.asynccontextmanager
async def tracked(run: RunFolder, config: RunConfig, telemetry: Telemetry) -> AsyncIterator[None]:
    """Have the trackers of a run receive its numbers while the block runs. Raises `PluginRefused` for a tracker that
    cannot be made, and nothing of what one raises later."""
    if not config.trackers:
        yield
        return
    about = TrackedRun(
        name=run.path.name,
        run_id=str(run.identity()["run_id"]),
        folder=str(run.path.absolute()),
        resumed=bool(run.phases()),
        config=to_plain(config),
        facts=run.identity(),
    )

    def report(plugin: Plugin, error: PluginError) -> None:
        telemetry.event("tracker", tracker=plugin.path, error=f"{error.what}: {error.facts}")
        print(f"warning: {error}", file=sys.stderr)

    members = [_Member(plugin, make(Kind.TRACKER, plugin), about, report) for plugin in config.trackers]
    numbers = Numbers(run / "events")
    following = asyncio.create_task(_follow(numbers, members), name="trackers")
    outcome = "failed"
    try:
        yield
        outcome = "finished"
    except asyncio.CancelledError:
        outcome = "stopped"
        raise
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        _hand_out(numbers, members)
        await asyncio.to_thread(_finish, members, outcome)


async def _follow(numbers: Numbers, members: list[_Member]) -> None:
    while True:
        await asyncio.sleep(POLL_S)
        _hand_out(numbers, members)


def _hand_out(numbers: Numbers, members: list[_Member]) -> None:
    for step, values in numbers.new():
        for member in members:
            member.log(step, values)


def _finish(members: list[_Member], outcome: str) -> None:
    """End all trackers, within `FINISH_S` together."""
    end = time.monotonic() + FINISH_S
    for member in members:
        member.finish(outcome, end)
    for member in members:
        member.join(end)


class _Member:
    """One tracker and its thread."""

    def __init__(self, plugin: Plugin, tracker: Tracker, about: TrackedRun, report: Report) -> None:
        self._plugin, self._tracker, self._report = plugin, tracker, report
        self._waiting = queue.Queue[Callable[[], None]](MAX_WAITING)
        self._dropped, self._failed, self._has_ended = 0, 0, False
        self._waiting.put(lambda: self._call("start", about))
        self._thread = threading.Thread(target=self._work, name=f"tracker {plugin.path}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put(lambda: self._call("log", step, values))

    def finish(self, outcome: str, end: float) -> None:
        with contextlib.suppress(queue.Full):  # it hangs, which `join` reports
            self._waiting.put(lambda: self._end(outcome), timeout=max(0.0, end - time.monotonic()))

    def join(self, end: float) -> None:
        """Wait until it has ended, and report what it missed."""
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            self._tell(f"it did not finish within {FINISH_S:g} s", "look at what it waits for")
        if self._dropped or self._failed > 1:
            facts = f"it raised {self._failed} times, and {self._dropped} calls were dropped since it was behind"
            self._tell(facts, "the run folder has every number, in events/")

    def _put(self, call: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if not self._dropped:
                self._tell(
                    f"{MAX_WAITING} calls wait: it is slow or hangs, and misses numbers", "see what it waits for"
                )
            self._dropped += 1

    def _work(self) -> None:
        while not self._has_ended:
            self._waiting.get()()

    def _end(self, outcome: str) -> None:
        self._has_ended = True
        self._call("finish", outcome)

    def _call(self, method: str, *arguments: object) -> None:
        try:
            with called(Kind.TRACKER, self._plugin, f"its {method}"):
                getattr(self._tracker, method)(*arguments)
        except EtudeError as error:
            self._failed += 1
            if self._failed == 1:
                self._tell(error.facts or error.what, "the run goes on; the run folder has every number, in events/")

    def _tell(self, facts: str, hint: str) -> None:
        self._report(self._plugin, PluginError(f"{Kind.TRACKER.noun} {self._plugin} failed", facts, hint=hint))


class Numbers:
    """The numbers that a run's processes write from now on."""

    def __init__(self, events: Path) -> None:
        self._events = events
        self._offsets = {path: path.stat().st_size for path in events.glob("*.jsonl")}

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Those written since the last call, as (step, values by name)."""
        for path in sorted(self._events.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for line in whole.splitlines():
                if (found := _numbers(line)) is not None:
                    yield found


def _numbers(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of an event; None for one that has none.

    >>> _numbers(b'{"t": 1.0, "kind": "rl.step", "step": 3, "loss": 0.5, "reward": {"mean": 0.25}}')
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
    others = {name: value for name, value in event.items() if name not in ("t", "kind", "step", "name", "process")}
    return event["step"], dict(_flat(others, part))


def _flat(values: Mapping[str, Any], where: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{where}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield f"{where}/{name}", float(value)
