"""The chain's versions for an SGLang: fetched and proven here, written as a checkpoint, loaded in a pause."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from etude.errors import WeightsError
from etude.inference.foreign.engine import ForeignEngine
from etude.inference.foreign.following import Following
from etude.inference.sglang.process import SglangCalls
from etude.records.adapter import modules
from etude.records.completion import Version
from etude.telemetry import Telemetry
from etude.weights import Follower
from etude.weights.files.checkpoint import CheckpointWriter, copy_others, index_of, layout


class SglangFollowing(Following):
    """`start`: the checkpoint that SGLang was started from; `folder`: where there is room for another like it."""

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
        super().__init__(engine, poll_s=poll_s, telemetry=telemetry)
        self._calls, self._chain, self._start, self._folder = engine.calls, chain, start, folder

    async def _ready(self) -> bool:
        await asyncio.to_thread(self._chain.advance)
        if self._chain.version is None or self._chain.version == self._held:
            return False
        await asyncio.to_thread(self._write, self._folder)
        return True

    async def _swap(self) -> Version:
        await self._calls.load(self._folder)
        assert self._chain.version is not None, "it is ready"
        return self._chain.version

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
