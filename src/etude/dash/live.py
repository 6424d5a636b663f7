"""The live view of a run: parts of its overview as HTML, which a browser replaces when they change.

The parts are rendered at most once a second for all browsers, and only while one is connected. A stream sends what
differs from what it sent last, so a slow browser has no queue: it gets the newest state, or is dropped."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from etude.dash.overview import Overview, overview
from etude.dash.pages import render
from etude.dash.runs import ShownRun

EVERY_S, READ_S = 1.0, 0.2
"""Seconds between two renderings, and of these for reading events."""
COUNT_S = 0.1
"""Longest wait for the numbers of rollouts; later ones are sent when they are there."""
PING_S = 15.0
MAX_STREAMS = 32
PARTS = ("status", "tiles", "warnings", "plots")
_EVENTS = ("rl.step", "weights.publish", "eval.result", "mid.step", "mid.eval", "engine.probe", "parity.alarm")


class LivePage:
    """The live parts of one run's overview. Safe for many threads."""

    def __init__(self, run: ShownRun) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._at, self._parts = -EVERY_S, dict[str, str]()
        self._plots_of: tuple[object, ...] = ()

    def parts(self) -> dict[str, str]:
        """Return the parts as HTML by name, at most `EVERY_S` seconds old."""
        with self._lock:
            if time.monotonic() - self._at >= EVERY_S:
                self.run.refresh(READ_S)
                self._parts = self._rendered()
                self._at = time.monotonic()
            return self._parts

    def _rendered(self) -> dict[str, str]:
        found, share = make_overview(self.run)
        with self.run.frozen() as view:
            newest = tuple((len(view.events(kind)), (view.latest(kind) or {}).get("t")) for kind in _EVENTS)
        rendered = {
            name: render(f"_{name}.jinja", overview=found, share=share)
            for name in PARTS
            if name != "plots" or newest != self._plots_of or "plots" not in self._parts
        }
        self._plots_of = newest
        return self._parts | rendered


def make_overview(run: ShownRun) -> tuple[Overview, float]:
    """Return the overview of a run, and the share of its events that was read so far."""
    missing = list[str]()
    for name in ("run.json", "config.toml", "events"):
        if not (run.path / name).exists():
            missing.append(f"{name} is missing")
    if (run.path / "run.json").exists() and not run.identity():
        missing.append("run.json is damaged")
    states = run.counts.get(COUNT_S)
    if states.missing:
        missing.append(f"rollouts: {states.missing}")
    with run.frozen() as view:
        return overview(view, holder=run.holder(), states=states.value, missing=missing), view.share_read


class EventStream(StreamingResponse):
    """Server-sent events: the parts of a live page when they change. `ended` is called when the client is gone."""

    def __init__(self, page: LivePage, stopping: asyncio.Event, release: threading.Semaphore) -> None:
        super().__init__(_events(page, stopping), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client or the server ends."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release.release()


async def _events(page: LivePage, stopping: asyncio.Event) -> AsyncIterator[str]:
    sent, said = dict[str, str](), time.monotonic()
    yield "retry: 3000\n\n"
    while not stopping.is_set():
        parts = await run_in_threadpool(page.parts)
        changed = {name: html for name, html in parts.items() if sent.get(name) != html}
        if changed:
            sent, said = dict(parts), time.monotonic()
            yield f"event: parts\ndata: {json.dumps(changed)}\n\n"
        elif time.monotonic() - said > PING_S:
            said = time.monotonic()
            yield ": still here\n\n"
        try:
            await asyncio.wait_for(stopping.wait(), EVERY_S)
        except TimeoutError:
            continue
