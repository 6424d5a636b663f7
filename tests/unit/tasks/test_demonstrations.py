"""Scripts on repair problems, played on machines in memory."""

from __future__ import annotations

import asyncio
import random

from etude.records.task import Split, Task
from etude.seams import Machine
from etude.tasks import Script, write_reference
from etude.tasks.repair import Problem, RepairSource, imperfect, oracle, random_agent
from etude.tasks.scripts import demonstrations
from etude.testing import FakeGrader, MemoryMachine

SOURCE = RepairSource(seed=0)


async def _tool(machine: Machine, task: Task, key: str, name: str, arguments: dict[str, str | int]) -> str:
    """The least that the scripts need of the real tools."""
    path = str(arguments.get("path", ""))
    match name:
        case "test":
            return (await machine.exec(task.test_command, key=key, deadline_s=10)).output.decode()
        case "cat":
            return (await machine.read(path)).decode()
        case "write":
            await machine.write(path, str(arguments["text"]).encode())
        case "edit":
            lines = (await machine.read(path)).decode().splitlines()
            lines[int(arguments["line"]) - 1] = f"    {arguments['text']}"
            await machine.write(path, ("\n".join(lines) + "\n").encode())
    return "ok"


async def _play(task: Task, script: Script) -> tuple[float, list[tuple[str, str]]]:
    """The reward and every (tool, output)."""
    machine = MemoryMachine({path: text.encode() for path, text in task.files.items()})
    said: list[tuple[str, str]] = []
    call = next(script)
    while call[0] != "submit":
        said.append((call[0], await _tool(machine, task, str(len(said)), *call)))
        call = script.send(said[-1][1])
    exports = {path: await machine.read(path) for path in task.exports}
    return (await FakeGrader().grade(task, SOURCE.answer(task), exports)).reward, said


def _rate(problems: list[tuple[Task, Script]]) -> float:
    async def all_of_them() -> float:
        return sum([(await _play(task, script))[0] for task, script in problems]) / len(problems)

    return asyncio.run(all_of_them())


def _heldout(n: int) -> list[tuple[Task, Problem]]:
    return [(SOURCE.task(Split.HELDOUT, i), SOURCE.problem(Split.HELDOUT, i)) for i in range(n)]


def test_the_oracle_repairs_everything_and_sees_the_tests_fail_before_and_pass_after() -> None:
    assert _rate([(task, oracle(problem)) for task, problem in _heldout(60)]) == 1.0
    task, problem = _heldout(1)[0]
    _, said = asyncio.run(_play(task, oracle(problem)))
    assert "2 of 4 passed" in said[0][1]
    assert said[-1] == ("test", "4 of 4 passed\n")


def test_writing_the_reference_solves_any_task() -> None:
    assert _rate([(task, write_reference(task, SOURCE.answer(task))) for task, _ in _heldout(20)]) == 1.0


def test_the_random_agent_hardly_ever_succeeds() -> None:
    assert _rate([(t, random_agent(p, random.Random(i))) for i, (t, p) in enumerate(_heldout(200))]) < 0.1


def test_demonstrations_succeed_about_as_often_as_documented() -> None:
    def rate(right_body: float) -> float:
        made = demonstrations(SOURCE, count=500, seed=0, right_body=right_body)
        return _rate([(d.task, d.script) for d in made])

    # Four standard errors of 500 tries (0.022 and 0.020) around what 12,000 and 8,000 tries gave.
    assert abs(rate(0.6) - 0.38) < 4 * 0.022
    assert abs(rate(0.44) - 0.26) < 4 * 0.020
    assert rate(0.0) == 0.0


def test_demonstrations_are_seeded_and_have_nine_turns_at_most() -> None:
    def calls(seed: int) -> list[list[tuple[str, dict[str, str | int]]]]:
        return [list(d.script) for d in demonstrations(SOURCE, count=100, seed=seed)]

    assert calls(0) == calls(0) != calls(1)
    assert max(map(len, calls(0))) <= 9
    assert all(c[-1] == ("submit", {}) for c in calls(0))


def test_demonstrations_of_another_split_show_its_tasks() -> None:
    made = list(demonstrations(SOURCE, count=20, seed=0, first=5, split=Split.VALIDATION))
    assert [d.task for d in made] == [SOURCE.task(Split.VALIDATION, i) for i in range(5, 25)]


def test_a_wrong_edit_never_miscopies_a_constant() -> None:
    seen = 0
    for index in range(300):
        problem = SOURCE.problem(Split.TRAIN, index)
        for name, arguments in imperfect(problem, random.Random(index), right_body=0.0):
            if name == "edit":
                function = problem.modules[str(arguments["path"]).removesuffix(".py")][0]
                if function.constant:
                    seen += 1
                    assert str(arguments["text"]).split()[-1] == str(function.constant)
    assert seen > 50
