"""Runs the phases of a run in order: corpus → mid-training → eval-before → rl → eval-after → report.

A phase that has ended is skipped. The results of a phase are in the run folder, so a killed run continues with the
phase that it was in. Corpus and mid-training are separate programs. From `eval-before` on the run's processes (engines,
workers, graders, learner) are up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import to_plain
from etude.dashboard import RunView, summarise, write_report
from etude.errors import EtudeError
from etude.evals import EvalResult
from etude.file_checksums import sealed
from etude.harness import ChatFormat
from etude.loop import usage
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig, open_tasks
from etude.loop.engine_leases import EngineLeases
from etude.loop.evaluation import Baseline, baseline
from etude.loop.limits import check_limits, first_tasks
from etude.loop.locations import read_ledger
from etude.loop.placement import NO_ENV, Placement
from etude.loop.preflight import used_splits
from etude.loop.processes import EXIT_RESTART, KEEP_MEMORY_ENV, Child, Supervisor, unless_failed
from etude.loop.rollout_views import reported_views
from etude.loop.rpc import ProcessLost
from etude.loop.run_processes import RunProcesses, open_processes, rank_arguments, start_rank_hosts
from etude.records.task import Split
from etude.records.view import RolloutView
from etude.run import RunFolder, write_durably
from etude.telemetry import Telemetry
from etude.trackers.tracking import tracked

Phase = Callable[[], Awaitable[Mapping[str, Any]]]


async def run_phases(
    run: RunFolder, config: RunConfig, telemetry: Telemetry, *, placement: Placement | None = None
) -> None:
    """Run all phases that have not ended. Cancel it to stop cleanly; the run can be resumed.

    `placement` decides where the run's processes run, and is closed at the end; None: as children of this process."""
    supervisor = Supervisor(telemetry, hung_s=config.fleet.hung_s, placement=placement)
    telemetry.event("session")
    watching = asyncio.create_task(usage.log_usage(supervisor.usage, telemetry), name="usage")
    try:
        async with tracked(run, config.trackers, to_plain(config), telemetry):
            program = functools.partial(_program, run, telemetry, supervisor)
            if config.start is not None:
                await _phase(run, telemetry, "corpus", functools.partial(_adopt_start, run, config, telemetry))
            else:
                await _phase(run, telemetry, "corpus", functools.partial(program, "corpus", "etude.loop.corpus"))
                if not run.ended("mid-training"):
                    await asyncio.to_thread(_check_limits, run, config)
            if config.mid_trains:
                arguments = rank_arguments(config, supervisor)
                training = functools.partial(program, "mid-training", "etude.loop.mid_training", arguments)
                if not run.ended("mid-training"):
                    await start_rank_hosts(run, config, telemetry, supervisor)
                await _phase(run, telemetry, "mid-training", training)
            if not run.ended("eval-after"):
                async with open_processes(run, config, telemetry, supervisor) as members:
                    await _with_processes(run, config, telemetry, members)
            await _phase(run, telemetry, "report", functools.partial(_report, run))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await supervisor.close()


async def _phase(run: RunFolder, telemetry: Telemetry, name: str, work: Phase) -> None:
    if run.ended(name):
        return
    telemetry.event("phase", phase=name, state="start")
    began = time.perf_counter()
    facts = await work()
    wall_s = time.perf_counter() - began
    telemetry.event("phase", phase=name, state="end", wall_s=round(wall_s, 3))
    span = await asyncio.to_thread(lambda: RunView(run.path).phase(name))
    run.end_phase(name, wall_s=span.wall_s if span is not None and span.wall_s else wall_s, facts=facts)


def _check_limits(run: RunFolder, config: RunConfig) -> None:
    """Check the limits that `preflight` could not check while the run had no tokeniser. Raises `ConfigError`."""
    tasks = first_tasks(open_tasks(config, canaries=False), used_splits(config))
    check_limits(config.harness, ChatFormat.load(run / "tokenizer"), tasks)


async def _adopt_start(run: RunFolder, config: RunConfig, telemetry: Telemetry) -> Mapping[str, Any]:
    """The corpus phase of a run with a starting checkpoint: copy the checkpoint into the run."""
    assert config.start is not None, "called with a start only"
    name = "start" if config.mid_trains else "mid"
    await asyncio.to_thread(copy_start_checkpoint, config.start, run, telemetry, name=name)
    return {"start": str(config.start)}


