"""The commands ``etude tasks check``, ``show``, ``mine`` and ``sessions``."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from etude.cli.progress import ProgressBar
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
from etude.tasks.harbor import HarborSource
from etude.tasks.journal import Journal
from etude.tasks.leaks import Leak, leaks_in_machines, leaks_in_task
from etude.tasks.mining import Attempt, MiningResult, Repository, functions_to_delete, mine_commits, mine_deletions
from etude.tasks.mining.git import MAX_BLOB_BYTES
from etude.tasks.mutation_testing import MutationResult, run_mutants
from etude.tasks.report import TaskReport, as_json, reports
from etude.tasks.sessions import ImportedSession, SessionStore, import_sessions
from etude.tasks.text_files import MAX_FILES
from etude.tasks.verdicts import DEFAULT_TASKS
from etude.tasks.verifiers import grader_for

SHOWN = 20
VERDICT_S = 3_600.0  # for a grader that hangs; graders have their own, shorter deadlines for hidden tests


def jobs() -> int:
    """Return the default number of concurrent grades: two for each core that this process may use."""
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2 * (os.cpu_count() or 1)


def check(args: argparse.Namespace) -> int:
    """Verify tasks: the reference solution scores 1, the unchanged files score 0, the test command can start.

    With `--mutants`, also report tasks that give wrong patches a reward. Returns exit code 1 if a task fails."""
    started = time.perf_counter()
    if args.out is not None and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        raise InputError(f"--out {args.out} cannot be a file", hint="give a file in an existing folder")
    tasks, proofs = asyncio.run(_check(args))
    wall_s = time.perf_counter() - started
    num_proven, num_tasks = sum(p.num_proven for p in proofs), sum(p.num_tasks for p in proofs)
    what = args.split if args.split != "all" else "of all splits"
    print(f"{num_proven} of {num_tasks} {what} tasks of {args.source} are valid ({wall_s:.1f} s)")
    for task in tasks:
        if task.failure:
            folder = f" in {task.folder}" if task.folder else ""
            print(f"  task {task.index} ({task.task_id}){folder}: {task.failure}")
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
            with ProgressBar("images built", num_images(source)) as progress:
                source = await with_images(source, store, runtime, progress.advance)
        grader = grader_for(source, MachineGrader(runtime))
        settings = {"concurrency": args.jobs or jobs(), "export": partial(simulate_exports, runtime)}
        proofs = await _proofs(
            source, grader, counts, splits, tests=partial(find_test_command_problem, runtime), **settings
        )
        fast_grader = grader_for(source, MachineGrader(runtime, repeats=0, canaries=0, run_all_tests=False))
        results = await _mutation_results(args, source, fast_grader, counts, splits, **settings)
        pairs = _pairs(source, proofs)
        leaks = await _leaks(runtime, pairs) if args.leaks else {}
        ids = {position: task.task_id for position, (task, _) in pairs.items()}
        folders = {"folder_of": source.folder} if isinstance(source, DirectorySource | HarborSource) else {}
        return reports(proofs, results, leaks, ids, **folders), proofs
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
        raise StoreError(
            f"{out} cannot be written", str(error), hint="free disk space, or give another --out"
        ) from None


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
    with ProgressBar("tasks checked", sum(counts[split] for split in splits)) as progress:
        return [
            await prove(
                source, grader, split, counts[split], deadline_s=VERDICT_S, on_task=progress.advance, **settings
            )
            for split in splits
        ]


async def _mutation_results(
    args: argparse.Namespace,
    source: TaskSource,
    grader: Grader,
    counts: Mapping[Split, int],
    splits: Sequence[Split],
    **settings: Any,
) -> list[MutationResult]:
    if not args.mutants:
        return []
    options: dict[str, Any] = {"num_mutants": args.mutants, "repeats": args.repeat, "deadline_s": VERDICT_S, **settings}
    if args.within is not None:
        options["until"] = time.monotonic() + args.within
    if args.out is not None:
        options["journal"] = Journal(_journal_path(args.out), MutationResult)
    total = sum(counts[split] for split in splits)
    with ProgressBar("tasks mutated", total) as progress:
        options["on_result"] = partial(_show_result, progress)
        found: list[MutationResult] = []
        for split in splits:
            found += await run_mutants(source, grader, split, counts[split], **options)
    if len(found) < total:
        again = (
            "repeat the command to continue" if args.out is not None else "add --out FILE.json to be able to continue"
        )
        print(f"{total - len(found)} of {total} tasks were not mutated within {args.within} s: {again}")
    elif args.out is not None:
        _journal_path(args.out).unlink(missing_ok=True)
    return found


def _journal_path(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial")


def _show_result(progress: ProgressBar, result: MutationResult) -> None:
    passed = f"{len(result.survivors)} of {result.num_mutants} wrong patches pass"
    progress.advance(f"{result.split} {result.index}: {passed} ({result.wall_s:.0f} s)")


def _pairs(source: TaskSource, proofs: Sequence[Proof]) -> dict[tuple[Split, int], tuple[Task, Answer]]:
    pairs = {}
    for proof in proofs:
        for index in range(proof.num_tasks):
            with suppress(TaskError):  # a task that cannot be made is among the failures
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
            f"({float(str(report['survival'])):.1%}); some of them may be equivalent to the reference"
        )
    weak = sorted((t for t in tasks if t.weaknesses), key=lambda t: (-t.survival, t.split, t.index))
    if not weak:
        print("no weak tasks")
        return
    table = Table(title=f"{len(weak)} weak tasks", title_justify="left")
    for name in ("task", "mutants", "survived", "weakness"):
        table.add_column(name)
    for task in weak[:SHOWN]:
        table.add_row(
            f"{task.split} {task.index}", str(task.num_mutants), str(len(task.survivors)), "; ".join(task.weaknesses)
        )
    Console(highlight=False, markup=False).print(table)
    if len(weak) > SHOWN:
        print(f"and {len(weak) - SHOWN} more: --out REPORT.json lists all, with the diff of every survivor")
    for task in weak[:3]:
        for survivor in task.survivors[:2]:
            print(f"{task.split} {task.index}:\n{survivor.diff}")


def show(args: argparse.Namespace) -> int:
    """Print a task, and with `--answer` its hidden answer. Returns 0."""
    source = open_source(args.source, args.seed)
    size = source.size(Split(args.split))
    if args.index < 0 or (size is not None and args.index >= size):
        has = "an unlimited number of tasks" if size is None else f"{size} task{'' if size == 1 else 's'}"
        hint = f"give an --index from 0 to {size - 1}" if size else "give an --index of at least 0, or another --split"
        raise InputError(f"no task {args.index} in {args.split}", f"{args.source} has {has} in that split", hint=hint)
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


def mine(args: argparse.Namespace) -> int:
    """Write tasks made from a Git repository, or with `--deletions` from any folder of code, below `--out`.

    Attempts are recorded there: a repeated command continues where it stopped. Returns the exit code."""
    mined = asyncio.run(_mine(args))
    tasks = mined.tasks
    print(f"{len(tasks)} tasks from {len(mined.attempts)} attempts, in {args.out}")
    for reason, count in _grouped(mined).most_common(12):
        print(f"  {count:5}  {reason}")
    if tasks:
        source = DirectorySource(args.out)
        sizes = ", ".join(f"{source.size(split)} {split}" for split in Split)
        print(f"{sizes}\nto verify them: etude tasks check {args.out} --split all --mutants 20 --leaks")
    elif not args.deletions:
        print("no commit gave a task; --deletions makes tasks from functions that tests cover")
    return 0


def _grouped(mined: MiningResult) -> Counter[str]:
    """Counts of the reasons for failed attempts, without details."""
    counts: Counter[str] = Counter()
    for reason, count in mined.reasons().items():
        counts[reason.partition(":")[0]] += count
    return counts


async def _mine(args: argparse.Namespace) -> MiningResult:
    if args.module and not args.deletions:
        raise InputError("--module needs --deletions", hint="add --deletions")
    concurrency, deadline_s = args.jobs or max(1, jobs() // 2), float(args.deadline)
    files, repository = {}, None
    if args.deletions:
        files = _tree(args.repository)
        functions = functions_to_delete(files, args.module)[: args.num]
        if not functions:
            facts = "a function needs at least three statements, and its module a test file"
            raise TaskError(
                f"no function of {args.repository} can be deleted to make a task",
                facts,
                hint="see docs/guides/tasks.md",
            )
    else:
        repository = Repository(args.repository)
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory)
    try:
        grader = MachineGrader(runtime)
        if repository is None:
            with ProgressBar("functions tried", len(functions)) as progress:
                return await mine_deletions(
                    files,
                    functions,
                    runtime,
                    grader,
                    args.out,
                    deadline_s=deadline_s,
                    concurrency=concurrency,
                    on_attempt=lambda attempt: progress.advance(_note(attempt)),
                )
        with ProgressBar("commits tried", len(repository.commits(args.num))) as progress:
            return await mine_commits(
                repository,
                runtime,
                grader,
                args.out,
                limit=args.num,
                deadline_s=deadline_s,
                concurrency=concurrency,
                on_attempt=lambda attempt: progress.advance(_note(attempt)),
            )
    finally:
        await runtime.close()


def _note(attempt: Attempt) -> str:
    if attempt.outcome != "task":
        return ""
    tests = f"{attempt.num_failing} failing tests, {attempt.num_passing} passing tests"
    return f"{attempt.name}: {tests} ({attempt.wall_s:.0f} s)"


def _tree(path: Path) -> dict[str, str]:
    """The text files of a repository's newest commit, or the Python files of any other folder."""
    if (path / ".git").exists() or (path / "HEAD").is_file():
        repository = Repository(path)
        return repository.texts(repository.tree("HEAD"))
    if not path.is_dir():
        raise InputError(f"no folder {path}", hint="give a Git repository, or a folder with modules and their tests")
    files: dict[str, str] = {}
    for file in sorted(path.rglob("*.py")):
        if file.is_file() and not file.is_symlink() and file.stat().st_size <= MAX_BLOB_BYTES:
            files[file.relative_to(path).as_posix()] = file.read_bytes().decode("utf-8", "replace")
        if len(files) > MAX_FILES:
            raise InputError(
                f"{path} has more than {MAX_FILES} Python files", hint="copy the needed files to another folder"
            )
    return files


