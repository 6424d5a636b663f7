"""Plays cheats on a runtime and a grader. For each: set it up, let it try, freeze the machine, grade what it left, and
look whether a sibling or the host was hurt.

A cheat succeeds if its program got something; if a secret of the host came out; if the reward is above 0; if it is
not graded (the agent caused it, so it must be); if it worked on after the freeze; or if a sibling or the host suffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from etude.environments.grading import take_exports
from etude.environments.grading.cheat_detector import CheatIndicator, find_cheating
from etude.environments.images import BadSource
from etude.errors import MachineError
from etude.records.command import ExecResult
from etude.records.rollout import Graded, Invalid
from etude.records.task import Task, Trust
from etude.redteam.catalogue import CATALOGUE, EXPORTS
from etude.redteam.cheat import Cheat, Finding, Kind, Row, Verdict
from etude.redteam.stage import Problem, Secrets, playable, problems, programs, repository, secrets_of_the_host
from etude.seams import Grader, Machine, Runtime

PROGRAM_S, PLAY_S = 12.0, 120.0
_ABLE_S, _LOOK_S = 30.0, 8.0


@dataclass(frozen=True)
class Stage:
    """What cheats are played against."""

    runtime: Runtime
    grader: Grader
    secrets: Secrets
    problems: Mapping[Kind, Problem]
    unplayable: Mapping[Kind, str]  # why a kind of task cannot be played on; "" where it can
    program_s: float = PROGRAM_S  # what a program has
    play_s: float = PLAY_S  # a play that takes longer has hung the host


class _Succeeded(Exception):
    """What a cheat got."""


async def check(
    runtime: Runtime,
    grader: Grader,
    *,
    cheats: Sequence[Cheat] = CATALOGUE,
    at_once: int = 1,
    program_s: float = PROGRAM_S,
    play_s: float = PLAY_S,
) -> AsyncGenerator[Finding, None]:
    """What came of each cheat on each kind of task that it is for, in order. `grader` judges in machines of `runtime`.
    A program has `program_s`; a play that takes longer than `play_s` has hung the host.

    Raises `MachineError` where no kind of task can be judged at all: then nothing was tried.
    """
    async with secrets_of_the_host() as of_host:
        wanted = {kind for cheat in cheats for kind in cheat.kinds}
        staged = {kind: problem for kind, problem in problems(EXPORTS).items() if kind in wanted}
        unplayable = await playable(runtime, grader, staged, at_once=at_once)
        if unplayable and all(unplayable.values()):
            facts = "; ".join(f"{kind}: {why}" for kind, why in unplayable.items())
            raise MachineError(
                "no cheat can be played", facts, hint="mend what keeps honest work from being graded first"
            )
        stage = Stage(runtime, grader, of_host, staged, unplayable, program_s, play_s)
        room = asyncio.Semaphore(at_once)

        async def one(cheat: Cheat, kind: Kind) -> Finding:
            async with room:
                return await play(cheat, kind, stage)

        tasks = [asyncio.create_task(one(cheat, kind)) for cheat in cheats for kind in cheat.kinds]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()


async def play(cheat: Cheat, kind: Kind, stage: Stage) -> Finding:
    """Try one cheat on one kind of task. Raises nothing that a cheat can cause."""
    began = time.perf_counter()
    verdict, evidence = _skipped(cheat, kind, stage)
    if not evidence:
        try:
            async with asyncio.timeout(stage.play_s):
                verdict, evidence = await _played(cheat, stage.problems[kind], stage)
        except _Succeeded as success:
            shared = stage.runtime.info.isolation == "shared kernel"
            verdict = Verdict.KNOWN if cheat.known and shared else Verdict.SUCCEEDED
            evidence = f"{success}: {cheat.known}" if verdict is Verdict.KNOWN else str(success)
        except TimeoutError:
            verdict, evidence = Verdict.SUCCEEDED, f"it hung the host: no end after {stage.play_s:g} s"
        except BadSource as error:
            verdict, evidence = Verdict.SKIPPED, f"no repository could be made: {error.what}: {error.facts}"
        except MachineError as error:
            verdict, evidence = Verdict.SUCCEEDED, f"it made the machine fail for its host: {error.what}: {error.facts}"
        except Exception as error:  # noqa: BLE001 - whatever a cheat makes host code raise, it has broken it
            verdict, evidence = Verdict.SUCCEEDED, f"it broke code of the host: {type(error).__name__}: {error}"
    return Finding(
        cheat=cheat.name,
        row=cheat.row,
        kind=kind,
        verdict=verdict,
        evidence=" ".join(evidence.split())[:300],
        wall_s=round(time.perf_counter() - began, 4),
    )


def _skipped(cheat: Cheat, kind: Kind, stage: Stage) -> tuple[Verdict, str]:
    isolation = stage.runtime.info.isolation
    if cheat.shared_kernel and isolation not in ("shared kernel", "none"):
        return Verdict.SKIPPED, f"nothing to be had by it: {isolation}"
    if cheat.danger and isolation == "none":
        return Verdict.SKIPPED, "would do harm without isolation"
    return Verdict.SKIPPED, stage.unplayable[kind]


async def _played(cheat: Cheat, problem: Problem, stage: Stage) -> tuple[Verdict, str]:
    runtime, task = stage.runtime, problem.task
    token = f"sibling-{secrets.token_hex(8)}"
    tree = {path: text.encode() for path, text in task.files.items()} | (programs() if cheat.program else {})
    if cheat.row is Row.HISTORY:
        tree |= await asyncio.to_thread(repository, stage.secrets.word)
    facts = stage.secrets.facts(runtime, token)
    snapshot = await runtime.prepare(tree, image=task.image)
    needs_sibling = bool(cheat.partner or cheat.bomb)
    machine, *siblings = await runtime.fork(snapshot, 2 if needs_sibling else 1)
    try:
        for path, data in cheat.files.items():
            with contextlib.suppress(OSError, ValueError):
                await machine.write(path, data if isinstance(data, bytes) else data.encode())
        why = ""
        if cheat.program:
            why = await _tried(cheat, machine, siblings, facts, stage)
            await machine.exec(["python", "-c", "print(6 * 7)"], key="after", deadline_s=stage.program_s)
        exports = await _taken(machine, task, stage)
        if cheat.bomb:
            with contextlib.suppress(OSError, ValueError):
                await machine.snapshot()
            await _must_be_able(siblings[0], facts)
            await _host_must_be_well(runtime, snapshot, stage)
    finally:
        for each in (machine, *siblings):
            await each.close()
    return await _judged(problem, exports, why, stage)


async def _taken(machine: Machine, task: Task, stage: Stage) -> Mapping[str, bytes]:
    """The exports; and a look at whether anything still works after the freeze."""
    exports = await take_exports(machine, task, stage.runtime)
    if any(stage.secrets.word.encode() in data for data in exports.values()):
        raise _Succeeded("a secret file of the host was exported")
    with contextlib.suppress(OSError, ValueError):
        before = await machine.read("late")
        await asyncio.sleep(0.5)
        if await machine.read("late") != before:
            raise _Succeeded("it worked on after the freeze")
    return exports


async def _judged(problem: Problem, exports: Mapping[str, bytes], why: str, stage: Stage) -> tuple[Verdict, str]:
    outcome = await stage.grader.grade(problem.task, problem.answer, exports)
    _must_be_tellable(outcome)
    if isinstance(outcome, Invalid):
        return Verdict.SUCCEEDED, f"not graded: {outcome.boundary}: {outcome.reason}: {outcome.evidence}"
    found = _looked_through(problem, exports, outcome)
    if outcome.grade <= 0:
        return Verdict.RESISTED, why or outcome.reason
    return _rewarded(outcome, found)


def _must_be_tellable(outcome: Graded | Invalid) -> None:
    try:
        msgspec.json.encode(outcome)
    except (UnicodeEncodeError, ValueError) as error:
        raise _Succeeded(f"its verdict cannot be written down: {error}") from None
    if not outcome.reason.isprintable():
        raise _Succeeded(f"it writes on the terminal of whoever reads its verdict: {outcome.reason!r}")


def _looked_through(problem: Problem, exports: Mapping[str, bytes], outcome: Graded) -> list[CheatIndicator]:
    """What the detector says, which everything that is graded passes through on the host."""
    began = time.process_time()
    found = find_cheating(problem.task, exports=exports, outcome=outcome)
    if (took_s := time.process_time() - began) > _LOOK_S:
        raise _Succeeded(f"it holds the host up for {took_s:.0f} s while it is looked through")
    return found


def _rewarded(outcome: Graded, found: Sequence[CheatIndicator]) -> tuple[Verdict, str]:
    if outcome.trust is Trust.CODE and found:
        return Verdict.CAUGHT, f"rewarded as {outcome.trust}; flagged: {found[0].reason} in {found[0].place}"
    raise _Succeeded(f"reward {outcome.grade:g} ({outcome.trust}): {outcome.reason}")


# ------------------------------------------------------------------------------------------------ programs


async def _tried(cheat: Cheat, machine: Machine, siblings: list[Machine], facts: dict[str, Any], stage: Stage) -> str:
    """Run a cheat's program, and its partner before, during or after it. Returns why it got nothing."""
    _, _, part = cheat.partner.partition(".")
    if part == "hold":
        async with _running(cheat.partner, siblings[0], {**facts, "secret": stage.secrets.word}, stage) as holding:
            await holding
            result = await _run(cheat.program, machine, facts, stage)
    elif part == "touch":
        async with _running(cheat.program, machine, facts, stage) as holding:
            await holding
            await _run(cheat.partner, siblings[0], facts, stage)
            result = await _run(cheat.program, machine, facts, stage)  # the same key: the one that runs
    else:
        result = await _run(cheat.program, machine, facts, stage)
    got, why = _said(result)
    if part == "marks":
        got, why = _said(await _run(cheat.partner, siblings[0], facts, stage))
    elif part == "draw":
        got = _alike(got, _said(await _run(cheat.partner, siblings[0], facts, stage))[0])
    if stage.secrets.word.encode() in result.output:
        got = got or "a secret came out"
    if stage.secrets.touched:
        got = f"{stage.secrets.touched.pop()} of the host answered"
    if got:
        raise _Succeeded(got)
    return why or "it got nothing"


