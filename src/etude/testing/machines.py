"""Fakes without processes: a task source in memory, a grader for trusted code only, and a run's workers and graders."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from etude.environments.memory import run_python
from etude.errors import TaskError
from etude.records.rollout import Graded, Invalid, Outcome, RolloutSpec
from etude.records.task import Answer, Split, Task, Trust


class ListSource:
    """A `TaskSource` of the given (task, answer) pairs.

    It replaces `source` and `index` of each task: `index` is the position among the tasks of the same split."""

    name = "list"

    def __init__(self, pairs: Iterable[tuple[Task, Answer]]) -> None:
        self._pairs: dict[Split, list[tuple[Task, Answer]]] = {split: [] for split in Split}
        for task, answer in pairs:
            row = self._pairs[task.split]
            row.append((_replace(task, source=self.name, index=len(row)), answer))

    def size(self, split: Split) -> int | None:
        return len(self._pairs[split])

    def task(self, split: Split, index: int) -> Task:
        if not 0 <= index < len(self._pairs[split]):
            raise TaskError(
                f"no task {index} in {split}", hint=f"give an index from 0 to {len(self._pairs[split]) - 1}"
            )
        return self._pairs[split][index][0]

    def answer(self, task: Task) -> Answer:
        if self.task(task.split, task.index) != task:
            raise TaskError(f"task {task.task_id} is not from this list", hint="use the source that made the task")
        return self._pairs[task.split][task.index][1]


def _replace(task: Task, **changes: Any) -> Task:
    return Task(**{name: changes.get(name, getattr(task, name)) for name in task.__struct_fields__})


class FakeGrader:
    """A `Grader` that runs the hidden tests in the current process, so use it only with trusted code.

    If `outcome` is given, its result is the grade of a task and no test is run."""

    def __init__(self, outcome: Callable[[Task], Graded | Invalid] | None = None) -> None:
        self._outcome = outcome

    async def grade(self, task: Task, answer: Answer, exports: Mapping[str, bytes]) -> Graded | Invalid:
        if self._outcome is not None:
            return self._outcome(task)
        if task.trust is Trust.CODE:
            passed, total = self._code(answer, dict(exports)), 1
        else:
            passed, total = self._cases(answer, dict(exports)), len(answer.cases)
        solved = float(passed == total > 0)
        measures = {"tests": passed / max(total, 1), "pass": solved}
        return Graded.of(solved, measures, trust=task.trust, reason=f"{passed} of {total} hidden tests pass")

    def _cases(self, answer: Answer, files: dict[str, bytes]) -> int:
        lines = [f"    ({c.module!r}, {c.function!r}, {c.args!r})," for c in answer.cases]
        script = "\n".join(["import json", "CASES = [", *lines, "]", _CALLS])
        _, output = run_python({**files, "__cases__.py": script.encode()}, "__cases__.py")
        got = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        return sum(row == [type(c.expected).__name__, c.expected] for row, c in zip(got, answer.cases, strict=False))

    def _code(self, answer: Answer, files: dict[str, bytes]) -> int:
        module, _, function = answer.entry_point.partition(":")
        script = f"{answer.test_code}\ncheck(getattr(__import__({module!r}), {function!r}))\n"
        code, _ = run_python({**files, "__check__.py": script.encode()}, "__check__.py")
        return int(code == 0)


_CALLS = """
for module, function, args in CASES:
    try:
        got = getattr(__import__(module), function)(*args)
        print(json.dumps([type(got).__name__, got]))
    except Exception:
        print("[]")
"""


class FakeRunProcesses:
    """A fake of a run's workers and graders, in this process.

    A rollout takes `takes_s(spec)` seconds, and its result is `play(spec)`. Its grade is `judge(rollout)`. `config` is
    the config of a run, and `max_running` the `Limit` of concurrent rollouts."""

    def __init__(
        self,
        config: Any,
        max_running: Any,
        *,
        play: Callable[[RolloutSpec], Any],
        judge: Callable[[Any], Outcome],
        takes_s: Callable[[RolloutSpec], float] = lambda _: 0.0,
    ) -> None:
        self.config, self.max_running = config, max_running
        self._play, self._judge, self._takes_s = play, judge, takes_s

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> Any:
        await asyncio.sleep(self._takes_s(spec))
        return self._play(spec)

    async def grade(self, rollout: Any) -> Outcome:
        return self._judge(rollout)
