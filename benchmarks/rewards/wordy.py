"""Small tasks whose demonstrations use many words, and two terms: what the benchmarks of the effort term need.

A task names a file and a number that its function should return. In a demonstration most calls come after a sentence
that says what the agent is about to do. The sentences depend on the name of the tool alone, so they help with nothing:
a policy that learnt from them has a habit of using more tokens than it needs. A share of the tasks may leave out the
number: an attempt at them is right by chance, so giving up is tempting where failures cost something."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from etude.environments.memory import MemoryMachine
from etude.errors import TaskError
from etude.harness import standard_tools
from etude.records import Graded, Rollout
from etude.records.reward import Score
from etude.records.task import Answer, Case, Split, Task
from etude.rewards.effort import Effort
from etude.rollouts import demonstrate
from etude.tasks.scripts import Script

NAMES = ("bank", "book", "card", "cart", "city", "code", "disk", "door", "farm", "fish")
NAMES += ("game", "gate", "hall", "item", "keys", "lamp", "line", "mail", "menu", "road")
NUMBERS = range(10)
TOOLS = ("ls", "cat", "edit", "submit")
WORDS = {
    "ls": ("Let me see which files there are in this folder.", "First I list the files, so that I know my way."),
    "cat": ("I read the file before I change it.", "I want to see how the function is written now."),
    "edit": (
        "Now I know what is wrong, and I replace the line by what it should be.",
        "The line does not do what was asked for, so I write it again.",
    ),
    "submit": (
        "The work is done and there is nothing left to change, so I submit.",
        "I am confident that this is right, and I hand it in now.",
    ),
}
"""What a demonstration says before a call of each tool."""
SAID, LISTED, READ = 0.8, 0.4, 0.6
"""Shares of demonstrations: of calls with words before them; that list the files, that read the file."""


class Wordy:
    """A task source: make the function of a file return a number. A tenth of all pairs of file and number is held out,
    and another tenth is for validation.

    `unknowable`: the share of tasks that do not say the number; their family is "unknowable". `gives_up`: the share of
    demonstrations that submit at once."""

    name = "wordy"

    def __init__(self, seed: int = 0, unknowable: float = 0.0, gives_up: float = 0.0) -> None:
        self.seed, self.unknowable, self.gives_up = seed, unknowable, gives_up

    def size(self, split: Split) -> int | None:
        return 0 if split is Split.TRANSFER else None

    def task(self, split: Split, index: int) -> Task:
        name, number = self._pair(split, index)
        known = self._known(split, index)
        return Task(
            source=self.name,
            split=split,
            index=index,
            family=self.name if known else "unknowable",
            problem=f"{name} {number}",
            instruction=f"{name}.py should return {number if known else 'a number'}",
            files={f"{name}.py": "def f():\n    return None\n"},
            exports=(f"{name}.py",),
        )

    def answer(self, task: Task) -> Answer:
        if task != self.task(task.split, task.index):
            raise TaskError(f"task {task.task_id} is not from this source", hint="use the same settings")
        name, number = self._pair(task.split, task.index)
        return Answer(
            reference={f"{name}.py": f"def f():\n    return {number}\n"}, cases=(Case(name, "f", [], number),)
        )

    def conversation(self, split: Split, index: int, *, seed: int, right: float) -> list[dict[str, Any]]:
        """Return a conversation in which a share `right` of the edits is correct and most calls come after words.

        In tasks that do not say the number, the edits are right by chance."""
        task, rng = self.task(split, index), random.Random(f"demonstration {seed} {index}")
        name, number = self._pair(split, index)
        knows = rng.random() < right and self._known(split, index)
        script = repair(name, number if knows else rng.choice(NUMBERS), rng)
        if rng.random() < self.gives_up:
            script = give_up()
        machine = MemoryMachine({path: text.encode() for path, text in task.files.items()})
        messages = demonstrate(task, script, standard_tools(TOOLS), machine)
        for message in messages:
            if message["role"] == "assistant" and rng.random() < SAID:
                message["content"] = rng.choice(WORDS[message["tool_calls"][0]["function"]["name"]])
        return messages

    def _known(self, split: Split, index: int) -> bool:
        return random.Random(f"known {self.seed} {split} {index}").random() >= self.unknowable

    def _pair(self, split: Split, index: int) -> tuple[str, int]:
        pairs = [(name, number) for name in NAMES for number in NUMBERS if split_of(name, number) is split]
        return random.Random(f"wordy {self.seed} {split} {index}").choice(pairs)


def split_of(name: str, number: int) -> Split:
    """The split of a pair of file and number, by its hash."""
    place = hashlib.sha256(f"{name} {number}".encode()).digest()[0] % 10
    return {0: Split.HELDOUT, 1: Split.VALIDATION}.get(place, Split.TRAIN)


def repair(name: str, number: int, rng: random.Random) -> Script:
    """Yield the calls of an agent that perhaps lists the files, perhaps reads the file, writes a number and submits."""
    if rng.random() < LISTED:
        yield "ls", {}
    if rng.random() < READ:
        yield "cat", {"path": f"{name}.py"}
    yield "edit", {"path": f"{name}.py", "line": 2, "text": f"return {number}"}
    yield "submit", {}


def give_up() -> Script:
    """Yield the one call of an agent that submits at once."""
    yield "submit", {}


class GaveUp:
    """1 for a rollout that was submitted without an edit, else 0."""

    version = "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        calls = [call.name for turn in rollout.trace.turns for call in turn.calls]
        return Score(value=float("submit" in calls and "edit" not in calls), evidence=f"{len(calls)} calls")


class LengthPenalty(Effort, frozen=True, kw_only=True):
    """The cost of the effort term charged to every rollout, solved or not: what the effort term is compared with."""

    @property
    def version(self) -> str:
        """The version of the formula."""
        return "1"

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        effort = self.effort(rollout)
        return Score(value=-min(1.0, self.cost(effort) / self.cost(self.limit)), evidence=f"{effort:g} tokens")


__all__ = ["GaveUp", "LengthPenalty", "Wordy"]
