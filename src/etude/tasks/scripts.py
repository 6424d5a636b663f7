"""Scripted agents without a model, and the optional methods of task sources that provide them.

A script is a generator: it yields ``(tool name, arguments)``, receives the tool's output as text, and ends after
``submit``. Rollouts use it as a policy (baselines), or run it on a machine in memory (demonstrations).
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from etude.records.exports import covering
from etude.records.task import Answer, Split, Task

Call = tuple[str, dict[str, str | int]]
"""A tool's name and its arguments, in the order of the tool's schema."""

Script = Generator[Call, str, None]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A task and a script for it. The script can be run once."""

    task: Task
    script: Script


@runtime_checkable
class Demonstrating(Protocol):
    """Optional method of a `TaskSource`: demonstrations of its tasks, on which mid-training trains. The scripts run on
    machines in memory, in the calling process, so the scripts and the files of the tasks must be trusted code."""

    def demonstration(self, split: Split, index: int, *, seed: int, right: float) -> Demonstration:
        """A demonstration for task `index` of a split, deterministic in its arguments. `right`: probability from 0 to 1
        that its decisive edit is correct (`corpus.right_body`)."""
        ...


@runtime_checkable
class WithBaselines(Protocol):
    """Optional method of a `TaskSource`: scripted agents as baselines for the solve rate of a run."""

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """A script of kind "oracle", which knows the answer, or "random", which makes random valid edits."""
        ...


@runtime_checkable
class WithCopyProbe(Protocol):
    """Optional method of a `TaskSource`: texts whose last words a model can only predict by copying from the context,
    for a metric of mid-training. The scripts run like demonstrations."""

    def copy_probe(self, index: int) -> tuple[Task, Script, str]:
        """(training task, a script that ends with the call to copy, the last words of that call)."""
        ...


def demonstrations(
    source: Demonstrating,
    *,
    count: int,
    seed: int,
    right_body: float = 0.6,
    first: int = 1_000_000,
    split: Split = Split.TRAIN,
) -> Iterator[Demonstration]:
    """Yield `count` demonstrations for tasks from index `first`, which rollouts never reach.

    Train only on the training split; demonstrations of another split are for measuring a loss.
    """
    for index in range(first, first + count):
        yield source.demonstration(split, index, seed=seed, right=right_body)


def write_reference(task: Task, answer: Answer) -> Script:
    """The oracle for any source: write the files of the reference solution, run its command if any, and submit."""
    is_declared = covering(task.exports)
    for path, text in answer.reference.items():
        if answer.reference_argv or is_declared(path):
            yield "write", {"path": path, "text": text}
    if answer.reference_argv:
        yield "run", {"command": shlex.join(answer.reference_argv)}
    yield "submit", {}
