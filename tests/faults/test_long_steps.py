"""Steps of ten minutes, tokens of seconds, engines that take minutes to load a version or to restart.

The real conductor, ledger, fleet, harness and channel of weights, on an event loop whose clock jumps; what computes
is stood in for. Nothing of this may cost a rollout: all of them wait longer than any of them may be silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.clock import run_at_once
from tests.small_rollouts import Kit
from tests.unit.harness.tokeniser import laptop_chat

from etude.config import build, to_toml
from etude.errors import EngineBehind
from etude.experience import audit, record_batch
from etude.harness import HarnessConfig
from etude.inference import EngineGone, Fleet
from etude.loop.adjustable_semaphore import Limit
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig
from etude.loop.locations import rollout_files
from etude.loop.rollout_result import RolloutResult, store_rollout
from etude.loop.rpc import ProcessLost
from etude.records import Completion, CompletionRequest, Rollout, RolloutSpec, Task, Version
from etude.records.sample import Published
from etude.records.task import Split
from etude.rollouts import run_rollout
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import Telemetry, read_events
from etude.testing import FakeLearner, FakeRunProcesses, MemoryRuntime, ScriptedEngine
from etude.weights.chain.channel import Channel
from etude.weights.chain.history import LineageSteps
from etude.weights.tensors import Tensor

CHAT = laptop_chat()
STEP_S, ADOPT_S, TOKEN_S, DEADLINE_S = 600.0, 240.0, 3.0, 60.0
LIMITS = HarnessConfig(turn_tokens=48, context_tokens=2048, max_turns=2, turn_deadline_s=DEADLINE_S)
STEPS, CHECKPOINT_EVERY = 6, 3


class SlowEngine(ScriptedEngine):
    """A token takes `TOKEN_S`; a version is held `ADOPT_S` after it was published."""

    def __init__(self, name: str) -> None:
        super().__init__(iter(lambda: list(range(40, 80)), None), name=name, step=-1)
        self.is_gone, self._moved = False, asyncio.Condition()

    async def generate(self, request: CompletionRequest) -> Completion:
        done = await super().generate(request)
        for _ in done.token_ids:
            await asyncio.sleep(TOKEN_S)
            if self.is_gone:
                raise EngineGone(f"{self.name} is gone", hint="it comes back")
            if self.version.step < request.min_step:
                raise EngineBehind(f"{self.name} went back to {self.version}", hint="adopt")
        return done

    async def adopt(self, min_step: int, *, deadline_s: float) -> Version:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s), self._moved:
                await self._moved.wait_for(lambda: self.version.step >= min_step)
        return self.version

    async def info(self, *, deadline_s: float = 5.0) -> Any:
        if self.is_gone:
            raise EngineGone(f"{self.name} is gone", hint="it comes back")
        return await super().info()

    async def follow(self, version: Version, *, takes_s: float = ADOPT_S) -> None:
        await asyncio.sleep(takes_s)
        async with self._moved:
            self.version = version
            self._moved.notify_all()

    async def restart(self) -> None:
        """Gone for ten minutes, and without weights for another ten."""
        self.is_gone, version = True, self.version
        await asyncio.sleep(600.0)
        self.is_gone, self.version = False, Kit.version(-1)
        await self.follow(version, takes_s=600.0)


class MortalLearner:
    """Records and counts batches, and publishes what `publish(step, rollout_ids)` does. Dies in the middle of a step,
    once for each of `dies`."""

    name = "learner"

    def __init__(self, run: RunFolder, publish: Any, dies: set[int]) -> None:
        self.lost, self.made = asyncio.Event(), FakeLearner()
        self._run, self._publish, self._dies, self._offered = run, publish, dies, tuple[str, ...]()

    async def call(self, method: str, kind: type, *args: Any, deadline_s: float) -> Any:
        if method == "forward_backward":
            await self._compute()
        if self.lost.is_set():
            raise ProcessLost("the learner is gone", hint="another comes")
        match method:
            case "begin" if (Path(args[0]) / "learner.json").exists():
                self.made.load(args[0])
            case "record":
                files = rollout_files(self._run)
                batch, ref = record_batch(self._run / "traces", args[0], files.read)
                self._batch = batch
                return ref
            case "forward_backward":
                return self.made.forward_backward(self._batch)
            case "optim_step" | "save":
                return getattr(self.made, method)(*args)
            case "offer":
                self._offered = args[0]
            case "published":
                return self._publish(self.made.step, self._offered)
        return {"begin": self.made.step, "parity": "", "probe": []}.get(method)

    async def _compute(self) -> None:
        dies = self.made.step + 1 in self._dies
        await asyncio.sleep(STEP_S / 2 if dies else STEP_S)
        if dies:
            self._dies.remove(self.made.step + 1)
            self.lost.set()


class SlowProcesses(FakeRunProcesses):
    """Real rollouts on slow engines, which follow what is published."""

    def __init__(self, config: RunConfig, run: RunFolder, dies: Collection[int]) -> None:
        super().__init__(config, Limit(64), play=self._never, judge=lambda _: Kit.graded(next(self._rewards)))
        self._rewards = iter(lambda: float(next(self._coin)), None)
        self._coin = iter(np.random.default_rng(0).integers(0, 2, 100_000).tolist())
        self.slow = [SlowEngine(f"engine-{i}") for i in range(2)]
        self.fleet, self.runtime, self._at_work = Fleet({e.name: e for e in self.slow}), MemoryRuntime(), set[Any]()
        self._channel, self._versions = Channel(DirectoryStore(run / "weights")), dict[int, Version]()
        self._dies, self.behind, self.run, self.files = set(dies), 0, run, rollout_files(run)
        self.engines, self.remote, self.learners = dict[str, Any](), (), SimpleNamespace(pick=self._pick)
        self._learner: MortalLearner | None = None

    def require_parity(self, learner_class: str) -> None:
        """Of nobody."""

    async def wait_for_engine(self) -> None:
        """Nobody is waited for."""

    async def wait_for_adoption(self, version: Version) -> None:
        """Nobody is waited for: an engine adopts a version when a request asks for it."""

    async def _pick(self, *, deadline_s: float) -> MortalLearner:
        if self._learner is None or self._learner.lost.is_set():
            self._learner = MortalLearner(self.run, self._publish, self._dies)
        return self._learner

    def _publish(self, step: int, rollout_ids: Sequence[str]) -> Published:
        weights = {"w": Tensor("bf16", (2,), np.array([step, 1], np.uint16))}
        parent = self._versions.get(step - 1 if rollout_ids else step)
        done = self._channel.publish(weights, step=step, parent=parent, rollout_ids=tuple(rollout_ids))
        self._versions[step] = done.version
        return done

    def set_head(self, version: Version) -> None:
        for engine in self.slow:
            self.do(engine.follow(version))

    def do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._at_work.add(task)
        task.add_done_callback(self._at_work.discard)

    def _never(self, spec: RolloutSpec) -> Rollout:
        raise AssertionError(spec)

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        published = max(self._versions) if self._learner is None else self._learner.made.step
        self.behind += spec.min_step > published
        played = await run_rollout(
            spec,
            runtime=self.runtime,
            policy=self.fleet,
            chat=CHAT,
            harness=LIMITS,
            clock=asyncio.get_running_loop().time,
        )
        return store_rollout(played, self.files, kept=kept).with_task(spec.task)


class Tasks:
    """Endless tasks of one kind."""

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return Task(source="s", split=split, index=index, family="f", instruction="fix", files={"a.py": ""}, exports=())


@pytest.fixture
def config() -> RunConfig:
    raw: dict[str, Any] = {
        "experience": {"groups_per_step": 2, "group_size": 4, "max_lag": 2, "quarantine": False},
        "rl": {"steps": STEPS, "checkpoint_every": CHECKPOINT_EVERY},
        "evals": {"every": 10 * STEPS},
    }
    return build(RunConfig, raw)


@pytest.mark.parametrize("engines_die", [False, True])
def test_no_rollout_is_lost_or_invalid_by_waiting_for_versions_engines_or_tokens(
    config: RunConfig, tmp_path: Path, engines_die: bool
) -> None:
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)

    async def story() -> tuple[Conductor, SlowProcesses, float]:
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        processes, loop = SlowProcesses(config, run, dies={2, 3, 5, 6}), asyncio.get_running_loop()
        if engines_die:
            for i in range(6):
                dying = functools.partial(lambda engine: processes.do(engine.restart()), processes.slow[i % 2])
                loop.call_later(1500.0 * (i + 1), dying)
        conductor = Conductor(run, config, telemetry, processes, Tasks(), CHAT)  # type: ignore[arg-type]
        await conductor.reinforce()
        telemetry.close()
        return conductor, processes, loop.time()

    conductor, processes, took_s = run_at_once(story())
    assert conductor.step == STEPS
    assert took_s > STEPS * STEP_S, "steps of ten minutes"
    assert 40 * TOKEN_S > DEADLINE_S, "a completion takes longer than it may be silent"
    assert processes.behind == 0, "none began before its version was published"
    ledger = conductor.ledger
    assert "invalid" not in ledger.states(), [row.reason for row in ledger.rows() if row.state == "invalid"]
    audit(ledger, run / "traces", LineageSteps(DirectoryStore(run / "weights"))).require_sound()
    lost = [event for event in read_events(run / "events") if event["kind"] == "lineage" and event["state"] == "lost"]
    assert len(lost) == 4
    assert sum(n for state, n in ledger.states().items() if state in ("trained", "no-signal")) == STEPS * 8
    conductor.close()
