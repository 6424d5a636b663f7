"""Keeps a server of another make at the head of the weight chain: when, in which order, and what is told of it.

What is new is made ready beside the requests, and given to the server in a pause. A swap that fails leaves the engine
frozen until one succeeds: what it holds is no version's. Trouble is told (`engine.trouble`, an event) and tried again.
What the server answers proves nothing about what it computes: `verify` is for that, and a run asks it at each version.
"""

from __future__ import annotations

import abc
import asyncio
import time

from etude.errors import EtudeError
from etude.inference.external.engine import ExternalEngine
from etude.records.completion import Version
from etude.telemetry import Telemetry

RETRY_S = 0.5


class ExternalWeightSync(abc.ABC):
    """Follows from `start_at_head` to `stop`."""

    def __init__(self, engine: ExternalEngine, *, poll_s: float, telemetry: Telemetry | None) -> None:
        self.engine, self.poll_s, self._telemetry = engine, poll_s, telemetry
        self._held: Version | None = None  # what was swapped in last; None: what the server loaded, or nobody knows
        self._task: asyncio.Task[None] | None = None

    async def start_at_head(self) -> None:
        """Adopt what is there, so that the first request finds it, then follow. Trouble is told, not raised."""
        await self._try()
        self._task = asyncio.create_task(self._run(), name=f"{self.engine.name}-follow")

    async def stop(self) -> None:
        """End at once. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def step(self) -> Version | None:
        """Adopt what is new; the version adopted, or None. Raises `EtudeError` when it cannot."""
        began, engine = time.monotonic(), self.engine
        if not await self._ready():
            return None
        fetch_s, self._held = time.monotonic() - began, None
        async with engine.swapping():
            began, num_running = time.monotonic(), engine.num_requests
            version = await self._swap()
            engine.set_version(version)
            self._held = version
        if self._telemetry is not None:
            self._telemetry.event(
                "engine.adopt",
                step=version.step,
                version=str(version),
                fetch_s=round(fetch_s, 6),
                pause_s=round(time.monotonic() - began, 6),
                num_running=num_running,
            )
        return version

    @abc.abstractmethod
    async def _ready(self) -> bool:
        """Have what is new fetched and proven; False: nothing is newer than `_held`. Raises `EtudeError`."""

    @abc.abstractmethod
    async def _swap(self) -> Version:
        """Give the server what is ready; nothing runs in it. Raises `EtudeError`: it stays frozen then."""

    async def _run(self) -> None:
        while True:
            well = await self._try()
            await asyncio.sleep(self.poll_s if well else RETRY_S)

    async def _try(self) -> bool:
        try:
            await self.step()
        except EtudeError as error:
            reason = str(error).replace("\n", "; ")
            if reason != self.engine.trouble and self._telemetry is not None:
                self._telemetry.event("engine.trouble", reason=reason)
            self.engine.trouble = reason
            return False
        self.engine.trouble = ""
        return True
