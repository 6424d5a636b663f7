"""Tasks for mini-swe-agent: an issue in one line, a small repository, and demonstrations in the agent's own format.

The repositories are those of the source "repair". A demonstration is the conversation that mini-swe-agent has with the
model under `mini.yaml`: its system and its first message, calls of its tool `bash`, and the outputs as its template
renders them. The files change in memory; `tests.py` really runs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from etude.environments.memory import run_python
from etude.errors import TaskError
from etude.records.task import Answer, Split, Task
from etude.tasks.repair.demonstrations import oracle, random_agent
from etude.tasks.repair.functions import Body
from etude.tasks.repair.problem import Problem, line_of, task_of
from etude.tasks.repair.source import RepairSource
from etude.tasks.scripts import Script
from etude.tasks.visible import TEST_FILE, call_text

Message = dict[str, Any]

SYSTEM = "fix the bug"
"""The system message: `agent.system_template` of mini.yaml."""
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The command with which mini-swe-agent submits."""
TEST = f"python {TEST_FILE}"
RIGHT_FILE = 0.9
TESTED = 0.3
REPEATED = 0.5
"""Shares of demonstrations: that read the right file first, that run the tests, that edit again after a failed test."""


class Issues:
    """A task source: repair the function that an issue names, in a repository of `files` modules with one each.

    >>> source = Issues()
    >>> source.task(Split.TRAIN, 0).instruction
    'bank.py apply([8, 5, 0, 9]) gives 8 not 9'
    >>> [m["tool_calls"][0]["function"]["arguments"]["command"] for m in
    ...  source.conversation(Split.TRAIN, 0, seed=0, right=1.0) if m["role"] == "assistant"]
    """

    name = "issues"

    def __init__(self, seed: int = 0, files: int = 3) -> None:
        self._repair = RepairSource(seed, files=files)

    def size(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> Task:
        return self._task(self._repair.problem(split, index), split, index)

    def answer(self, task: Task) -> Answer:
        problem = self._repair.problem(task.split, task.index)
        if self._task(problem, task.split, task.index) != task:
            raise TaskError(f"task {task.task_id} is not from this source", hint="use the same settings")
        return Answer(reference=problem.reference(), cases=problem.hidden)

    def conversation(self, split: Split, index: int, *, seed: int, right: float) -> list[Message]:
        """Return a conversation of mini-swe-agent in which a share `right` of the edits is correct."""
        problem = self._repair.problem(split, index)
        rng = random.Random(f"demonstration {seed} {index}")
        return play(self._task(problem, split, index), list(commands(problem, rng, right=right)))

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """Return the oracle, or an agent that makes a random valid edit. Both use etude's own tools."""
        problem = self._repair.problem(task.split, task.index)
        return oracle(problem) if kind == "oracle" else random_agent(problem, random.Random(seed))

    def _task(self, problem: Problem, split: Split, index: int) -> Task:
        return msgspec.structs.replace(task_of(problem, split, index), source=self.name, instruction=issue(problem))


def issue(problem: Problem) -> str:
    """Return what is wrong in one line: a call, what it gives, and what it should give."""
    function = problem.function
    case = next(c for c in problem.visible if (c.module, c.function) == (problem.module, function.name))
    got = problem.bug.body.value(function.variables, case.args)
    return f"{case.module}.py {call_text(case.function, case.args)} gives {got!r} not {case.expected!r}"


def edit(problem: Problem, body: Body) -> str:
    """Return the command that gives the broken function another body."""
    return f"sed -i '{line_of(problem.place)}c\\    return {body.text}' {problem.module}.py"


def commands(problem: Problem, rng: random.Random, *, right: float) -> Iterator[str]:
    """Yield the commands of an agent that reads, edits, perhaps tests and edits again, and submits.

    A wrong edit changes the operator or the operands, never the constant, so that it does not teach the model not to
    copy."""
    function, known = problem.function, rng.random() < RIGHT_FILE
    wrong = [*function.wrong_operators(), *function.wrong_operands()]
    if not known:
        yield f"cat {rng.choice([name for name in problem.modules if name != problem.module])}.py"
    yield f"cat {problem.module}.py"
    tested = rng.random() < TESTED
    for again in (False, True):
        is_right = rng.random() < right
        yield edit(problem, function.body if is_right else rng.choice(wrong))
        if tested:
            yield TEST
        if is_right or again or not tested or rng.random() >= REPEATED:
            break
    yield SUBMIT


def play(task: Task, lines: list[str]) -> list[Message]:
    """Return the conversation in which the model gives these commands for a task."""
    files = {path: text.encode() for path, text in task.files.items()}
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.instruction},
    ]
    for number, line in enumerate(lines):
        call = {"id": f"call{number}", "type": "function", "function": {"name": "bash", "arguments": {"command": line}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        if line != SUBMIT:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": execute(line, files).strip()})
    return messages


def execute(line: str, files: dict[str, bytes]) -> str:
    """Do what a shell does for the commands of demonstrations: cat, sed with one changed line, and the tests."""
    if (edited := re.fullmatch(r"sed -i '(\d+)c\\(.*)' (\S+)", line)) is not None:
        number, text, path = int(edited[1]), edited[2], edited[3]
        kept = files[path].decode().splitlines()
        files[path] = ("\n".join([*kept[: number - 1], text, *kept[number:]]) + "\n").encode()
        return ""
    if line == TEST:
        return run_python(files, TEST_FILE)[1]
    return files[line.removeprefix("cat ")].decode()
