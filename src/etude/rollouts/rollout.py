"""One rollout from start to end: create a machine with the task's files, run the agent, read the exported files.

This module decides whether a rollout can be graded or is invalid. Everything that the agent can cause leads to exports
that are graded; files that were deleted, are too large or became links are not exported. An invalid rollout needs
evidence from outside the machine: an `EngineError` (no inference engine answered), a `MachineError` (the machine could
not be created, or died; runtimes raise it only for causes outside the agent's reach), or a `TaskError` (the exports
that the task declares are invalid).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from etude import __version__
from etude.environments import prepare, take_exports
from etude.errors import EngineBehind, EtudeError, MachineError, TaskError
from etude.harness import ChatFormat, Episode, HarnessConfig, RequestOptions, run_program, standard_tools
from etude.harness.compaction import remove_history
from etude.harness.episode import AgentRun
from etude.records.reward import SUBMITTED, Term
from etude.records.rollout import Boundary, Ending, Invalid, Rollout, RolloutSpec, Trace
from etude.records.summary import RolloutSummary
from etude.rollouts.logs import write_log
from etude.rollouts.model_url import UrlEpisode, UrlPolicy
from etude.seams import Machine, Policy, Runtime

UNFINISHED = Ending.DEADLINE
"""The value of `Rollout.ending` in an invalid rollout, which did not end by itself."""


async def run_rollout(
    spec: RolloutSpec,
    *,
    runtime: Runtime,
    policy: Policy,
    chat: ChatFormat,
    harness: HarnessConfig,
    clock: Callable[[], float] = time.monotonic,
    logs: Path | None = None,
) -> Rollout:
    """Run one rollout to its end, and return its record.

    - `spec`: the task, the seed and the versions of the weights that may sample.
    - `runtime`: makes the machine. `policy`: samples the model's turns.
    - `chat`: converts messages to token ids and back. `harness`: agent program, tools and limits.
    - `clock`: returns the time in seconds.
    - `logs`: the folder for the output of an agent program that is a process; None keeps no logs.

    Failures of machines and engines are not raised: they make the rollout invalid (`Rollout.invalid`). Raises
    `EngineBehind` if no engine has the required policy version yet (run the rollout again later), and the errors of
    `run_program`, which the user must fix."""
    began = clock()
    try:
        snapshot = await prepare(runtime, spec.task)
        (machine,) = await runtime.fork(snapshot, 1)
    except MachineError as error:
        return not_run(spec, Boundary.MACHINE, error, wall_s=clock() - began)
    return await run_on_machine(
        spec, machine, runtime, policy=policy, chat=chat, harness=harness, clock=clock, began=began, logs=logs
    )


async def run_on_machine(
    spec: RolloutSpec,
    machine: Machine,
    runtime: Runtime,
    *,
    policy: Policy,
    chat: ChatFormat,
    harness: HarnessConfig,
    clock: Callable[[], float],
    began: float,
    logs: Path | None = None,
) -> Rollout:
    """Run one rollout on a machine that was created for it, then close the machine.

    `began` is the start of the rollout by `clock`. The other arguments are those of `run_rollout`."""
    try:
        episode = (UrlEpisode if isinstance(policy, UrlPolicy) else Episode)(
            spec.task,
            machine,
            policy=policy,
            chat=chat,
            tools=standard_tools(harness.tools),
            limits=harness,
            options=_request_options(spec),
            clock=clock,
        )
        run = await run_program(episode)
        if logs is not None and run.log:
            await asyncio.to_thread(write_log, logs, spec.rollout_id, spec.attempt, run.log)
        if isinstance(run.failure, EngineBehind):
            raise run.failure
        if run.failure is not None or run.ending is None:
            boundary = Boundary.MACHINE if isinstance(run.failure, MachineError) else Boundary.PROVIDER
            return _invalid(spec, boundary, run.failure, run, wall_s=clock() - began)
        try:
            await remove_history(episode)
            exports = await take_exports(machine, spec.task, runtime, max_bytes=harness.export_bytes)
        except (MachineError, TaskError) as error:
            boundary = Boundary.TASK if isinstance(error, TaskError) else Boundary.MACHINE
            return _invalid(spec, boundary, error, run, wall_s=clock() - began)
        return Rollout(
            rollout_id=spec.rollout_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            task=spec.task,
            trace=run.trace,
            ending=run.ending,
            exports=exports,
            wall_s=clock() - began,
            tool_s=run.tool_s,
        )
    finally:
        await machine.close()


def submitted(rollout: Rollout | RolloutSummary) -> Term:
    """Return the reward term `SUBMITTED`: 1.0 if the agent submitted its work, 0.0 for every other ending.

    Without this term a policy would not learn to submit."""
    value = float(rollout.ending is Ending.SUBMITTED)
    return Term(name=SUBMITTED, value=value, version=__version__, evidence=rollout.ending.value)


def session_of(spec: RolloutSpec) -> str:
    """Return the session id of a rollout's requests to engines: "rollout_id/attempt"."""
    return f"{spec.rollout_id}/{spec.attempt}"


def _request_options(spec: RolloutSpec) -> RequestOptions:
    return RequestOptions(
        session_id=session_of(spec),
        seed=spec.seed,
        group_seed=spec.group_seed,
        temperature=spec.temperature,
        min_step=spec.min_step,
        pin_step=spec.pin_step,
        keep_routes=spec.keep_routes,
    )


def _invalid(
    spec: RolloutSpec, boundary: Boundary, error: EtudeError | None, run: AgentRun | None = None, *, wall_s: float
) -> Rollout:
    what, facts = (error.what, error.facts) if error else ("the agent returned neither an ending nor a failure", "")
    invalid = Invalid(boundary=boundary, reason=what, evidence=f"{type(error).__name__}: {facts or what}")
    return Rollout(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        attempt=spec.attempt,
        task=spec.task,
        trace=run.trace if run else Trace(()),
        ending=UNFINISHED,
        exports={},
        wall_s=wall_s,
        tool_s=run.tool_s if run else 0.0,
        invalid=invalid,
    )


def not_run(spec: RolloutSpec, boundary: Boundary, error: EtudeError, *, wall_s: float = 0.0) -> Rollout:
    """Return the record of a rollout that could not start because it got no machine or no engine.

    `boundary` says which part failed, `error` why, and `wall_s` how many seconds it took."""
    return _invalid(spec, boundary, error, wall_s=wall_s)
