"""Agent programs: the built-in loop, or a plug-in of kind "harness".

A program works on an `Episode`. A plug-in has a deadline, and the errors that it causes name the plug-in."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Protocol

from etude.config import Plugin
from etude.errors import ContextFull, EngineError, EtudeError, MachineError, PluginError
from etude.harness.compaction import Compactor, RoomMaker
from etude.harness.config import PROGRAMS
from etude.harness.episode import AgentRun, Episode, EpisodeEnded
from etude.harness.tools import PLUGIN_GRACE_S
from etude.plugins import Kind, called, make, unusable
from etude.records.completion import Completion, CompletionRequest
from etude.records.rollout import Ending
from etude.seams import Policy


class Harness(Protocol):
    """The interface of an agent program that is a plug-in of kind "harness". The built-in program is `run_agent`."""

    async def run(self, episode: Episode) -> None:
        """Work on the episode until `episode.ending` is set. A program that returns earlier has not submitted.

        Do not catch `EpisodeEnded`, `EngineError` and `MachineError` of the episode. `ContextFull` may be caught. Any
        other exception is a defect of the plug-in and ends the run with `PluginError`. So does a program that runs
        longer than its tool calls may take together (completions do not count). Many episodes run at the same time on
        one object. When a rollout is cancelled, so is this coroutine."""
        ...


class Loop:
    """The built-in agent program, as a `Harness`."""

    async def run(self, episode: Episode) -> None:
        await run_agent(episode)


async def run_agent(
    episode: Episode, room: RoomMaker | None = None, *, until: Callable[[], bool] = lambda: False
) -> None:
    """Run the built-in program: sample a turn, run its tool calls, and repeat until the episode ends.

    `room` keeps the conversation within the context. By default the model summarises it (`Compactor`) if
    `harness.summary_tokens` is set; otherwise a full context ends the episode. `until`: asked before each turn, when
    there is room for it; if it returns True the program stops there."""
    if room is None and episode.limits.summary_tokens:
        room = Compactor(episode)
    while episode.ending is None:
        if room is not None:
            await room.make_room(episode)
        if episode.ending is None:
            if until():
                return
            await episode.act(await episode.ask())


async def run_program(episode: Episode) -> AgentRun:
    """Run the agent program that the config names (`harness.program`) to its end.

    Raises `ChatError` for a chat template, `ConfigError` for a command, and `PluginError` for a plug-in that cannot be
    used: the user must fix it."""
    plugin = episode.limits.program
    if not isinstance(plugin, Plugin):
        return await run_to_end(episode, run_agent(episode))
    harness = _load_harness(plugin)
    if plugin.path in PROGRAMS:
        return await run_to_end(episode, harness.run(episode))
    return await run_plugin(plugin, harness, episode)


@functools.lru_cache(maxsize=16)
def _load_harness(plugin: Plugin) -> Harness:
    harness: Harness = make(Kind.HARNESS, plugin)
    return harness


async def run_plugin(plugin: Plugin, harness: Harness, episode: Episode) -> AgentRun:
    """Run the agent program `harness` of a plug-in to its end. `plugin` names it in errors.

    Raises `PluginError` when the program fails, or takes longer than `harness.max_turns` tool calls may take
    (`tool_deadline_s` each, and 30 s). The time in which it waits for the policy does not count. Also raises
    `ChatError`."""
    limit_s = episode.limits.max_turns * episode.limits.tool_deadline_s + PLUGIN_GRACE_S

    async def run() -> None:
        with called(Kind.HARNESS, plugin, "run"):
            returned: object = await harness.run(episode)  # type: ignore[func-returns-value]
        if returned is not None:
            raise unusable(Kind.HARNESS, plugin, f"run returned {type(returned).__name__}, not None")

    try:
        async with asyncio.timeout(limit_s) as limit:
            episode.policy = DeadlinePausingPolicy(episode.policy, limit, limit_s)
            return await run_to_end(episode, run())
    except (EtudeError, TimeoutError) as error:
        if not limit.expired():
            raise
        facts = f"run has not returned within {limit_s:g} s, without the time in which it waited for the policy"
        hint = "give every wait in the harness a deadline, and do not catch EpisodeEnded"
        raise PluginError(f"harness {plugin} hangs", facts, hint=hint) from error


async def run_to_end(episode: Episode, run: Coroutine[None, None, None]) -> AgentRun:
    """Run an agent program (`run`, its coroutine) on an episode, and return the result.

    A failure of a machine or an engine is returned as `AgentRun.failure`, not raised. A full context is an ending."""
    try:
        await run
    except ContextFull:
        episode.ending = episode.ending or Ending.CONTEXT
    except EpisodeEnded:
        pass  # its ending is set
    except (EngineError, MachineError) as error:
        episode.failure = episode.failure or error
    return episode.result()


class DeadlinePausingPolicy:
    """The policy of an agent program with a deadline. The deadline does not run while the program waits for a
    completion.

    `limit` is the asyncio timeout of the program, and `limit_s` the time that it has, in seconds. The wrapped policy
    has its own limit for an engine without progress."""

    def __init__(self, policy: Policy, limit: asyncio.Timeout, limit_s: float) -> None:
        self._policy, self._limit = policy, limit
        self._limit_s = self._left_s = limit_s
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

    def used_s(self) -> float:
        """Return the seconds that the program has used, without the time in which it waited for completions."""
        running_s = 0.0 if self._num_pending else asyncio.get_running_loop().time() - self._since
        return self._limit_s - self._left_s + running_s

    def _set_deadline(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # the timeout has expired or ended
            self._limit.reschedule(when)
