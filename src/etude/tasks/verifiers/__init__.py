"""Uses the rows of an environment of the library `verifiers` as tasks, and the environment's rubric as their grader.

The `verifiers` package runs in a child process with its own Python interpreter. The child receives the text that the
agent wrote to ``answer.txt`` and returns a number. Only environments whose reward depends on that text are supported:
those that need the agent's container, a conversation or an LLM judge are refused with an error. If the child fails, the
result is a `TaskError`, or `Invalid` for a rollout, but never a reward of 0.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude import __version__
from etude.errors import NoSource, TaskError
from etude.records.reward import VERIFIERS
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split, Task, Trust
from etude.seams import Grader, TaskSource
from etude.tasks.splits import row_at, split_of
from etude.tasks.verifiers.process import Child

__all__ = ["VerifiersGrader", "VerifiersSource", "grader_for"]

FILE = "answer.txt"
PYTHON = "ETUDE_VERIFIERS_PYTHON"
ROW_S, SCORE_S = 60.0, 120.0
_PROGRAM = Path(__file__).with_name("child.py")
_SUFFIX = f"\n\nWrite your answer, and nothing else, into the file {FILE}."


class VerifiersSource:
    """A `TaskSource` over the rows of one `verifiers` environment.

    `python` is the interpreter that has `verifiers` and the environment. `settings` configure the environment, `env`
    are the environment variables of the child process. The split of a row is decided by a hash of its data, or of its
    number if the environment is infinite. Raises `NoSource` if the environment cannot be opened."""

    name = "verifiers"

    def __init__(
        self,
        environment: str,
        python: str,
        *,
        settings: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.environment = environment
        opening = {"do": "open", "environment": environment, "settings": dict(settings or {})}
        self._child = Child([python, str(_PROGRAM)], opening, env=env)
        try:
            opened = self._child.open()
            self._size, hashes = opened["size"], opened["hashes"]
        except TaskError as error:
            what = f"environment {environment!r} cannot be opened"
            raise NoSource(what, f"{error.what}: {error.facts}", hint=error.hint) from None
        except (KeyError, TypeError) as error:
            raise NoSource(
                f"environment {environment!r} cannot be opened",
                f"the child process sent an invalid response: {error!r}",
                hint="check the name of the environment, and that it is installed in that interpreter",
            ) from None
        self._rows: dict[Split, list[int]] = {split: [] for split in Split}
        self._seen = 0
        for number, digest in enumerate(hashes):
            self._rows[split_of(str(digest))].append(number)

    def size(self, split: Split) -> int | None:
        endless = self._size is None and split is not Split.TRANSFER  # no row is in the transfer split
        return None if endless else len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        return self._task(split, index, self._row(self.number(split, index)))

    def answer(self, task: Task) -> Answer:
        """Return the answer of the row as the reference solution; the rubric stays in the child process.

        The reference is empty if the row has no answer; such a task cannot be validated. Raises `TaskError` for another
        source's task."""
        row = self._row(self.number(task.split, task.index))
        if task != self._task(task.split, task.index, row):
            raise TaskError(
                f"task {task.task_id} is not from {self.environment}",
                f"it differs from {task.split} task {task.index} of this environment",
                hint="use the environment from which the task was made, with the same arguments",
            )
        if row.get("answer") is None:
            return Answer(reference={})
        return Answer(reference={FILE: str(row["answer"])})

    def number(self, split: Split, index: int) -> int:
        """Return the row number, in the environment, of task `index` of a split. Raises `TaskError` if it has none."""
        row = self._rows[split]
        while self.size(split) is None and 0 <= index >= len(row):
            self._rows[split_of(f"{self.environment} {self._seen}")].append(self._seen)
            self._seen += 1
        return row_at(row, split, index, self.environment)

    def score(self, number: int, completion: str, *, deadline_s: float = SCORE_S) -> tuple[float, dict[str, float]]:
        """Return the reward and the metrics that the environment gives for an answer to a row.

        `number` is the row's number, `completion` the text of the answer. Raises `TaskError` if the environment fails
        or takes longer than `deadline_s` seconds."""
        result = self._child.ask({"do": "score", "index": number, "completion": completion}, deadline_s=deadline_s)
        try:
            metrics = {str(k): float(v) for k, v in result["metrics"].items() if v is not None}
            return float(result["reward"]), metrics
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            hint = "check the rubric of the environment"
            raise TaskError(f"{self.environment} returned no reward", repr(error), hint=hint) from None

    def grader(self) -> VerifiersGrader:
        """Return the grader of these tasks, which uses the environment's rubric."""
        return VerifiersGrader(self)

    def close(self) -> None:
        """Stop the child process. Further calls do nothing."""
        self._child.close()

    def _row(self, number: int) -> dict[str, Any]:
        row = self._child.ask({"do": "row", "index": number}, deadline_s=ROW_S)
        if not isinstance(row, dict) or not isinstance(row.get("instruction"), str) or not row["instruction"].strip():
            hint = "check the environment's dataset: each row needs a prompt"
            raise TaskError(f"row {number} of {self.environment} has no instruction", hint=hint)
        if row.get("needs"):
            hint = "use an environment that grades only the text of the answer"
            raise TaskError(
                f"row {number} of {self.environment} cannot be graded", f"it needs {row['needs']}", hint=hint
            )
        return row

    def _task(self, split: Split, index: int, row: Mapping[str, Any]) -> Task:
        return Task(
            source=self.name,
            split=split,
            index=index,
            family=self.environment,
            instruction=row["instruction"] + _SUFFIX,
            files={},
            exports=(FILE,),
            trust=Trust.DATA,
        )


