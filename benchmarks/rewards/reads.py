"""Tasks whose agent has a bad habit: it reads a file again that it has just read. For `benchmarks.rewards.hints`.

The agent reads a module of one function, changes the number that it returns from 0 to 1, and submits.
`talk` makes conversations to mid-train a model on: most of them read twice. In some the hint of the reward term
`repeated-reads` is in the context, and these do not repeat a read: so the model can follow the hint, as large models
can, and does not do it by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from etude.errors import TaskError
from etude.harness import Call
from etude.harness.chat import Reply
from etude.harness.episode import assistant_message
from etude.harness.tools import number_lines
from etude.records.task import Answer, Case, Split, Task

NAMES = tuple(f"m{i}" for i in range(12))
FILE = "m.py"
HINT = "you have read {fault}"


def code(digit: int) -> str:
    """The module that returns a digit; at first it returns 0."""
    return f"def f():\n    return {digit}\n"


@dataclass(frozen=True)
class Reads:
    """A task source: module `FILE` returns 0 and should return 1. Tasks differ in their instruction only."""

    name = "reads"

    def size(self, split: Split) -> int | None:
        return 0 if split is Split.TRANSFER else None

    def task(self, split: Split, index: int) -> Task:
        if index < 0 or split is Split.TRANSFER:
            raise TaskError(f"no task {index} in {split}", hint="indices start at 0")
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="reads",
            instruction=f"mend {NAMES[index % len(NAMES)]}",
            files={FILE: code(0)},
            exports=(FILE,),
        )

    def answer(self, task: Task) -> Answer:
        return Answer(reference={FILE: code(1)}, cases=(Case("m", "f", [], 1),))


def talk(rng: random.Random, *, habit: float, hinted: float) -> list[dict[str, Any]]:
    """A conversation that solves a task. `habit`: the probability of each repeated read, at most two of them.

    `hinted`: the share of conversations with a hint, after which no read is repeated."""
    number = 0

    def say(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        nonlocal number
        number += 1
        return assistant_message(Reply("", (Call(name, arguments),)), turn=number)

    def hear(text: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}

    def read() -> Iterator[dict[str, Any]]:
        repeats = next((i for i in range(2) if rng.random() >= habit), 2)
        hints = rng.random() < hinted
        for i in range(repeats + 1):
            yield say("cat", {"path": FILE})
            last = hints and i == repeats
            yield hear(number_lines(code(0)) + ("\n" + HINT.replace("{fault}", f"cat {FILE}") if last else ""))

    return [
        {"role": "user", "content": f"mend {rng.choice(NAMES)}"},
        *read(),
        say("edit", {"path": FILE, "line": "2", "text": "return 1"}),
        hear("ok"),
        say("submit", {}),
    ]
