"""Publishing beside a step: the real conductor, ledger and learner over their socket, with a store that is held up.

Only sampling is played: rollouts are made up, and there is no engine to adopt or to probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config import load, to_toml
from etude.errors import StoreError
from etude.experience import Ledger, audit
from etude.harness import ChatFormat
from etude.loop import learning
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig, open_tasks
from etude.loop.crew import Pool
from etude.loop.standalone import take_checkpoint
from etude.loop.wire import Caller, serve
from etude.records import Completion, Graded, Rollout, RolloutSpec, Trace, Version, VersionSpan
from etude.records.completion import StopReason
from etude.records.rollout import Ending, Turn
from etude.records.task import Trust
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry, read_events
from etude.weights import lineage

pytestmark = pytest.mark.timeout(120)
PROMPT, SAMPLED = 4, 6


class Players:
    """A crew that makes its rollouts up; every other one is right."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.learners, self.engines = config, Pool("learner"), dict[str, Any]()

    async def rollout(self, spec: RolloutSpec) -> Rollout:
        draw = np.random.default_rng(spec.seed)
        sampled = Completion(
            request_id=spec.rollout_id,
            token_ids=draw.integers(0, 300, SAMPLED, np.int32),
            logprobs=np.full(SAMPLED, -5.0, np.float32),
            routes=np.zeros((PROMPT + SAMPLED - 1, 2, 2), np.uint8),
            routes_start=0,
            spans=(VersionSpan(Version(spec.min_step, "0" * 8, "0" * 64), SAMPLED),),
            stop_reason=StopReason.STOP,
            engine="engine-0",
        )
        return Rollout(
            rollout_id=spec.rollout_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            task=spec.task,
            trace=Trace((Turn(parent=None, prompt_ids=np.arange(PROMPT, dtype=np.int32), completion=sampled),)),
            ending=Ending.SUBMITTED,
            exports={},
            wall_s=0.1,
            tool_s=0.0,
        )

    async def grade(self, rollout: Rollout) -> Graded:
        reward = float(int(rollout.rollout_id[-1]) % 2)
        return Graded(reward=reward, terms={"tests": reward}, trust=Trust.DATA, reason="as its number says")


class Held(DirectoryStore):
    """A store that puts the manifest of version 1 when it is told to, or refuses it then."""

    opened = threading.Event()
    full = False

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("manifests/policy/v000001-"):
            assert self.opened.wait(60.0), "nobody opened it"
            if self.full:
                raise StoreError(f"object {key!r} cannot be written", "No space left on device", hint="free disk space")
        super().put(key, data)


class Run:
    """A run whose learner is in this process. `calls`: what the learner was asked, as ("begin" or "end", method)."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        self.calls: list[tuple[str, str]] = []
        self._more = asyncio.Event()

    @contextlib.asynccontextmanager
    async def conductor(self) -> AsyncIterator[Conductor]:
        ours, theirs = socket.socketpair()
        told = Telemetry(self.folder / "events" / "learner.jsonl", process="learner")
        known = await learning.handlers(self.folder, "learner", told)
        server = asyncio.create_task(
            serve(theirs, {n: (kinds, self._heard(n, work)) for n, (kinds, work) in known.items()})
        )
        caller = Caller(ours, "learner")
        await caller.open()
        players = Players(self.config)
        players.learners.join(caller)
        telemetry = Telemetry(self.folder / "events" / "conductor.jsonl", process="conductor")
        chat = ChatFormat.load(self.folder / "tokenizer")
        conductor = Conductor(self.folder, self.config, telemetry, players, source=open_tasks(self.config), chat=chat)  # type: ignore[arg-type]
        try:
            yield conductor
        finally:
            caller.close()
            await server
            await caller.lost.wait()
            conductor.ledger.close()
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
        async with asyncio.timeout(60.0):
            while self.calls.count(call) < count:
                self._more.clear()
                await self._more.wait()

    def assert_sound(self, steps: int) -> None:
        """Every step is in the lineage once, and nothing was lost, trained twice or left holding a slot."""
        ledger = Ledger.reading(self.folder / "ledger.sqlite")
        chain: Sequence[Sequence[str]] = [
            m.rollout_ids for m in lineage(DirectoryStore(self.folder / "weights"), "policy")
        ]
        found = audit(ledger, self.folder / "traces", chain)
        ledger.close()
        found.require_sound()
        assert found.num_steps == steps


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> type[Held]:
    """The learner's store holds version 1 back until it is opened."""
    monkeypatch.setattr(learning, "DirectoryStore", Held)
    monkeypatch.setattr(Held, "opened", threading.Event())
    monkeypatch.setattr(Held, "full", False)
    return Held


