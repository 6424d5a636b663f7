"""Keeps an SGLang at the head of the weight chain: fetched and proven here, written as a checkpoint, loaded in a pause.

Everything but the load happens beside the requests. A load that fails leaves the engine frozen until one succeeds: what
it holds is no version's. Trouble is told (`engine.trouble`, an event) and tried again. HTTP 200 proves nothing about
what is computed: `verify` is for that, and a run asks it at each version.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from etude.errors import EtudeError, WeightsError
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.sglang.process import SglangCalls
from etude.records.adapter import modules
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights import Follower
from etude.weights.files.checkpoint import CheckpointWriter, copy_others, index_of, layout

TROUBLE_REST_S = 0.5


class Following:
    """Follows from `start_at_head` to `stop`. `start`: the checkpoint that SGLang was started from; `folder`: where
    there is room for another like it."""

    def __init__(
        self,
        engine: ForeignEngine,
        chain: Follower,
        *,
        start: Path,
        folder: Path,
        poll_s: float = 0.05,
        telemetry: Telemetry | None = None,
    ) -> None:
        assert isinstance(engine.calls, SglangCalls), "it is told to load weights"
        self.engine, self.poll_s = engine, poll_s
        self._calls, self._chain, self._telemetry = engine.calls, chain, telemetry
        self._start, self._folder = start, folder
        self._held: Version | None = None
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
        began = time.monotonic()
        await asyncio.to_thread(self._chain.advance)
        version = self._chain.version
        if version is None or version == self._held:
            return None
        await asyncio.to_thread(self._write, self._folder)
        fetch_s, engine, self._held = time.monotonic() - began, self.engine, None
        async with engine.swapping():
            began, num_running = time.monotonic(), engine.num_here
            await self._calls.load(self._folder)
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

    def _write(self, folder: Path) -> None:
        """The version that the chain is at, as a checkpoint. Raises `WeightsError`, `CheckpointError`."""
        tensors = self._chain.tensors
        if modules(tensors):
            facts, hint = "SGLang takes whole weights", "take vLLM or reference engines, or learner.lora_rank = 0"
            raise WeightsError("an adapter is published", facts, hint=hint)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy_others(self._start, folder)
        headers = layout(tensors)
        with CheckpointWriter(folder, headers, index_of(headers)) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor)

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
