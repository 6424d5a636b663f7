"""Rewards as data: the terms that were measured of a rollout, and the reward composed from them."""

from __future__ import annotations

import msgspec

GRADE = "grade"  # what the grader gave
SUBMITTED = "submitted"  # 1.0 where the agent submitted, else 0.0
SIGNS = "signs"  # number of signs of cheating
SIGNS_IF_REWARDED = "signs_if_rewarded"  # number of signs that count only where the other terms earn more than 0
K1 = "k1"  # Σ log π − log π_ref over the sampled tokens; measured when a batch is made
BUILT_IN = (GRADE, SUBMITTED, SIGNS, SIGNS_IF_REWARDED, K1)
"""Names of the terms that etude measures itself."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one measurement of a rollout. An unknown value is neither 0 nor a failure of the rollout."""

    value: float | None  # None: unknown
    evidence: str = ""  # one line: what the value rests on, or why it is unknown


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """A `Score` with the name and the version of what measured it: one raw part of a reward. Terms are stored, and
    never changed."""

    name: str
    value: float | None  # None: unknown
    version: str = ""  # of what measured it: another version may give the same rollout another value
    evidence: str = ""  # one line: what the value rests on, or why it is unknown


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a rollout. Derived: `etude.rewards.Composition` makes it from terms."""

    value: float  # what credit is computed from
    raw: float  # before the KL penalty
    reason: str  # one line: the grader's, after those of the gates that took the reward
    gates: tuple[str, ...] = ()  # names of the terms that took the reward: `SUBMITTED`, `SIGNS`
    missing: tuple[str, ...] = ()  # weighted terms that do not count in this group: a sibling has no comparable value
