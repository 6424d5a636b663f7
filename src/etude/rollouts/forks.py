"""Rollouts whose machine is forked after the first summary, to estimate the summary's value by several continuations.

The machine is saved after the first summary and closed. The continuations then run one after the other, each on a new
fork and with its own seed. The first one runs on a fork too, so that all are equal samples of what follows the summary:
where `RuntimeInfo.forks_memory` is False, a fork has the files, but no running processes.

With or without forks, a rollout uses one machine at a time, and waits for one completion at a time. So rollouts that
wait for their next machine cannot block each other in a pool of limited size."""

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
    """An episode that stopped after its first summary.

    `room`: its compactor. `run`: its result so far. `snapshot`: the id of the snapshot of its machine. `wall_s`: the
    time from the start of the rollout to the snapshot, in seconds."""

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
    """Run a rollout with the built-in program up to its first summary, then `spec.forks` continuations to their ends.

    Returns the continuations, `spec.forks` of them; the first one has the id of `spec`. The trace of each begins with
    the shared turns (`Rollout.fork`), which count in its limits of turns and of seconds. A continuation whose machine
    cannot be created is invalid.

    Returns only one rollout, without `fork`, in these cases: it ended before a summary; the agent caused that the
    machine cannot be saved, and it went on alone (`Rollout.unforked`); or it is invalid, since an engine or a machine
    failed before the fork.

    The arguments are those of `run_rollout`, without `logs`; `harness.summary_tokens` must be above 0, and
    `harness.program` the built-in one. The errors are those of `run_rollout`."""
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
    """Run an episode up to its first summary and save its machine, or run it to its end if there is nothing to fork.

    Returns `_Saved`, or a finished rollout: it ended before a summary, or the agent caused that the machine cannot be
    saved, or it is invalid. `holds` keeps the snapshot until it is closed. `began` is the start by `clock`."""
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
    """Run an episode from the turn before which `run_agent` stopped to its end.

    `run_agent` had already called `room.make_room` for this turn, so it is not called again."""
    await episode.act(await episode.ask())
    await run_agent(episode, room)
