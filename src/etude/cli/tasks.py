"""``etude tasks check | show``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.cli.task_progress import Steps
from etude.environments import MachineGrader, find_test_command_problem, simulate_exports
from etude.environments.backends import open_memory_bounded
from etude.environments.images import ImageStore
from etude.errors import InputError, StoreError, TaskError
from etude.loop.task_images import num_images, with_images
from etude.records.task import Answer, Split, Task
from etude.seams import Grader, Runtime, TaskSource
from etude.tasks import DirectorySource, Proof, open_source
from etude.tasks import check as prove
from etude.tasks import show as show_task
from etude.tasks.gate import Gated, gate
from etude.tasks.harbor import HarborSource
from etude.tasks.journal import Journal
from etude.tasks.leaks import Leak, leaks_in_machines, leaks_in_task
from etude.tasks.verdicts import DEFAULT_TASKS
from etude.tasks.verifiers import grader_for
from etude.tasks.weak import TaskReport, as_json, reports

SHOWN = 20
VERDICT_S = 3_600.0  # graders have deadlines of their own, of every hidden test; this is for one that hangs


def jobs() -> int:
    """How many verdicts are asked for at once when nobody says: two for each core that this process may use."""
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2 * (os.cpu_count() or 1)


def check(args: argparse.Namespace) -> int:
    """Prove tasks: the reference solution scores 1, the untouched state 0, the test command can start. With --mutants,
    wrong patches must not pass. Exit code 1 when a task does not prove itself; weak ones are reported."""
    started = time.perf_counter()
    if args.out is not None and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        raise InputError(f"--out {args.out} cannot be a file", hint="name a file in a folder that is there")
    tasks, proofs = asyncio.run(_check(args))
    wall_s = time.perf_counter() - started
    num_proven, num_tasks = sum(p.num_proven for p in proofs), sum(p.num_tasks for p in proofs)
    what = args.split if args.split != "all" else "of all splits"
    print(f"{num_proven} of {num_tasks} {what} tasks of {args.source} prove themselves ({wall_s:.1f} s)")
    for task in tasks:
        if task.failure:
            place = f" in {task.folder}" if task.folder else ""
            print(f"  task {task.index} ({task.task_id}){place}: {task.failure}")
    report = as_json(args.source, tasks, wall_s)
    if args.mutants or args.leaks:
        _print_weak(tasks, report)
    if args.out is not None:
        _write(args.out, json.dumps(report, indent=1) + "\n")
    for proof in proofs:
        proof.require(args.source, listed=True)
    return 0


async def _check(args: argparse.Namespace) -> tuple[list[TaskReport], list[Proof]]:
    source = open_source(args.source, args.seed)
    splits = list(Split) if args.split == "all" else [Split(args.split)]
    counts = {split: _count(source, split, args.num) for split in splits}
    splits = [split for split in splits if counts[split]] or splits[:1]
    store = None if args.images is None else ImageStore(args.images)
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory, images=store)
    try:
        if store is not None and isinstance(source, HarborSource):
            with Steps("images built", num_images(source)) as steps:
                source = await with_images(source, store, runtime, steps.done)
        grader = grader_for(source, MachineGrader(runtime))
        settings = {"concurrency": args.jobs or jobs(), "export": partial(simulate_exports, runtime)}
        proofs = await _proofs(
            source, grader, counts, splits, tests=partial(find_test_command_problem, runtime), **settings
        )
        hasty = grader_for(source, MachineGrader(runtime, repeats=0, canaries=0, run_all_tests=False))
        gated = await _gated(args, source, hasty, counts, splits, **settings)
        pairs = _pairs(source, proofs)
        leaks = await _leaks(runtime, pairs) if args.leaks else {}
        ids = {place: task.task_id for place, (task, _) in pairs.items()}
        placed = {"folder_of": source.folder} if isinstance(source, DirectorySource | HarborSource) else {}
        return reports(proofs, gated, leaks, ids, **placed), proofs
    finally:
        await runtime.close()


def _write(out: Path, text: str) -> None:
    try:
        new = out.with_name(f"{out.name}.new")
        try:
            new.write_text(text)
            new.replace(out)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{out} cannot be written", str(error), hint="make room, or name another --out") from None


def _count(source: TaskSource, split: Split, num: int | None) -> int:
    size = source.size(split)
    if size is None:
        return num or DEFAULT_TASKS
    return min(size, num or size)


async def _proofs(
    source: TaskSource,
    grader: Grader,
    counts: Mapping[Split, int],
    splits: Sequence[Split],
    **settings: Any,
) -> list[Proof]:
    with Steps("tasks checked", sum(counts[split] for split in splits)) as steps:
        return [
            await prove(source, grader, split, counts[split], deadline_s=VERDICT_S, told=steps.done, **settings)
            for split in splits
        ]


async def _gated(
    args: argparse.Namespace,
    source: TaskSource,
    grader: Grader,
    counts: Mapping[Split, int],
    splits: Sequence[Split],
    **settings: Any,
) -> list[Gated]:
    if not args.mutants:
        return []
    asked: dict[str, Any] = {"num_mutants": args.mutants, "repeats": args.repeat, "deadline_s": VERDICT_S, **settings}
    if args.within is not None:
        asked["until"] = time.monotonic() + args.within
    if args.out is not None:
        asked["journal"] = Journal(_journal_of(args.out), Gated)
    total = sum(counts[split] for split in splits)
    with Steps("tasks mutated", total) as steps:
        told = partial(_tell, steps)
        found = [
            one for split in splits for one in await gate(source, grader, split, counts[split], told=told, **asked)
        ]
    if len(found) < total:
        again = "the same command goes on with them" if args.out is not None else "with --out FILE.json one can go on"
        print(f"{total - len(found)} of {total} tasks were not mutated within {args.within} s: {again}")
    elif args.out is not None:
        _journal_of(args.out).unlink(missing_ok=True)
    return found


def _journal_of(out: Path) -> Path:
    """Where the gate's findings are kept until all are there."""
    return out.with_name(f"{out.name}.partial")


