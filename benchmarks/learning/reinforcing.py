"""Reinforcement learning from a checkpoint, alone: the real processes and conductor, without the phases around them.

For benchmarks that ask what no config should offer: to stop at a solve rate, or to have another program in some role
(a worker with late tools, a learner with shuffled credit). What it leaves is a run folder that `RunView` reads. Knows
nothing of what is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from etude.config import to_toml
from etude.errors import DeadlineExceeded
from etude.harness import ChatFormat
from etude.loop import usage
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.conductor import Conductor
from etude.loop.config import RunConfig, open_tasks
from etude.loop.placement import Placement
from etude.loop.processes import Child, Supervisor
from etude.loop.run_processes import RunProcesses
from etude.records.task import Split
from etude.run import RunFolder
from etude.telemetry import Telemetry

Reached = Callable[[Mapping[str, Any]], bool]
"""Whether a step, given as the facts of its `rl.step` event, is the last one that is needed."""


class Watched(Telemetry):
    """Tells of each step as it is written."""

    def __init__(self, path: Path, *, process: str, step: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(path, process=process)
        self._step = step

    def event(self, kind: str, **facts: Any) -> None:
        super().event(kind, **facts)
        if kind == "rl.step":
            self._step(facts)


class Recast(RunProcesses):
    """Run processes with other programs in some roles. `instead`: the usual program's module → the other's."""

    instead: Mapping[str, str] = {}

    def _child(self, name: str, argv: list[str], **options: Any) -> Child:
        return super()._child(name, [self.instead.get(word, word) for word in argv], **options)


async def reinforce(
    folder: Path,
    config: RunConfig,
    *,
    until: Reached | None = None,
    instead: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    heldout: bool = False,
    deadline_s: float = 3600.0,
    placement: Placement | None = None,
) -> dict[str, Any] | None:
    """Train from `config.start` until a step is enough or the last one is done.

    `instead`: as in `Recast`; `notes`: files of the run folder that tell those programs what to do. `heldout`:
    evaluate the last version on the config's held-out tasks; the facts of that `eval.result`, else None. `placement`:
    where the run's processes run, if not here.
    Raises what the run raises, `DeadlineExceeded` when it takes too long.
    """
    assert config.start is not None, "reinforcement from a checkpoint needs one"
    run = RunFolder.create(folder, config_toml=to_toml(config), seed=config.seed)
    copy_start_checkpoint(config.start, run)
    for name, text in (notes or {}).items():
        (run / name).write_text(text)
    enough = asyncio.Event()

    def step(facts: Mapping[str, Any]) -> None:
        if until is not None and until(facts):
            enough.set()

    telemetry = Watched(run / "events" / "conductor.jsonl", process="conductor", step=step)
    supervisor = Supervisor(telemetry, placement=placement)
    watching = asyncio.create_task(usage.log_usage(supervisor.usage, telemetry), name="usage")
    members = Recast(run, config, telemetry, supervisor)
    members.instead = instead or {}
    try:
        await asyncio.gather(members.start_learner(), members.start_sampling())
        chat = ChatFormat.load(run / "tokenizer")
        conductor = Conductor(run, config, telemetry, members, source=open_tasks(config), chat=chat)
        await conductor.resume()
        telemetry.event("phase", phase="rl", state="start")
        await _first(conductor.reinforce(), enough, supervisor, deadline_s)
        telemetry.event("phase", phase="rl", state="end")
        if not heldout:
            return None
        result = await conductor.evaluate("after", Split.HELDOUT, config.evals.heldout_tasks)
        return dict(result.facts())
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await members.close()
        telemetry.close()


async def _first(training: Any, enough: asyncio.Event, supervisor: Supervisor, deadline_s: float) -> None:
    """Train until the end or until it is enough; a child that cannot be kept alive ends it by name."""
    work = asyncio.ensure_future(training)
    stop = asyncio.ensure_future(enough.wait())
    try:
        done, _ = await asyncio.wait(
            {work, stop, supervisor.failed}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED
        )
        if supervisor.failed in done:
            raise supervisor.failed.result()
        if not done:
            raise DeadlineExceeded("waited for the last step", f"for {deadline_s:g} s", hint="see the run's logs")
        if work in done:
            work.result()
    finally:
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)
