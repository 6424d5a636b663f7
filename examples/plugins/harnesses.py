"""Harnesses: agent programs. This one shows the model the repository before its first turn."""

from dataclasses import dataclass
from typing import Any

import msgspec

from etude.harness import AgentRun, run_agent
from etude.records.task import Task
from etude.seams import Machine


@dataclass(frozen=True)
class Oriented:
    """The built-in loop, with the names of the files and the head of each in the instruction."""

    lines: int = 2  # of each file

    async def run(self, task: Task, machine: Machine, **how: Any) -> AgentRun:
        parts = [task.instruction]
        for path in sorted(task.files):
            text = (await machine.read(path)).decode(errors="replace")
            parts.append("\n".join([path, *text.splitlines()[: self.lines]]))
        shown = msgspec.structs.replace(task, instruction="\n\n".join(parts))
        return await run_agent(shown, machine, **how)
