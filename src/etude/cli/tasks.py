"""``etude tasks check | show``."""

from __future__ import annotations

import argparse
import asyncio

from etude.environments import MachineGrader, NamespaceRuntime
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
