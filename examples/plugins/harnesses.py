"""A harness (agent program) that shows the repository to the model before its first turn."""

from dataclasses import dataclass
from typing import Any

import msgspec

from etude.harness import AgentRun, run_agent
from etude.records.task import Task
from etude.seams import Machine


@dataclass(frozen=True)
class Oriented:
    """The built-in loop; the instruction also has the names and first lines of all files."""

    lines: int = 2  # per file

    async def run(self, task: Task, machine: Machine, **how: Any) -> AgentRun:
        parts = [task.instruction]
        for path in sorted(task.files):
            text = (await machine.read(path)).decode(errors="replace")
            parts.append("\n".join([path, *text.splitlines()[: self.lines]]))
        shown = msgspec.structs.replace(task, instruction="\n\n".join(parts))
        return await run_agent(shown, machine, **how)
