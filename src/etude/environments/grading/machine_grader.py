"""Judging exported files: which way a task is judged, and what becomes of failures.

Whatever the agent's code can do (raise, hang, exit, print, exhaust its machine) is a reward of 0 with a reason.
`Invalid` needs evidence from the host: it also happens without any file of the agent's.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping

import msgspec

from etude.environments.grading.check import grade_check
from etude.environments.grading.data import grade_cases
from etude.environments.grading.exports import MAX_STATE_BYTES, reference_exports, validate_exports
from etude.environments.grading.ground import Ground, Work
from etude.environments.grading.python import Pythons
from etude.environments.grading.tests import Plan, TestBench
from etude.environments.grading.verdicts import Broken, Refused, one_line, refused
from etude.environments.grading.verifier import Canary, VerifierBench
from etude.errors import MachineError, TaskError
from etude.records.exports import NO_STATE, STATE
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Task, Trust
from etude.seams import Runtime

MAX_PLANS = 256
_NOTHING_LEFT = "there is no state of the machine: nothing was left of it"


class MachineGrader:
    """A `Grader` whose machines come from `runtime`. Chooses by what the answer holds.

    `deadline_s` is that of data-graded calls and of a check; hidden tests and verifiers bring their own. `longest_s`
    is the longest that a grade may take from its beginning. `repeats` and `canaries` guard hidden tests that pass, see
    `TestBench`; at most two machines a core run them at once, so that their deadlines mean something. Not `to_the_end`,
    a verdict is there with the first hidden test that fails: for those who ask only whether all pass.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        deadline_s: float = 10.0,
        longest_s: float = 3600.0,
        repeats: int = 4,
        canaries: int = 4,
        to_the_end: bool = True,
    ) -> None:
        self._runtime, self._deadline_s, self._longest_s = runtime, deadline_s, longest_s
        self._pythons = Pythons(runtime)
        at_once = 2 * (os.cpu_count() or 1)
        self._tests = TestBench(runtime, repeats=repeats, canaries=canaries, at_once=at_once, to_the_end=to_the_end)
        self._verifiers = VerifierBench(runtime, canaries=min(2, canaries))
        self._plans: dict[str, asyncio.Task[Plan | list[Canary]]] = {}  # the newest MAX_PLANS, by what they are made of

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        """Judge the exports. Raises nothing that the agent or a machine can cause."""
        trust = Trust.DATA if answer.cases else Trust.CODE if answer.verifier is None else task.trust
        try:
            plan = await self._plan(task, answer) if answer.tests or answer.verifier else None
            async with asyncio.timeout(self._longest_s):
                return await self._judged(task, answer, _checked(task, exports), plan)
        except Refused as refusal:
            return refused(refusal, trust)
        except Broken as broken:
            return broken.invalid()
        except TaskError as error:
            return Invalid(boundary=Boundary.TASK, reason=one_line(error.what), evidence=str(error))
        except TimeoutError:
            return refused(Refused(f"the grade did not end within {self._longest_s:g} s"), trust)
        except MachineError as error:
            return Invalid(boundary=Boundary.MACHINE, reason="no machine to grade in", evidence=str(error))

    async def _judged(self, task: Task, answer: Answer, work: Work, plan: Plan | list[Canary] | None) -> Graded:
        if answer.tests is not None and isinstance(plan, Plan) and not task.running:
            return await self._tests.grade(self._tests.ground(task, answer.tests), answer.tests, plan, work)
        if answer.verifier is not None:
            canaries = plan if isinstance(plan, list) else []
            return await self._verifiers.grade(task, answer.verifier, canaries, work)
        if task.running:
            facts = f"task {task.task_id} is judged by running processes, and its answer is no verifier"
            raise Broken(Boundary.TASK, "running processes are judged by a verifier", facts)
        ground = Ground(self._runtime, task, pythons=self._pythons)
        if answer.cases:
            return await grade_cases(ground, answer.cases, work, deadline_s=self._deadline_s)
        if answer.test_code:
            return await grade_check(ground, answer, work, deadline_s=self._deadline_s)
        raise Broken(Boundary.GRADER, "the answer holds no hidden test", f"task {task.task_id}: nothing to judge by")

    async def _plan(self, task: Task, answer: Answer) -> Plan | list[Canary]:
        """What is asked of whoever does a task, made once however many ask for it. Raises `Broken`."""
        key = hashlib.sha256(task.task_id.encode() + msgspec.json.encode(answer)).hexdigest()
        if key not in self._plans:
            self._plans[key] = asyncio.create_task(self._made(task, answer))
            self._plans[key].add_done_callback(_retrieve)
            if len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        try:
            return await asyncio.shield(self._plans[key])
        except Exception:
            self._plans.pop(key, None)  # what broke it may be over
            raise

    async def _made(self, task: Task, answer: Answer) -> Plan | list[Canary]:
        if answer.verifier is not None and not self._verifiers.variants(task, answer.verifier):
            return []
        try:
            reference = await reference_exports(self._runtime, task, answer)
            async with asyncio.timeout(self._longest_s):
                if answer.tests is not None:
                    return await self._tests.plan(task, answer.tests, reference)
                assert answer.verifier is not None
                return await self._verifiers.plan(task, answer.verifier, reference)
        except TaskError as error:
            raise Broken(Boundary.TASK, "there is no reference solution", str(error)) from None
        except TimeoutError:
            facts = f"no plan within {self._longest_s:g} s"
            raise Broken(Boundary.TASK, "the reference solution is not judged in time", facts) from None
        except MachineError as error:
            raise Broken(Boundary.MACHINE, "no machine to grade in", str(error)) from None


def _retrieve(made: asyncio.Task[Plan | list[Canary]]) -> None:
    if not made.cancelled():
        made.exception()  # nobody may be waiting any more


def _checked(task: Task, exports: Mapping[str, bytes]) -> Work:
    """The exports, validated. Raises `Refused`."""
    state = exports.get(STATE) if task.state else None
    if task.state and state is None:
        why = exports.get(NO_STATE, b"").decode(errors="replace")
        raise Refused(f"the machine's state is over a limit: {why}" if why else _NOTHING_LEFT, over_limit=bool(why))
    beside = (STATE, NO_STATE) if task.state else ()
    try:
        files = validate_exports({p: d for p, d in exports.items() if p not in beside}, task.exports)
    except ValueError as error:
        raise Refused(f"exports refused: {error}") from None
    if state is not None and len(state) > MAX_STATE_BYTES:
        raise Refused(f"the machine's state has {len(state)} bytes, at most {MAX_STATE_BYTES}", over_limit=True)
    return files if state is None else {**files, STATE: state}
