"""Grades work with hidden tests (code-graded): runs each named test in a process and a machine of its own, with the
machine's own pytest or unittest, under the task's own configuration.

Such tests import the agent's code, so that code could report results itself. The verdict is guarded by what that code
cannot know: when every named test has passed, some are run again, mixed with canaries (`canaries`): variants that right
code fails, under the same name, form and nonce. A canary that passes shows a forgery. Passing `n` runs and failing `k`
by chance alone happens at best in `(n/(n+k))^n (k/(n+k))^k` of all tries: 1 in 484 for one test and the defaults.

A `Plan` is made once for each task, on the reference solution: which tests there are, and which canaries fail.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from etude.environments.grading.canaries import of_data, variants
from etude.environments.grading.ground import Ground, Work
from etude.environments.grading.python import Pythons
from etude.environments.grading.reports import NotTold, new_nonce, runner
from etude.environments.grading.verdicts import Broken, Refused, earned
from etude.records.exports import CONFIGURATION
from etude.records.rollout import Boundary, Graded
from etude.records.task import HiddenTests, Runner, Task, Trust
from etude.seams import Runtime

_MOST_TRIED = 24  # the most variants that are tried on the reference solution in search of canaries
_READ_TRIED = 3  # of these, variants of files that tests read: few of their characters decide a test
_COLLECT_S = 300.0


class Target(NamedTuple):
    """One test: the `ordinal`-th (from 0) of those that share the name `base`. `id`: its name in the test runner."""

    base: str
    ordinal: int
    id: str


class Canary(NamedTuple):
    """A variant of the hidden files with which the test `target` must fail."""

    hidden: Mapping[str, str]
    target: Target


class Plan(NamedTuple):
    """How to grade work on one task: the hidden files (path to text), the tests to run, and the canaries."""

    hidden: Mapping[str, str]
    targets: Sequence[Target]
    canaries: Sequence[Canary]


class TestBench:
    """Runs hidden tests. Where all named tests pass, `repeats` further runs of tests and `canaries` runs that must fail
    guard the verdict. `at_once`: the most machines that run tests at once, over all grades. `to_the_end`: run all tests
    even when one has failed; else those that have not begun are left out."""

    __test__ = False

    def __init__(self, runtime: Runtime, *, repeats: int, canaries: int, at_once: int, to_the_end: bool = True) -> None:
        self._runtime, self._repeats, self._canaries = runtime, repeats, canaries
        self._pythons = Pythons(runtime)
        self._room, self._to_the_end = asyncio.Semaphore(at_once), to_the_end

    def ground(self, task: Task, tests: HiddenTests) -> Ground:
        """The `Ground` of these tests. Test files and configuration files are never taken from the agent."""
        return Ground(self._runtime, task, never=CONFIGURATION, kept=_files_of(tests), pythons=self._pythons)

    async def plan(self, task: Task, tests: HiddenTests, reference: Work) -> Plan:
        """Find the named tests and canaries for them, on the reference solution. Raises `Broken` where that fails: no
        agent is involved."""
        ground = self.ground(task, tests)
        own = {path: task.files[path] for path in _files_of(tests) if path in task.files}
        hidden = {**own, **tests.files}
        try:
            targets = await self._collected(ground, tests, hidden, reference)
            sources = await _sources(ground, tests, hidden)
            hidden |= sources  # those of the image too: else the file of a canary alone would have a newer time
            canaries = await self._proven(ground, tests, sources, hidden, targets, reference)
        except Refused as error:
            raise Broken(Boundary.TASK, "the hidden tests do not run on the reference solution", error.reason) from None
        return Plan(hidden, targets, canaries)

    async def grade(self, ground: Ground, tests: HiddenTests, plan: Plan, work: Work) -> Graded:
        """Grade the agent's work: reward 1 where every named test passes, else 0; the term is the share that passed.
        Raises `Refused` for a forged result."""
        first = await self._all(ground, tests, [(plan.hidden, target) for target in plan.targets], work, give_up=True)
        passed = [_passed(said, target) for said, target in zip(first, plan.targets, strict=True)]
        if not all(passed):
            at = passed.index(False)
            why = f": {first[at].get('why') or first[at].get('outcome')}"
            reason = f"{sum(passed)} of {len(passed)} hidden tests pass; {tests.names[at]} does not{why}"
            return earned(0.0, sum(passed) / len(passed), Trust.CODE, reason)
        await self._guard(ground, tests, plan, work)
        return earned(1.0, 1.0, Trust.CODE, f"all {len(passed)} hidden tests pass")

    async def _guard(self, ground: Ground, tests: HiddenTests, plan: Plan, work: Work) -> None:
        """Run some tests again, mixed with canaries in a random order. Raises `Refused` where a test fails or a canary
        passes."""
        rng = random.Random(new_nonce())
        again = [(plan.hidden, target, True) for target in _drawn(plan.targets, self._repeats, rng)]
        must_fail = [(canary.hidden, canary.target, False) for canary in _drawn(plan.canaries, self._canaries, rng)]
        runs = rng.sample([*again, *must_fail], self._repeats + len(must_fail))
        told = await self._all(ground, tests, [(hidden, target) for hidden, target, _ in runs], work)
        for (_, target, real), said in zip(runs, told, strict=True):
            if not real and said.get("outcome") == "passed":
                raise Refused("canary: a test that must fail passed, so passes prove nothing", forged=True)
            if real and not _passed(said, target):
                why = said.get("why") or said.get("outcome")
                raise Refused(f"a hidden test passed once and not again: {target.id}: {why}")

    async def _all(
        self,
        ground: Ground,
        tests: HiddenTests,
        runs: Sequence[tuple[Mapping[str, str], Target]],
        work: Work,
        *,
        give_up: bool = False,
    ) -> list[dict[str, str]]:
        """The reports of all runs, in order. `give_up`: after a run without a report, those that have not begun are
        left out, so that work that hangs costs one deadline and not many."""
        lost: list[str] = []

        async def one(hidden: Mapping[str, str], target: Target) -> dict[str, str]:
            async with self._room:
                if lost and give_up:
                    return {"outcome": "not run", "why": lost[0]}
                said = await self._run(ground, tests, hidden, target, work)
                if said.get("outcome") == "lost" or not (self._to_the_end or _passed(said, target)):
                    lost.append(str(said.get("why") or said.get("outcome")))
                return said

        try:
            async with asyncio.TaskGroup() as group:
                told = [group.create_task(one(hidden, target)) for hidden, target in runs]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first decides: `Broken`, or `Refused`
        return [task.result() for task in told]

    async def _run(
        self, ground: Ground, tests: HiddenTests, hidden: Mapping[str, str], target: Target, work: Work
    ) -> dict[str, str]:
        """The report of one run: only its known fields, and only where they are text."""
        request = {"role": "run", **_how(tests), "base": target.base, "index": target.ordinal}
        try:
            said = await ground.report(work, hidden, _argv(await ground.python()), request, deadline_s=tests.deadline_s)
        except NotTold as error:
            return {"outcome": "lost", "why": error.reason}
        words = said if type(said) is dict else {"outcome": "no report"}
        return {name: words[name] for name in ("id", "outcome", "why") if type(words.get(name)) is str}

    async def _collected(
        self, ground: Ground, tests: HiddenTests, hidden: Mapping[str, str], reference: Work
    ) -> list[Target]:
        request = {"role": "collect", **_how(tests), "names": list(tests.names)}
        said = await ground.report(reference, hidden, _argv(await ground.python()), request, deadline_s=_COLLECT_S)
        if type(said) is dict and said.get("needs"):
            facts = f"the tests have fixtures or parameters, and {said['needs']} is not installed there"
            raise Broken(
                Boundary.TASK, f"the task's machine has no {said['needs']}", facts + "; use an image that has it"
            )
        ids = said.get("ids") if type(said) is dict else None
        if type(ids) is not dict:
            raise Broken(Boundary.TASK, "the hidden tests cannot be collected", str(said)[:1000])
        targets = []
        for name in tests.names:
            base = name.partition("[")[0] if tests.runner is Runner.PYTEST else name
            found = ids.get(base, [])
            known = found.index(name) if name in found else 0 if tests.runner is Runner.UNITTEST and found else -1
            if known < 0:
                facts = f"there are {len(found)} of {base}; {'; '.join(said.get('errors', []))[:1000]}"
                raise Broken(Boundary.TASK, f"{name} is not among the hidden tests", facts)
            targets.append(Target(base, known, found[known]))
        return targets

    async def _proven(
        self,
        ground: Ground,
        tests: HiddenTests,
        sources: Mapping[str, str],
        hidden: Mapping[str, str],
        targets: Sequence[Target],
        work: Work,
    ) -> list[Canary]:
        """Canaries that fail on the reference solution: those that look like the tests; others only where none of these
        is found."""
        candidates = list(_candidates(sources, hidden, tests, targets, random.Random(new_nonce())))[:_MOST_TRIED]
        found: list[Canary] = []
        outcomes: Counter[str] = Counter()
        for path, source, target, alike in candidates:
            if len(found) >= self._canaries or (found and not alike):
                break
            canary = Canary({**hidden, path: source}, target)
            said = await self._run(ground, tests, canary.hidden, target, work)
            outcome = str(said.get("outcome"))
            outcomes[outcome] += 1
            if outcome == "failed":
                found.append(canary)
        if self._canaries and not found:
            ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()) or "there are none"
            facts = f"{len(candidates)} variants of its {len(targets)} tests that must fail: {ended}"
            raise Broken(Boundary.TASK, "no variant of the hidden tests was seen to fail", facts)
        return found


def _candidates(
    sources: Mapping[str, str],
    hidden: Mapping[str, str],
    tests: HiddenTests,
    targets: Sequence[Target],
    rng: random.Random,
) -> Iterator[tuple[str, str, Target, bool]]:
    """Variants as (path, source, test, whether it looks like the test), these first: one of each kind, since code that
    defeats one kind of check leaves the others, and some of the files that tests read; then one of each test in turn.
    """
    data = [path for path in hidden if not path.endswith(".py") and PurePosixPath(path).name not in CONFIGURATION]
    by_test = []
    for target in rng.sample(targets, min(len(targets), _MOST_TRIED)):
        path, names = _place(target.base, tests.runner, sources)
        if path in sources:
            found = variants(sources[path], names, target.ordinal, rng)
            mine = [(each.kind, (path, each.source, target, each.alike)) for each in found]
            read = [
                (place, of_data(hidden[place], target.ordinal, rng)) for place in rng.sample(data, min(2, len(data)))
            ]
            by_test.append([*(("read", (place, text, target, True)) for place, text in read if text), *mine])
    rounds = [
        each[depth] for depth in range(max(map(len, by_test), default=0)) for each in by_test if depth < len(each)
    ]
    kinds: Counter[str] = Counter()
    late = []
    for kind, _ in rounds:
        kinds[kind] += 1
        late.append(kinds[kind] > (_READ_TRIED if kind == "read" else 1))
    order = sorted(range(len(rounds)), key=lambda at: (not rounds[at][1][3], late[at]))
    yield from (rounds[at][1] for at in order)


async def _sources(ground: Ground, tests: HiddenTests, hidden: Mapping[str, str]) -> dict[str, str]:
    """The text of the files that contain the tests: hidden files, the task's, or those of its image."""
    found = {path: text for path, text in hidden.items() if path.endswith(".py")}
    missing = [path for path in _files_of(tests) if path not in found]
    if ground.task.image is not None and missing:
        async with ground.machine({}, {}) as machine:
            for path in missing:
                try:
                    found[path] = (await machine.read(path)).decode()
                except (OSError, ValueError):  # a guessed path without a file
                    continue
    return found


