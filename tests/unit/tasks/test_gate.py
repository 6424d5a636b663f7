"""The gate: which wrong patches pass, which verdicts change, which answers lie about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.here import opened

from etude.environments import NamespaceRuntime
from etude.errors import TaskError
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Case, HiddenTests, Runner, Split, Task, Trust
from etude.tasks.journal import Journal
from etude.tasks.leaks import leaks_in_machines, leaks_in_task
from etude.tasks.mutation_testing import MIN_TIMEOUT_S, MutationResult, mutants_of, run_mutants
from etude.tasks.proof import check
from etude.tasks.report import as_json, reports
from etude.testing import FakeGrader, ListSource

RIGHT = "def f(a, b):\n    if a < b:\n        return a + b\n    return a - b\n"
STRONG = tuple(Case("m", "f", [a, b], a + b if a < b else a - b) for a, b in [(1, 2), (2, 2), (3, 1), (-1, 4), (5, 0)])
WEAK = (Case("m", "f", [1, 2], 3),)


def _source(*cases: tuple[Case, ...]) -> ListSource:
    stub = "def f(a, b):\n    pass\n"
    return ListSource(
        (
            Task(
                source="", split=Split.TRAIN, index=0, family="own", instruction=f"write f {n}",
                files={"m.py": stub}, exports=("m.py",),
            ),
            Answer(reference={"m.py": RIGHT}, cases=some),
        )
        for n, some in enumerate(cases)
    )  # fmt: skip


def test_wrong_patches_pass_weak_tests_and_fail_strong_ones() -> None:
    strong, weak = asyncio.run(run_mutants(_source(STRONG, WEAK), FakeGrader(), Split.TRAIN, num_mutants=12))
    assert strong.survivors == ()
    assert strong.num_mutants == weak.num_mutants > 5
    assert weak.survival > 0.3
    assert all("m.py" in s.diff and s.diff.count("\n@@") == 1 for s in weak.survivors)


class Flaky(FakeGrader):
    """Every second verdict is another, and some do not come."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        self.count += 1
        if self.count % 3 == 0:
            return Invalid(boundary=Boundary.MACHINE, reason="lost", evidence="")
        return Graded.of(float(self.count % 2), trust=Trust.DATA, reason="")


def test_a_verdict_that_changes_is_seen_and_one_that_does_not_come_is_no_survivor() -> None:
    [one] = asyncio.run(run_mutants(_source(STRONG), Flaky(), Split.TRAIN, num_mutants=6, repeats=4, concurrency=1))
    assert one.flaky
    assert one.num_ungraded >= 2
    assert len(one.survivors) + one.num_ungraded <= one.num_mutants


def test_a_gate_that_was_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class Counting(FakeGrader):
        count = 0

        async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
            Counting.count += 1
            return await super().grade(task, answer, exports)

    async def gated(**settings: Any) -> list[MutationResult]:
        journal = Journal(tmp_path / "found.partial", MutationResult)
        return await run_mutants(
            _source(STRONG, WEAK), Counting(), Split.TRAIN, num_mutants=6, concurrency=1, journal=journal, **settings
        )

    assert asyncio.run(gated(until=time.monotonic())) == []
    asyncio.run(gated(n=1))
    first = Counting.count
    both = asyncio.run(gated())
    assert Counting.count == 2 * first, "the first task was gated again"
    assert both == asyncio.run(gated())
    assert both[1].survivors
    assert Counting.count == 2 * first


def test_a_hidden_test_of_a_wrong_version_has_as_long_as_the_references_need_and_no_more() -> None:
    tests = HiddenTests(runner=Runner.PYTEST, files={"test_m.py": ""}, names=("test_m.py::test_f",), deadline_s=300)
    seen: dict[bool, float] = {}

    class Watching(FakeGrader):
        async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
            assert answer.tests is not None
            seen[exports["m.py"] == RIGHT.encode()] = answer.tests.deadline_s
            return Graded.of(0.0, trust=Trust.CODE, reason="")

    task, answer = _source(STRONG).task(Split.TRAIN, 0), Answer(reference={"m.py": RIGHT}, tests=tests)
    asyncio.run(run_mutants(ListSource([(task, answer)]), Watching(), Split.TRAIN, num_mutants=2))
    assert seen == {True: 300, False: MIN_TIMEOUT_S}


