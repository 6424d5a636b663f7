"""Tasks: what to do, on which files, and how it will be judged.

A `Task` is public: every process may see it. Its `Answer` is hidden: only graders hold it, in processes that
agent code is never forked from.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Any

import msgspec

from etude.records.image import Image

CANARY = "canary"
"""How the family of a task begins that cannot be solved honestly: to be rewarded for it is a proof of cheating."""


class Trust(enum.StrEnum):
    """How far a reward can be believed; the label travels with it."""

    DATA = "data-graded"  # plain outputs compared outside; agent code never shares the grader's process
    CODE = "code-graded"  # tests had to import the agent's code; a hidden must-fail canary guards them


class Split(enum.StrEnum):
    """Which part of a source a task belongs to, by hash of its content; settings are chosen on VALIDATION only.

    HELDOUT holds new problems of the kinds that are trained on, TRANSFER problems of kinds that no training text
    shows. A source that knows no kinds has no TRANSFER tasks unless they are marked.
    """

    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT = "heldout"
    TRANSFER = "transfer"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do. Made by a `TaskSource`, read by harness and rollouts.

    >>> t = Task(source="repair", split=Split.TRAIN, index=7, family="ak", instruction="fix the failing test",
    ...          files={"calc.py": "def f(n):\\n    return None\\n"}, exports=("calc.py",))
    >>> len(t.task_id)
    16
    """

    source: str
    split: Split
    index: int  # position in (source, split); with the source's seed it regenerates the task and its answer
    family: str  # a label for reports: which kind of task
    problem: str = ""  # what the task asks for, the same in all its variants; intervals count problems. "": unique
    instruction: str
    files: dict[str, str]  # path -> text: the prepared tree of the machine
    exports: tuple[str, ...]  # what is taken out of the frozen machine and graded: "calc.py", folders as "logs/"
    test_command: tuple[str, ...] = ()  # what the `test` tool runs in the machine, e.g. ("python", "tests.py")
    trust: Trust = Trust.DATA
    image: Image | None = None  # what the machine is forked from; None: the runtime's own root filesystem
    state: bool = False  # what counts is the machine's state: it is graded in a fork of the frozen machine
    running: bool = False  # with the processes that run in it at the deadline; else with its files alone

    def __post_init__(self) -> None:
        if self.running and not (self.state and self.trust is Trust.CODE):
            raise ValueError("a task judged with its processes running counts its state, and is code-graded")

    @property
    def task_id(self) -> str:
        """SHA-256 of the whole content, 16 hex characters: the same content has the same id everywhere."""
        content: list[object] = [
            self.source,
            self.family,
            self.instruction,
            sorted(self.files.items()),
            self.exports,
            self.test_command,
        ]
        if self.image is not None or self.state:
            content.append([self.image, self.state])
        if self.running:
            content.append("running")
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


class Case(msgspec.Struct, frozen=True):
    """One hidden test of a data-graded task: call `function` of `module` with `args`; the result must be `expected`.

    Values are plain JSON data; comparison is by type and value, outside the machine.
    """

    module: str
    function: str
    args: list[Any]
    expected: Any


class Runner(enum.StrEnum):
    """Which of the machine's own programs collects and runs hidden tests."""

    PYTEST = "pytest"
    UNITTEST = "unittest"


class HiddenTests(msgspec.Struct, frozen=True, kw_only=True):
    """Hidden tests of a code-graded task: the exact set that must pass, each in a process and a machine state of its
    own. Skipped, expected to fail, or not found is not passed."""

    runner: Runner
    files: dict[str, str]  # path -> text: laid over the task's tree in the fresh machine, the agent's files below them
    names: tuple[str, ...]  # "tests/test_a.py::test_b" (pytest), "tests.test_a.Case.test_b" (unittest)
    roots: tuple[str, ...] = ()  # folders that modules are found in beside the tree's own: "src"
    deadline_s: float = 60.0  # of each


class Verifier(msgspec.Struct, frozen=True, kw_only=True):
    """A command that judges a fresh machine with the exports in it (or, where the task's `state` counts, a fork of the
    frozen one), by its exit code or by a number it writes. Beside running processes it works as root in a folder that
    only root can enter, and relative paths are in there."""

    files: dict[str, str]  # path -> text: laid into the machine once the agent's work is in it
    argv: tuple[str, ...]
    reward_path: str = ""  # where it writes a number from 0 to 1; "": exit code 0 is 1, any other is 0
    deadline_s: float = 600.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden side of a task: exactly one of `cases` (data-graded), `test_code`, `tests` and `verifier` is there."""

    reference: dict[str, str]  # path -> text of the reference solution's files; scores 1 by proof
    cases: tuple[Case, ...] = ()
    test_code: str = ""  # Python source that defines check(candidate) and fails by exception
    entry_point: str = ""  # "module:function" handed to check
    tests: HiddenTests | None = None
    verifier: Verifier | None = None
    reference_argv: tuple[str, ...] = ()  # the reference solution as a command, where it is not files alone
