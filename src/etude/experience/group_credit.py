"""Computes the rewards and advantages of a whole group, with a credit scheme of `etude.experience.credit`.

The scheme is called more than once for two kinds of groups: those that run in two stages, and those with machines that
were forked after a summary. In this module `Fork` is `records.rollout.Fork`, not the scheme `credit.Fork`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from etude.experience.credit import DR_GRPO, advantages, turn_advantages
from etude.records.reward import Reward
from etude.records.rollout import Fork, Graded
from etude.records.summary import TurnPlace
from etude.rewards import Composition
from etude.seams import CreditScheme


class Credited(NamedTuple):
    """The reward and the advantage of a rollout. `by_turn`: one advantage per turn; empty if all have `advantage`."""

    reward: Reward
    advantage: float
    by_turn: tuple[float, ...]


def staged_credit(
    graded: Sequence[Graded],
    places: Sequence[Sequence[TurnPlace]],
    first: Sequence[bool],
    composition: Composition,
    scheme: CreditScheme = DR_GRPO,
    forks: Sequence[Fork | None] = (),
) -> list[Credited]:
    """Return the reward and the advantages of each graded rollout of a group, in the given order.

    - `graded`: the terms of each rollout, from which `composition` computes its reward.
    - `places`: the turns of each rollout, for schemes with an advantage per turn.
    - `first`: for each rollout, whether it is in the first stage of its group. Rollouts of the first stage are compared
      only with each other; all others are compared with all rollouts. Ignored if a rollout has a fork.
    - `forks`: `Rollout.fork` of each rollout; empty if no machine of the group was forked.

    Raises `PluginError` for a scheme that fails.

    >>> from etude.experience.credit import SCHEMES, Credit
    >>> from etude.records.task import Trust
    >>> graded = [Graded.of(grade, trust=Trust.DATA, reason="") for grade in (1.0, 0.0, 1.0, 1.0)]
    >>> found = staged_credit(graded, [()] * 4, [True, True, False, False], Composition(), SCHEMES[Credit.RLOO])
    >>> [round(one.advantage, 2) for one in found]
    [1.0, -1.0, 0.33, 0.33]
    """
    rewards = composition.rewards([one.terms for one in graded])
    if any(forks):
        return _forked(rewards, places, forks, scheme)
    found = _credited(rewards, places, scheme)
    early = [i for i, is_first in enumerate(first) if is_first]
    if len(early) < len(rewards):
        alone = _credited([rewards[i] for i in early], [places[i] for i in early], scheme)
        for i, credited in zip(early, alone, strict=True):
            found[i] = credited
    return found


def num_context_turns(forks: Sequence[Fork | None]) -> list[int]:
    """Return, for each valid rollout of a group, how many of its first turns are context only, without loss.

    `forks`: `Rollout.fork` of the valid rollouts, in order. The first rollout that has the shared turns is trained on
    them; in all others they are context. This need not be the rollout that sampled them (`Fork.origin`): that one may
    be invalid, and then is not in `forks`."""
    seen, found = set[str](), list[int]()
    for fork in forks:
        found.append(fork.num_turns if fork is not None and fork.origin in seen else 0)
        seen |= {fork.origin} if fork is not None else set()
    return found


def _forked(
    rewards: Sequence[Reward],
    places: Sequence[Sequence[TurnPlace]],
    forks: Sequence[Fork | None],
    scheme: CreditScheme,
) -> list[Credited]:
    """Return the credit of a group in which machines were forked after the first summary.

    An entry is one summary with the m valid rollouts that continue it, or one rollout that was not forked. The m
    rollouts are independent samples of what follows the summary. Their mean reward V estimates the value of the summary
    without bias, and with less noise than one reward. The scheme is applied twice (formulas for RLOO):

    - *To the group*, with one reward per entry: V, or the reward of the rollout. The advantage of the shared turns, the
      summary included, is V minus the mean of the other entries. The baseline must not contain rollouts of the same
      entry: these have read the shared turns, so their rewards depend on them, and the gradient would be biased.
    - *To the continuations of one summary*, with the turns after it. The advantage of a turn is (r minus the mean
      reward of the m - 1 other continuations) / m. The gradient is a mean over the m samples; without the division
      these turns would weigh m times as much as those of a rollout that was not forked.

    Each shared turn is trained on once: the first rollout of an entry has its advantage. In the others its advantage is
    0, and it is context only (`num_context_turns`). With RLOO and fork credit no baseline depends on the tokens that it
    is for. So, with two entries or more, the expected gradient is that of the mean reward times the number of entries.
    A config allows forks with fork credit only.

    With fork credit, a part of a reward that one turn caused (`Reward.turns`) is credited to that turn alone, with and
    without forks. Schemes without an advantage per turn credit a part of a later turn to the shared turns too, since V
    contains it."""
    entries = dict[int | str, list[int]]()
    for i, fork in enumerate(forks):
        entries.setdefault(i if fork is None else fork.origin, []).append(i)
    shared = dict[int | str, int]()
    for fork in forks:
        if fork is not None and len(entries[fork.origin]) > 1:
            shared[fork.origin] = fork.num_turns
    values = [_mean_reward([rewards[i] for i in some]) for some in entries.values()]
    turns = [places[some[0]][: shared.get(key)] for key, some in entries.items()]
    found = dict[int, Credited]()
    for (key, some), whole in zip(entries.items(), _credited(values, turns, scheme), strict=True):
        if (num_shared := shared.get(key)) is None:
            found[some[0]] = whole._replace(reward=rewards[some[0]])
            continue
        own = [_later_reward(rewards[i], num_shared) for i in some]
        later = _credited(own, [_later_places(places[i], num_shared) for i in some], scheme)
        for number, (i, one) in enumerate(zip(some, later, strict=True)):
            before = whole.by_turn or (whole.advantage,) * num_shared
            after = one.by_turn or (one.advantage,) * (len(places[i]) - num_shared)
            by_turn = (*((0.0,) * num_shared if number else before), *(each / len(some) for each in after))
            found[i] = Credited(rewards[i], whole.advantage, by_turn)
    return [found[i] for i in range(len(rewards))]


def _mean_reward(rewards: Sequence[Reward]) -> Reward:
    """Return the mean of the rewards of rollouts that share turns. Its parts by turn include those of later turns."""
    parts = dict[int, float]()
    for at, part in (one for reward in rewards for one in reward.turns):
        parts[at] = parts.get(at, 0.0) + part / len(rewards)
    return Reward(
        value=math.fsum(one.value for one in rewards) / len(rewards),
        raw=math.fsum(one.raw for one in rewards) / len(rewards),
        reason="",
        turns=tuple(sorted(parts.items())),
    )


def _later_reward(reward: Reward, num_shared: int) -> Reward:
    """Return the reward for the turns after the shared ones: without the parts that shared turns caused.

    In `Reward.turns` of the result, turn 0 is the first turn after the shared ones."""
    before = math.fsum(part for at, part in reward.turns if at < num_shared)
    turns = tuple((at - num_shared, part) for at, part in reward.turns if at >= num_shared)
    return msgspec.structs.replace(reward, value=reward.value - before, raw=reward.raw - before, turns=turns)


def _later_places(places: Sequence[TurnPlace], num_shared: int) -> list[TurnPlace]:
    """Return the places of the turns after the shared ones, with parents numbered from 0 again.

    A new conversation begins after a summary, so no later turn has a shared turn as its parent."""
    return [
        msgspec.structs.replace(one, parent=None if one.parent is None else one.parent - num_shared)
        for one in places[num_shared:]
    ]


def _credited(rewards: Sequence[Reward], places: Sequence[Sequence[TurnPlace]], scheme: CreditScheme) -> list[Credited]:
    whole, by_turn = advantages(rewards, scheme), turn_advantages(rewards, places, scheme)
    return [Credited(*one) for one in zip(rewards, whole, by_turn, strict=True)]
