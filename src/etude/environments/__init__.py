"""Isolated machines (sandboxes), and the grading of what an agent leaves in them. Usable alone, without torch.

A `Runtime` prepares a snapshot of a file tree and forks machines from it. The agent works in one machine. The files
that the task declares as its exports are then copied out of that machine and graded in other, fresh machines.

Untrusted code never runs without isolation: on a host without namespaces, `NamespaceRuntime` raises `MachineError` and
its hint lists the alternatives.

>>> import asyncio
>>> from etude.records.task import Answer, Case, Split, Task
>>> task = Task(source="s", split=Split.TRAIN, index=0, family="f", instruction="mend it",
...             files={"calc.py": "def f(n): return None"}, exports=("calc.py",))
>>> answer = Answer(reference={}, cases=(Case("calc", "f", [20], 21),))
>>> async def main():
...     runtime = NamespaceRuntime()
...     outcome = await MachineGrader(runtime).grade(task, answer, {"calc.py": b"def f(n): return n + 1"})
...     await runtime.close()
...     return outcome.grade, outcome.reason
>>> asyncio.run(main())
(1.0, 'the hidden test passes')
"""

from etude.environments.config import MachineLimits
from etude.environments.grading import (
    MachineGrader,
    find_test_command_problem,
    prepare,
    reference_exports,
    simulate_exports,
    take_exports,
    validate_exports,
)
from etude.environments.namespace import NamespaceRuntime, probe

__all__ = [
    "MachineGrader",
    "MachineLimits",
    "NamespaceRuntime",
    "find_test_command_problem",
    "prepare",
    "probe",
    "reference_exports",
    "simulate_exports",
    "take_exports",
    "validate_exports",
]