async def _program(
    run: RunFolder, telemetry: Telemetry, supervisor: Supervisor, phase: str, module: str, arguments: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Run a program until it ends. One that is killed is started again and continues from its files."""
    env = KEEP_MEMORY_ENV if phase == "mid-training" else NO_ENV
    argv, placement = ["-m", module, "--run", str(run.path), *arguments], supervisor.placement
    child = Child(phase, argv, logs=run / "logs", telemetry=telemetry, env=env, placement=placement)
    supervisor.children[phase] = child
    try:
        while True:
            try:
                await child.start(with_socket=False)
            except ProcessLost:  # its machine is lost; another may be free
                if not child.can_restart():
                    raise
                await child.back_off()
                continue
            code = await child.exited()
            if code == 0:
                return {}
            failed = code > 0 and code != EXIT_RESTART
            if failed or not child.can_restart():  # an error, or killed repeatedly
                raise EtudeError(f"{phase} failed", child.log_tail(), hint=f"the full log is {child.log_path}")
    finally:
        await child.stop()
        supervisor.children.pop(phase, None)


async def _with_processes(run: RunFolder, config: RunConfig, telemetry: Telemetry, members: RunProcesses) -> None:
    chat = ChatFormat.load(run / "tokenizer")
    source = open_tasks(config)
    conductor = Conductor(run, config, telemetry, members, source=source, chat=chat)
    evals = config.evals
    lending = list[asyncio.Task[None]]()
    up = False

    async def ready() -> None:
        """Start all processes before the first phase that needs them."""
        nonlocal up
        if not up:
            await asyncio.gather(members.start_learner(), members.start_sampling())
            await conductor.resume()
            lending.append(asyncio.create_task(EngineLeases(run, members, telemetry).watch(), name="lend engines"))
            up = True

    async def measure(name: str) -> EvalResult:
        """Evaluate held-out tasks and return the result; then, if configured, tasks of kinds never trained on."""
        result = await conductor.evaluate(name, Split.HELDOUT, evals.heldout_tasks, evals.heldout_tries)
        if evals.transfer_tasks:
            await conductor.evaluate(f"{name}-transfer", Split.TRANSFER, evals.transfer_tasks, evals.heldout_tries)
        return result

    async def before() -> Mapping[str, Any]:
        await ready()
        result = await measure("before")
        rates = {}
        for kind in Baseline:
            rates[kind] = await baseline(
                members,
                source,
                kind,
                num_tasks=evals.baseline_tasks,
                seed=config.seed,
                telemetry=telemetry,
            )
        telemetry.event("eval.baselines", **rates)
        return {"rate": result.rate, "baselines": rates}

    async def rl() -> Mapping[str, Any]:
        await ready()
        await conductor.reinforce()
        return {"step": conductor.step}

    async def after() -> Mapping[str, Any]:
        await ready()
        return {"rate": (await measure("after")).rate}

    with contextlib.closing(conductor):
        try:
            async with unless_failed(members.supervisor):
                await _phase(run, telemetry, "eval-before", before)
                await _phase(run, telemetry, "rl", rl)
                await _phase(run, telemetry, "eval-after", after)
        finally:
            for task in lending:
                task.cancel()
            await asyncio.gather(*lending, return_exceptions=True)


async def _report(run: RunFolder) -> Mapping[str, Any]:
    await asyncio.to_thread(write_run_report, run)
    return {}


def write_run_report(run: RunFolder) -> Path:
    """Write summary.json and report.html of a run, finished or not. Returns the path of report.html."""
    states: dict[str, int] | None = None
    rollouts = list[RolloutView]()
    with contextlib.suppress(EtudeError), contextlib.closing(read_ledger(run)) as ledger:
        if run.setting("experience.ledger"):
            states = ledger.states()
        rollouts = reported_views(run, ledger)
    write_durably(run / "summary.json", json.dumps(sealed(summarise(run.path, rollouts=states)), indent=2).encode())
    return write_report(run.path, rollouts)
