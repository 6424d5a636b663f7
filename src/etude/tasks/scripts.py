"""Scripts: agents without a model, written as generators.

A script yields ``(tool name, arguments)`` and is sent the tool's output as text; it ends after ``submit``. The
rollout code plays it as a policy (baselines) or against a machine in memory (demonstrations). Knows nothing of
how tools work or how calls are spelled.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator

from etude.records.exports import covering
from etude.records.task import Answer, Task

Call = tuple[str, dict[str, str | int]]
"""A tool's name and its arguments, in the order of the tool's schema."""

Script = Generator[Call, str, None]


def write_reference(task: Task, answer: Answer) -> Script:
    """The oracle of any source: write the reference solution's files, run its command if it has one, and submit."""
    is_declared = covering(task.exports)
    for path, text in answer.reference.items():
        if answer.reference_argv or is_declared(path):
            yield "write", {"path": path, "text": text}
    if answer.reference_argv:
        yield "run", {"command": shlex.join(answer.reference_argv)}
    yield "submit", {}
