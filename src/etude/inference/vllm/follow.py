"""The chain's versions for a vLLM: the store is asked for news here, and the workers fetch, prove and write.

Here only the pointer is read, some hundred bytes; fetching, decoding and proving happen in vLLM's workers beside the
requests, and what is proven is written between two steps, in a pause.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from etude.errors import DeadlineExceeded, WeightsError
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.following import Following
from etude.inference.vllm.process import VllmCalls
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights.follow.head import Head

PREPARE_S, SWAP_S = 600.0, 120.0
FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25  # between two questions to the workers, each of which takes time of a step


class VllmFollowing(Following):
    """`place`: the store, as vLLM's workers open it, `head` is of the same; `public_key`: the workers believe only what
    its owner signed; `cache`: a directory in which a region's engines share what they fetched."""

    def __init__(
        self,
        engine: ForeignEngine,
        head: Head,
        place: str,
        *,
        public_key: bytes | None = None,
        cache: Path | None = None,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.calls, VllmCalls), "its workers are called"
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self.head, self.place, self.cache, self._call = head, place, cache, engine.calls.call
        self._public_key = public_key.hex() if public_key else ""

    async def start_at_head(self) -> None:
        """As of every follower. Raises `EngineError` for a model that the workers have no map for."""
        await self._call("etude_follow", self.place, "policy", "", self._public_key, str(self.cache or ""))
        await super().start_at_head()

    async def _ready(self) -> bool:
        newest = await asyncio.to_thread(self.head.version)
        if newest is None or newest == self._held:
            return False
        await self._prepared()
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

    async def _swap(self) -> Version:
        """The version that every worker has written."""
        call = self._call
        told: list[dict[str, Any]] = await call("etude_swap", deadline_s=SWAP_S)
        trouble = next((one["trouble"] for one in told if one["trouble"]), "")
        if trouble:
            raise WeightsError(
                f"{self.engine.name} could not write a version", trouble, hint="it is written whole next, requests wait"
            )
        versions = [msgspec.convert(one["version"], Version) for one in told]
        if any(version != versions[0] for version in versions):
            facts = ", ".join(map(str, versions))
            raise WeightsError(f"the workers of {self.engine.name} hold different versions", facts, hint="restart it")
        return versions[0]
