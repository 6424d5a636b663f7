"""The stand-ins for worker and learner in `benchmarks.run.loop_scale`: processes of their own, called over the wire.

A worker waits as long as a rollout takes, stores 200 tokens in a rollout's file and says what there is to know of it;
a grader draws the reward; the learner makes and records the batch from those files, waits as long as a step takes, and
publishes two numbers in the run's real channel. `python -m benchmarks.run.loop_scale_parts ROLE RUN SOCKET STEP_S`
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from pathlib import Path

import numpy as np
from tests.small_rollouts import chain

from etude.experience import record_batch
from etude.loop.child import Handlers
from etude.loop.locations import rollout_files
from etude.loop.rollout_result import RolloutReply, store_rollout
from etude.loop.rpc import serve
from etude.records import Batch, Graded, Rollout, RolloutSpec, Task, Version
from etude.records.rollout import Ending
from etude.records.sample import Published, StepReport
from etude.records.summary import BatchPlan, BatchRef, RolloutSummary
from etude.records.task import Trust
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.testing import FakeLearner
from etude.weights.chain.channel import Channel
from etude.weights.tensors import Tensor

A_ROLLOUT_S = 1.0


def play(spec: RolloutSpec) -> Rollout:
    return Rollout(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        attempt=spec.attempt,
        task=spec.task,
        trace=chain([(spec.min_step, 100)], [(spec.min_step, 94)]),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=1.0,
        tool_s=0.0,
    )


def takes_s(spec: RolloutSpec) -> float:
    return A_ROLLOUT_S * random.Random(spec.seed).uniform(0.5, 1.5)


async def ready() -> bool:
    return True


def worker(run: RunFolder) -> Handlers:
    """Rollouts, and the grades of all."""
    files = rollout_files(run)

    async def rollout(spec: RolloutSpec, kept: bool) -> RolloutReply:
        await asyncio.sleep(takes_s(spec))
        return store_rollout(play(spec), files, kept=False)  # not durable: this machine's disk is not measured

    async def grade(task: Task, summary: RolloutSummary) -> Graded:
        reward = float(random.Random(summary.rollout_id).random() < 0.5)
        return Graded.of(reward, {"tests": reward}, trust=Trust.DATA, reason="drawn")

    return {"ready": ((), ready), "rollout": ((RolloutSpec, bool), rollout), "grade": ((Task, RolloutSummary), grade)}


def learner(run: RunFolder, step_s: float) -> Handlers:
    """Batches that are recorded and read, steps that are waited for, versions of two numbers."""
    made, files, channel = FakeLearner(), rollout_files(run), Channel(DirectoryStore(run / "weights"))
    versions, offered = list[Version | None]([None]), list[tuple[str, ...]]()

    async def begin(checkpoint: str) -> int:
        return made.step

    held = dict[str, Batch]()

    async def record(plan: BatchPlan) -> BatchRef:
        batch, ref = await asyncio.to_thread(record_batch, run / "traces", plan, files.read)
        held[ref.digest] = batch
        return ref

    async def forward_backward(step: int, digest: str) -> StepReport:
        await asyncio.sleep(step_s)
        made.batches.clear()
        return made.forward_backward(held.pop(digest))

    async def optim_step() -> dict[str, float]:
        return dict(made.optim_step())

    async def offer(rollout_ids: tuple[str, ...]) -> None:
        offered[:] = [rollout_ids]

    async def published() -> Published:
        weights = {"w": Tensor("bf16", (2,), np.array([made.step, 1], np.uint16))}
        done = channel.publish(weights, step=made.step, parent=versions[-1], rollout_ids=offered[0])
        versions.append(done.version)
        return done

    async def probe(token_ids: list[int]) -> list[float]:
        return []

    async def parity() -> str:
        return ""

    async def save(path: str) -> None:
        made.save(path)

    return {
        "ready": ((), ready),
        "begin": ((str,), begin),
        "record": ((BatchPlan,), record),
        "forward_backward": ((int, str), forward_backward),
        "optim_step": ((), optim_step),
        "offer": ((tuple[str, ...],), offer),
        "published": ((), published),
        "probe": ((list[int],), probe),
        "parity": ((), parity),
        "save": ((str,), save),
    }


def main() -> None:
    role, folder, fd, step_s = sys.argv[1:]
    run = RunFolder.open(Path(folder))
    handlers = worker(run) if role == "worker" else learner(run, float(step_s))

    async def child() -> None:
        await serve(socket.socket(fileno=int(fd)), handlers)

    asyncio.run(child())
    os._exit(0)


if __name__ == "__main__":
    main()
