"""One group: siblings of one task, on machines forked from one snapshot, each with its own end.

A sibling that fails does not touch the others; a fork that fails makes all of them invalid at the machine boundary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from etude.errors import MachineError
from etude.harness import ChatFormat, HarnessConfig
from etude.records.rollout import Rollout, RolloutSpec
from etude.rollouts.rollout import on_machine, prepare, unplaced
from etude.seams import Policy, Runtime


async def run_group(
    specs: Sequence[RolloutSpec],
    *,
    runtime: Runtime,
    policy: Policy,
    chat: ChatFormat,
    harness: HarnessConfig,
    finished: Callable[[Rollout], None] = lambda rollout: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Rollout]:
    """Run siblings side by side; their rollouts in the order of `specs`, each told to `finished` as soon as it ends.

    Raises `ValueError` when the specs are not siblings of one task.
    """
    if len({(s.group_id, s.task.task_id) for s in specs}) != 1:
        raise ValueError("a group is one or more rollouts of one task, under one group id")
    began = clock()
    try:
        snapshot = await prepare(specs[0].task, runtime)
        machines = await runtime.fork(snapshot, len(specs))
    except MachineError as error:
        lost = [unplaced(spec, error, wall_s=clock() - began) for spec in specs]
        for rollout in lost:
            finished(rollout)
        return lost

    async def one(index: int) -> Rollout:
        rollout = await on_machine(
            specs[index],
            machines[index],
            policy=policy,
            chat=chat,
            harness=harness,
            clock=clock,
            began=began,
        )
        finished(rollout)
        return rollout

    try:
        async with asyncio.TaskGroup() as siblings:
            tasks = [siblings.create_task(one(i), name=spec.rollout_id) for i, spec in enumerate(specs)]
    finally:
        for machine in machines:  # idempotent; a sibling that was cancelled before it began has not closed its own
            await machine.close()
    return [task.result() for task in tasks]
