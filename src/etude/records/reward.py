"""Rewards as data: the measured terms of a rollout, and the reward composed from them."""

from __future__ import annotations

import msgspec

GRADE = "grade"  # the grade of the grader
SUBMITTED = "submitted"  # 1.0 where the agent submitted, else 0.0
SIGNS = "signs"  # number of detected signs of cheating
SIGNS_IF_REWARDED = "signs_if_rewarded"  # number of signs that count only when the other terms give more than 0
K1 = "k1"  # Σ log π − log π_ref over the sampled tokens; measured when a batch is made
BUILT_IN = (GRADE, SUBMITTED, SIGNS, SIGNS_IF_REWARDED, K1)
"""Names of the built-in terms."""
MEASURES = ("tests", "pass")
"""Names of the terms that graders measure in addition to the grade."""
VERIFIERS = "verifiers."
"""Prefix of the names of terms that an environment of the library `verifiers` measures."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one measurement of a rollout. `value` is None when it is unknown, which is neither 0 nor a failure.

    `evidence`: the reason for the value, or why it is unknown, in one line. `retry`: whether an unknown value may be
    known later, for example when a service is unreachable now. `turns`: parts of the value that single turns of
    the rollout caused, as (index in `Trace.turns`, part); credit by turn gives each part to its turn. `hints`: texts
    that would have helped the policy in faulty turns, as (index in `Trace.turns`, text); at most one for each turn."""

    value: float | None
    evidence: str = ""
    retry: bool = False
    turns: tuple[tuple[int, float], ...] = ()
    hints: tuple[tuple[int, str], ...] = ()


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One stored component of a reward: a measured value, with the name and version of the term that measured it.

    `value` is None when it is unknown. `version`: the version of the code that measured it; another version may give
    another value. `evidence`: the reason for the value, in one line. `turns`: the parts of the value that single turns
    caused, as (index, part). `hints`: texts for faulty turns, as (index, text). A known value is never changed, except
    that all siblings are measured again by a new version."""

    name: str
    value: float | None
    version: str = ""
    evidence: str = ""
    turns: tuple[tuple[int, float], ...] = ()
    hints: tuple[tuple[int, str], ...] = ()


class Hint(msgspec.Struct, frozen=True):
    """A hint for one turn of a rollout.

    `turn`: index in `Trace.turns`. `text`: a text that would have helped the policy in this turn. The learner adds
    `weight` times the change of a token's log-probability when `text` is in the context to the advantage of each
    sampled token of the turn (`training.hints`)."""

    turn: int
    text: str
    weight: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A term that was just measured. `retry`: whether an unknown value may be known later (`Score.retry`)."""

    term: Term
    retry: bool = False


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a rollout, as `etude.rewards.Composition` computes it from the stored terms.

    `value`: the input of the credit scheme, which computes advantages. `raw`: the reward before the KL penalty.
    `reason`: one line: the gates that removed the reward, if any, then the grader's reason. `gates`: names of the terms
    that set the reward to 0 (`SUBMITTED`, `SIGNS`). `missing`: terms that were left out for the whole group, because
    the value of a rollout of the group is unknown or of another version. `turns`: parts of the value that single turns
    caused, as (index in `Trace.turns`, part), ascending."""

    value: float
    raw: float
    reason: str
    gates: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    turns: tuple[tuple[int, float], ...] = ()
