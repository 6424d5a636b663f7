"""The rollout worker process: harness and machines. It holds no weights and no answers. What it played it stores in
the run folder, and tells the conductor what there is to know of it.

Its policy is the fleet of engines, of which the conductor tells it again whenever something is new. How many rollouts
run here is the conductor's to bound.
"""

from __future__ import annotations

import asyncio

from etude.environments.backends import runtime_of
from etude.harness import ChatFormat
from etude.inference import Assignment, Fleet
from etude.inference.registry_client import FleetUpdater
from etude.inference.registry_messages import Roster
from etude.loop import child
from etude.loop.config import open_tasks, read_config
from etude.loop.places import rollout_files
from etude.loop.played import HandedOver, hand_over
from etude.records import Rollout, RolloutSpec
from etude.rollouts import ScriptedPolicy, run_rollout
from etude.rollouts.rollout import session_of
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks.scripts import Script, WithBaselines, write_reference
from etude.telemetry import Telemetry

HEARTBEAT_S, FAR_HEARTBEAT_S = 5.0, 2.0
"""How often an engine that holds a request is asked whether it still answers. A line to another region breaks more
often than a process of this host hangs, and what is asked twice comes out the same."""


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    runtime = runtime_of(config.machines)
    chat = ChatFormat.load(run / "tokenizer")
    stable = config.experience.max_lag == 0
    fleet = Fleet(
        {},
        assignment=Assignment.STABLE if stable else Assignment.LEAST_LOADED,
        heartbeat_s=FAR_HEARTBEAT_S if config.fleet.listen else HEARTBEAT_S,
    )
    following, files = FleetUpdater(fleet), rollout_files(run)

    async def engines(roster: Roster) -> dict[str, int]:
        """The fleet as it is now; how many sessions each engine has."""
        await following.apply(roster)
        return fleet.sessions()

    async def stored(rollout: Rollout, *, kept: bool, looks: bool) -> HandedOver:
        """In a thread: the disk may be slow, and what was handed in large."""
        return await asyncio.to_thread(hand_over, rollout, files, kept=kept, looks=looks, chat=None if kept else chat)

    async def rollout(spec: RolloutSpec, kept: bool) -> HandedOver:
        """A rollout of training, whose file is `kept`; or of an evaluation, which has a transcript."""
        try:
            played = await run_rollout(spec, runtime=runtime, policy=fleet, chat=chat, harness=config.harness)
        finally:
            fleet.forget(session_of(spec))
        return await stored(played, kept=kept, looks=config.experience.quarantine)

    async def baseline(spec: RolloutSpec, kind: str) -> HandedOver:
        """A rollout of a script that needs no model: "oracle" or "random"."""
        policy = ScriptedPolicy(_script(kind, open_tasks(config, canaries=False), spec), chat)
        played = await run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=config.harness)
        return await stored(played, kept=False, looks=False)

    async def ready() -> bool:
        return True

    return {
        "engines": ((Roster,), engines),
        "rollout": ((RolloutSpec, bool), rollout),
        "baseline": ((RolloutSpec, str), baseline),
        "ready": ((), ready),
    }


def _submit() -> Script:
    """The agent that does nothing: the random baseline of a source without baselines of its own."""
    yield "submit", {}


def _script(kind: str, source: TaskSource, spec: RolloutSpec) -> Script:
    """What a baseline plays. Only the oracle sees an answer, and nothing of a model runs beside it."""
    if isinstance(source, WithBaselines):
        return source.baseline(spec.task, kind, seed=spec.seed)
    return write_reference(spec.task, source.answer(spec.task)) if kind == "oracle" else _submit()


if __name__ == "__main__":
    child.main(handlers)
