"""``etude tasks mine``."""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from pathlib import Path

from etude.cli.task_progress import Steps
from etude.cli.tasks import jobs
from etude.environments import MachineGrader
from etude.environments.backends import open_memory_bounded
from etude.errors import InputError, TaskError
from etude.records.task import Split
from etude.tasks import DirectorySource
from etude.tasks.mining import Mined, Repository, Tried, functions_to_delete, mine_commits, mine_deletions
from etude.tasks.mining.git import MAX_BLOB_BYTES
from etude.tasks.trees import MAX_FILES


def mine(args: argparse.Namespace) -> int:
    """Make task folders below --out. What was tried is kept there: the same command goes on where it stopped."""
    mined = asyncio.run(_mine(args))
    tasks = mined.tasks
    print(f"{len(tasks)} tasks of {len(mined.tried)} tried, in {args.out}")
    for reason, count in _grouped(mined).most_common(12):
        print(f"  {count:5}  {reason}")
    if tasks:
        source = DirectorySource(args.out)
        sizes = ", ".join(f"{source.size(split)} {split}" for split in Split)
        print(f"{sizes}\nprove and probe them with `etude tasks check {args.out} --split all --mutants 20 --leaks`")
    elif not args.deletions:
        print("no commit made a task: --deletions makes them of functions that tests cover")
    return 0


def _grouped(mined: Mined) -> Counter[str]:
    """Reasons without their details."""
    counts: Counter[str] = Counter()
    for reason, count in mined.reasons().items():
        counts[reason.partition(":")[0]] += count
    return counts


async def _mine(args: argparse.Namespace) -> Mined:
    if args.module and not args.deletions:
        raise InputError("--module names modules whose functions are deleted", hint="add --deletions")
    concurrency, deadline_s = args.jobs or max(1, jobs() // 2), float(args.deadline)
    files, repository = {}, None
    if args.deletions:
        files = _tree(args.repository)
        functions = functions_to_delete(files, args.module)[: args.num]
        if not functions:
            facts = "no function of at least three statements in a module that a test file is about"
            raise TaskError(f"nothing to delete in {args.repository}", facts, hint="see the guide on tasks")
    else:
        repository = Repository(args.repository)
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory)
    try:
        grader = MachineGrader(runtime)
        if repository is None:
            with Steps("functions tried", len(functions)) as steps:
                return await mine_deletions(
                    files,
                    functions,
                    runtime,
                    grader,
                    args.out,
                    deadline_s=deadline_s,
                    concurrency=concurrency,
                    told=lambda tried: steps.done(_note(tried)),
                )
        with Steps("commits tried", len(repository.commits(args.num))) as steps:
            return await mine_commits(
                repository,
                runtime,
                grader,
                args.out,
                limit=args.num,
                deadline_s=deadline_s,
                concurrency=concurrency,
                told=lambda tried: steps.done(_note(tried)),
            )
    finally:
        await runtime.close()


def _note(tried: Tried) -> str:
    if tried.outcome != "task":
        return ""
    return f"{tried.name}: {tried.num_failing} tests fail, {tried.num_passing} must stay ({tried.wall_s:.0f} s)"


def _tree(path: Path) -> dict[str, str]:
    """The texts of a repository's newest commit, or of a folder that is none."""
    if (path / ".git").exists() or (path / "HEAD").is_file():
        repository = Repository(path)
        return repository.texts(repository.tree("HEAD"))
    if not path.is_dir():
        raise InputError(f"no folder {path}", hint="give a Git repository, or a folder with modules and their tests")
    files: dict[str, str] = {}
    for place in sorted(path.rglob("*.py")):
        if place.is_file() and not place.is_symlink() and place.stat().st_size <= MAX_BLOB_BYTES:
            files[place.relative_to(path).as_posix()] = place.read_bytes().decode("utf-8", "replace")
        if len(files) > MAX_FILES:
            raise InputError(f"{path} has more than {MAX_FILES} Python files", hint="copy what is needed elsewhere")
    return files
