"""The agent program of a rollout: the built-in loop, or a plug-in of kind "harness".

A plug-in can call `run_agent` with changed arguments (another instruction, a wrapper around the policy), or call the
policy itself and return its turns. A plug-in has a deadline, and its errors and invalid results name the plug-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from etude.config import Plugin
from etude.errors import EngineError, EtudeError, MachineError, PluginError
from etude.harness.agent import AgentRun, RequestOptions, run_agent
from etude.harness.chat import ChatFormat
from etude.harness.config import HarnessConfig
from etude.harness.tools import PLUGIN_GRACE_S, ToolSet
from etude.plugins import Kind, called, make, unusable
from etude.records.completion import Completion, CompletionRequest
from etude.records.rollout import Ending, Trace
from etude.records.task import Task
from etude.seams import Machine, Policy


class Harness(Protocol):
    """An agent program. A plug-in of kind "harness" is one; the built-in loop is `run_agent`."""

    async def run(
        self,
        task: Task,
        machine: Machine,
        *,
        policy: Policy,
        chat: ChatFormat,
        tools: ToolSet,
        limits: HarnessConfig,
        options: RequestOptions,
        clock: Callable[[], float],
    ) -> AgentRun:
        """Work on a task on its machine, within `limits`, and return the turns and how it ended.

        `policy`: samples completions. `chat`: messages to tokens and back. `tools`: those of the config. `options`:
        settings of every request. `clock`: returns seconds. What the agent causes is returned as an `Ending`. Raise
        `EngineError` and `MachineError`, or return them as `AgentRun.failure`; any other exception is a defect of the
        plug-in and ends the run. Many rollouts run at the same time on one object. The coroutine is cancelled when its
        rollout is."""
        ...


@functools.lru_cache(maxsize=16)
def _load_harness(plugin: Plugin) -> Harness:
    harness: Harness = make(Kind.HARNESS, plugin)
    return harness


async def run_program(
    task: Task,
    machine: Machine,
    *,
    policy: Policy,
    chat: ChatFormat,
    tools: ToolSet,
    limits: HarnessConfig,
    options: RequestOptions,
    clock: Callable[[], float] = time.monotonic,
) -> AgentRun:
    """Run the agent program of the config (`limits.program`). Arguments as in `Harness.run`. Raises `ChatError` and
    `PluginError`."""
    plugin = limits.program
    if not isinstance(plugin, Plugin):
        return await run_agent(
            task, machine, policy=policy, chat=chat, tools=tools, limits=limits, options=options, clock=clock
        )
    arguments = {"chat": chat, "tools": tools, "ask": options, "clock": clock}
    return await run_plugin(
        plugin, _load_harness(plugin), task, machine, policy=policy, limits=limits, arguments=arguments
    )


class _DeadlinePausingPolicy:
    """The policy that a plug-in gets. The plug-in's deadline is suspended while it waits for a completion: the policy
    has its own limit for an engine without progress."""

    def __init__(self, policy: Policy, limit: asyncio.Timeout, limit_s: float) -> None:
        self._policy, self._limit, self._left_s = policy, limit, limit_s
        self._since, self._num_pending = asyncio.get_running_loop().time(), 0

    async def complete(self, request: CompletionRequest) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._num_pending:
            self._left_s -= loop.time() - self._since
            self._set_deadline(None)
        self._num_pending += 1
        try:
            return await self._policy.complete(request)
        finally:
            self._num_pending -= 1
            if not self._num_pending:
                self._since = loop.time()
                self._set_deadline(self._since + self._left_s)

    def _set_deadline(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the timeout has expired or ended
            self._limit.reschedule(when)


async def run_plugin(
    plugin: Plugin,
    harness: Harness,
    task: Task,
    machine: Machine,
    *,
    policy: Policy,
    limits: HarnessConfig,
    arguments: Mapping[str, Any],
) -> AgentRun:
    """Run a harness plug-in and check its result. `arguments`: the other arguments of `Harness.run`.

    Raises `PluginError`, also when the run takes longer than its tools are allowed to, not counting the time in which
    it waits for the policy."""
    limit_s = limits.max_turns * limits.tool_deadline_s + PLUGIN_GRACE_S
    try:
        async with asyncio.timeout(limit_s) as limit:
            pausing_policy = _DeadlinePausingPolicy(policy, limit, limit_s)
            with called(Kind.HARNESS, plugin, "run"):
                run = await harness.run(task, machine, policy=pausing_policy, limits=limits, **arguments)
    except (EngineError, MachineError) as error:
        return AgentRun(Trace(()), [], 0.0, None, error)
    except (EtudeError, TimeoutError) as error:
        if not limit.expired():
            raise
        facts = f"run has not returned within {limit_s:g} s, without the time in which it waited for the policy"
        raise PluginError(f"harness {plugin} hangs", facts, hint="give what it waits for a deadline") from error
    if not isinstance(run, AgentRun):
        raise unusable(Kind.HARNESS, plugin, f"run returned {type(run).__name__}, not AgentRun")
    if (run.ending is None) == (run.failure is None) or not isinstance(run.ending, Ending | None):
        raise unusable(
            Kind.HARNESS, plugin, f"its ending is {run.ending!r} and its failure {run.failure!r}: one is set"
        )
    return run
