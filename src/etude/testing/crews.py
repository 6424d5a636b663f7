"""The children of a run without processes: rollouts, grades and steps that are made up, for the real conductor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from etude.records.completion import Version
from etude.records.rollout import Outcome, RolloutSpec
from etude.records.sample import Batch, Published
from etude.records.summary import BatchPlan, BatchRef
from etude.testing.learning import FakeLearner


class FakeCaller:
    """A `FakeLearner` where a conductor expects a process to call. A step takes `step_s`; a version is what
    `publish(step, rollout_ids)` says, and a batch what `record(plan)` does, so that they can be real ones. Batches are
    not read, and it is never lost."""

    name = "learner"

    def __init__(
        self,
        publish: Callable[[int, Sequence[str]], Published],
        record: Callable[[BatchPlan], BatchRef],
        *,
        step_s: float = 0.0,
    ) -> None:
        self.lost, self._made, self._publish, self._record = asyncio.Event(), FakeLearner(), publish, record
        self._step_s, self._offered = step_s, tuple[str, ...]()

    async def call(self, method: str, kind: type, *args: Any, deadline_s: float) -> Any:
        if method == "offer":
            self._offered = args[0]
        if method == "published":
            return self._publish(self._made.step, self._offered)
        if method == "record":
            return self._record(*args)
        if method == "forward_backward":
            await asyncio.sleep(self._step_s)
            self._made.batches.clear()
            step, digest = args
            empty = Batch(batch_id=digest, step=step, samples=(), rollout_ids=(), num_loss_tokens=0)
            return self._made.forward_backward(empty)
        if method in ("optim_step", "save"):
            return getattr(self._made, method)(*args)
        return {"begin": self._made.step, "parity": "", "probe": []}.get(method)


class FakeCrew:
    """Workers that wait `takes_s(spec)` and return `play(spec)`, graders that return `judge(rollout)`, in this process.
    There are no engines, so none is behind or held to a parity class. `config` is a run's, `max_running` a `Limit`,
    `files` the `RolloutFiles` that `play` stores in."""

    def __init__(
        self,
        config: Any,
        max_running: Any,
        *,
        play: Callable[[RolloutSpec], Any],
        judge: Callable[[Any], Outcome],
        files: Any = None,
        takes_s: Callable[[RolloutSpec], float] = lambda _: 0.0,
        learner: FakeCaller | None = None,
    ) -> None:
        self.config, self.max_running, self.files = config, max_running, files
        self.engines, self.far, self.learners = dict[str, Any](), (), SimpleNamespace(pick=self._pick)
        self._play, self._judge, self._takes_s, self._learner = play, judge, takes_s, learner

    async def _pick(self, *, deadline_s: float) -> FakeCaller:
        assert self._learner is not None, "this crew was given no learner"
        return self._learner

    def wants_parity(self, learner_class: str) -> None:
        """Of nobody."""

    def head(self, version: Version) -> None:
        """Nobody follows it."""

    async def some_engine(self) -> None:
        """Nobody is waited for."""

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> Any:
        await asyncio.sleep(self._takes_s(spec))
        return self._play(spec)

    async def grade(self, rollout: Any) -> Outcome:
        return self._judge(rollout)
