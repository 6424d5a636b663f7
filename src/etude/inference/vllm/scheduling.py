"""vLLM's scheduler with two changes: strict priorities, and an error for a request whose grammar failed.

vLLM (0.32) orders its queue by priority, but does not preempt running requests for waiting ones: when long rollouts
have every sequence slot, a production request waits until one of them ends. Here, before a step is planned, the
youngest rollouts return to the queue by vLLM's own preemption. They keep their tokens and their random state, and later
compute again what the prefix cache no longer has.

A grammar can become too complex for its matcher while the text grows. vLLM's backend "guidance" then allows the end
token only, so the text would end as if it were complete. Here the request fails instead.

Only vLLM's core loads this module (`--scheduler-cls`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # type: ignore[import-not-found]
from vllm.v1.core.sched.interface import PauseState  # type: ignore[import-not-found]
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]

URGENT = 0
"""The priority of production; rollouts have a higher number."""


class _Strict:
    """The scheduling of `StrictScheduler` and `StrictAsyncScheduler`, as a mix-in before vLLM's `Scheduler`."""

    waiting: Any
    running: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.structured_output_manager  # type: ignore[attr-defined]
        manager.accept_tokens = partial(_accept_tokens, manager.accept_tokens)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Preempt rollouts if needed, then plan a step."""
        if self._pause_state == PauseState.UNPAUSED:  # type: ignore[attr-defined]
            self._make_way()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _make_way(self) -> None:
        """Preempt rollouts until all waiting production requests fit, or no rollout is left."""
        urgent = list(itertools.takewhile(lambda one: one.priority <= URGENT, self.waiting)) if self.waiting else []
        while urgent and not self._fit(urgent):
            victim = max(self.running, key=lambda one: (one.priority, one.arrival_time), default=None)
            if victim is None or victim.priority <= URGENT or not self._request_blocks_can_be_freed(victim):  # type: ignore[attr-defined]
                return
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())  # type: ignore[attr-defined]

    def _fit(self, urgent: list[Any]) -> bool:
        """Return whether there are sequence slots and blocks for these requests, without counting shared prefixes."""
        seats = self.max_num_active_reqs - len(self.running)  # type: ignore[attr-defined]
        blocks = sum(one.num_tokens // self.block_size + 1 for one in urgent)  # type: ignore[attr-defined]
        free: int = self.kv_cache_manager.block_pool.get_num_free_blocks()
        return len(urgent) <= seats and blocks <= free


def _accept_tokens(accept: Callable[[Any, list[int]], bool], request: Any, token_ids: list[int]) -> bool:
    """Advance a request's grammar by sampled tokens with vLLM's `accept`, and return whether that succeeded.

    False makes vLLM end the request as failed. Unlike `accept` it is also returned when the matcher has an error."""
    accepted = accept(request, token_ids)
    structured = request.structured_output_request
    matcher = getattr(structured.grammar, "ll_matcher", None) if structured is not None else None
    return accepted and not (matcher is not None and matcher.is_error())


class StrictScheduler(_Strict, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler with strict priorities, for the CPU build, which plans a step after the previous one ended."""


class StrictAsyncScheduler(_Strict, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler with strict priorities, for builds that plan a step while the previous one runs."""
