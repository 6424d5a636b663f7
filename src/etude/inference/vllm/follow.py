"""Keeps a vLLM at the head of the weight chain: asks the store for news, and has the workers fetch, prove and write.

Here only the pointer is read, some hundred bytes; fetching, decoding and proving happen in vLLM's workers beside the
requests, and what is proven is written between two steps, in a pause. A swap that fails leaves the engine frozen until
one succeeds: what it holds is no version's. Trouble is told (`engine.trouble`, an event) and tried again. Bytes that
are right prove nothing about what is computed from them: `verify` is for that, and a run asks it at each version.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import DeadlineExceeded, EtudeError, WeightsError
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.vllm.process import VllmCalls
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights.follow.head import Head

PREPARE_S, SWAP_S = 600.0, 120.0
TROUBLE_REST_S = 0.5
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25  # between two questions to the workers, each of which takes time of a step


class Following:
    """Follows from `start_at_head` to `stop`. `place`: the store, as vLLM's workers open it, `head` is of the same;
    `cache`: a directory in which a region's engines share what they fetched."""

    def __init__(
        self,
        engine: ForeignEngine,
        head: Head,
        place: str,
        *,
        cache: Path | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.engine, self.head, self.place, self.cache, self.poll_s = engine, head, place, cache, poll_s
        assert isinstance(engine.calls, VllmCalls), "its workers are called"
        self._call = engine.calls.call
        self._telemetry = telemetry
        self._task: asyncio.Task[None] | None = None
        self._held: Version | None = None  # what was written last; None: what vLLM loaded, or nobody knows

    async def start_at_head(self) -> None:
        """Adopt what is there, so that the first request finds it, then follow. Trouble with a version is told, not
        raised; a model that the workers have no map for is an `EngineError`."""
        await self._call("etude_follow", self.place, "policy", "", "", str(self.cache or ""))
        await self._try()
        self._task = asyncio.create_task(self._run(), name=f"{self.engine.name}-follow")

    async def stop(self) -> None:
        """End at once. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def step(self) -> Version | None:
        """Adopt what is new; the version adopted, or None. Raises `EtudeError` when it cannot."""
        newest = await asyncio.to_thread(self.head.version)
        if newest is None or newest == self._held:
            return None
        began = time.monotonic()
        await self._prepared()
        fetch_s, engine = time.monotonic() - began, self.engine
        async with engine.swapping():
            began, num_running = time.monotonic(), engine.num_here
            version = await self._written()
            engine.moved(version)
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

    async def _run(self) -> None:
        while True:
            well = await self._try()
            await asyncio.sleep(self.poll_s if well else TROUBLE_REST_S)

    async def _try(self) -> bool:
        try:
            await self.step()
        except EtudeError as error:
            said = str(error).replace("\n", "; ")
            if said != self.engine.trouble and self._telemetry is not None:
                self._telemetry.event("engine.trouble", reason=said)
            self.engine.trouble = said
            return False
        self.engine.trouble = ""
        return True

    async def _prepared(self) -> None:
        """Every worker has one and the same version fetched and proven."""
        call, version = self._call, None
        await call("etude_prepare")
        end, rest_s = time.monotonic() + PREPARE_S, FIRST_LOOK_S
        while time.monotonic() < end:
            states = await call("etude_state")
            trouble = next((one["trouble"] for one in states if one["trouble"]), "")
            if trouble:
                raise WeightsError(
                    f"{self.engine.name} cannot come to the head", trouble, hint="see etude weights fsck"
                )
            found = [one["prepared"] for one in states]
            if not any(one["preparing"] for one in states):
                what = f"{self.engine.name} finds nothing new in {self.place}"
                raise WeightsError(what, "its pointer is at another version", hint="see etude weights log")
            if all(found):
                if all(one == found[0] for one in found):
                    return
                version = max(found, key=lambda one: one["step"])  # the others come to the newest
                await call("etude_prepare", version)
            await asyncio.sleep(rest_s)
            rest_s = min(LAST_LOOK_S, 1.5 * rest_s)
        raise DeadlineExceeded(
            f"{self.engine.name} did not fetch the head within {PREPARE_S:g} s",
            f"asked for {version or 'the newest'}",
            hint="see the store, and the engine's log",
        )

    async def _written(self) -> Version:
        """The version that every worker has written. Raises `WeightsError`: the engine stays frozen then."""
        call = self._call
        told: list[dict[str, Any]] = await call("etude_swap", deadline_s=SWAP_S)
        trouble = next((one["trouble"] for one in told if one["trouble"]), "")
        if trouble:
            self._held = None
            raise WeightsError(
                f"{self.engine.name} could not write a version", trouble, hint="it is written whole next, requests wait"
            )
        versions = [msgspec.convert(one["version"], Version) for one in told]
        if any(version != versions[0] for version in versions):
            self._held = None
            facts = ", ".join(map(str, versions))
            raise WeightsError(f"the workers of {self.engine.name} hold different versions", facts, hint="restart it")
        return versions[0]