def sessions(args: argparse.Namespace) -> int:
    """Make tasks of session folders and store them in a privacy folder; without folders, list what is stored.

    Returns 0, or 1 if a session was refused."""
    with SessionStore(args.privacy) as store:
        if not args.folder:
            _list_sessions(store)
            return 0
        results = asyncio.run(_import_sessions(args, store))
    for one in results:
        print(f"{one.name}: {one.outcome} {one.task_id or one.reason}")
    counts = Counter(one.outcome for one in results)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ("task", "quarantined", "refused")))
    if counts["task"]:
        print(f"to verify them: etude tasks check sessions:{args.privacy} --split all")
    return 1 if counts["refused"] else 0


def _list_sessions(store: SessionStore) -> None:
    if not store.records():
        print("no sessions are stored that may be used now")
    for record_id in store.records():
        if (session := store.read(record_id)) is not None:
            task = session.task
            print(f"{session.name}: {session.reason if task is None else f'{task.split} task {task.task_id}'}")


async def _import_sessions(args: argparse.Namespace, store: SessionStore) -> list[ImportedSession]:
    runtime = open_memory_bounded(args.backend, accepts_unbounded=args.unbounded_memory)
    try:
        with ProgressBar("sessions proven", len(args.folder)) as progress:
            return await import_sessions(
                args.folder,
                store,
                runtime,
                MachineGrader(runtime),
                partial(simulate_exports, runtime),
                concurrency=args.jobs or jobs(),
                on_session=lambda one: progress.advance(f"{one.name}: {one.outcome}"),
            )
    finally:
        await runtime.close()