@pytest.fixture
def run(game: Any, tmp_path: Path) -> Callable[..., Run]:
    """A run of some steps that is checkpointed at its end only."""

    def make(*sets: str) -> Run:
        text = ["learner.replay_routes=false", "rl.checkpoint_every=50", "evals.every=50", *sets]
        config = load(game.config, RunConfig, text)
        folder = RunFolder.create(tmp_path / "r", config_toml=to_toml(config), seed=1)
        take_checkpoint(game.start, folder)
        return Run(folder, config)

    return make


async def some_turns(conductor: Conductor) -> None:
    """Whatever the conductor would do now, it has done: each turn is a call to the learner and back."""
    for _ in range(4):
        await conductor._call("ready", bool)


def test_the_next_batch_is_trained_beside_a_publish_and_the_optimiser_step_waits_for_the_commit(
    run: Callable[..., Run], held: type[Held]
) -> None:
    async def main() -> None:
        this = run("rl.steps=3")
        async with this.conductor() as conductor:
            work = asyncio.create_task(conductor.reinforce())
            await this.until(2, ("end", "forward_backward"))
            await some_turns(conductor)
            assert this.calls.count(("end", "published")) == 1, "the checkpoint that it began with, alone"
            assert this.calls.count(("begin", "optim_step")) == 1
            assert (conductor.step, conductor.trained) == (0, 1)
            assert conductor.ledger.states()["batched"] == 24, "both batches: no version has learned from them yet"
            assert "trained" not in conductor.ledger.states()
            held.opened.set()
            await work
            assert conductor.step == 3
        after = this.calls[this.calls.index(("end", "optim_step")) :]
        committed = after.index(("end", "published"))
        assert after.index(("end", "forward_backward")) < committed < after.index(("begin", "optim_step"))
        offers = [i for i, call in enumerate(this.calls) if call == ("end", "offer")]
        assert len(offers) == 4
        assert all(("begin", "probe") in this.calls[i : i + 2] for i in offers), "of these weights, before others come"
        this.assert_sound(3)
        steps = [e for e in read_events(this.folder / "events") if e["kind"] == "rl.step"]
        assert [e["step"] for e in steps] == [1, 2, 3]
        assert all(e["stall_s"] >= 0 and e["train_s"] > 0 for e in steps)

    asyncio.run(main())


def test_a_publish_that_fails_beside_the_next_batch_ends_the_run_by_name_and_loses_nothing(
    run: Callable[..., Run], held: type[Held]
) -> None:
    async def main() -> None:
        this = run("rl.steps=3")
        async with this.conductor() as conductor:
            work = asyncio.create_task(conductor.reinforce())
            await this.until(2, ("begin", "forward_backward"))
            held.full = True
            held.opened.set()
            with pytest.raises(StoreError, match=r"v000001.* cannot be written") as caught:
                await work
            assert caught.value.hint == "free disk space"
            assert this.calls.count(("begin", "optim_step")) == 1
            assert conductor.step == 0
            assert "trained" not in conductor.ledger.states()
        held.full = False
        again = Run(this.folder, this.config)
        async with again.conductor() as conductor:
            await conductor.reinforce()
        again.assert_sound(3)

    asyncio.run(main())


def test_nothing_runs_beside_a_publish_of_a_synchronous_run(run: Callable[..., Run]) -> None:
    async def main() -> None:
        this = run("rl.steps=2", "experience.max_lag=0")
        async with this.conductor() as conductor:
            await conductor.reinforce()
        work = [call for call in this.calls if call[1] in ("forward_backward", "optim_step", "offer", "published")]
        each = [
            (when, name)
            for name in ("forward_backward", "optim_step", "offer", "published")
            for when in ("begin", "end")
        ]
        assert work == [*each[4:], *each, *each]
        this.assert_sound(2)

    asyncio.run(main())