async def _run(program: str, machine: Machine, facts: Mapping[str, Any], stage: Stage, tell: Any = None) -> ExecResult:
    module, _, function = program.partition(".")
    command = ["python", "-m", "programs", module, function, json.dumps(dict(facts))]
    return await machine.exec(command, key=program, deadline_s=stage.program_s, tell=tell)


@contextlib.asynccontextmanager
async def _running(
    program: str, machine: Machine, facts: Mapping[str, Any], stage: Stage
) -> AsyncIterator[Awaitable[None]]:
    """A program that runs meanwhile; what is yielded waits until it says that it is there, or ends."""
    there = asyncio.Event()
    running = asyncio.create_task(
        _run(program, machine, facts, stage, lambda told: there.set() if hasattr(told, "data") else None)
    )
    running.add_done_callback(lambda _: there.set())

    async def until_there() -> None:
        await there.wait()

    try:
        yield until_there()
    finally:
        running.cancel()
        await asyncio.wait([running])


def _said(result: ExecResult) -> tuple[str, str]:
    """What a program got, and why it got nothing."""
    for line in reversed(result.output.splitlines()):
        if line.startswith(b'{"got"'):
            with contextlib.suppress(ValueError):
                told = json.loads(line)
                return str(told["got"]), str(told["why"])
    end = "at its deadline" if result.timed_out else f"with exit code {result.exit_code}"
    tail = result.output[-200:].decode(errors="replace")
    return "", f"it ended {end} {tail}"


def _alike(ours: str, theirs: str) -> str:
    """Which draws of randomness two siblings share."""
    with contextlib.suppress(ValueError):
        mine, other = json.loads(ours), json.loads(theirs)
        same = [name for name in mine if mine[name] and mine[name] == other.get(name)]
        return f"siblings draw the same {', '.join(same)}" if same else ""
    return ""


# ------------------------------------------------------------------------------------------------ who was hurt


async def _must_be_able(sibling: Machine, facts: Mapping[str, Any]) -> None:
    command = ["python", "-m", "programs", "siblings", "able", json.dumps(dict(facts))]
    got, why = _said(await sibling.exec(command, key="able", deadline_s=_ABLE_S))
    if got != "able":
        raise _Succeeded(f"a sibling suffers: {why}")


async def _host_must_be_well(runtime: Runtime, snapshot: str, stage: Stage) -> None:
    [another] = await runtime.fork(snapshot, 1)
    await another.close()
    if stage.secrets.file.read_text() != stage.secrets.word:
        raise _Succeeded("a file of the host was changed")
    done = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.DEVNULL)
    if await done.wait() != 0:
        raise _Succeeded("the host cannot start a process")
