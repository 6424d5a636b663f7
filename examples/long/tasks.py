"""Tasks longer than the context: read many logs, remember the keys in some of them, write them down at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from etude.capture.context import REQUEST
from etude.errors import TaskError
from etude.records.task import Answer, Case, Split, Task
from etude.tasks.scripts import Demonstration
from etude.tasks.splits import split_of

Script = Generator[tuple[str, dict[str, str | int]], str, None]

# fmt: off
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "grove", "haven", "iris", "jade", "karst", "lotus", "maple",
    "north", "ocean", "pearl", "quartz", "river", "stone", "tulip", "umber", "violet", "willow", "xenon", "yarrow",
    "zinc", "apple", "bronze", "copper", "dune", "elm", "fern",
)
LABELS = ("user", "disk", "host", "mode", "path", "zone")
STATES = ("ok", "busy", "idle", "slow")
# fmt: on
FILE = "answer.py"
INSTRUCTION = "write the keys of all logs"


@dataclass(frozen=True)
class Problem:
    """One task with its answer. `logs` are texts, `keys` has the key of each log, or "" for a log without one."""

    logs: tuple[str, ...]
    keys: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The keys in the order of the logs."""
        return " ".join(key for key in self.keys if key)


@dataclass(frozen=True)
class Logs:
    """A task source: `num_logs` logs with `num_lines` lines each, of which `num_keys` have a line "key WORD".

    The agent fills in a function that returns the keys in the order of the logs. The split of a task is a hash of its
    keys, so held-out tasks have keys that occur together in no training text."""

    num_logs: int = 11
    num_keys: int = 4
    num_lines: int = 7
    seed: int = 0
    name = "long-logs"

    def size(self, split: Split) -> int | None:
        return 0 if split is Split.TRANSFER else None

    def problem(self, split: Split, index: int) -> Problem:
        if index < 0 or split is Split.TRANSFER:
            raise TaskError(f"no task {index} in {split}", hint="indices start at 0")
        rng = random.Random(f"long {self.seed} {split} {index}")
        while True:
            found = rng.sample(WORDS, self.num_keys)
            if split_of(" ".join(found)) is split:
                break
        places = sorted(rng.sample(range(self.num_logs), self.num_keys))
        keys = [""] * self.num_logs
        for place, key in zip(places, found, strict=True):
            keys[place] = key
        return Problem(tuple(self._log(rng, n, key) for n, key in enumerate(keys, 1)), tuple(keys))

    def _log(self, rng: random.Random, number: int, key: str) -> str:
        lines = [f"{rng.choice(LABELS)} {rng.choice(STATES)}" for _ in range(self.num_lines - 1)]
        if key:
            lines[rng.randrange(len(lines))] = f"key {key}"
        return "\n".join([f"log {number}", *lines]) + "\n"

    def task(self, split: Split, index: int) -> Task:
        problem = self.problem(split, index)
        logs = {f"{n}.log": text for n, text in enumerate(problem.logs, 1)}
        return Task(
            source=self.name,
            split=split,
            index=index,
            family="logs",
            problem=problem.answer,
            instruction=INSTRUCTION,
            files={**logs, FILE: "def answer():\n    return None\n"},
            exports=(FILE,),
        )

    def answer(self, task: Task) -> Answer:
        if task != self.task(task.split, task.index):
            raise TaskError(f"task {task.task_id} is not from this source", hint="use the same settings")
        text = self.problem(task.split, task.index).answer
        return Answer(
            reference={FILE: f'def answer():\n    return "{text}"\n'},
            cases=(Case("answer", "answer", [], text),),
        )

    def demonstration(self, split: Split, index: int, *, seed: int, right: float) -> Demonstration:
        """A script that reads all logs; a share `right` of its summaries keeps everything that it found."""
        rng = random.Random(f"demonstration {seed} {index}")
        return Demonstration(self.task(split, index), play(self.num_logs, rng, right=right))

    def baseline(self, task: Task, kind: str, *, seed: int) -> Script:
        """The oracle keeps everything in its summaries; the random agent writes random keys."""
        rng = random.Random(seed)
        return play(self.num_logs, rng, right=1.0) if kind == "oracle" else guess(self.num_keys, rng)


def play(num_logs: int, rng: random.Random, *, right: float) -> Script:
    """Read all logs and write the keys down. It knows only what it has seen, and of that what its summaries keep."""
    at, keys = 0, dict[int, str]()
    while at < num_logs:
        output = yield "cat", {"path": f"{at + 1}.log"}
        while True:
            if (number := re.match(r"1 log (\d+)", output)) is not None:
                at = int(number[1])
                if (key := re.search(r"^\d+ key (\w+)$", output, re.MULTILINE)) is not None:
                    keys[at] = key[1]
            if not output.endswith(f"\n{REQUEST}"):
                break
            if rng.random() >= right:
                spoil(keys, rng)
            output = yield "", {"text": summary(at, keys)}
    text = " ".join(keys.values())
    output = yield "edit", {"path": FILE, "line": 2, "text": f'return "{text}"'}
    if output.endswith(f"\n{REQUEST}"):
        yield "", {"text": "written"}
    yield "submit", {}


def summary(at: int, keys: dict[int, str]) -> str:
    """The text of a summary: the last log that was read, and the keys so far."""
    return " ".join([f"read {at} keys", *keys.values()])


def spoil(keys: dict[int, str], rng: random.Random) -> None:
    """Forget one of the keys, or mistake it for another word."""
    if keys:
        place = rng.choice(list(keys))
        if rng.random() < 0.6:
            del keys[place]
        else:
            keys[place] = rng.choice(WORDS)


@dataclass(frozen=True)
class Lists:
    """A corpus source: short texts that a model can only continue by copying words in their order.

    In one half, a list of words is repeated at once; in the other half (`notes`) after other lines. The distance of the
    copies varies, since a model that can copy by a fixed distance knows the keys of a summary, but not their order."""

    count: int = 13_000

    def documents(self, seed: int) -> Iterator[str]:
        rng = random.Random(f"lists {seed}")
        for number in range(self.count):
            yield notes(rng) if number % 2 else f"keys {' '.join(rng.sample(WORDS, rng.randint(8, 16)))}\n" * 3


def notes(rng: random.Random) -> str:
    """Return four copies of a list of words, with lines of a log between them, some of which add a word to the list.

    Half of the texts end with a statement that returns the list."""
    words = rng.sample(WORDS, rng.randint(4, 9))
    known, text = rng.randint(2, len(words)), ""
    for _ in range(3):
        text += f"keys {' '.join(words[:known])}\n{other_lines(rng)}"
        new = words[known : known + rng.choice((0, 0, 1, 1, 2))]
        text, known = text + "".join(f"key {word}\n{other_lines(rng)}" for word in new), known + len(new)
    last = " ".join(words[:known])
    return text + (f'return "{last}"\n' if rng.random() < 0.5 else f"keys {last}\n")


def other_lines(rng: random.Random) -> str:
    """Return some lines of a log without a key."""
    return "".join(f"{rng.choice(LABELS)} {rng.choice(STATES)}\n" for _ in range(rng.choice((0, 1, 2, 4, 8))))


def guess(num_keys: int, rng: random.Random) -> Script:
    """Write random keys."""
    yield "edit", {"path": FILE, "line": 2, "text": f'return "{" ".join(rng.sample(WORDS, num_keys))}"'}
    yield "submit", {}
