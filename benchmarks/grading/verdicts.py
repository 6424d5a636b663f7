"""What a verdict costs, and whether verdicts are right: a HumanEval-style file graded whole, and each way of judging.

    python -m benchmarks.grading.verdicts DATA.jsonl.gz [--rounds N]

Every task's reference solution has to be accepted and its untouched state refused; the wall time of all references is
the number that counts. The ways of judging are timed on one small task, a right and a wrong answer apart: what a pass
costs beyond a fail are its repeats and canaries.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import report
from etude.environments import MachineGrader, NamespaceRuntime, reference_exports, simulate_exports
from etude.records.rollout import Graded
from etude.records.task import Answer, Case, HiddenTests, Runner, Split, Task, Trust, Verifier
from etude.tasks import HumanEvalSource

AT_ONCE = 8
RIGHT, WRONG = "def f(n):\n    return n + 1\n", "def f(n):\n    return None\n"
UNITS = """
import unittest, calc
class A(unittest.TestCase):
    def test_f(self):
        self.assertEqual(calc.f(2), 3)
"""
PYTESTS = "import calc\ndef test_f():\n    assert calc.f(2) == 3\n"
VERIFIER = "import calc, sys\nsys.exit(calc.f(2) != 3)\n"


class Whole:
    """All tasks of a source, their references and then their untouched states, judged by one grader."""

    def __init__(self, source: HumanEvalSource, runtime: NamespaceRuntime) -> None:
        self._source, self._runtime = source, runtime
        self._grader, self._room = MachineGrader(runtime), asyncio.Semaphore(AT_ONCE)
        self.tasks = [source.task(split, index) for split in Split for index in range(source.size(split) or 0)]
        self.took_s: list[float] = []
        self.wrong: list[str] = []

    async def run(self, solved: bool) -> float:
        """Seconds that all tasks took."""
        began = time.perf_counter()
        await asyncio.gather(*(self._one(task, solved) for task in self.tasks))
        return time.perf_counter() - began

    async def _one(self, task: Task, solved: bool) -> None:
        answer = self._source.answer(task)
        exports = await (
            reference_exports(self._runtime, task, answer) if solved else simulate_exports(self._runtime, task)
        )
        async with self._room:
            began = time.perf_counter()
            outcome = await self._grader.grade(task, answer, exports)
            self.took_s.append(time.perf_counter() - began)
        if not isinstance(outcome, Graded) or outcome.grade != float(solved):
            label = "reference" if solved else "untouched"
            self.wrong.append(f"{task.split} {task.index}, {label}: {outcome.reason}")


async def humaneval(path: Path, rounds: int) -> dict[str, Any]:
    """All references and all untouched states, `rounds` times."""
    walls, took_s, wrong = [], [], []
    machines_cpu_s = own_cpu_s = 0.0
    for _ in range(rounds):
        runtime = NamespaceRuntime()
        whole = Whole(HumanEvalSource(path), runtime)
        own = time.process_time()
        walls.append(await whole.run(solved=True))
        own_cpu_s += time.process_time() - own
        machines_cpu_s += runtime.cpu_s()
        await runtime.close()
        took_s += whole.took_s
        runtime = NamespaceRuntime()
        untouched = Whole(HumanEvalSource(path), runtime)
        await untouched.run(solved=False)
        await runtime.close()
        wrong += whole.wrong + untouched.wrong
    grades = len(whole.tasks) * rounds
    return {
        "tasks": len(whole.tasks),
        "references_rejected_or_untouched_accepted": wrong,
        "wall_s_all_references": walls,
        "grade_ms_p50": 1000 * statistics.median(took_s),
        "grade_ms_p95": 1000 * statistics.quantiles(took_s, n=20)[-1],
        "cpu_ms_a_grade_in_machines": 1000 * machines_cpu_s / grades,
        "cpu_ms_a_grade_in_the_grader": 1000 * own_cpu_s / grades,
    }


def ways() -> dict[str, Answer]:
    """One task, judged in every way."""
    reference = {"calc.py": RIGHT}

    def tests(runner: Runner, path: str, text: str, name: str) -> Answer:
        return Answer(reference=reference, tests=HiddenTests(runner=runner, files={path: text}, names=(name,)))

    return {
        "cases": Answer(reference=reference, cases=tuple(Case("calc", "f", [n], n + 1) for n in range(8))),
        "check": Answer(reference=reference, test_code="def check(c):\n    assert c(2) == 3\n", entry_point="calc:f"),
        "unittest": tests(Runner.UNITTEST, "test_u.py", UNITS, "test_u.A.test_f"),
        "pytest": tests(Runner.PYTEST, "test_p.py", PYTESTS, "test_p.py::test_f"),
        "verifier": Answer(
            reference=reference, verifier=Verifier(files={"verify.py": VERIFIER}, argv=("python", "verify.py"))
        ),
    }


async def each_way(rounds: int) -> dict[str, Any]:
    """Milliseconds of a verdict, one at a time: of the first of its task, of a right answer, of a wrong one."""
    found: dict[str, Any] = {}
    for name, answer in ways().items():
        runtime = NamespaceRuntime()
        grader = MachineGrader(runtime)
        found[name] = {
            "first_ms": await verdict_ms(grader, answer, RIGHT, 1),
            "right_ms": await verdict_ms(grader, answer, RIGHT, rounds),
            "wrong_ms": await verdict_ms(grader, answer, WRONG, rounds),
        }
        await runtime.close()
    return found


async def verdict_ms(grader: MachineGrader, answer: Answer, text: str, n: int) -> float:
    """The median of n."""
    task = Task(
        source="benchmark",
        split=Split.TRAIN,
        index=0,
        family="f",
        instruction="mend",
        files={"calc.py": WRONG},
        exports=("calc.py",),
        trust=Trust.DATA if answer.cases else Trust.CODE,
    )
    took = []
    for _ in range(n):
        began = time.perf_counter()
        outcome = await grader.grade(task, answer, {"calc.py": text.encode()})
        took.append(1000 * (time.perf_counter() - began))
        if not isinstance(outcome, Graded) or outcome.grade != float(text == RIGHT):
            raise SystemExit(f"a wrong verdict: {outcome}")
    return statistics.median(took)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a HumanEval-style .jsonl or .jsonl.gz")
    parser.add_argument("--rounds", type=int, default=3)
    said = parser.parse_args(argv)
    numbers = {
        "humaneval": asyncio.run(humaneval(said.data, said.rounds)),
        "ways": asyncio.run(each_way(said.rounds)),
    }
    report("grading", numbers)


if __name__ == "__main__":
    main()
