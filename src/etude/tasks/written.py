"""Generated tasks whose result is text files, checked by a program: following rules exactly, and being interrupted.

`FollowingSource`: write a text that keeps several exact rules. `InterruptionSource`: copy words from file to file,
while the user changes the task (`etude.harness.interruption`). A hash of a task's rules or words decides its split, so
no two splits share any. Nothing of what the agent writes is executed: the verifier reads its files as text.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.errors import TaskError
from etude.records.interruption import interrupted
from etude.records.task import Answer, Split, Task, Trust, Verifier
from etude.tasks.splits import split_of

# fmt: off
WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "flint", "grove", "haven", "iris", "jade", "karst", "lotus", "maple",
    "north", "ocean", "pearl", "quartz", "river", "stone", "tulip", "umber", "violet", "willow", "yarrow", "zinc",
    "apple", "bronze", "copper", "dune", "elm", "fern", "moss", "reed", "sand", "slate", "thorn", "vale", "wind",
)
# fmt: on
_VERIFY = """\
import json, pathlib, sys

def read(path):
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""

wanted = json.loads(pathlib.Path("wanted.json").read_text())
for path, text in wanted.get("texts", {}).items():
    if read(path).strip() != text:
        sys.exit(f"{path} is not as asked")
rules = wanted.get("rules")
if rules:
    lines = read(rules["path"]).strip().split("\\n")
    words = [line.split() for line in lines]
    flat = [word for line in words for word in line]
    checks = {
        "lines": lambda n: len(lines) == n,
        "words": lambda n: all(len(line) == n for line in words),
        "first": lambda word: bool(flat) and flat[0] == word,
        "last": lambda word: bool(flat) and flat[-1] == word,
        "often": lambda pair: flat.count(pair[0]) == pair[1],
        "never": lambda letter: letter not in " ".join(flat).lower(),
        "upper": lambda _: bool(flat) and all(word.isupper() for word in flat),
        "sorted": lambda _: [line[:1] for line in words] == sorted(line[:1] for line in words),
    }
    for name, value in rules["checks"]:
        if not checks[name](value):
            sys.exit(f"a rule is broken: {name} {value}")
