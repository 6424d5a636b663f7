"""How a grade ends: a number with a reason in one line, or evidence that it says nothing of the agent.

The rule of blame is here in two exceptions. `Refused` is the agent's: its work earns nothing, for this reason.
`Broken` is nobody's but the host's, the task's or the grader's, and may only be raised for what also happens without
any file of the agent's (`Ground.host_works`, `Ground.starts`, a verifier on the untouched machine).
"""

from __future__ import annotations

from etude import __version__
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Trust

REASON_CHARS = 200


class Rejected(Exception):
    """The agent's work earns nothing; the message says why in one line. `forged`: a test passed that cannot pass.
    `over_limit`: it was not looked at, being larger than may be."""

    def __init__(self, reason: str, *, forged: bool = False, over_limit: bool = False) -> None:
        self.reason, self.forged, self.over_limit = one_line(reason), forged, over_limit
        super().__init__(self.reason)


class GradingFault(Exception):
    """There is no verdict, and the agent has no part in that."""

    def __init__(self, boundary: Boundary, reason: str, evidence: str) -> None:
        self.boundary, self.reason, self.evidence = boundary, one_line(reason), evidence
        super().__init__(self.reason)

    def invalid(self) -> Invalid:
        return Invalid(boundary=self.boundary, reason=self.reason, evidence=self.evidence)


def graded(grade: float, share: float, trust: Trust, reason: str) -> Graded:
    """A verdict. `share` is that of the hidden tests which pass; `grade` alone counts."""
    measures = {"tests": share, "pass": float(grade == 1.0)}
    return Graded.of(grade, measures, trust=trust, reason=one_line(reason), version=__version__)


def rejected_grade(rejection: Rejected, trust: Trust) -> Graded:
    """The verdict on work that earns nothing. A forged one says so in a term, one over a limit too: they are to be
    looked at."""
    flags = {"forged": rejection.forged, "over_limit": rejection.over_limit}
    measures = {"tests": 0.0, "pass": 0.0, **{name: 1.0 for name, is_so in flags.items() if is_so}}
    return Graded.of(0.0, measures, trust=trust, reason=rejection.reason, version=__version__)


def one_line(text: str) -> str:
    """The text without line breaks, cut to what a log can bear; what cannot be printed or written is a question mark.

    >>> one_line("a\\n  b \\ud800 \\x1b[2J")
    'a b ? ?[2J'
    """
    line = " ".join(text.split())[:REASON_CHARS]
    return "".join(char if char.isprintable() else "?" for char in line)
