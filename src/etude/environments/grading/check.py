"""A hidden `check(candidate)`, in a machine that has nothing of the agent's; the agent's code answers in another.

The host carries calls and results between the two as plain data, so what the test expects, its nonce and its verdict
are out of the agent's reach by construction: there is nothing to patch, to read or to forge. A test that passes is run
once more with every result spoiled, and must then fail: else it tests nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Any

from etude.environments.grading.ground import Ground, Work
from etude.environments.grading.reports import NotStarted, NotTold, new_nonce, runner
from etude.environments.grading.verdicts import Refused, earned
from etude.errors import MachineError
from etude.records.command import ExecResult, Printed, Started
from etude.records.exports import covering
from etude.records.rollout import Graded
from etude.records.task import Answer, Trust
from etude.seams import Machine

MAX_LINE_BYTES = 1 << 20
MAX_CALLS = 20_000
MAX_CARRIED_BYTES = 64 << 20  # from the agent's side
MAX_UNASKED_BYTES = 64 << 10


async def grade_check(ground: Ground, answer: Answer, work: Work, *, deadline_s: float) -> Graded:
    """The verdict of `answer.test_code`."""
    verdicts = await _verdicts(ground, answer, work, deadline_s)
    if verdicts[0] != ["passes"]:
        raise Refused(str(verdicts[0][-1]))
    if verdicts[1:] == [["passes"]]:
        raise Refused("canary: the test passes whatever the code returns")
    return earned(1.0, 1.0, Trust.CODE, "the hidden test passes")


async def _verdicts(ground: Ground, answer: Answer, work: Work, deadline_s: float) -> list[list[Any]]:
    module, _, function = answer.entry_point.partition(":")
    nonce = new_nonce()
    test = {"role": "test", "nonce": nonce, "module": module, "function": function, "test": answer.test_code}
    modules = _modules(ground, work, module)
    python = await ground.python()
    request = json.dumps({**test, "modules": modules, "more": _made(work, modules)}).encode() + b"\n"
    for lost in range(2):
        try:
            async with contextlib.AsyncExitStack() as stack:
                tests, code = [await stack.enter_async_context(ground.machine(w)) for w in ({}, work)]
                return await _Talk(python, nonce, deadline_s).between(tests, code, request)
        except NotStarted:
            await ground.python_starts()
            raise
        except MachineError:
            if lost:
                await ground.host_works()
                raise Refused("the machines were lost again and again") from None
    raise AssertionError("the loop returns or raises")


def _modules(ground: Ground, work: Work, module: str) -> list[str]:
    """The modules that are the agent's, whatever else has such a name: those of the files that the task declares by
    name, or declares and has."""
    is_declared = covering(ground.task.exports)
    files = [path for path in ground.task.files if is_declared(path)]
    return sorted({module, *_names([*ground.task.exports, *files])})


def _made(work: Work, modules: Collection[str]) -> list[str]:
    """The modules that the agent made besides. One that the test's machine has, too, is not the agent's."""
    return sorted(_names(work) - {*modules})


def _names(paths: Iterable[str]) -> set[str]:
    python = [path for path in paths if path.endswith(".py")]
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in python}


class _Lines:
    """Bytes as they come, to whole lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(self._rest) > MAX_LINE_BYTES:
            raise Refused("an argument or a result is too large")
        return [bytes(line) for line in lines]


class _Talk:
    """One conversation between a test and the code that it tests."""

    def __init__(self, python: str, nonce: str, deadline_s: float) -> None:
        self._python = python
        self._marker, self._deadline_s = f"{nonce} ".encode(), deadline_s
        self._to_test: asyncio.Queue[bytes] = asyncio.Queue()
        self._to_code: asyncio.Queue[bytes] = asyncio.Queue()
        self._asked = self._answered = self._carried_bytes = self._unasked_bytes = 0
        self._verdicts: list[list[Any]] = []
        self._failure: Refused | None = None
        self._over = asyncio.Event()

    async def between(self, tests: Machine, code: Machine, request: bytes) -> list[list[Any]]:
        """The verdicts, one for each run of the test that ended. Raises `Refused` where none did, or `MachineError`."""
        self._to_test.put_nowait(request)
        self._to_code.put_nowait(b'{"role": "calls"}\n')
        sides = [
            asyncio.create_task(self._side(tests, self._to_test, self._from_test)),
            asyncio.create_task(self._side(code, self._to_code, self._from_code)),
        ]
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait([*sides, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*sides, over):
                each.cancel()
            results = await asyncio.gather(*sides, return_exceptions=True)
        if self._verdicts:
            return self._verdicts
        if self._failure is not None:
            raise self._failure
        raise _why(results)

    async def _side(self, machine: Machine, to: asyncio.Queue[bytes], take: Any) -> ExecResult:
        lines = _Lines()

        def tell(event: Started | Printed) -> None:
            if isinstance(event, Printed) and event.stream == 1 and not self._over.is_set():
                try:
                    for line in lines.feed(event.data):
                        take(line)
                except Refused as refusal:
                    self._failure = refusal
                    self._over.set()

        async def given() -> AsyncIterator[bytes]:
            while True:
                yield await to.get()

        argv = [self._python, "-c", runner("check")]
        return await machine.exec(argv, key="check", deadline_s=self._deadline_s, stdin=given(), tell=tell)

    def _from_test(self, line: bytes) -> None:
        if not line.startswith(self._marker):
            return
        kind, *words = json.loads(line[len(self._marker) :])
        if kind == "call":
            self._asked += 1
            if self._asked > MAX_CALLS:
                raise Refused(f"the test calls more than {MAX_CALLS} times")
            self._to_code.put_nowait(json.dumps(words).encode() + b"\n")
            return
        self._verdicts.append([kind, *words])
        if kind == "fails" or len(self._verdicts) == 2:
            self._over.set()

    def _from_code(self, line: bytes) -> None:
        if self._answered == self._asked:  # what nobody asked for is no answer
            self._unasked_bytes += len(line) + 1
            if self._unasked_bytes > MAX_UNASKED_BYTES:
                raise Refused("it answers what nobody asked")
            return
        self._answered += 1
        self._carried_bytes += len(line)
        if self._carried_bytes > MAX_CARRIED_BYTES:
            raise Refused("the results are too large")
        self._to_test.put_nowait(line + b"\n")


def _why(results: list[ExecResult | BaseException]) -> BaseException:
    """Why a conversation ended without a verdict: the code's process is told of first, it is the likely one."""
    for result in reversed(results):
        if isinstance(result, MachineError):
            return result
        if isinstance(result, ExecResult):
            if result.timed_out:
                return NotTold("the hidden tests did not end before their deadline")
            reason = f"the process ended with exit code {result.exit_code} before it reported"
            return (NotStarted if result.exit_code in (126, 127) else NotTold)(reason)
    return NotTold("the hidden tests did not end before their deadline")
