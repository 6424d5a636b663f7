"""Runs of the real conductor, ledger and learner over their socket, with rollouts that are made up: no engines."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etude.config import load, to_toml
from etude.errors import StoreError
from etude.experience import Ledger, RolloutFiles, audit
from etude.harness import ChatFormat
from etude.loop import learner
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig, open_tasks
from etude.loop.grader import judge_accounts, named_term
from etude.loop.processes import Supervisor
from etude.loop.rollout_result import RolloutResult, store_rollout
from etude.loop.rpc import MAX_FRAME_BYTES, Caller, serve
from etude.loop.run_processes import RunProcesses
from etude.records import Completion, Graded, Rollout, RolloutSpec, Sampling, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.reward import Measured
from etude.records.rollout import Ending, Turn
from etude.records.summary import RolloutSummary
from etude.records.task import Trust
from etude.rewards import measure_group
from etude.rewards.config import TermConfig
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry
from etude.weights import lineage

PROMPT, SAMPLED = 4, 6


class Players(RunProcesses):
    """Run processes without engines that makes its rollouts up; every other one is right."""

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        return store_rollout(self.made(spec), self.files, kept=kept).with_task(spec.task)

    sampled = SAMPLED

    def made(self, spec: RolloutSpec) -> Rollout:
        """A rollout of one turn, of `sampled` tokens."""
        draw = np.random.default_rng(spec.seed)
        sampled = Completion(
            request_id=spec.rollout_id,
            token_ids=draw.integers(0, 300, self.sampled, np.int32),
            logprobs=np.full(self.sampled, -5.0, np.float32),
            routes=np.tile(np.array([0, 1], np.uint8), (PROMPT + self.sampled - 1, 2, 1)),
            routes_start=0,
            spans=(VersionSpan(Version(spec.min_step, "0" * 8, "0" * 64), self.sampled),),
            stop_reason=StopReason.STOP,
            engine="engine-0",
        )
        prompt_ids, sampling = np.arange(PROMPT, dtype=np.int32), Sampling(max_tokens=self.sampled, stop_token_ids=())
        turn = Turn(parent=None, prompt_ids=prompt_ids, completion=sampled, sampling=sampling)
        return Rollout(
            rollout_id=spec.rollout_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            task=spec.task,
            trace=Trace((turn,)),
            ending=Ending.SUBMITTED,
            exports={},
            wall_s=0.1,
            tool_s=0.0,
        )

    async def grade(self, rollout: RolloutResult) -> Graded:
        reward = float(int(rollout.summary.rollout_id[-1]) % 2)
        return Graded.of(reward, {"tests": reward}, trust=Trust.DATA, reason="as its number says")

    async def measure(
        self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
    ) -> list[list[Measured]]:
        rollouts = list(map(self.files.read, summaries))
        return await measure_group([named_term(one, self.run) for one in terms], rollouts, graded)

    async def judge_accounts(self, terms: Sequence[TermConfig]) -> dict[str, float | None] | None:
        with contextlib.suppress(StoreError):
            return judge_accounts(terms, self.run)
        return None


class PlayedRun:
    """A run whose learner is in this process. `calls`: what the learner was asked, as ("begin" or "end", method)."""

    @classmethod
    def create(cls, path: Path, game: Any, *sets: str) -> PlayedRun:
        """A new run folder, from the game's checkpoint."""
        config = load(game.config, RunConfig, sets)
        folder = RunFolder.create(path, config_toml=to_toml(config), seed=1)
        copy_start_checkpoint(game.start, folder)
        return cls(folder, config)

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        *,
        players: type[Players] = Players,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.folder, self.config, self._players, self._max_frame_bytes = folder, config, players, max_frame_bytes
        self.calls: list[tuple[str, str]] = []
        self._more = asyncio.Event()

    @contextlib.asynccontextmanager
    async def conductor(self) -> AsyncIterator[Conductor]:
        ours, theirs = socket.socketpair()
        told = Telemetry(self.folder / "events" / "learner.jsonl", process="learner")
        known = await learner.handlers(self.folder, "learner", told)
        server = asyncio.create_task(
            serve(
                theirs,
                {n: (kinds, self._heard(n, work)) for n, (kinds, work) in known.items()},
                max_frame_bytes=self._max_frame_bytes,
            )
        )
        caller = Caller(ours, "learner", max_frame_bytes=self._max_frame_bytes)
        await caller.open()
        telemetry = Telemetry(self.folder / "events" / "conductor.jsonl", process="conductor")
        players = self._players(self.folder, self.config, telemetry, Supervisor(telemetry))
        players.learners.join(caller)
        chat = ChatFormat.load(self.folder / "tokenizer")
        conductor = Conductor(self.folder, self.config, telemetry, players, source=open_tasks(self.config), chat=chat)
        try:
            yield conductor
        finally:
            caller.close()
            await server
            await caller.lost.wait()
            conductor.close()
            telemetry.close()
            told.close()

    def _heard(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: object) -> object:
            self.calls.append(("begin", name))
            try:
                return await work(*arguments)
            finally:
                self.calls.append(("end", name))
                self._more.set()

        return call

    async def until(self, count: int, call: tuple[str, str]) -> None:
        """Wait until the learner was asked, or has answered, something so many times."""
        async with asyncio.timeout(600.0):
            while self.calls.count(call) < count:
                self._more.clear()
                await self._more.wait()

    def assert_sound(self, steps: int) -> None:
        """Every step is in the lineage once, and nothing was lost, trained twice or left holding a slot."""
        ledger = Ledger.open_readonly(self.folder / "ledger.sqlite")
        manifests = lineage(DirectoryStore(self.folder / "weights"), "policy")
        chain = [(manifest.version.step, manifest.rollout_ids) for manifest in manifests]
        found = audit(ledger, self.folder / "traces", chain, files=RolloutFiles(self.folder / "rollouts"))
        ledger.close()
        found.require_sound()
        assert found.num_steps == steps


async def cut_off(run: PlayedRun, reached: Callable[[], asyncio.Event]) -> None:
    """Train until an event, `reached` when the conductor is up, and end there, as if the process had been killed."""
    async with run.conductor() as conductor:
        training = asyncio.create_task(conductor.reinforce())
        async with asyncio.timeout(600.0):
            await reached().wait()
        training.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await training
