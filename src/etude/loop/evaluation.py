"""Evaluates published weights or a checkpoint: the same rollouts as in training, on tasks that are never trained on."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from etude.config import to_toml
from etude.evals import EvalResult, EvalRow, make_row, write_rows
from etude.evals import evaluate as sum_up
from etude.inference.config import EngineKind
from etude.loop.adjustable_semaphore import AdjustableSemaphore
from etude.loop.checkpoints import checkpoint_version, copy_start_checkpoint
from etude.loop.config import RunConfig, open_tasks
from etude.loop.processes import Supervisor
from etude.loop.rollout_result import RolloutResult
from etude.loop.rollout_scheduler import composed_reward, counted_signs, grade_and_drop, run_once, siblings
from etude.loop.run_in_thread import run_in_thread
from etude.loop.run_processes import RunProcesses, open_processes
from etude.records import Outcome, RolloutSpec
from etude.records.task import Split
from etude.rewards import Composition
from etude.run import RunFolder
from etude.scratch import ScratchDirectory
from etude.seams import TaskSource
from etude.telemetry import Telemetry

PROGRESS_EVERY_S = 1.0
Done = tuple[RolloutResult, Outcome]
Each = Callable[[], None]


async def evaluate(
    processes: RunProcesses,
    source: TaskSource,
    *,
    name: str,
    split: Split,
    step: int,
    num_tasks: int,
    tries: int,
    seed: int,
    temperature: float,
    out: Path,
    telemetry: Telemetry,
    each: Each = lambda: None,
) -> EvalResult:
    """Evaluate the weights of training step `step` on the first `num_tasks` tasks of a split, `tries` rollouts each.

    Returns the solve rate and related numbers, and writes them as an `eval.result` event. Every rollout is written with
    its turns as text to the folder `out`: in ``<name>-<step>.parquet`` for validation tasks, ``<name>.parquet`` for
    others. A repeated evaluation replaces the file. A rollout with signs of cheating counts as not solved. `each` is
    called after every rollout."""
    began = time.perf_counter()

    async def one(spec: RolloutSpec) -> Done:
        return await run_once(processes, spec)

    specs = _specs(source, split, num_tasks, tries, seed=seed, temperature=temperature, pin_step=step)
    done = await run_all(processes, specs, one, name=name, telemetry=telemetry, each=each)
    rows = [_row(*one, processes.config.composition) for one in done]
    write_rows(out / file_name(name, split, step), rows)
    result = sum_up(rows, name=name, split=split, step=step, wall_s=round(time.perf_counter() - began, 3))
    telemetry.event("eval.result", **result.facts())
    return result


def _row(played: RolloutResult, outcome: Outcome, composition: Composition) -> EvalRow:
    reward = composed_reward(outcome, composition.without_weights)  # without weighted terms: 1.0 when solved
    signs = counted_signs(played, outcome, reward)
    return make_row(played.summary, reward, turns=played.turns, sign=str(signs[0]) if signs else "")


def file_name(name: str, split: Split, step: int) -> str:
    """Return the name of the file with the rollouts of an evaluation, in the run's folder evals."""
    return f"{name}-{step:06d}.parquet" if split is Split.VALIDATION else f"{name}.parquet"


async def run_all(
    processes: RunProcesses,
    specs: Sequence[RolloutSpec],
    one: Callable[[RolloutSpec], Awaitable[Done]],
    *,
    name: str,
    telemetry: Telemetry,
    each: Each = lambda: None,
) -> list[Done]:
    """Await `one(spec)` for every spec, as many concurrently as the engines allow, and return the results in order.

    `each` is called after every rollout. `name` is the evaluation in `eval.progress` events."""
    semaphore, num_done, reported_at = AdjustableSemaphore(processes.max_running), 0, float("-inf")

    async def in_slot(spec: RolloutSpec) -> Done:
        nonlocal num_done, reported_at
        async with semaphore.slot():
            result = await one(spec)
        num_done += 1
        each()
        if num_done == len(specs) or time.monotonic() - reported_at >= PROGRESS_EVERY_S:
            reported_at = time.monotonic()
            telemetry.event("eval.progress", name=name, done=num_done, total=len(specs))
        return result

    telemetry.event("eval.progress", name=name, done=0, total=len(specs))
    return await asyncio.gather(*(in_slot(spec) for spec in specs))


async def baseline(
    processes: RunProcesses, source: TaskSource, kind: str, *, num_tasks: int, seed: int, telemetry: Telemetry
) -> float:
    """Compute the solve rate of a scripted agent on held-out tasks, with the same rollout code.

    `kind` is "oracle", which plays a known solution, or "random"."""

    async def one(spec: RolloutSpec) -> Done:
        rollout = await processes.baseline(spec, kind)
        return rollout, await grade_and_drop(processes, rollout)

    specs = _specs(source, Split.HELDOUT, num_tasks, 1, seed=seed, temperature=1.0, pin_step=None)
    done = await run_all(processes, specs, one, name=kind, telemetry=telemetry)
    rows = [_row(*one, processes.config.composition) for one in done]
    return sum_up(rows, name=kind, split=Split.HELDOUT, step=0, wall_s=0.0).rate


def _specs(
    source: TaskSource, split: Split, num_tasks: int, tries: int, *, seed: int, temperature: float, pin_step: int | None
) -> list[RolloutSpec]:
    size = source.size(split)
    count = num_tasks if size is None else min(num_tasks, size)
    return [
        spec
        for index in range(count)
        for spec in siblings(
            f"{split}{index:06d}",
            source.task(split, index),
            tries,
            seed=seed,
            temperature=temperature,
            pin_step=pin_step,
        )
    ]


def without_remote_engines(config: RunConfig) -> RunConfig:
    """Return the config without remote engines, which follow the weights of a run and cannot serve a checkpoint."""
    engines = config.fleet.engines or (EngineKind.REFERENCE,)
    return dataclasses.replace(config, fleet=dataclasses.replace(config.fleet, engines=engines, listen=""))


async def evaluate_checkpoint(
    checkpoint: Path, config: RunConfig, *, split: Split, num_tasks: int, tries: int, out: Path | None, each: Each
) -> EvalResult:
    """Evaluate a checkpoint on the first `num_tasks` tasks of a split, without a run and its learner.

    There are `tries` rollouts per task. Returns what `evaluate` returns. `out` is the folder for the rollouts; None:
    they are not kept. `each` is called after every rollout."""
    version, config = checkpoint_version(checkpoint), without_remote_engines(config)
    with ScratchDirectory("eval") as scratch:
        run = RunFolder.create(scratch / "run", config_toml=to_toml(config), seed=config.seed)
        telemetry = Telemetry(run / "events" / "conductor.jsonl", process="conductor")
        await run_in_thread(functools.partial(copy_start_checkpoint, checkpoint, run, telemetry))
        async with open_processes(run, config, telemetry, Supervisor(telemetry, hung_s=config.fleet.hung_s)) as members:
            await members.start_sampling()
            result = await evaluate(
                members,
                open_tasks(config, canaries=False),
                name=checkpoint.name,
                split=split,
                step=0,  # the engines start with these weights as step 0
                num_tasks=num_tasks,
                tries=tries,
                seed=config.seed,
                temperature=config.evals.temperature,
                out=out or run / "evals",
                telemetry=telemetry,
                each=each,
            )
    return dataclasses.replace(result, step=version.step if version else 0)
