"""A fake of a run's workers and graders: no processes, invented rollouts and grades."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from etude.records.rollout import Outcome, RolloutSpec


class FakeRunProcesses:
    """A fake of a run's workers and graders, in this process.

    A rollout takes `takes_s(spec)` seconds and is `play(spec)`; a grade is `judge(rollout)`. `config` is the config of
    a run, and `max_running` the `Limit` of concurrent rollouts."""

    def __init__(
        self,
        config: Any,
        max_running: Any,
        *,
        play: Callable[[RolloutSpec], Any],
        judge: Callable[[Any], Outcome],
        takes_s: Callable[[RolloutSpec], float] = lambda _: 0.0,
    ) -> None:
        self.config, self.max_running = config, max_running
        self._play, self._judge, self._takes_s = play, judge, takes_s

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> Any:
        await asyncio.sleep(self._takes_s(spec))
        return self._play(spec)

    async def grade(self, rollout: Any) -> Outcome:
        return self._judge(rollout)
