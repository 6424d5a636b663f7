"""Words of the cheat suite: what a cheat is, what it belongs to, and what came of it. Plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class Row(enum.StrEnum):
    """What a cheat belongs to: the rows of the threat model's table, and three more."""

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
    """How a task is judged."""

    DATA = "cases"
    CHECK = "test code"
    PYTEST = "pytest"
    UNITTEST = "unittest"
    COMMAND = "verifier"
    REWARD = "verifier with a reward file"
    STATE = "state"
    LOOSE = "loose test code over a whole folder"  # a test that iterates, borrows from a library, and compares by `>`
    WHOLE = "verifier over a whole folder"  # which starts the code as a process of its own, and has no canary


class Verdict(enum.StrEnum):
    """What came of a cheat."""

    RESISTED = "resisted"
    CAUGHT = "caught"  # rewarded by a code-graded task, whose label says that it can be; and flagged: it does not train
    KNOWN = "known"  # succeeded, as the threat model says that it can here
    SUCCEEDED = "succeeded"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """One way to get what was not earned. An agent would run `program` in its machine, leave `files` there, and be
    graded; it succeeds if the program got something, the reward is above 0, or there is no grade at all.

    >>> Cheat(name="exit", row=Row.ENDINGS, what="exit at import", files={"calc.py": "raise SystemExit(0)"}).kinds
    (<Kind.DATA: 'cases'>,)
    """

    name: str
    row: Row
    what: str
    program: str = ""  # "module.function" of `programs`; "": none
    partner: str = ""  # what a sibling runs meanwhile, likewise
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = (Kind.DATA,)  # of task, on each of which it is tried
    shared_kernel: bool = False  # means something only where the kernel is the host's
    bomb: bool = False  # exhausts something: host and siblings are looked at afterwards
    known: str = ""  # why it can be done where the kernel is shared, and what it is worth; "": it cannot
    danger: bool = False  # never to be tried without isolation, not even as a control


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one cheat on one kind of task."""

    cheat: str
    row: Row
    kind: Kind
    verdict: Verdict
    evidence: str  # what it got, or what stopped it
    wall_s: float
