"""Rewards of episodes from signals of users, and the choice of a step's episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from etude.production.episodes import Answer, Episode
from etude.records.rollout import Graded
from etude.records.task import Trust

Values = Mapping[str, Sequence[float]]
"""Values in [0, 1] of the signals about one episode, by name."""


class SignalSource(Protocol):
    """Where the signals about answers are kept."""

    def values_of(self, answers: Sequence[Answer]) -> Mapping[Answer, Values]:
        """Return the values of the signals about these answers that may be trained on, by answer and name.

        Answers and names without a signal are left out."""
        ...


def values_together(each: Iterable[Values]) -> Values:
    """Return the values of several answers in one mapping, by name.

    >>> values_together([{"kept": [1.0]}, {"kept": [0.0], "rated": [0.5]}])
    {'kept': [1.0, 0.0], 'rated': [0.5]}
    """
    found = dict[str, list[float]]()
    for values in each:
        for name, some in values.items():
            found.setdefault(name, []).extend(some)
    return found


def reward_of(values: Values, weights: Mapping[str, float]) -> float | None:
    """Return the reward of an episode, in [-1, 1]; None without a signal that counts.

    It is the mean value of each signal times its weight, over the sum of the absolute weights of the signals that the
    episode has.

    >>> reward_of({"kept": [1.0], "dissatisfied": [1.0]}, {"kept": 1.0, "dissatisfied": -1.0})
    0.0
    >>> reward_of({"seen": [1.0]}, {"kept": 1.0})
    """
    known = {name: math.fsum(found) / len(found) for name, found in values.items() if found and name in weights}
    if not known:
        return None
    total = math.fsum(abs(weights[name]) for name in known)
    return math.fsum(weights[name] * value for name, value in sorted(known.items())) / total


def graded_of(values: Values, reward: float) -> Graded:
    """Return the outcome of an episode: its reward as the grade, and the mean of each signal as a term."""
    means = {f"signal.{name}": math.fsum(found) / len(found) for name, found in sorted(values.items()) if found}
    told = ", ".join(f"{name.removeprefix('signal.')} {mean:.3g}" for name, mean in means.items()) or "no signal"
    return Graded.of(reward, means, trust=Trust.DATA, reason=f"signals: {told}")


def choose(
    ready: Sequence[Episode],
    *,
    episodes: int,
    per_user: int,
    own: Collection[str] | None = None,
    own_share: float = 0.0,
) -> list[Episode]:
    """Choose the episodes of a window: the oldest first, at most `per_user` of one subject.

    `own`: the digests of the versions that count as the deployed policy; None: all versions count. Episodes with tokens
    of other versions come last, and only as long as at least the share `own_share` of all tokens is from `own`."""
    taken, chosen = Counter[str](), list[Episode]()
    total = num_own = 0
    sized = [(one, one.num_sampled, one.num_sampled if own is None else one.tokens_of(own)) for one in ready]
    for one, number, mine in sorted(sized, key=lambda one: (one[2] < one[1], one[0].last_at, one[0].record_ids)):
        allowed = mine == number or num_own + mine >= own_share * (total + number)
        if len(chosen) < episodes and taken[one.subject] < per_user and allowed:
            taken[one.subject] += 1
            chosen.append(one)
            total, num_own = total + number, num_own + mine
    return chosen
