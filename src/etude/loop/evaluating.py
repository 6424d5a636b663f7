"""Evaluation: the same rollouts as in training, on tasks that were never trained on, at one pinned version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from etude.evals import EvalResult, make_row, write_rows
from etude.evals import evaluate as sum_up
from etude.loop.crew import Crew
from etude.loop.played import Played
from etude.loop.rolling import judged_once, run_once, siblings
from etude.loop.room import Room
from etude.records import Outcome, RolloutSpec
from etude.records.task import Split
from etude.seams import TaskSource
from etude.telemetry import Telemetry

TELL_EVERY_S = 1.0
Done = tuple[Played, Outcome]
Each = Callable[[], None]


def _nothing() -> None:
    """For whoever reads the events."""


async def evaluate(
    crew: Crew,
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
    each: Each = _nothing,
) -> EvalResult:
    """Solve rate of version step `step` on the first `num_tasks` of a split; the `eval.result` event's facts.

    Keeps every rollout with its transcript: ``out/<name>-<step>.parquet`` for validation tasks, ``out/<name>.parquet``
    for the others; replaced when done again. `each` is called for every rollout that is done.
    """
    began = time.perf_counter()

    async def one(spec: RolloutSpec) -> Done:
        return await run_once(crew, spec)

    specs = _specs(source, split, num_tasks, tries, seed=seed, temperature=temperature, pin_step=step)
    done = await played(crew, specs, one, name=name, telemetry=telemetry, each=each)
    rows = [make_row(one.summary, outcome, transcript=one.transcript) for one, outcome in done]
    write_rows(out / file_name(name, split, step), rows)
    result = sum_up(rows, name=name, split=split, step=step, wall_s=round(time.perf_counter() - began, 3))
    telemetry.event("eval.result", **result.facts())
    return result


def file_name(name: str, split: Split, step: int) -> str:
    """Where the rows of an evaluation are, in the run's folder for them."""
    return f"{name}-{step:06d}.parquet" if split is Split.VALIDATION else f"{name}.parquet"


async def played(
    crew: Crew,
    specs: Sequence[RolloutSpec],
    one: Callable[[RolloutSpec], Awaitable[Done]],
    *,
    name: str,
    telemetry: Telemetry,
    each: Each = _nothing,
) -> list[Done]:
    """Every spec played, as many at once as there is room for; `eval.progress` tells of it."""
    room, num_done, told = Room(crew.max_running), 0, float("-inf")

    async def placed(spec: RolloutSpec) -> Done:
        nonlocal num_done, told
        async with room.place():
            result = await one(spec)
        num_done += 1
        each()
        if num_done == len(specs) or time.monotonic() - told >= TELL_EVERY_S:
            told = time.monotonic()
            telemetry.event("eval.progress", name=name, done=num_done, total=len(specs))
        return result

    telemetry.event("eval.progress", name=name, done=0, total=len(specs))
    return await asyncio.gather(*(placed(spec) for spec in specs))


async def baseline(
    crew: Crew, source: TaskSource, kind: str, *, num_tasks: int, seed: int, telemetry: Telemetry
) -> float:
    """Solve rate of a script that needs no model ("oracle", "random") on held-out tasks, by the same rollout code."""

    async def one(spec: RolloutSpec) -> Done:
        rollout = await crew.baseline(spec, kind)
        return rollout, await judged_once(crew, rollout)

    specs = _specs(source, Split.HELDOUT, num_tasks, 1, seed=seed, temperature=1.0, pin_step=None)
    done = await played(crew, specs, one, name=kind, telemetry=telemetry)
    rows = [make_row(one.summary, outcome, transcript="") for one, outcome in done]
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
