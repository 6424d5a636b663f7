"""`VerifiersSource`: the rows of a `verifiers` environment as tasks, judged by its own rubric.

The package lives in an interpreter of its own, in a child process; what goes there is the text that the agent left in
``answer.txt``, what comes back is a number. For environments whose rewards read the answer's text: those that want the
agent's own container, a conversation or a model that judges are refused by name. A child that fails is a `TaskError`,
or an `Invalid` where a rollout is judged, never a reward of 0.
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
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Answer, Split, Task, Trust
from etude.seams import Grader, TaskSource
from etude.tasks.splits import split_of
from etude.tasks.verifiers.process import Child

__all__ = ["VerifiersGrader", "VerifiersSource", "grader_for"]

FILE = "answer.txt"
PYTHON = "ETUDE_VERIFIERS_PYTHON"
ROW_S, SCORE_S = 60.0, 120.0
_PROGRAM = Path(__file__).with_name("child.py")
_TOLD = f"\n\nWrite your answer, and nothing else, into the file {FILE}."


class VerifiersSource:
    """A `TaskSource` over one environment. `python` is the interpreter that has `verifiers` and the environment.

    The split is by the hash of a row's data; of an environment without end, by the row's number. Raises `NoSource`
    where the environment cannot be opened.
    """

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
            raise NoSource(f"no environment {environment!r}", f"{error.what}: {error.facts}", hint=error.hint) from None
        except (KeyError, TypeError) as error:
            raise NoSource(
                f"no environment {environment!r}",
                f"its answer: {error!r}",
                hint="check the environment's name, and that it is installed there",
            ) from None
        self._rows: dict[Split, list[int]] = {split: [] for split in Split}
        self._seen = 0
        for number, digest in enumerate(hashes):
            self._rows[split_of(str(digest))].append(number)

    def size(self, split: Split) -> int | None:
        endless = self._size is None and split is not Split.TRANSFER  # rows are put into the others by their hash
        return None if endless else len(self._rows[split])

    def task(self, split: Split, index: int) -> Task:
        return self._task(split, index, self._row(self.number(split, index)))

    def answer(self, task: Task) -> Answer:
        """Its reference is the row's own answer; empty where it has none, and then it cannot prove itself. The hidden
        side stays in the child."""
        row = self._row(self.number(task.split, task.index))
        if task != self._task(task.split, task.index, row):
            raise TaskError(
                f"task {task.task_id} is not of {self.environment}", hint="open the environment that made it"
            )
        if row.get("answer") is None:
            return Answer(reference={})
        return Answer(reference={FILE: str(row["answer"])})

    def number(self, split: Split, index: int) -> int:
        """A task's row in the environment. Raises `TaskError` past the end."""
        row = self._rows[split]
        while self.size(split) is None and 0 <= index >= len(row):
            self._rows[split_of(f"{self.environment} {self._seen}")].append(self._seen)
            self._seen += 1
        if not 0 <= index < len(row):
            facts = f"{self.environment} has {len(row)} of that split"
            raise TaskError(f"no task {index} in {split}", facts, hint="start at 0")
        return row[index]

    def score(self, number: int, completion: str, *, deadline_s: float = SCORE_S) -> tuple[float, dict[str, float]]:
        """The environment's reward of a completion of a row, and its metrics. Raises `TaskError`."""
        said = self._child.ask({"do": "score", "index": number, "completion": completion}, deadline_s=deadline_s)
        try:
            metrics = {str(k): float(v) for k, v in said["metrics"].items() if v is not None}
            return float(said["reward"]), metrics
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TaskError(f"{self.environment} gave no reward", repr(error), hint="look into its rubric") from None

    def grader(self) -> VerifiersGrader:
        """The grader of these tasks."""
        return VerifiersGrader(self)

    def close(self) -> None:
        """End the child. Idempotent."""
        self._child.close()

    def _row(self, number: int) -> dict[str, Any]:
        row = self._child.ask({"do": "row", "index": number}, deadline_s=ROW_S)
        if not isinstance(row, dict) or not isinstance(row.get("instruction"), str) or not row["instruction"].strip():
            raise TaskError(f"row {number} of {self.environment} has no instruction", hint="look into its data set")
        if row.get("needs"):
            hint = "only environments that judge the answer's text can be used"
            raise TaskError(
                f"row {number} of {self.environment} cannot be judged", f"it needs {row['needs']}", hint=hint
            )
        return row

    def _task(self, split: Split, index: int, row: Mapping[str, Any]) -> Task:
        return Task(
            source=self.name,
            split=split,
            index=index,
            family=self.environment,
            instruction=row["instruction"] + _TOLD,
            files={},
            exports=(FILE,),
            trust=Trust.DATA,
        )


class VerifiersGrader:
    """A `Grader` for the tasks of one `VerifiersSource`: plain text goes to the environment's rubric."""

    def __init__(self, source: VerifiersSource) -> None:
        self._source = source

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        data = exports.get(FILE)
        if data is None or set(exports) != {FILE}:
            return _graded(0.0, {}, f"no {FILE} was left")
        number, text = self._source.number(task.split, task.index), data.decode("utf-8", "replace").strip()
        try:
            reward, metrics = await asyncio.to_thread(self._source.score, number, text)
        except TaskError as error:
            return await self._blamed(number, error)
        if not math.isfinite(reward) or not 0.0 <= reward <= 1.0:
            facts = f"the environment gave {reward}"
            return Invalid(boundary=Boundary.TASK, reason="the reward is not from 0 to 1", evidence=facts)
        return _graded(reward, metrics, f"the environment gives {reward:g}")

    async def _blamed(self, number: int, error: TaskError) -> Graded | Invalid:
        """Whose fault it is that there is no reward: the agent's, if an empty answer to the same row gets one."""
        try:
            await asyncio.to_thread(self._source.score, number, "")
        except TaskError:
            return Invalid(boundary=Boundary.GRADER, reason=error.what, evidence=str(error))
        return _graded(0.0, {}, f"the rubric fails on this answer alone: {error.facts[:200]}")


def _graded(reward: float, metrics: Mapping[str, float], reason: str) -> Graded:
    """The environment's metrics are named "verifiers.NAME", so that none is taken for a term of ours."""
    measures = {**{f"verifiers.{name}": value for name, value in metrics.items()}, "pass": float(reward == 1.0)}
    return Graded.of(reward, measures, trust=Trust.DATA, reason=reason, version=__version__)


def grader_for(source: TaskSource, usual: Grader) -> Grader:
    """The grader for the tasks of a source: the source's own where it has one, else `usual`."""
    return source.grader() if isinstance(source, VerifiersSource) else usual


def interpreter() -> str:
    """The interpreter that ETUDE_VERIFIERS_PYTHON names. Raises `NoSource` where it names none."""
    python = os.environ.get(PYTHON, "")
    if not python:
        hint = f"make a venv, pip install verifiers and the environment there, and set {PYTHON}=VENV/bin/python"
        raise NoSource("no interpreter for verifiers is named", f"{PYTHON} is not set", hint=hint)
    return python
