"""An agent of Inspect, its `react` loop, with a shell in the machine of its rollout."""

from __future__ import annotations

import os
import sys

from inspect_ai import Task, eval, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import Tool, tool
from inspect_ai.util import subprocess


@tool
def shell() -> Tool:
    async def execute(command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: The command.
        """
        done = await subprocess(["etude-machine", "-c", command], input="")
        return f"{done.stdout}{done.stderr}[exit code {done.returncode}]"

    return execute


@task
def engineer() -> Task:
    return Task(dataset=[Sample(input=os.environ["ETUDE_TASK"])], solver=react(tools=[shell()]))


if __name__ == "__main__":
    options = {"reasoning_summary": "none"}  # otherwise it first asks the model for a greeting
    (log,) = eval(engineer(), model="openai/etude", display="plain", log_dir="logs", **options)
    sys.exit(log.status != "success")
