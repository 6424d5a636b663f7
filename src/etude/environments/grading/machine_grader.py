"""`MachineGrader`: grade exported files by the method that the task's answer needs.

Anything that the agent's code can do (raise, hang, exit, print, exhaust its machine) is a reward of 0 with a reason. An
`Invalid` outcome needs evidence from the host: the failure also happens without the agent's files.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping

import msgspec

from etude.environments.command_registry import consume_exception
from etude.environments.grading.check import grade_check
from etude.environments.grading.data import grade_cases
from etude.environments.grading.exports import MAX_STATE_BYTES, reference_exports, validate_exports
from etude.environments.grading.hidden_tests import HiddenTestGrader, HiddenTestPlan
from etude.environments.grading.machines import GradingMachines, PythonFinder, Submission
from etude.environments.grading.verdicts import GradingFault, Rejected, one_line, rejected_grade
from etude.environments.grading.verifier import VerifierCanary, VerifierGrader
from etude.errors import MachineError, TaskError
from etude.records.exports import NO_STATE, STATE
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Task, Trust
from etude.seams import Runtime

MAX_PLANS = 256
_NOTHING_LEFT = "the machine's state is missing: the machine was gone"


class MachineGrader:
    """A `Grader` that grades in machines of `runtime`.

    The task's answer decides how: by function calls, hidden tests, a check function or a verifier.

    - `deadline_s`: seconds for function calls and check functions; hidden tests and verifiers have their own deadlines
    - `total_deadline_s`: seconds for a whole grade
    - `repeats`, `canaries`: when all hidden tests have passed, this many are run again, and this many changed tests
      must fail, so that forged results are found
    - `run_all_tests`: False stops at the first hidden test that fails, if only passing or failing matters

    At most two machines per core run tests at once, so that their deadlines are fair.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        deadline_s: float = 10.0,
        total_deadline_s: float = 3600.0,
        repeats: int = 4,
        canaries: int = 4,
        run_all_tests: bool = True,
    ) -> None:
        self._runtime, self._deadline_s, self._total_deadline_s = runtime, deadline_s, total_deadline_s
        self._python_finder = PythonFinder(runtime)
        max_machines = 2 * (os.cpu_count() or 1)
        self._tests = HiddenTestGrader(
            runtime, repeats=repeats, canaries=canaries, max_machines=max_machines, run_all_tests=run_all_tests
        )
        self._verifiers = VerifierGrader(runtime, canaries=min(2, canaries))
        # The newest MAX_PLANS, by a digest of task and answer.
        self._plans: dict[str, asyncio.Task[HiddenTestPlan | list[VerifierCanary]]] = {}

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        """Grade the exports (path to content) and return the outcome.

        Every failure that the agent or a machine can cause is part of the outcome, and raises no exception.
        """
        trust = Trust.DATA if answer.cases else Trust.CODE if answer.verifier is None else task.trust
        try:
            plan = await self._plan(task, answer) if answer.tests or answer.verifier else None
            async with asyncio.timeout(self._total_deadline_s):
                return await self._grade(task, answer, _validated(task, exports), plan)
        except Rejected as rejection:
            return rejected_grade(rejection, trust)
        except GradingFault as fault:
            return fault.invalid()
        except TaskError as error:
            return Invalid(boundary=Boundary.TASK, reason=one_line(error.what), evidence=str(error))
        except TimeoutError:
            return rejected_grade(Rejected(f"the grade did not end within {self._total_deadline_s:g} s"), trust)
        except MachineError as error:
            return Invalid(boundary=Boundary.MACHINE, reason="no machine for grading", evidence=str(error))

    async def _grade(
        self, task: Task, answer: Answer, submission: Submission, plan: HiddenTestPlan | list[VerifierCanary] | None
    ) -> Graded:
        if answer.tests is not None and isinstance(plan, HiddenTestPlan) and not task.running:
            return await self._tests.grade(self._tests.machines(task, answer.tests), answer.tests, plan, submission)
        if answer.verifier is not None:
            canaries = plan if isinstance(plan, list) else []
            return await self._verifiers.grade(task, answer.verifier, canaries, submission)
        if task.running:
            facts = f"task {task.task_id} is graded by running processes, but its answer is not a verifier"
            raise GradingFault(Boundary.TASK, "running processes need a verifier", facts)
        machines = GradingMachines(self._runtime, task, python_finder=self._python_finder)
        if answer.cases:
            return await grade_cases(machines, answer.cases, submission, deadline_s=self._deadline_s)
        if answer.test_code:
            return await grade_check(machines, answer, submission, deadline_s=self._deadline_s)
        raise GradingFault(Boundary.GRADER, "the answer has no hidden test", f"task {task.task_id}: no way to grade")

    async def _plan(self, task: Task, answer: Answer) -> HiddenTestPlan | list[VerifierCanary]:
        """The plan of a task (which tests and canaries to run), made once and shared by concurrent grades. Raises
        `GradingFault`."""
        key = hashlib.sha256(task.task_id.encode() + msgspec.json.encode(answer)).hexdigest()
        if key not in self._plans:
            self._plans[key] = asyncio.create_task(self._make_plan(task, answer))
            self._plans[key].add_done_callback(consume_exception)
            if len(self._plans) > MAX_PLANS:
                del self._plans[next(iter(self._plans))]
        try:
            return await asyncio.shield(self._plans[key])
        except Exception:
            self._plans.pop(key, None)  # the failure may be temporary
            raise

    async def _make_plan(self, task: Task, answer: Answer) -> HiddenTestPlan | list[VerifierCanary]:
        if answer.verifier is not None and not self._verifiers.variants(task, answer.verifier):
            return []
        try:
            reference = await reference_exports(self._runtime, task, answer)
            async with asyncio.timeout(self._total_deadline_s):
                if answer.tests is not None:
                    return await self._tests.plan(task, answer.tests, reference)
                assert answer.verifier is not None
                return await self._verifiers.plan(task, answer.verifier, reference)
        except TaskError as error:
            raise GradingFault(Boundary.TASK, "there is no reference solution", str(error)) from None
        except TimeoutError:
            facts = f"no plan within {self._total_deadline_s:g} s"
            raise GradingFault(Boundary.TASK, "the reference solution is not graded in time", facts) from None
        except MachineError as error:
            raise GradingFault(Boundary.MACHINE, "no machine for grading", str(error)) from None


def _validated(task: Task, exports: Mapping[str, bytes]) -> Submission:
    state = exports.get(STATE) if task.state else None
    if task.state and state is None:
        why = exports.get(NO_STATE, b"").decode(errors="replace")
        raise Rejected(f"the machine's state is over a limit: {why}" if why else _NOTHING_LEFT, over_limit=bool(why))
    state_keys = (STATE, NO_STATE) if task.state else ()
    try:
        files = validate_exports({p: d for p, d in exports.items() if p not in state_keys}, task.exports)
    except ValueError as error:
        raise Rejected(f"exports refused: {error}") from None
    if state is not None and len(state) > MAX_STATE_BYTES:
        raise Rejected(f"the machine's state has {len(state)} bytes, at most {MAX_STATE_BYTES}", over_limit=True)
    return files if state is None else {**files, STATE: state}
