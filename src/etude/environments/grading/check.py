"""Grade with a hidden function `check(candidate)`: the test runs in one machine, the agent's code in another.

The host relays calls and results between the two as plain data. So the agent's code cannot reach the expected values,
the nonce or the verdict: there is nothing to patch, read or forge. A test that passes runs once more with every result
changed. It must fail then, or it tests nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from etude.environments.grading.machines import (
    GradingMachines,
    NoReport,
    RunnerNotStarted,
    Submission,
    new_nonce,
    runner_source,
)
from etude.environments.grading.verdicts import Rejected, graded
from etude.errors import MachineError
from etude.records.command import ExecResult, OutputChunk, ProcessStarted
from etude.records.exports import covering
from etude.records.rollout import Graded
from etude.records.task import Answer, Trust
from etude.seams import Machine

MAX_LINE_BYTES = 1 << 20
MAX_CALLS = 20_000
MAX_CARRIED_BYTES = 64 << 20  # results from the agent's side
MAX_UNSOLICITED_BYTES = 64 << 10


async def grade_check(
    machines: GradingMachines, answer: Answer, submission: Submission, *, deadline_s: float
) -> Graded:
    """Grade a submission with the function in `answer.test_code`: reward 1 if it passes, else `Rejected` is raised.

    `deadline_s`: the most seconds for both runs of the test together. Raises `GradingFault` if the task or the host is
    to blame.
    """
    verdicts = await _verdicts(machines, answer, submission, deadline_s)
    if verdicts[0] != ["passes"]:
        raise Rejected(str(verdicts[0][-1]))
    if verdicts[1:] == [["passes"]]:
        raise Rejected("canary: the test passes whatever the code returns")
    return graded(1.0, 1.0, Trust.CODE, "the hidden test passes")


async def _verdicts(
    machines: GradingMachines, answer: Answer, submission: Submission, deadline_s: float
) -> list[list[Any]]:
    module, _, function = answer.entry_point.partition(":")
    nonce = new_nonce()
    test = {"role": "test", "nonce": nonce, "module": module, "function": function, "test": answer.test_code}
    modules = _modules(machines, module)
    python = await machines.python()
    more = sorted(
        _module_names(submission) - {*modules}
    )  # a module of this name in the test's machine takes precedence
    request = json.dumps({**test, "modules": modules, "more": more}).encode() + b"\n"
    for is_retry in range(2):
        try:
            async with contextlib.AsyncExitStack() as stack:
                tests, code = [await stack.enter_async_context(machines.open(w)) for w in ({}, submission)]
                return await _Relay(python, nonce, deadline_s).run(tests, code, request)
        except RunnerNotStarted:
            await machines.check_python()
            raise
        except MachineError:
            if is_retry:
                await machines.check_host()
                raise Rejected("the machines were lost repeatedly") from None
    raise AssertionError("the loop returns or raises")


def _modules(machines: GradingMachines, module: str) -> list[str]:
    """The modules that belong to the agent: the entry point's, and those of files that the task declares."""
    is_declared = covering(machines.task.exports)
    files = [path for path in machines.task.files if is_declared(path)]
    return sorted({module, *_module_names([*machines.task.exports, *files])})


def _module_names(paths: Iterable[str]) -> set[str]:
    python = [path for path in paths if path.endswith(".py")]
    return {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in python}


class _Lines:
    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        *lines, rest = self._rest.split(b"\n")
        self._rest = bytearray(rest)
        if len(self._rest) > MAX_LINE_BYTES:
            raise Rejected("an argument or a result is too large")
        return [bytes(line) for line in lines]


class _Relay:
    def __init__(self, python: str, nonce: str, deadline_s: float) -> None:
        self._python = python
        self._marker, self._deadline_s = f"{nonce} ".encode(), deadline_s
        self._to_test: asyncio.Queue[bytes] = asyncio.Queue()
        self._to_code: asyncio.Queue[bytes] = asyncio.Queue()
        self._num_calls = self._num_answers = self._carried_bytes = self._unsolicited_bytes = 0
        self._verdicts: list[list[Any]] = []
        self._failure: Rejected | None = None
        self._finished = asyncio.Event()

    async def run(self, tests: Machine, code: Machine, request: bytes) -> list[list[Any]]:
        """Return the verdicts, one for each completed run of the test. Raises `Rejected` without any verdict, or
        `MachineError`."""
        self._to_test.put_nowait(request)
        self._to_code.put_nowait(b'{"role": "calls"}\n')
        sides = [
            asyncio.create_task(self._run_side(tests, self._to_test, self._from_test)),
            asyncio.create_task(self._run_side(code, self._to_code, self._from_code)),
        ]
        finished = asyncio.create_task(self._finished.wait())
        try:
            await asyncio.wait([*sides, finished], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (*sides, finished):
                each.cancel()
            results = await asyncio.gather(*sides, return_exceptions=True)
        if self._verdicts:
            return self._verdicts
        if self._failure is not None:
            raise self._failure
        raise _missing_verdict(results)

    async def _run_side(self, machine: Machine, queue: asyncio.Queue[bytes], on_line: Any) -> ExecResult:
        lines = _Lines()

        def on_event(event: ProcessStarted | OutputChunk) -> None:
            if isinstance(event, OutputChunk) and event.stream == 1 and not self._finished.is_set():
                try:
                    for line in lines.feed(event.data):
                        on_line(line)
                except Rejected as rejection:
                    self._failure = rejection
                    self._finished.set()

        async def stdin() -> AsyncIterator[bytes]:
            while True:
                yield await queue.get()

        argv = [self._python, "-c", runner_source("check")]
        return await machine.exec(argv, key="check", deadline_s=self._deadline_s, stdin=stdin(), on_output=on_event)

    def _from_test(self, line: bytes) -> None:
        if not line.startswith(self._marker):
            return
        kind, *args = json.loads(line[len(self._marker) :])
        if kind == "call":
            self._num_calls += 1
            if self._num_calls > MAX_CALLS:
                raise Rejected(f"the test calls more than {MAX_CALLS} times")
            self._to_code.put_nowait(json.dumps(args).encode() + b"\n")
            return
        self._verdicts.append([kind, *args])
        if kind == "fails" or len(self._verdicts) == 2:
            self._finished.set()

    def _from_code(self, line: bytes) -> None:
        if self._num_answers == self._num_calls:  # not an answer to a call
            self._unsolicited_bytes += len(line) + 1
            if self._unsolicited_bytes > MAX_UNSOLICITED_BYTES:
                raise Rejected("it sends answers without calls")
            return
        self._num_answers += 1
        self._carried_bytes += len(line)
        if self._carried_bytes > MAX_CARRIED_BYTES:
            raise Rejected("the results are too large")
        self._to_test.put_nowait(line + b"\n")


def _missing_verdict(results: list[ExecResult | BaseException]) -> BaseException:
    """The error for a relay that ended without a verdict. The code's process is checked first, as the likely cause."""
    for result in reversed(results):
        if isinstance(result, MachineError):
            return result
        if isinstance(result, ExecResult):
            if result.timed_out:
                return NoReport("the hidden tests did not end before their deadline")
            reason = f"the process ended with exit code {result.exit_code} before it reported"
            return (RunnerNotStarted if result.exit_code in (126, 127) else NoReport)(reason)
    return NoReport("the hidden tests did not end before their deadline")