def test_mutants_are_made_where_the_reference_differs_and_in_every_file_in_turn() -> None:
    files = {"a.py": "X = 1\nY = 2\n", "b.py": "Z = 3\n"}
    task = Task(
        source="s",
        split=Split.TRAIN,
        index=0,
        family="f",
        instruction="i",
        files=files,
        exports=("a.py", "b.py", "c.py"),
    )
    answer = Answer(reference={"a.py": "X = 1\nY = 5\n", "b.py": "Z = 4\n", "c.py": "W = 6\n"})
    made = mutants_of(task, answer, 6)
    assert {m.path for m in made} == {"a.py", "b.py", "c.py"}
    assert all(m.text.startswith("X = 1\n") for m in made if m.path == "a.py")


def test_a_solution_that_is_a_command_is_made_wrong_line_by_line_and_one_that_fails_has_failed() -> None:
    task = _source(WEAK).task(Split.TRAIN, 0)
    script = "write add\nwrite nothing\nfail if missing\n"
    source = ListSource([(task, Answer(reference={"solve": script}, reference_argv=("sh", "solve"), cases=WEAK))])

    async def export(task: Task, files: Mapping[str, bytes], argv: Sequence[str]) -> Mapping[str, bytes]:
        text = files["solve"].decode()
        if "fail" not in text:
            raise TaskError("it failed", hint="")
        return {"m.py": b"def f(a, b): return a + b\n" if "add" in text else b"def f(a, b): pass\n"}

    [one] = asyncio.run(run_mutants(source, FakeGrader(), Split.TRAIN, num_mutants=9, repeats=2, export=export))
    assert one.num_mutants == 3
    assert [survivor.diff.splitlines()[4] for survivor in one.survivors] == ["-write nothing"]
    assert one.rewards == (1.0, 1.0)


def test_the_report_names_what_is_weak_and_holds_every_diff() -> None:
    source = _source(STRONG, WEAK)
    proof = asyncio.run(check(source, FakeGrader(), Split.TRAIN))
    gated = asyncio.run(run_mutants(source, FakeGrader(), Split.TRAIN, num_mutants=12, repeats=2))
    ids = {(Split.TRAIN, n): source.task(Split.TRAIN, n).task_id for n in range(2)}
    strong, weak = made = reports([proof], gated, {}, ids)
    assert strong.weaknesses == ()
    assert "wrong patches pass" in weak.weaknesses[0]
    plain = as_json("list", made, 1.0)
    assert plain["num_weak"] == 1
    assert plain["num_survivors"] == len(weak.survivors) == len(plain["tasks"][1]["survivors"])
    assert 0 < plain["survival"] < 1


BODY = "".join(f"    total_{n} = compute_something_long({n}, total={n * n}, other='{n}')\n" for n in range(6))


def _leaking(**files: str) -> tuple[Task, Answer]:
    task = Task(
        source="s", split=Split.TRAIN, index=0, family="f", instruction="write it",
        files={"m.py": "def f():\n    pass\n", **files}, exports=("m.py",),
    )  # fmt: skip
    return task, Answer(reference={"m.py": f"def f():\n{BODY}"})


def test_an_answer_in_another_file_of_the_task_is_a_leak_whatever_its_indentation() -> None:
    [leak] = leaks_in_task(*_leaking(**{"old/copy.txt": BODY.replace("    ", "\t\t"), "other.py": "x = 1\n"}))
    assert leak.place == "old/copy.txt"
    assert leak.share >= 0.8  # its first line is the task's own
    assert leaks_in_task(*_leaking()) == []


def test_an_answer_in_a_library_of_the_machine_is_found_there() -> None:
    runtime = opened("namespace", lambda: NamespaceRuntime(spare=0))
    source = """import bisect\n"""
    library = __import__("bisect").__file__
    with open(library) as file:
        text = file.read()

    async def main() -> dict[str, list[object]]:
        try:
            task = Task(
                source="s", split=Split.TRAIN, index=0, family="f", instruction="i",
                files={"bisect.py": source}, exports=("bisect.py",),
            )  # fmt: skip
            found = await leaks_in_machines(runtime, [(task, Answer(reference={"bisect.py": text}))])
            return {task_id: [leak.place for leak in leaks] for task_id, leaks in found.items()}
        finally:
            await runtime.close()

    [places] = asyncio.run(main()).values()
    assert any(str(place).endswith("bisect.py") for place in places)
