"""The grader process: the only one that ever sees hidden answers. It runs no agent and is forked into nothing.

Its machines are made by a launcher that was executed afresh, so no answer is in any memory that agent code can see.
"""

from __future__ import annotations

import asyncio

from etude.environments import MachineGrader, NamespaceRuntime
from etude.loop import child
from etude.loop.config import open_tasks, read_config
from etude.records import Outcome, Task
from etude.run import RunFolder
from etude.telemetry import Telemetry

GRADES_AT_ONCE = 16


async def handlers(run: RunFolder, name: str, telemetry: Telemetry) -> child.Handlers:
    config = read_config(run)
    source = open_tasks(config)
    runtime = NamespaceRuntime(config.machines)
    grader = MachineGrader(runtime)
    room = asyncio.Semaphore(GRADES_AT_ONCE)

    async def grade(task: Task, exports: dict[str, bytes]) -> Outcome:
        async with room:
            return await grader.grade(task, source.answer(task), exports)

    async def ready() -> bool:
        return True

    return {"grade": ((Task, dict[str, bytes]), grade), "ready": ((), ready)}


if __name__ == "__main__":
    child.main(handlers)
