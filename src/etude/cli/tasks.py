"""``etude tasks check | show``."""

from __future__ import annotations

import argparse
import asyncio

from etude.environments import MachineGrader, NamespaceRuntime
from etude.errors import InputError
from etude.records.task import Split
from etude.tasks import Proof, open_source
from etude.tasks import check as prove
from etude.tasks import show as show_task


def check(args: argparse.Namespace) -> int:
    """Prove tasks: the reference solution scores 1, the untouched state 0. Exit code 1 when one does not."""
    proof = asyncio.run(_check(args))
    print(
        f"{proof.num_proven} of {proof.num_tasks} {proof.split} tasks of {args.source} prove themselves "
        f"({proof.wall_s:.1f} s)"
    )
    for failure in proof.failures:
        print(f"  task {failure.index} ({failure.task_id}): {failure.reason}")
    proof.require(args.source, listed=True)
    return 0


async def _check(args: argparse.Namespace) -> Proof:
    source = open_source(args.source, args.seed)
    runtime = NamespaceRuntime()
    try:
        return await prove(source, MachineGrader(runtime), Split(args.split), args.num)
    finally:
        await runtime.close()


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
        answer = source.answer(task)
        for path, text in answer.reference.items():
            print(f"--- reference {path}\n{text}")
        for case in answer.cases:
            print(f"{case.module}.{case.function}({', '.join(map(repr, case.args))}) == {case.expected!r}")
        if answer.test_code:
            print(f"--- hidden tests\n{answer.test_code}")
    return 0