def _place(base: str, runner: Runner, sources: Mapping[str, str]) -> tuple[str, list[str]]:
    """The file of a test, and the names (class, function) that lead to it in the file."""
    if runner is Runner.PYTEST:
        path, *names = base.split("::")
        return path, names
    parts = base.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (path := "/".join(parts[:count]) + ".py") in sources:
            return path, parts[count:]
    return "", []


def _files_of(tests: HiddenTests) -> list[str]:
    """The files that the tests' names can be in; of a dotted name, every file that it could mean."""
    if tests.runner is Runner.PYTEST:
        return sorted({name.partition("::")[0] for name in tests.names})
    parts = [name.split(".") for name in tests.names]
    return sorted({"/".join(each[:count]) + ".py" for each in parts for count in range(1, len(each))})


def _how(tests: HiddenTests) -> dict[str, Any]:
    return {"program": tests.runner.value, "roots": list(tests.roots)}


def _argv(python: str) -> list[str]:
    return [python, "-s", "-B", "-c", runner("tests")]


def _passed(said: Mapping[str, str], target: Target) -> bool:
    return said.get("outcome") == "passed" and said.get("id") == target.id


def _drawn(among: Sequence[Any], n: int, rng: random.Random) -> list[Any]:
    """Draw n items, each as often as any other, or once more."""
    rounds = [rng.sample(among, len(among)) for _ in range(-(-n // len(among)))] if among else []
    return [each for one in rounds for each in one][:n]
