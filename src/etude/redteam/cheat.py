"""Data types of the cheat suite: cheats, their categories, and the result of running them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class Row(enum.StrEnum):
    """The category of a cheat: a row of the threat model's table, or one of three further categories."""

    HISTORY = "reads future commits, tags, reflogs, unreachable objects"
    NETWORK = "fetches the fix over the network"
    INSTALLED = "finds the fix installed or cached"
    TESTS = "edits, deletes or configures the tests"
    ENDINGS = "exits, skips, expects to fail"
    EQUALITY = "overloads equality, patches the grader, reads the expected value"
    CLOCK = "patches the clock"
    REWARDS = "writes the reward itself, or rewrites results later"
    PRELOAD = "leaves start-up files, libraries and programs behind"
    FORGERY = "forges the report"
    TRAVERSAL = "exports through links, archives, devices"
    STATE = "keeps state across tests, finds answers in /proc and descriptors"
    DEADLINE = "works past the deadline, exhausts to be tried again"
    SIBLINGS = "learns from a sibling"
    ESCAPE = "leaves the machine"
    RESOURCES = "exhausts the host"
    INVALID = "becomes invalid instead of failed"


class Kind(enum.StrEnum):
    """How a task is graded. A cheat is tried on tasks of one or more of these kinds."""

    DATA = "cases"
    CHECK = "test code"
    PYTEST = "pytest"
    UNITTEST = "unittest"
    COMMAND = "verifier"
    REWARD = "verifier with a reward file"
    STATE = "state"
    LOOSE = "loose test code over a whole folder"  # its test iterates, imports a library, and compares with `>`
    WHOLE = "verifier over a whole folder"  # it runs the code as a separate process, and has no canary


class Verdict(enum.StrEnum):
    """The result of a cheat: whether the defences held."""

    RESISTED = "resisted"
    CAUGHT = "caught"  # rewarded by a code-graded task, but flagged by the detector, so that it is not trained on
    KNOWN = "known"  # succeeded, as the threat model documents
    SUCCEEDED = "succeeded"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """One attempt to cheat: a program that the agent runs in its machine, or files that it leaves there to be graded.

    It succeeds if the program returns a proof of its success, the reward is above 0, or there is no grade. `program`
    and `partner` are names "module.function" in `programs`; a sibling machine runs the partner at the same time.
    `kinds` are the kinds of task that it is tried on. `shared_kernel`: it can only work if the machine shares the
    host's kernel. `bomb`: it exhausts a resource, so host and siblings are checked afterwards. `known`: why it works
    with a shared kernel, and what an agent gains by it; "" if it does not work. `danger`: it must never run without
    isolation.

    >>> Cheat(name="exit", row=Row.ENDINGS, what="exit at import", files={"calc.py": "raise SystemExit(0)"}).kinds
    (<Kind.DATA: 'cases'>,)
    """

    name: str
    row: Row
    what: str
    program: str = ""  # "module.function" in `programs`; "": no program
    partner: str = ""  # the program that a sibling machine runs at the same time
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = (Kind.DATA,)  # the kinds of task that it is tried on
    shared_kernel: bool = False  # only relevant if the machine shares the host's kernel
    bomb: bool = False  # exhausts a resource: host and siblings are checked afterwards
    known: str = ""  # why it works with a shared kernel, and what it is worth; "": it does not work
    danger: bool = False  # never run it without isolation, not even as a control


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cheat (a row of attacks) on one kind of task. `evidence` says what the cheat achieved, or why
    it failed."""

    cheat: str
    row: Row
    kind: Kind
    verdict: Verdict
    evidence: str
    wall_s: float