"""
_SPLITS = (Split.TRAIN, Split.VALIDATION, Split.HELDOUT)
TEXT = "text.txt"


@dataclass(frozen=True)
class _Made:
    """A generated task with its answer. `key` decides the split."""

    key: str
    instruction: str
    files: Mapping[str, str]
    exports: tuple[str, ...]
    wanted: Mapping[str, Any]
    reference: Mapping[str, str]
    family: str


class _Generated(ABC):
    """A `TaskSource` without end that draws tasks with `make` until one belongs to the split."""

    name: str

    def __init__(self, seed: int) -> None:
        self.seed = seed

    @abstractmethod
    def make(self, rng: random.Random) -> _Made: ...

    def size(self, split: Split) -> int | None:
        return None if split in _SPLITS else 0

    def task(self, split: Split, index: int) -> Task:
        return self._task(self._made(split, index), split, index)

    def answer(self, task: Task) -> Answer:
        made = self._made(task.split, task.index)
        if self._task(made, task.split, task.index) != task:
            facts = f"the source has seed {self.seed}"
            hint = "use a source with the seed with which the task was made"
            raise TaskError(
                f"{task.split} task {task.index} ({task.task_id}) is not from {self.name}", facts, hint=hint
            )
        files = {"verify.py": _VERIFY, "wanted.json": json.dumps(made.wanted)}
        verifier = Verifier(files=files, argv=("python", "verify.py"), deadline_s=20.0)
        return Answer(reference=dict(made.reference), verifier=verifier)

    def _made(self, split: Split, index: int) -> _Made:
        if index < 0 or split not in _SPLITS:
            raise TaskError(
                f"no task {index} in {split}", hint="indices start at 0; the splits are train, validation, heldout"
            )
        rng = random.Random(f"{self.name} {self.seed} {split} {index}")
        while True:
            made = self.make(rng)
            if split_of(made.key) is split:
                return made

    def _task(self, made: _Made, split: Split, index: int) -> Task:
        return Task(
            source=self.name,
            split=split,
            index=index,
            family=made.family,
            problem=made.key,
            instruction=made.instruction,
            files=dict(made.files),
            exports=made.exports,
            trust=Trust.CODE,
        )


class FollowingSource(_Generated):
    """A source of tasks to write a text that follows three to five exact rules.

    >>> print(FollowingSource(0).task(Split.HELDOUT, 0).instruction.splitlines()[0])
    Write text.txt: words in lower case, with single spaces between them. Rules:
    """

    name = "following"

    def make(self, rng: random.Random) -> _Made:
        num_lines, num_words = rng.randint(2, 5), rng.randint(2, 5)
        letter = rng.choice("aeou") if rng.random() < 0.5 else ""
        lexicon = [word for word in WORDS if not letter or letter not in word]
        rng.shuffle(lexicon)
        lines = [[rng.choice(lexicon[:9]) for _ in range(num_words)] for _ in range(num_lines)]
        checks: list[tuple[str, Any]] = [("lines", num_lines), ("words", num_words)]
        said = [f"exactly {num_lines} lines", f"every line has exactly {num_words} words"]
        if rng.random() < 0.4:
            lines.sort(key=lambda line: line[0])
            checks.append(("sorted", None))
            said.append("the first words of the lines are in alphabetical order")
        flat = [word for line in lines for word in line]
        options: list[tuple[tuple[str, Any], str]] = [
            (("first", flat[0]), f"the first word of the text is {flat[0]}"),
            (("last", flat[-1]), f"the last word of the text is {flat[-1]}"),
        ]
        word = rng.choice(flat)
        options.append(
            (("often", (word, flat.count(word))), f"the word {word} occurs exactly {flat.count(word)} times")
        )
        for check, text in rng.sample(options, rng.randint(1, 2)):
            checks.append(check)
            said.append(text)
        if letter:
            checks.append(("never", letter))
            said.append(f"no word has the letter {letter}")
        return _Made(
            key="; ".join(said),
            instruction="\n".join(
                [
                    f"Write {TEXT}: words in lower case, with single spaces between them. Rules:",
                    *(f"- {rule}" for rule in said),
                ]
            ),
            files={"words.txt": "\n".join(WORDS) + "\n"},
            exports=(TEXT,),
            wanted={"rules": {"path": TEXT, "checks": checks}},
            reference={TEXT: "\n".join(" ".join(line) for line in lines) + "\n"},
            family=f"{len(said)} rules",
        )


class InterruptionSource(_Generated):
    """A source of tasks to copy words between files. The user changes the task after the first turn.

    >>> InterruptionSource(0).task(Split.HELDOUT, 0).exports
    ('a.txt', 'b.txt', 'status.txt')
    """

    name = "interruption"

    def make(self, rng: random.Random) -> _Made:
        one, two, new = rng.sample(WORDS, 3)
        kind, (change, texts) = rng.choice(list(_changes(one, two, new).items()))
        first = "Write the word of one.txt into a.txt and the word of two.txt into b.txt. Read the two files first."
        wanted = {**dict.fromkeys(("a.txt", "b.txt", "status.txt"), ""), **texts}
        return _Made(
            key=f"{kind} {one} {two} {new}",
            instruction=interrupted(first, change, after=1),
            files={"one.txt": f"{one}\n", "two.txt": f"{two}\n"},
            exports=("a.txt", "b.txt", "status.txt"),
            wanted={"texts": wanted},
            reference={path: f"{text}\n" for path, text in texts.items()},
            family=kind,
        )


def _changes(one: str, two: str, new: str) -> dict[str, tuple[str, dict[str, str]]]:
    """By kind of interruption: what the user says, and the texts that the files must then have; others are empty."""
    return {
        "stop": (
            "Stop. Write the word stopped into status.txt and nothing into a.txt and b.txt.",
            {"status.txt": "stopped"},
        ),
        "instead": (f"Change of plan: write {new} into both a.txt and b.txt.", {"a.txt": new, "b.txt": new}),
        "swap": ("Sorry, the other way round: the word of one.txt belongs into b.txt.", {"a.txt": two, "b.txt": one}),
        "also": (f"One more thing: write {new} into status.txt, too.", {"a.txt": one, "b.txt": two, "status.txt": new}),
        "half": ("Leave b.txt out: only a.txt is needed.", {"a.txt": one}),
    }


GENERATED: Mapping[str, Callable[[int], FollowingSource | InterruptionSource]] = {
    FollowingSource.name: FollowingSource,
    InterruptionSource.name: InterruptionSource,
}
"""The sources of this module by name: each takes a seed."""
