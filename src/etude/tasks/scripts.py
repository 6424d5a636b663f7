"""Scripts: agents without a model, written as generators; and what a task source may offer of them beside its tasks.

A script yields ``(tool name, arguments)`` and is sent the tool's output as text; it ends after ``submit``. The rollout
code plays it as a policy (baselines) or against a machine in memory (demonstrations). Knows nothing of how tools work
or how calls are spelled.
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
    """A task and a script to play on it, once."""

    task: Task
    script: Script


@runtime_checkable
class Demonstrating(Protocol):
    """An optional part of a `TaskSource`: shows how its tasks are done. Mid-training learns from it. The scripts are
    played on machines in memory, in the process that calls: they and the tasks' files are to be trusted code."""

    def demonstration(self, split: Split, index: int, *, seed: int, right: float) -> Demonstration:
        """A demonstration on the task `index` of a split: the same for the same arguments. `right`: how often its
        decisive edit is to be right, from 0 to 1 (`corpus.right_body`)."""
        ...


@runtime_checkable
class WithBaselines(Protocol):
    """An optional part of a `TaskSource`: scripted agents, whose solve rates a run is compared with."""

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """A script of the kind "oracle", which knows the answer, or "random", which acts without judgement."""
        ...


@runtime_checkable
class WithCopyProbe(Protocol):
    """An optional part of a `TaskSource`: texts whose end a model can only know by copying, for mid-training's probe.
    Played as demonstrations are."""

    def copy_probe(self, index: int) -> tuple[Task, Script, str]:
        """Training task, a script that ends with the call to be copied, and the end of that call's text."""
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
    """Demonstrations on tasks from index `first` on, far from those that rollouts try.

    Only training tasks may be learned from; those of another split serve to measure a loss.
    """
    for index in range(first, first + count):
        yield source.demonstration(split, index, seed=seed, right=right_body)


def write_reference(task: Task, answer: Answer) -> Script:
    """The oracle of any source: write the reference solution's files, run its command if it has one, and submit."""
    is_declared = covering(task.exports)
    for path, text in answer.reference.items():
        if answer.reference_argv or is_declared(path):
            yield "write", {"path": path, "text": text}
    if answer.reference_argv:
        yield "run", {"command": shlex.join(answer.reference_argv)}
    yield "submit", {}
