"""The rollout worker process: runs the agent loop and its machines. It has no weights and no hidden answers.

It stores each rollout as a file in the run folder and returns a summary to the conductor. Completions come from the
run's engines; the conductor sends a new list of them whenever it changes. The conductor also limits how many rollouts
run here."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from etude.environments.backends import runtime_from_config
from etude.harness import ChatFormat
from etude.harness.config import LOOP
from etude.inference import Assignment, Fleet
from etude.inference.registry_client import FleetUpdater
from etude.inference.registry_messages import Roster
from etude.loop import child
from etude.loop.blocked import interrupt_blocking
from etude.loop.config import open_tasks, read_config
from etude.loop.locations import rollout_files
from etude.loop.rollout_result import RolloutReply, store_rollout
from etude.records import Rollout, RolloutSpec
from etude.rollouts import ScriptedPolicy, run_rollout
from etude.rollouts.forks import run_forked
from etude.rollouts.logs import FOLDER as LOGS
from etude.rollouts.model_url import UrlPolicy, read_endpoint
from etude.rollouts.rollout import session_of
from etude.run import RunFolder
from etude.seams import TaskSource
from etude.tasks.scripts import Script, WithBaselines, write_reference
from etude.telemetry import Telemetry

HEARTBEAT_S, FAR_HEARTBEAT_S = 5.0, 2.0
"""Seconds between health checks of an engine that has a request in flight. Connections to another region break more
often than a local process hangs, and a repeated request gives the same result."""


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    """Return the RPC methods of a worker process, by name."""
    config = read_config(run)
    interrupt_blocking(config)
    runtime = runtime_from_config(config.machines)
    chat = ChatFormat.load(run / "tokenizer")
    scripted = (
        replace(config.harness, program=LOOP) if config.harness.is_command else config.harness
    )  # scripts use etude's tools
    stable = config.experience.max_lag == 0
    fleet = Fleet(
        {},
        assignment=Assignment.STABLE if stable else Assignment.LEAST_LOADED,
        heartbeat_s=FAR_HEARTBEAT_S if config.fleet.listen else HEARTBEAT_S,
    )
    following, files = FleetUpdater(fleet), rollout_files(run)
    endpoint = read_endpoint(run.path)  # of an evaluation of a model at a URL
    outside = UrlPolicy(endpoint, chat) if endpoint else None

    async def engines(roster: Roster) -> dict[str, int]:
        """Replace the list of engines. Returns the number of sessions by engine."""
        await following.apply(roster)
        return fleet.sessions()

    async def stored(rollout: Rollout, *, kept: bool, find_signs: bool) -> RolloutReply:
        """Store a rollout, in a thread: the disk may be slow, and exports large."""
        return await asyncio.to_thread(
            store_rollout, rollout, files, kept=kept, find_signs=find_signs, chat=None if kept else chat
        )

    async def rollout(spec: RolloutSpec, kept: bool) -> RolloutReply:
        """Run a rollout: of training (`kept`), or of an evaluation, which returns its turns as text.

        The reply of a rollout whose machine was forked has its other continuations."""
        policy, harness = outside or fleet, config.harness
        try:
            if spec.forks > 1:
                found = await run_forked(spec, runtime=runtime, policy=policy, chat=chat, harness=harness)
            else:
                alone = run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=harness, logs=run / LOGS)
                found = [await alone]
        finally:
            for number in range(spec.forks):
                fleet.forget(session_of(spec.continuation(number)))
        reply, *others = [await stored(one, kept=kept, find_signs=config.experience.quarantine) for one in found]
        if outside is not None:
            summary, turns = outside.counted(found[0].trace, reply.summary, reply.turns)
            return msgspec.structs.replace(reply, summary=summary, turns=turns)
        return msgspec.structs.replace(reply, continuations=tuple(others))

    async def baseline(spec: RolloutSpec, kind: str) -> RolloutReply:
        """Run a scripted agent that needs no model: "oracle" or "random".

        The task source is asked in threads: if it is a plug-in, a call may block until its deadline."""
        script = await asyncio.to_thread(lambda: _script(kind, open_tasks(config, canaries=False), spec))
        policy = ScriptedPolicy(script, chat, in_thread=True)
        played = await run_rollout(spec, runtime=runtime, policy=policy, chat=chat, harness=scripted)
        return await stored(played, kept=False, find_signs=False)

    async def ready() -> bool:
        return True

    return {
        "engines": ((Roster,), engines),
        "rollout": ((RolloutSpec, bool), rollout),
        "baseline": ((RolloutSpec, str), baseline),
        "ready": ((), ready),
    }


def _submit() -> Script:
    """An agent that does nothing: the random baseline of a source without its own baselines."""
    yield "submit", {}


def _script(kind: str, source: TaskSource, spec: RolloutSpec) -> Script:
    """The script of a baseline. Only the oracle sees an answer, and no model runs beside it."""
    if isinstance(source, WithBaselines):
        return source.baseline(spec.task, kind, seed=spec.seed)
    return write_reference(spec.task, source.answer(spec.task)) if kind == "oracle" else _submit()


if __name__ == "__main__":
    child.main(handlers)
