"""One grade on real machines, for tests."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from tests.here import opened

from etude.environments import MachineGrader, NamespaceRuntime
from etude.records.rollout import Graded, Invalid
from etude.records.task import Answer, Split, Task, Trust
from etude.seams import Runtime

RIGHT = b"def f(n):\n    return n + 1\n"
TASK = Task(
    source="t",
    split=Split.TRAIN,
    index=0,
    family="f",
    instruction="mend",
    files={"calc.py": "def f(n):\n    return None\n"},
    exports=("calc.py",),
    trust=Trust.CODE,
)


def on_machines(work: Callable[[Runtime], Awaitable[Any]], **options: Any) -> Any:
    """What it returns, given a runtime that is closed afterwards. Skips where there are no namespaces."""

    async def main() -> Any:
        runtime = opened("namespace", lambda: NamespaceRuntime(**{"spare": 0, **options}))
        try:
            return await work(runtime)
        finally:
            await runtime.close()

    return asyncio.run(main())


def judge(answer: Answer, *works: str | bytes | Mapping[str, bytes], grader: Any = None, **changes: Any) -> Any:
    """The outcomes of exporting each of these (a text or bytes is calc.py), one after the other, by one grader."""
    task = msgspec.structs.replace(TASK, **changes)
    exports = [
        dict(work)
        if isinstance(work, Mapping)
        else {"calc.py": textwrap.dedent(work).encode() if isinstance(work, str) else work}
        for work in works
    ]

    async def graded(runtime: Runtime) -> list[Graded | Invalid]:
        judge = MachineGrader(runtime, **(grader or {}))
        return [await judge.grade(task, answer, each) for each in exports]

    outcomes = on_machines(graded)
    return outcomes if len(outcomes) > 1 else outcomes[0]
