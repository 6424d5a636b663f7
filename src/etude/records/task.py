"""Tasks: what to do, on which files, and how the result is graded.

A `Task` is public: every process may see it. Its `Answer` is hidden: only graders have it, in processes that agent code
is never forked from."""

from __future__ import annotations

import enum
import hashlib
from typing import Any

import msgspec

from etude.records.image import Image

CANARY = "canary"
"""Prefix of the family of tasks that cannot be solved honestly. A reward for such a task proves cheating."""


class Trust(enum.StrEnum):
    """How far a reward can be trusted. The label is stored with the reward.

    DATA: plain outputs are compared outside the machine, and agent code never runs in the grader's process. CODE:
    hidden tests import the agent's code; a hidden test that must fail guards against tampering."""

    DATA = "data-graded"
    CODE = "code-graded"


class Split(enum.StrEnum):
    """The split of a task, chosen by a hash of its content. Settings are tuned on VALIDATION only.

    HELDOUT has new problems of the kinds that are trained on. TRANSFER has problems of kinds that no training text
    shows. A source without kinds has no TRANSFER tasks unless they are marked."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELDOUT = "heldout"
    TRANSFER = "transfer"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task: the instruction, the prepared files, and the names of the files that are graded. A `TaskSource` makes
    it.

    - `index`: position in (source, split); with the source's seed it determines the task and its answer.
    - `family`: the kind of task, a label for reports.
    - `problem`: an id that all variants of one problem share, since confidence intervals count problems. "": unique.
    - `files`: path → text of the prepared working directory.
    - `exports`: the graded files, such as "calc.py", or folders, such as "logs/" (`records.exports`).
    - `test_command`: the command that the agent's `test` tool runs in the machine.
    - `image`: the root filesystem of the machine; None: the runtime's own.
    - `state`: whether the state of the whole machine is graded, in a fork of the frozen machine, instead of exported
      files only.
    - `running`: whether, with `state`, the fork also has the running processes of the machine, not only its files.

    Raises `ValueError` for `running` without `state` and code grading.

    >>> t = Task(source="repair", split=Split.TRAIN, index=7, family="ak", instruction="fix the failing test",
    ...          files={"calc.py": "def f(n):\\n    return None\\n"}, exports=("calc.py",))
    >>> len(t.task_id)
    16
    """

    source: str
    split: Split
    index: int
    family: str
    problem: str = ""
    instruction: str
    files: dict[str, str]
    exports: tuple[str, ...]
    test_command: tuple[str, ...] = ()
    trust: Trust = Trust.DATA
    image: Image | None = None
    state: bool = False
    running: bool = False

    def __post_init__(self) -> None:
        if self.running and not (self.state and self.trust is Trust.CODE):
            raise ValueError("a task with running = true needs state = true and trust = code-graded")

    @property
    def task_id(self) -> str:
        """The first 16 hex characters of the SHA-256 of the content. Equal content has the same id everywhere."""
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
    """One hidden test of a data-graded task: `module.function(*args)` must return `expected`.

    Values are plain JSON data. They are compared by type and value, outside the machine."""

    module: str
    function: str
    args: list[Any]
    expected: Any


class Runner(enum.StrEnum):
    """The test framework that collects and runs hidden tests in the machine."""

    PYTEST = "pytest"
    UNITTEST = "unittest"


class HiddenTests(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden tests of a code-graded task: exactly the tests that must pass.

    Each test runs in a fresh process and machine state. A test that is skipped, expected to fail, or not found has not
    passed. `files`: path → text, written over the task's and the agent's files. `names`: the names of the tests, such
    as "tests/test_a.py::test_b" (pytest) or "tests.test_a.Case.test_b" (unittest). `roots`: further folders of the
    import path, such as "src". `deadline_s`: the most seconds for each test."""

    runner: Runner
    files: dict[str, str]
    names: tuple[str, ...]
    roots: tuple[str, ...] = ()
    deadline_s: float = 60.0


class Verifier(msgspec.Struct, frozen=True, kw_only=True):
    """A command that grades a machine by its exit code, or by a number that it writes.

    The machine is a fresh one with the agent's exported files; for a task with `state` it is a fork of the frozen
    machine. For a task with `running` the command runs as root in a folder that only root can enter, and relative paths
    refer to that folder. `files`: path → text, written into the machine after the agent's files. `reward_path`: a file
    with a number from 0 to 1; "": exit code 0 is grade 1, any other is 0."""

    files: dict[str, str]
    argv: tuple[str, ...]
    reward_path: str = ""
    deadline_s: float = 600.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The hidden part of a task. Exactly one of `cases`, `test_code`, `tests` and `verifier` is set.

    `reference`: path → text of the reference solution, which was checked to get grade 1. `cases`: the test cases of a
    task that is graded by data. `test_code`: Python source that defines `check(candidate)`, which fails by raising.
    `entry_point`: the "module:function" that is passed to `check`. `reference_argv`: the command of the reference
    solution, if it is more than files."""

    reference: dict[str, str]
    cases: tuple[Case, ...] = ()
    test_code: str = ""
    entry_point: str = ""
    tests: HiddenTests | None = None
    verifier: Verifier | None = None
    reference_argv: tuple[str, ...] = ()
