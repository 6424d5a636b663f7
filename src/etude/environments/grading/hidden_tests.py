"""Grade with hidden tests: each named test runs in a process and a machine of its own.

Tests run under the machine's own pytest or unittest and the task's own configuration. They import the agent's code, so
that code could forge results. Therefore, after all tests have passed, some are repeated, mixed with canaries: variants
that correct code fails, with the same names, form and nonce (`grading.canaries`). A canary that passes proves a
forgery. Code that passes at random survives `n` repeats and `k` canaries with a probability of at most `(n/(n+k))^n
(k/(n+k))^k`: 1 in 484 for one test and the defaults.

A plan (`HiddenTestPlan`) is made once per task with the reference solution: which tests exist, and which canaries fail.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from etude.environments.grading.canaries import variant_of_data, variants_of_test
from etude.environments.grading.machines import (
    GradingMachines,
    NoReport,
    PythonFinder,
    Submission,
    new_nonce,
    runner_source,
)
from etude.environments.grading.verdicts import GradingFault, Rejected, graded
from etude.records.exports import CONFIGURATION
from etude.records.rollout import Boundary, Graded
from etude.records.task import HiddenTests, Runner, Task, Trust
from etude.seams import Runtime

_MAX_VARIANTS = 24  # tried on the reference solution to find canaries
_MAX_DATA_VARIANTS = 3  # of these, variants of data files: few of their characters decide a test
_COLLECT_S = 300.0


class Target(NamedTuple):
    """One hidden test.

    `base`: its name without parameters. `ordinal`: its number, from 0, among the tests with that name. `id`: its full
    name in pytest or unittest.
    """

    base: str
    ordinal: int
    id: str


class Canary(NamedTuple):
    """A changed copy of the hidden files with which the test `target` must fail. `hidden`: path to text."""

    hidden: Mapping[str, str]
    target: Target


class HiddenTestPlan(NamedTuple):
    """How to grade all submissions of one task. `HiddenTestGrader.plan` makes it.

    `hidden`: path to text of the hidden files. `targets`: the tests to run. `canaries`: changed tests that must fail.
    """

    hidden: Mapping[str, str]
    targets: Sequence[Target]
    canaries: Sequence[Canary]


class HiddenTestGrader:
    """Grades submissions with hidden tests, in machines of `runtime`.

    After all tests have passed, `repeats` of them run again, and `canaries` changed tests must fail. `max_machines`:
    the most machines that run tests at the same time, for all submissions together. `run_all_tests`: False skips the
    remaining tests after a failure.
    """

    def __init__(
        self, runtime: Runtime, *, repeats: int, canaries: int, max_machines: int, run_all_tests: bool = True
    ) -> None:
        self._runtime, self._repeats, self._canaries = runtime, repeats, canaries
        self._python_finder = PythonFinder(runtime)
        self._slots, self._run_all_tests = asyncio.Semaphore(max_machines), run_all_tests

    def machines(self, task: Task, tests: HiddenTests) -> GradingMachines:
        """Return an object that makes the machines in which these tests of a task are graded.

        Test files and configuration files are never taken from the agent.
        """
        return GradingMachines(
            self._runtime,
            task,
            excluded_names=CONFIGURATION,
            protected_paths=_files_of(tests),
            python_finder=self._python_finder,
        )

    async def plan(self, task: Task, tests: HiddenTests, reference: Submission) -> HiddenTestPlan:
        """Find the tests that `tests` names, and changed tests that must fail, by running them on the reference
        solution.

        `reference`: the exports of the reference solution. Raises `GradingFault` if the tests do not pass there.
        """
        machines = self.machines(task, tests)
        own = {path: task.files[path] for path in _files_of(tests) if path in task.files}
        hidden = {**own, **tests.files}
        try:
            targets = await self._collect(machines, tests, hidden, reference)
            sources = await _sources(machines, tests, hidden)
            hidden |= sources  # also those of the image: else only a canary's file would have a new modification time
            canaries = await self._find_canaries(machines, tests, sources, hidden, targets, reference)
        except Rejected as error:
            raise GradingFault(
                Boundary.TASK, "the hidden tests do not run on the reference solution", error.reason
            ) from None
        return HiddenTestPlan(hidden, targets, canaries)

    async def grade(
        self, machines: GradingMachines, tests: HiddenTests, plan: HiddenTestPlan, submission: Submission
    ) -> Graded:
        """Grade a submission: reward 1 if every named test passes, else 0. The share that passed is recorded as a
        measure.

        `machines`, `plan`: the results of the methods with these names. `submission`: the agent's exports. Raises
        `Rejected` for a forged result or one that does not repeat, `GradingFault` if the task or the host is to blame.
        """
        first = await self._run_all(
            machines, tests, [(plan.hidden, target) for target in plan.targets], submission, stop_when_lost=True
        )
        passed = [_passed(report, target) for report, target in zip(first, plan.targets, strict=True)]
        if not all(passed):
            at = passed.index(False)
            why = f": {first[at].get('why') or first[at].get('outcome')}"
            reason = f"{sum(passed)} of {len(passed)} hidden tests pass; {tests.names[at]} does not{why}"
            return graded(0.0, sum(passed) / len(passed), Trust.CODE, reason)
        await self._verify_pass(machines, tests, plan, submission)
        reason = f"all {len(passed)} hidden tests pass" if len(passed) > 1 else "the hidden test passes"
        return graded(1.0, 1.0, Trust.CODE, reason)

    async def _verify_pass(
        self, machines: GradingMachines, tests: HiddenTests, plan: HiddenTestPlan, submission: Submission
    ) -> None:
        """Repeat some tests, mixed with canaries in a random order. Raises `Rejected` if a test fails or a canary
        passes."""
        rng = random.Random(new_nonce())
        again = [(plan.hidden, target, True) for target in _draw(plan.targets, self._repeats, rng)]
        must_fail = [(canary.hidden, canary.target, False) for canary in _draw(plan.canaries, self._canaries, rng)]
        runs = rng.sample([*again, *must_fail], self._repeats + len(must_fail))
        reports = await self._run_all(machines, tests, [(hidden, target) for hidden, target, _ in runs], submission)
        for (_, target, real), report in zip(runs, reports, strict=True):
            if not real and report.get("outcome") == "passed":
                raise Rejected("canary: a test that must fail passed, so passes prove nothing", forged=True)
            if real and not _passed(report, target):
                why = report.get("why") or report.get("outcome")
                raise Rejected(f"a hidden test passed once and not again: {target.id}: {why}")

    async def _run_all(
        self,
        machines: GradingMachines,
        tests: HiddenTests,
        runs: Sequence[tuple[Mapping[str, str], Target]],
        submission: Submission,
        *,
        stop_when_lost: bool = False,
    ) -> list[dict[str, str]]:
        """Return the reports of all runs, in order.

        `stop_when_lost`: after a run without a report, skip those that have not started, so that a submission that
        hangs costs one deadline.
        """
        lost: list[str] = []

        async def run_one(hidden: Mapping[str, str], target: Target) -> dict[str, str]:
            async with self._slots:
                if lost and stop_when_lost:
                    return {"outcome": "not run", "why": lost[0]}
                report = await self._run(machines, tests, hidden, target, submission)
                if report.get("outcome") == "lost" or not (self._run_all_tests or _passed(report, target)):
                    lost.append(str(report.get("why") or report.get("outcome")))
                return report

        try:
            async with asyncio.TaskGroup() as group:
                reports = [group.create_task(run_one(hidden, target)) for hidden, target in runs]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # `GradingFault` or `Rejected`
        return [task.result() for task in reports]

    async def _run(
        self,
        machines: GradingMachines,
        tests: HiddenTests,
        hidden: Mapping[str, str],
        target: Target,
        submission: Submission,
    ) -> dict[str, str]:
        """The report of one run: only its known fields, and only those that are text."""
        request = {"role": "run", **_runner_settings(tests), "base": target.base, "index": target.ordinal}
        try:
            report = await machines.run_runner(
                submission, hidden, _argv(await machines.python()), request, deadline_s=tests.deadline_s
            )
        except NoReport as error:
            return {"outcome": "lost", "why": error.reason}
        fields = report if type(report) is dict else {"outcome": "no report"}
        return {name: fields[name] for name in ("id", "outcome", "why") if type(fields.get(name)) is str}

    async def _collect(
        self, machines: GradingMachines, tests: HiddenTests, hidden: Mapping[str, str], reference: Submission
    ) -> list[Target]:
        request = {"role": "collect", **_runner_settings(tests), "names": list(tests.names)}
        report = await machines.run_runner(
            reference, hidden, _argv(await machines.python()), request, deadline_s=_COLLECT_S
        )
        if type(report) is dict and report.get("needs"):
            facts = f"the tests have fixtures or parameters, and {report['needs']} is not installed there"
            raise GradingFault(
                Boundary.TASK, f"the task's machine has no {report['needs']}", facts + "; use an image that has it"
            )
        ids = report.get("ids") if type(report) is dict else None
        if type(ids) is not dict:
            raise GradingFault(Boundary.TASK, "the hidden tests cannot be collected", str(report)[:1000])
        targets = []
        for name in tests.names:
            base = name.partition("[")[0] if tests.runner is Runner.PYTEST else name
            found = ids.get(base, [])
            known = found.index(name) if name in found else 0 if tests.runner is Runner.UNITTEST and found else -1
            if known < 0:
                facts = f"there are {len(found)} of {base}; {'; '.join(report.get('errors', []))[:1000]}"
                raise GradingFault(Boundary.TASK, f"{name} is not among the hidden tests", facts)
            targets.append(Target(base, known, found[known]))
        return targets

    async def _find_canaries(
        self,
        machines: GradingMachines,
        tests: HiddenTests,
        sources: Mapping[str, str],
        hidden: Mapping[str, str],
        targets: Sequence[Target],
        submission: Submission,
    ) -> list[Canary]:
        """Canaries that fail on the reference solution: those that look like the tests; others only if none of these
        is found."""
        candidates = list(_candidates(sources, hidden, tests, targets, random.Random(new_nonce())))[:_MAX_VARIANTS]
        found: list[Canary] = []
        outcomes: Counter[str] = Counter()
        for path, source, target, looks_original in candidates:
            if len(found) >= self._canaries or (found and not looks_original):
                break
            canary = Canary({**hidden, path: source}, target)
            report = await self._run(machines, tests, canary.hidden, target, submission)
            outcome = str(report.get("outcome"))
            outcomes[outcome] += 1
            if outcome == "failed":
                found.append(canary)
        if self._canaries and not found:
            ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "there are none"
            facts = f"{len(candidates)} variants of its {len(targets)} tests that must fail: {ended}"
            raise GradingFault(Boundary.TASK, "no variant of the hidden tests was seen to fail", facts)
        return found


def _candidates(
    sources: Mapping[str, str],
    hidden: Mapping[str, str],
    tests: HiddenTests,
    targets: Sequence[Target],
    rng: random.Random,
) -> Iterator[tuple[str, str, Target, bool]]:
    """Variants as (path, source, test, whether it looks like the test). Those that look like the test come first:
    one of each kind, since code that defeats one kind of check leaves the others; some data files; then the variants
    of each test in turn."""
    data = [path for path in hidden if not path.endswith(".py") and PurePosixPath(path).name not in CONFIGURATION]
    by_test = []
    for target in rng.sample(targets, min(len(targets), _MAX_VARIANTS)):
        path, names = _locate_test(target.base, tests.runner, sources)
        if path in sources:
            found = variants_of_test(sources[path], names, target.ordinal, rng)
            changed = [(each.kind, (path, each.source, target, each.looks_original)) for each in found]
            read = [
                (data_path, variant_of_data(hidden[data_path], target.ordinal, rng))
                for data_path in rng.sample(data, min(2, len(data)))
            ]
            by_test.append([*(("read", (data_path, text, target, True)) for data_path, text in read if text), *changed])
    rounds = [
        each[depth] for depth in range(max(map(len, by_test), default=0)) for each in by_test if depth < len(each)
    ]
    kinds: Counter[str] = Counter()
    late = []
    for kind, _ in rounds:
        kinds[kind] += 1
        late.append(kinds[kind] > (_MAX_DATA_VARIANTS if kind == "read" else 1))
    order = sorted(range(len(rounds)), key=lambda at: (not rounds[at][1][3], late[at]))
    yield from (rounds[at][1] for at in order)


async def _sources(machines: GradingMachines, tests: HiddenTests, hidden: Mapping[str, str]) -> dict[str, str]:
    """The text of the files that contain the tests: hidden files, the task's files, or those of its image."""
    found = {path: text for path, text in hidden.items() if path.endswith(".py")}
    missing = [path for path in _files_of(tests) if path not in found]
    if machines.task.image is not None and missing:
        async with machines.open({}, {}) as machine:
            for path in missing:
                try:
                    found[path] = (await machine.read(path)).decode()
                except (OSError, ValueError):  # a guessed path without a file
                    continue
    return found


