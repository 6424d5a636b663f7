"""How a grade ends: a reward with a one-line reason, or evidence that nothing can be said about the agent.

Two exceptions decide who is to blame. `Rejected`: the agent's submission earns nothing. `GradingFault`: the host, the
task or the grader failed, and the rollout is invalid. Raise `GradingFault` only for a failure that also happens without
the agent's files.
"""

from __future__ import annotations

from etude import __version__
from etude.records.rollout import Boundary, Graded, Invalid
from etude.records.task import Trust

REASON_CHARS = 200


class Rejected(Exception):
    """Raised when the agent's submission earns a reward of 0; `reason` is one line.

    `forged`: whether results were forged, since a test passed that cannot pass. `over_limit`: the submission was too
    large to be graded.
    """

    def __init__(self, reason: str, *, forged: bool = False, over_limit: bool = False) -> None:
        self.reason, self.forged, self.over_limit = one_line(reason), forged, over_limit
        super().__init__(self.reason)


class GradingFault(Exception):
    """Raised when a submission cannot be graded, for a reason that the agent did not cause.

    `boundary`: the part of the system that failed, such as the task or a machine. `reason`: one line. `evidence`: the
    facts, for the log.
    """

    def __init__(self, boundary: Boundary, reason: str, evidence: str) -> None:
        self.boundary, self.reason, self.evidence = boundary, one_line(reason), evidence
        super().__init__(self.reason)

    def invalid(self) -> Invalid:
        """Return the `Invalid` outcome of this fault."""
        return Invalid(boundary=self.boundary, reason=self.reason, evidence=self.evidence)


def graded(grade: float, share: float, trust: Trust, reason: str) -> Graded:
    """Return the outcome of a graded submission.

    `grade`: the reward, from 0 to 1. `share`: the share of hidden tests that pass, recorded as a measure only. `trust`:
    the kind of the grader (`Trust`).
    """
    measures = {"tests": share, "pass": float(grade == 1.0)}
    return Graded.of(grade, measures, trust=trust, reason=one_line(reason), version=__version__)


def rejected_grade(rejection: Rejected, trust: Trust) -> Graded:
    """Return the outcome of a rejected submission: reward 0.

    The measures "forged" and "over_limit" of the outcome mark submissions that a person should review.
    """
    flags = {"forged": rejection.forged, "over_limit": rejection.over_limit}
    measures = {"tests": 0.0, "pass": 0.0, **{name: 1.0 for name, is_so in flags.items() if is_so}}
    return Graded.of(0.0, measures, trust=trust, reason=rejection.reason, version=__version__)


def one_line(text: str) -> str:
    """Return the text as one line of at most `REASON_CHARS` characters.

    Characters that cannot be printed become question marks.

    >>> one_line("a\\n  b \\ud800 \\x1b[2J")
    'a b ? ?[2J'
    """
    line = " ".join(text.split())[:REASON_CHARS]
    return "".join(char if char.isprintable() else "?" for char in line)
