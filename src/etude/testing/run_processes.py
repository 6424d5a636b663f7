"""The workers and graders of a run without processes: rollouts and grades that are made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from etude.records.rollout import Outcome, RolloutSpec


class FakeRunProcesses:
    """Workers that wait `takes_s(spec)` and return `play(spec)`, graders that return `judge(rollout)`, in this process.
    `config` is a run's, `max_running` a `Limit`."""

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
