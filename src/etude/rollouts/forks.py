"""Rollouts whose machine is forked after the first summary, so that the summary gets credit by several continuations.

The machine is saved after the first summary and closed. Then the continuations run one after the other, each on a new
fork of it and with a seed of its own. So they are independent samples of what follows the summary, the first one
included: on a runtime whose forks have files only (`RuntimeInfo.forks_memory`), no continuation has the processes that
ran before. A rollout holds one machine and one engine session at a time, with or without forks: a bounded pool of them
cannot be used up by rollouts that wait for further ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from etude.environments import prepare
from etude.errors import MachineError
from etude.harness import ChatFormat, Episode, HarnessConfig, run_agent
from etude.harness.compaction import Compactor
from etude.harness.episode import AgentRun
from etude.harness.programs import run_to_end
from etude.records.rollout import Boundary, Fork, Rollout, RolloutSpec, Unforked
from etude.rollouts.rollout import begin_episode, end_rollout, invalid_rollout, not_run, request_options
from etude.seams import Holding, Policy, Runtime


class _Saved(NamedTuple):
    """An episode that stopped after its first summary. `snapshot`: the state of its machine. `wall_s`: how long it took
    until there, in seconds."""

    episode: Episode
    room: Compactor
    run: AgentRun
    snapshot: str
    wall_s: float


async def run_forked(
    spec: RolloutSpec,
    *,
    runtime: Runtime,
    policy: Policy,
    chat: ChatFormat,
    harness: HarnessConfig,
    clock: Callable[[], float] = time.monotonic,
) -> list[Rollout]:
    """Run a rollout up to its first summary, and `spec.forks` continuations from there to their ends.

    Returns the continuations; the first one has the id of `spec`. Each has the whole trace, and `Rollout.fork` says
    which turns are shared. Limits of turns and of seconds hold for each continuation with the shared part. A rollout
    without a summary, or whose machine cannot be saved because of what the agent did to it (`Rollout.unforked`), is
    returned alone.

    A machine that cannot be saved or forked for another reason is not the agent's fault: the continuations that need it
    are invalid. The arguments and errors are those of `run_rollout`; `harness.summary_tokens` must be set."""
    began = clock()
    try:
        (machine,) = await runtime.fork(await prepare(runtime, spec.task), 1)
    except MachineError as error:
        return [not_run(spec, Boundary.MACHINE, error, wall_s=clock() - began)]
    with contextlib.ExitStack() as holds:
        try:
            episode = begin_episode(spec, machine, policy=policy, chat=chat, harness=harness, clock=clock)
            first = await _first_part(spec, episode, runtime, holds, clock=clock, began=began)
        finally:
            await machine.close()
        if isinstance(first, Rollout):
            return [first]
        turns = first.run.trace.turns
        sampled = sum(len(turn.completion.token_ids) for turn in turns)
        fork = Fork(origin=spec.rollout_id, num_turns=len(turns), num_sampled=sampled)
        found = [await _continuation(spec.continuation(n), first, runtime, clock=clock) for n in range(spec.forks)]
        return [msgspec.structs.replace(one, fork=fork) for one in found]


async def _first_part(
    spec: RolloutSpec,
    episode: Episode,
    runtime: Runtime,
    holds: contextlib.ExitStack,
    *,
    clock: Callable[[], float],
    began: float,
) -> _Saved | Rollout:
    """Run an episode up to its first summary, and save its machine; or to its end, if it cannot be forked.

    The snapshot is kept until `holds` is closed."""
    room = Compactor(episode)
    run = await run_to_end(episode, run_agent(episode, room, until=lambda: room.number > 0))
    if episode.ending is not None or run.failure is not None:
        return await end_rollout(spec, episode, run, runtime, clock=clock, began=began)
    try:
        snapshot = await episode.machine.snapshot()
        if isinstance(runtime, Holding):
            runtime.hold(snapshot)
            holds.callback(runtime.release, snapshot)
    except MachineError as error:
        return invalid_rollout(spec, Boundary.MACHINE, error, run, wall_s=clock() - began)
    except (OSError, ValueError) as error:
        run = await run_to_end(episode, _go_on(episode, room))
        alone = await end_rollout(spec, episode, run, runtime, clock=clock, began=began)
        why = Unforked.GONE if isinstance(error, OSError) else Unforked.TOO_LARGE
        return msgspec.structs.replace(alone, unforked=why)
    return _Saved(episode, room, run, snapshot, clock() - began)


async def _continuation(spec: RolloutSpec, saved: _Saved, runtime: Runtime, *, clock: Callable[[], float]) -> Rollout:
    """Run one continuation on a fork of the saved machine, to its end."""
    began = clock() - saved.wall_s
    try:
        (machine,) = await runtime.fork(saved.snapshot, 1)
    except MachineError as error:
        return invalid_rollout(spec, Boundary.MACHINE, error, saved.run, wall_s=clock() - began)
    try:
        episode, room = saved.episode.branch(machine, request_options(spec)), saved.room.branch()
        run = await run_to_end(episode, _go_on(episode, room))
        return await end_rollout(spec, episode, run, runtime, clock=clock, began=began)
    finally:
        await machine.close()


async def _go_on(episode: Episode, room: Compactor) -> None:
    """Continue an episode after the summary for which `run_agent` stopped."""
    await episode.act(await episode.ask())
    await run_agent(episode, room)
