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


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one measurement of a rollout. An unknown value is neither 0 nor a failed rollout."""

    value: float | None  # None: unknown
    evidence: str = ""  # one line: the reason for the value, or why it is unknown


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One raw part of a reward: a `Score` with the name and version of the term that measured it. Terms are stored and
    never changed."""

    name: str
    value: float | None  # None: unknown
    version: str = ""  # of the code that measured it; another version may give another value
    evidence: str = ""  # one line: the reason for the value, or why it is unknown


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of a rollout. `etude.rewards.Composition` computes it from the stored terms."""

    value: float  # input of the credit scheme
    raw: float  # before the KL penalty
    reason: str  # one line: the gates that removed the reward, then the grader's reason
    gates: tuple[str, ...] = ()  # names of the terms that removed the reward: `SUBMITTED`, `SIGNS`
    missing: tuple[str, ...] = ()  # terms left out of this group: a sibling has no comparable value