def _locate_test(base: str, runner: Runner, sources: Mapping[str, str]) -> tuple[str, list[str]]:
    """(path of the test's file, names of its class and function)."""
    if runner is Runner.PYTEST:
        path, *names = base.split("::")
        return path, names
    parts = base.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (path := "/".join(parts[:count]) + ".py") in sources:
            return path, parts[count:]
    return "", []


def _files_of(tests: HiddenTests) -> list[str]:
    """The files that the tests can be in; of a dotted name, every file that it could mean."""
    if tests.runner is Runner.PYTEST:
        return sorted({name.partition("::")[0] for name in tests.names})
    parts = [name.split(".") for name in tests.names]
    return sorted({"/".join(each[:count]) + ".py" for each in parts for count in range(1, len(each))})


def _runner_settings(tests: HiddenTests) -> dict[str, Any]:
    return {"program": tests.runner.value, "roots": list(tests.roots)}


def _argv(python: str) -> list[str]:
    return [python, "-s", "-B", "-c", runner_source("tests")]


def _passed(report: Mapping[str, str], target: Target) -> bool:
    return report.get("outcome") == "passed" and report.get("id") == target.id


def _draw(among: Sequence[Any], n: int, rng: random.Random) -> list[Any]:
    """Draw n items; no item is drawn more than once more often than another."""
    rounds = [rng.sample(among, len(among)) for _ in range(-(-n // len(among)))] if among else []
    return [each for items in rounds for each in items][:n]
