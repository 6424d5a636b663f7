"""vLLM's scheduler, strict about who goes first: what is urgent gets a seat and room at once, that of the rollouts.

vLLM (0.32) orders its queue by priority, but takes nothing from what runs for what waits: with every seat taken by long
rollouts a request of production waits for one of them to end. Here the youngest of them goes back to the queue before
a step is planned, by vLLM's own preemption: it keeps its tokens and its stream of random numbers, and later computes
again what the prefix cache no longer holds. Loaded by vLLM's core alone (`--scheduler-cls`).
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
from vllm.v1.core.sched.interface import PauseState  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]

URGENT = 0
"""The priority of production; the adapter gives rollouts a later one."""


class _Strict:
    """Before a `Scheduler` in the order of resolution."""

    waiting: Any
    running: Any
    kv_cache_manager: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step."""
        if self._pause_state == PauseState.UNPAUSED:  # type: ignore[attr-defined]
            self._make_way()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _make_way(self) -> None:
        """Have rollouts give way until all that is urgent can begin, or none of them is left."""
        urgent = list(itertools.takewhile(lambda one: one.priority <= URGENT, self.waiting)) if self.waiting else []
        while urgent and not self._fit(urgent):
            victim = max(self.running, key=lambda one: (one.priority, one.arrival_time), default=None)
            if victim is None or victim.priority <= URGENT or not self._request_blocks_can_be_freed(victim):  # type: ignore[attr-defined]
                return
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())  # type: ignore[attr-defined]

    def _fit(self, urgent: list[Any]) -> bool:
        """Whether there are seats and blocks for them, shared prefixes not counted."""
        seats = self.max_num_active_reqs - len(self.running)  # type: ignore[attr-defined]
        blocks = sum(one.num_tokens // self.block_size + 1 for one in urgent)  # type: ignore[attr-defined]
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return len(urgent) <= seats and blocks <= free


class StrictScheduler(_Strict, Scheduler):  # type: ignore[misc]
    """For the CPU build, which plans a step after the one before."""


class StrictAsyncScheduler(_Strict, AsyncScheduler):  # type: ignore[misc]
    """For builds that plan a step while another runs."""