class VerifiersGrader:
    """A `Grader` for the tasks of one `VerifiersSource`: passes the text of the answer to the environment's rubric."""

    def __init__(self, source: VerifiersSource) -> None:
        self._source = source

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        data = exports.get(FILE)
        if data is None or set(exports) != {FILE}:
            return _graded(0.0, {}, f"there is no {FILE}")
        number, text = self._source.number(task.split, task.index), data.decode("utf-8", "replace").strip()
        try:
            reward, metrics = await asyncio.to_thread(self._source.score, number, text)
        except TaskError as error:
            return await self._without_reward(number, error)
        if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
            facts = f"the environment returned {reward}"
            return Invalid(boundary=Boundary.TASK, reason="the reward is not from 0 to 1", evidence=facts)
        return _graded(reward, metrics, f"the environment returned {reward:g}")

    async def _without_reward(self, number: int, error: TaskError) -> Graded | Invalid:
        """The outcome if the rubric failed: reward 0 if the rubric works with an empty answer to the same row, since
        then the agent's answer caused the failure; else `Invalid`."""
        try:
            await asyncio.to_thread(self._source.score, number, "")
        except TaskError:
            return Invalid(boundary=Boundary.GRADER, reason=error.what, evidence=str(error))
        return _graded(0.0, {}, f"the rubric fails only with this answer: {error.facts[:200]}")


def _graded(reward: float, metrics: Mapping[str, float], reason: str) -> Graded:
    """A grade with the metrics of the environment, named "verifiers.NAME" to avoid collisions with built-in terms."""
    measures = {**{f"{VERIFIERS}{name}": value for name, value in metrics.items()}, "pass": float(reward == 1.0)}
    return Graded.of(reward, measures, trust=Trust.DATA, reason=reason, version=__version__)


def grader_for(source: TaskSource, default: Grader) -> Grader:
    """Return the grader for the tasks of a source: its own if it has one, else `default`."""
    return source.grader() if isinstance(source, VerifiersSource) else default


def interpreter() -> str:
    """Return the interpreter named by the variable ETUDE_VERIFIERS_PYTHON. Raises `NoSource` if it is not set."""
    python = os.environ.get(PYTHON, "")
    if not python:
        hint = f"create a venv, install verifiers and the environment in it, and set {PYTHON}=VENV/bin/python"
        what = "the Python interpreter that has the library verifiers is unknown"
        raise NoSource(what, f"{PYTHON} is not set", hint=hint)
    return python
