"""Helpers of the cheats that are files: code that finds nonces and expected values, and kinds of task."""

from __future__ import annotations

from textwrap import dedent

from etude.redteam.cheat import Cheat, Kind, Row

TESTED = (Kind.CHECK, Kind.UNITTEST)
ALL = (Kind.DATA, *TESTED, Kind.COMMAND)
FILES = (*TESTED, Kind.PYTEST, Kind.COMMAND)
_BY_PYTEST = frozenset(
    {"pytest-skip", "pytest-skip-module", "xfail", "pytest-exit", "hard-exit-in-the-call", "equal-to-everything",
     "expected-from-the-frame", "patch-pytest", "nonce-from-frames", "sitecustomize", "pth", "expected-from-files"}
)  # fmt: skip
"""Cheats that are also tried on pytest, which takes a second for each test."""

GRAB = '''
import contextlib, gc, json, os, re, sys
HEX = re.compile(r"[0-9a-f]{16,64}")

def numbers(text, n):
    """What a test seems to expect of f(n): the number after it."""
    for pattern in (r"\\(%d\\)\\s*==\\s*(-?\\d+)" % n, r"\\(%d\\),\\s*(-?\\d+)" % n, r"\\[%d\\].{0,40}?(\\d{7,})" % n):
        found = re.search(pattern, text)
        if found:
            return int(found[1])

def forge(nonces):
    """Reports of success in every form, on every descriptor."""
    reports = []
    for nonce in nonces:
        for body in ("true", "[true]", '{"passed": true}', '{"verdict": true, "passed": true}', "passed", "1.0"):
            reports.append("\\n%s %s\\n" % (nonce, body))
        reports.append('\\n{"nonce": "%s", "verdict": true, "passed": true, "outcome": "passed"}\\n' % nonce)
    data = "".join(reports).encode()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), data)
'''


def calc(body: str) -> dict[str, str | bytes]:
    """Return the file calc.py with `body` after the helper functions of `GRAB`."""
    return {"calc.py": GRAB + dedent(body)}


WRONG = "def f(n):\n    return 0\n"


def cheat(name: str, row: Row, what: str, files: dict[str, str | bytes], kinds: tuple[Kind, ...] = ALL) -> Cheat:
    """Return a `Cheat` that hands in `files`, with a wrong calc.py unless they have one. `what` describes it."""
    tried = (*kinds, Kind.PYTEST) if name in _BY_PYTEST and Kind.PYTEST not in kinds else kinds
    return Cheat(name=name, row=row, what=what, files={"calc.py": WRONG, **files}, kinds=tried)
