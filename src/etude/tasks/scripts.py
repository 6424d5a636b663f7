"""Scripted agents without a model, and the optional methods of task sources that provide them.

A script is a generator: it yields ``(tool name, arguments)``, receives the tool's output as text, and ends after
``submit``. For tasks longer than the context it also writes summaries (`etude.rollouts.scripted`). Rollouts use it as a
policy (baselines), or run it on a machine in memory (demonstrations).
"""

from __future__ import annotations

import shlex
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from etude.errors import TaskError
from etude.records.exports import covering
from etude.records.task import Answer, Split, Task
from etude.seams import TaskSource

Call = tuple[str, dict[str, str | int]]
"""A tool's name and its arguments, in the order of the tool's schema."""

Script = Generator[Call, str, None]


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A task, and a script for it that can be run once."""

    task: Task
    script: Script


@runtime_checkable
class Demonstrating(TaskSource, Protocol):
    """An optional interface of a `TaskSource`: demonstrations of its tasks for mid-training.

    The scripts call the run's tools, including plug-ins, and the standard tools. They run on machines in memory, in the
    calling process, so scripts and tasks must be trusted."""

    def demonstration(self, split: Split, index: int, *, seed: int, right: float) -> Demonstration:
        """Return task `index` of a split and a script for it; the same arguments give the same demonstration.

        `index` is below the size of the split. A task is demonstrated several times with different seeds if there are
        fewer tasks than demonstrations. `right` is the probability, from 0 to 1, that the script's decisive edit is
        correct (`corpus.right_body`)."""
        ...


@runtime_checkable
class Conversing(TaskSource, Protocol):
    """An optional interface of a `TaskSource`: demonstrations as finished conversations, used in place of scripts.

    Use it for agent programs with their own prompts and tools. If `harness.summary_tokens` is set, scripts are used
    instead."""

    def conversation(self, split: Split, index: int, *, seed: int, right: float) -> list[dict[str, Any]]:
        """Return all messages of the agent program and the model for a task, in OpenAI's format.

        Every message has a text as its content, and the arguments of a call are a mapping. The arguments of this
        method are those of `Demonstrating.demonstration`; the same arguments give the same conversation."""
        ...


@runtime_checkable
class WithBaselines(Protocol):
    """Optional method of a `TaskSource`: scripted agents, whose solve rates are compared with that of a model."""

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """Return a script of kind "oracle", which knows the answer, or "random", which makes random valid edits."""
        ...


@runtime_checkable
class WithCopyProbe(Protocol):
    """Optional method of a `TaskSource`: texts whose last words a model can predict only by copying from the context.

    They are for a metric of mid-training. The scripts run like demonstrations."""

    def copy_probe(self, index: int) -> tuple[Task, Script, str]:
        """Return a training task, a script that ends with the call to copy, and the last words of that call."""
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
    """Yield `count` demonstrations for the tasks of a split, from index `first` on.

    By default this index is so high that rollouts never reach it. A finite source begins again with its first task and
    the next seed. `right_body` is the fraction of correct edits. Train only on the training split; those of another
    split are for measuring a loss. Raises `TaskError` for a split without tasks."""
    size = source.size(split)
    if size == 0:
        hint = "add tasks, or leave out the method `demonstration`: generated tasks are then demonstrated"
        raise TaskError(f"{source.name} has no {split} task to demonstrate", "its size is 0", hint=hint)
    for number in range(first, first + count):
        again, index = (0, number) if size is None else divmod(number, size)
        yield source.demonstration(split, index, seed=seed + again, right=right_body)


def write_reference(task: Task, answer: Answer) -> Script:
    """Yield the calls of an agent that writes the reference solution, runs its command if it has one, and submits.

    It works for tasks of any source."""
    is_declared = covering(task.exports)
    for path, text in answer.reference.items():
        if answer.reference_argv or is_declared(path):
            yield "write", {"path": path, "text": text}
    if answer.reference_argv:
        yield "run", {"command": shlex.join(answer.reference_argv)}
    yield "submit", {}
