"""Keeps an external server's weights at the newest published version.

A new version is prepared while requests run, and loaded by the server during a pause. A swap that fails leaves the
engine frozen until one succeeds, since its weights are then of no version. Errors are reported (`engine.trouble` and an
event) and retried. A server's response does not prove that it computes with the new weights: `verify` checks that, and
a run calls it for each version.
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
    """Updates a server's weights to each new version, from `start_at_head` until `stop`.

    Each kind of server has a subclass. `poll_s` is the pause between two checks for a new version, in seconds."""

    def __init__(self, engine: ExternalEngine, *, poll_s: float, telemetry: Telemetry | None) -> None:
        self.engine, self.poll_s, self._telemetry = engine, poll_s, telemetry
        self._held: Version | None = None  # version swapped in last; None: none yet, or unknown after an error
        self._task: asyncio.Task[None] | None = None

    async def start_at_head(self) -> None:
        """Adopt the newest version, so that the first request sees it, then start the task.

        Errors are reported in `engine.trouble`, not raised."""
        await self._try()
        self._task = asyncio.create_task(self._run(), name=f"{self.engine.name}-follow")

    async def stop(self) -> None:
        """Cancel the task. Further calls of `stop` do nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def step(self) -> Version | None:
        """Load the newest published version into the server, if it is not loaded yet.

        Returns the version, or None when there is nothing new. Raises `EtudeError`."""
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
        """Fetch and check the newest version. Returns False when it is `_held`. Raises `EtudeError`."""

    @abc.abstractmethod
    async def _swap(self) -> Version:
        """Load the prepared version into the paused server and return it.

        When this raises `EtudeError`, the engine stays frozen."""

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
