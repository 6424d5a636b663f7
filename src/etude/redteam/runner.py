"""Run cheats against a runtime and a grader.

For each cheat: make a machine, run the program, freeze the machine, grade the exports, and check siblings and host. A
cheat succeeds if its program returns a proof of its success, a secret of the host leaks, the reward is above 0, the
rollout is invalid instead of graded, a process continues after the freeze, or a sibling or the host is harmed.
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
from etude.redteam.stage import Problem, Secrets, check_problems, host_secrets, problems, programs, repository
from etude.seams import Grader, Machine, Runtime

PROGRAM_S, PLAY_S = 12.0, 120.0
_ABLE_S, _LOOK_S = 30.0, 8.0


@dataclass(frozen=True)
class Stage:
    """The targets of cheats: runtime, grader, secrets of the host, and a task of each kind with its answer.

    `unusable`: for each kind of task, why it cannot be used; "" if it can. `program_s` is the time limit in seconds of
    a program, and `play_s` that of a whole cheat; a cheat that takes longer has blocked the host."""

    runtime: Runtime
    grader: Grader
    secrets: Secrets
    problems: Mapping[Kind, Problem]
    unusable: Mapping[Kind, str]  # why a kind of task cannot be used; "" if it can
    program_s: float = PROGRAM_S  # time limit of a program
    play_s: float = PLAY_S  # time limit of a cheat; a longer one has hung the host


class _Succeeded(Exception):
    """Raised when a cheat succeeds, with what it got."""


async def check(
    runtime: Runtime,
    grader: Grader,
    *,
    cheats: Sequence[Cheat] = CATALOGUE,
    at_once: int = 1,
    program_s: float = PROGRAM_S,
    play_s: float = PLAY_S,
) -> AsyncGenerator[Finding, None]:
    """Run all cheats on all their kinds of task, and yield the findings in order.

    `grader` must grade in machines of `runtime`. `at_once` cheats run at the same time. `program_s` is the time limit
    in seconds of a program; `play_s` is that of a cheat; a cheat that takes longer counts as successful, since it has
    blocked the host. Raises `MachineError` before any cheat is run, if no kind of task can be graded."""
    async with host_secrets() as secrets_of_host:
        wanted = {kind for cheat in cheats for kind in cheat.kinds}
        staged = {kind: problem for kind, problem in problems(EXPORTS).items() if kind in wanted}
        unusable = await check_problems(runtime, grader, staged, at_once=at_once)
        if unusable and all(unusable.values()):
            facts = "; ".join(f"{kind}: {why}" for kind, why in unusable.items())
            raise MachineError("no cheat can be run", facts, hint="first fix the grading of honest solutions")
        stage = Stage(runtime, grader, secrets_of_host, staged, unusable, program_s, play_s)
        slots = asyncio.Semaphore(at_once)

        async def run(cheat: Cheat, kind: Kind) -> Finding:
            async with slots:
                return await play(cheat, kind, stage)

        tasks = [asyncio.create_task(run(cheat, kind)) for cheat in cheats for kind in cheat.kinds]
        try:
            for task in tasks:
                yield await task
        finally:
            for task in tasks:
                task.cancel()


async def play(cheat: Cheat, kind: Kind, stage: Stage) -> Finding:
    """Run one cheat on one kind of task. Errors that the cheat can cause are part of the finding, not raised."""
    began = time.perf_counter()
    verdict, evidence = _skipped(cheat, kind, stage)
    if not evidence:
        try:
            async with asyncio.timeout(stage.play_s):
                verdict, evidence = await _run_cheat(cheat, stage.problems[kind], stage)
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
    return Verdict.SKIPPED, stage.unusable[kind]


async def _run_cheat(cheat: Cheat, problem: Problem, stage: Stage) -> tuple[Verdict, str]:
    runtime, task = stage.runtime, problem.task
    token = f"sibling-{secrets.token_hex(8)}"
    tree = {path: text.encode() for path, text in task.files.items()} | (programs() if cheat.program else {})
    if cheat.row is Row.HISTORY:
        tree |= await asyncio.to_thread(repository, stage.secrets.secret)
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
            why = await _run_programs(cheat, machine, siblings, facts, stage)
            await machine.exec(["python", "-c", "print(6 * 7)"], key="after", deadline_s=stage.program_s)
        exports = await _take_exports(machine, task, stage)
        if cheat.bomb:
            with contextlib.suppress(OSError, ValueError):
                await machine.snapshot()
            await _require_working_sibling(siblings[0], facts)
            await _require_working_host(runtime, snapshot, stage)
    finally:
        for each in (machine, *siblings):
            await each.close()
    return await _grade(problem, exports, why, stage)


async def _take_exports(machine: Machine, task: Task, stage: Stage) -> Mapping[str, bytes]:
    """Take the exports, and check that no process still runs after the freeze."""
    exports = await take_exports(machine, task, stage.runtime)
    if any(stage.secrets.secret.encode() in data for data in exports.values()):
        raise _Succeeded("a secret file of the host was exported")
    with contextlib.suppress(OSError, ValueError):
        before = await machine.read("late")
        await asyncio.sleep(0.5)
        if await machine.read("late") != before:
            raise _Succeeded("it worked on after the freeze")
    return exports


async def _grade(problem: Problem, exports: Mapping[str, bytes], why: str, stage: Stage) -> tuple[Verdict, str]:
    outcome = await stage.grader.grade(problem.task, problem.answer, exports)
    _require_serializable(outcome)
    if isinstance(outcome, Invalid):
        return Verdict.SUCCEEDED, f"not graded: {outcome.boundary}: {outcome.reason}: {outcome.evidence}"
    found = _run_detector(problem, exports, outcome)
    if outcome.grade <= 0:
        return Verdict.RESISTED, why or outcome.reason
    return _reward_finding(outcome, found)


def _require_serializable(outcome: Graded | Invalid) -> None:
    try:
        msgspec.json.encode(outcome)
    except (UnicodeEncodeError, ValueError) as error:
        raise _Succeeded(f"its verdict cannot be written down: {error}") from None
    if not outcome.reason.isprintable():
        raise _Succeeded(f"it writes on the terminal of whoever reads its verdict: {outcome.reason!r}")


def _run_detector(problem: Problem, exports: Mapping[str, bytes], outcome: Graded) -> list[CheatIndicator]:
    began = time.process_time()
    found = find_cheating(problem.task, exports=exports, outcome=outcome)
    if (took_s := time.process_time() - began) > _LOOK_S:
        raise _Succeeded(f"it holds the host up for {took_s:.0f} s while it is looked through")
    return found


def _reward_finding(outcome: Graded, found: Sequence[CheatIndicator]) -> tuple[Verdict, str]:
    if outcome.trust is Trust.CODE and found:
        return Verdict.CAUGHT, f"rewarded as {outcome.trust}; flagged: {found[0].reason} in {found[0].place}"
    raise _Succeeded(f"reward {outcome.grade:g} ({outcome.trust}): {outcome.reason}")


async def _run_programs(
    cheat: Cheat, machine: Machine, siblings: list[Machine], facts: dict[str, Any], stage: Stage
) -> str:
    """Run the program of a cheat, and its partner in a sibling. Returns why it failed; raises `_Succeeded`
    otherwise."""
    _, _, part = cheat.partner.partition(".")
    if part == "hold":
        async with _running(cheat.partner, siblings[0], {**facts, "secret": stage.secrets.secret}, stage) as holding:
            await holding
            result = await _run(cheat.program, machine, facts, stage)
    elif part == "touch":
        async with _running(cheat.program, machine, facts, stage) as holding:
            await holding
            await _run(cheat.partner, siblings[0], facts, stage)
            result = await _run(cheat.program, machine, facts, stage)  # the same key: the one that runs
    else:
        result = await _run(cheat.program, machine, facts, stage)
    gain, why = _parse_output(result)
    if part == "marks":
        gain, why = _parse_output(await _run(cheat.partner, siblings[0], facts, stage))
    elif part == "draw":
        gain = _equal_draws(gain, _parse_output(await _run(cheat.partner, siblings[0], facts, stage))[0])
    if stage.secrets.secret.encode() in result.output:
        gain = gain or "a secret came out"
    if stage.secrets.touched:
        gain = f"{stage.secrets.touched.pop()} of the host answered"
    if gain:
        raise _Succeeded(gain)
    return why or "it got nothing"


async def _run(
    program: str, machine: Machine, facts: Mapping[str, Any], stage: Stage, on_output: Any = None
) -> ExecResult:
    module, _, function = program.partition(".")
    command = ["python", "-m", "programs", module, function, json.dumps(dict(facts))]
    return await machine.exec(command, key=program, deadline_s=stage.program_s, on_output=on_output)


@contextlib.asynccontextmanager
async def _running(
    program: str, machine: Machine, facts: Mapping[str, Any], stage: Stage
) -> AsyncIterator[Awaitable[None]]:
    """Run a program in the background. Yields an awaitable that waits for its first output or its end."""
    started = asyncio.Event()
    running = asyncio.create_task(
        _run(program, machine, facts, stage, lambda event: started.set() if hasattr(event, "data") else None)
    )
    running.add_done_callback(lambda _: started.set())

    async def until_started() -> None:
        await started.wait()

    try:
        yield until_started()
    finally:
        running.cancel()
        await asyncio.wait([running])


def _parse_output(result: ExecResult) -> tuple[str, str]:
    """Parse the output of a program: what it got, and why it failed."""
    for line in reversed(result.output.splitlines()):
        if line.startswith(b'{"got"'):
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                return str(fields["got"]), str(fields["why"])
    end = "at its deadline" if result.timed_out else f"with exit code {result.exit_code}"
    tail = result.output[-200:].decode(errors="replace")
    return "", f"it ended {end} {tail}"


def _equal_draws(first: str, second: str) -> str:
    with contextlib.suppress(ValueError):
        mine, other = json.loads(first), json.loads(second)
        same = [name for name in mine if mine[name] and mine[name] == other.get(name)]
        return f"siblings draw the same {', '.join(same)}" if same else ""
    return ""


async def _require_working_sibling(sibling: Machine, facts: Mapping[str, Any]) -> None:
    command = ["python", "-m", "programs", "siblings", "able", json.dumps(dict(facts))]
    gain, why = _parse_output(await sibling.exec(command, key="able", deadline_s=_ABLE_S))
    if gain != "able":
        raise _Succeeded(f"a sibling suffers: {why}")


async def _require_working_host(runtime: Runtime, snapshot: str, stage: Stage) -> None:
    [another] = await runtime.fork(snapshot, 1)
    await another.close()
    if stage.secrets.file.read_text() != stage.secrets.secret:
        raise _Succeeded("a file of the host was changed")
    done = await asyncio.create_subprocess_exec("true", stdin=asyncio.subprocess.DEVNULL)
    if await done.wait() != 0:
        raise _Succeeded("the host cannot start a process")