def _tell(steps: Steps, found: Gated) -> None:
    passed = f"{len(found.survivors)} of {found.num_mutants} wrong patches pass"
    steps.done(f"{found.split} {found.index}: {passed} ({found.wall_s:.0f} s)")


def _pairs(source: TaskSource, proofs: Sequence[Proof]) -> dict[tuple[Split, int], tuple[Task, Answer]]:
    pairs = {}
    for proof in proofs:
        for index in range(proof.num_tasks):
            with suppress(TaskError):  # one that cannot be made, or has no answer, is among the failures
                task = source.task(proof.split, index)
                pairs[proof.split, index] = task, source.answer(task)
    return pairs


async def _leaks(runtime: Runtime, pairs: Mapping[tuple[Split, int], tuple[Task, Answer]]) -> dict[str, list[Leak]]:
    found = await leaks_in_machines(runtime, pairs.values())
    for task, answer in pairs.values():
        own = leaks_in_task(task, answer)
        if own:
            found[task.task_id] = own + found.get(task.task_id, [])
    return found


def _print_weak(tasks: Sequence[TaskReport], report: Mapping[str, object]) -> None:
    if report["num_mutants"]:
        print(
            f"{report['num_survivors']} of {report['num_mutants_graded']} wrong patches pass "
            f"({float(str(report['survival'])):.1%}); some of them may mean the same as the original"
        )
    weak = sorted((t for t in tasks if t.weaknesses), key=lambda t: (-t.survival, t.split, t.index))
    if not weak:
        print("no task is weak")
        return
    table = Table(title=f"{len(weak)} weak tasks", title_justify="left")
    for name in ("task", "mutants", "survive", "what is weak"):
        table.add_column(name)
    for task in weak[:SHOWN]:
        place = f"{task.split} {task.index}"
        table.add_row(place, str(task.num_mutants), str(len(task.survivors)), "; ".join(task.weaknesses))
    Console(highlight=False, markup=False).print(table)
    if len(weak) > SHOWN:
        print(f"and {len(weak) - SHOWN} more: --out REPORT.json has them all, with the diff of every survivor")
    for task in weak[:3]:
        for survivor in task.survivors[:2]:
            print(f"{task.split} {task.index}:\n{survivor.diff}")


def show(args: argparse.Namespace) -> int:
    """Print a task; its hidden side only when asked for."""
    source = open_source(args.source, args.seed)
    size = source.size(Split(args.split))
    if args.index < 0 or (size is not None and args.index >= size):
        has = "tasks without end" if size is None else f"{size} task{'' if size == 1 else 's'}"
        hint = f"give an --index from 0 to {size - 1}" if size else "give an --index from 0 on, or another --split"
        raise InputError(f"no task {args.index} in {args.split}", f"{args.source} has {has} of that split", hint=hint)
    task = source.task(Split(args.split), args.index)
    print(show_task(task))
    if args.answer:
        _print_answer(source.answer(task))
    return 0


def _print_answer(answer: Answer) -> None:
    for path, text in answer.reference.items():
        print(f"--- reference {path}\n{text}")
    if answer.reference_argv:
        print(f"--- reference command\n{' '.join(answer.reference_argv)}")
    for case in answer.cases:
        print(f"{case.module}.{case.function}({', '.join(map(repr, case.args))}) == {case.expected!r}")
    if answer.test_code:
        print(f"--- hidden tests\n{answer.test_code}")
    if answer.tests is not None:
        print(f"--- hidden tests of {answer.tests.runner}", *answer.tests.names, sep="\n")
    if answer.verifier is not None:
        print(f"--- verifier\n{' '.join(answer.verifier.argv)}")
