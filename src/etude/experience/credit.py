"""Credit schemes: pure functions from the rewards of a group of rollouts to their advantages.

A scheme gets the rewards of the *valid* siblings of a group. Without a signal, that is with fewer than two siblings or
equal rewards, all advantages are 0. A scheme that divides by a standard deviation uses that of the rewards before the
KL penalty (`Reward.raw`), so that differences in the penalty alone are not magnified. A scheme may give each turn its
own advantage (`TurnCreditScheme`). This module does not use tokens.

A group may have two stages: further siblings run only if the rewards of the first ones differ
(`ExperienceConfig.min_group_size`). The rewards of the first siblings thus decide how many siblings there are. If the
baseline of a first sibling contained rewards of later ones, it would depend on the sibling's own reward, and be biased.
So the baselines of first siblings use first siblings only, and the baselines of later ones use all siblings
(`group_credit.staged_credit`). Then, with RLOO, Dr. GRPO and fork credit, the expected gradient of a task is the true
gradient of its mean reward times a positive factor (Wald's identity for a sum that may stop early). The factor is
larger for tasks with a less certain outcome."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set

from etude.errors import PluginError
from etude.records.reward import Reward
from etude.records.summary import TurnPlace
from etude.seams import CreditScheme, PairCreditScheme, TurnCreditScheme

GRPO_EPSILON = 1e-6
FORK_PRIOR = 4
"""In `Fork`, the baseline of the previous turn weighs as much as this number of siblings. In recorded runs the mean
squared advantage was up to 4 % above RLOO's with 1; with 4 it was up to 7 % below and never above."""


class DrGrpo:
    """Dr. GRPO: the advantage is r − mean(r).

    It does not divide by the standard deviation, which would favour groups that are nearly solved or nearly hopeless.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv 2503.20783).

    >>> DrGrpo().advantages([Reward(value=r, raw=r, reason="") for r in (1.0, 0.0, 0.0, 0.0)])
    [0.75, -0.25, -0.25, -0.25]
    """

    name, version = "dr-grpo", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        values = [reward.value for reward in rewards]
        return _centred(values) if _differ(values) else [0.0] * len(values)


class Grpo:
    """GRPO: the advantage is (r − mean(r)) / std(raw), where raw are the rewards before the KL penalty.

    The standard deviation is that of the population. There is no signal when all raw rewards are equal.

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300). There the KL penalty is part of the loss, so it is not in the
    standard deviation.

    >>> [round(a, 3) for a in Grpo().advantages([Reward(value=r, raw=r, reason="") for r in (1.0, 0.0)])]
    [1.0, -1.0]
    >>> penalised = [Reward(value=r, raw=raw, reason="") for r, raw in ((0.9, 1.0), (-0.2, 0.0))]
    >>> [round(a, 3) for a in Grpo().advantages(penalised)]
    [1.1, -1.1]
    """

    name, version = "grpo", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        raw = [reward.raw for reward in rewards]
        if not _differ(raw):
            return [0.0] * len(raw)
        centred = _centred(raw)
        deviation = math.sqrt(math.fsum(a * a for a in centred) / len(centred))
        return [a / (deviation + GRPO_EPSILON) for a in _centred([reward.value for reward in rewards])]


class Rloo:
    """RLOO: the advantage is r − the mean reward of the *other* siblings.

    This leave-one-out baseline is unbiased for any number of siblings.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024 (arXiv 2402.14740).

    >>> Rloo().advantages([Reward(value=r, raw=r, reason="") for r in (1.0, 0.0, 0.0)])
    [1.0, -0.5, -0.5]
    """

    name, version = "rloo", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        values = [reward.value for reward in rewards]
        if not _differ(values):
            return [0.0] * len(values)
        total, others = math.fsum(values), len(values) - 1
        return [value - (total - value) / others for value in values]


class Fork(Rloo):
    """Fork credit: the advantage of a turn is r − the mean reward of the siblings that reached the same context.

    Rollouts of a group whose first turns have equal tokens share a prefix. It ends at a fork, after which their turns
    differ. A turn is compared with the siblings that reached the same fork. The baseline of a turn is ``(Σ r + 4 b) /
    (k + 4)`` over the k other siblings that read the same context, where b is the baseline of the turn before. If the
    same siblings reached several turns in a row, only the first of these turns changes the baseline. The first b is
    RLOO's baseline, the mean of all other siblings. So a few siblings change a baseline only a little (`FORK_PRIOR`).
    Turns that no other sibling reached have the baseline of the last fork that another sibling reached too.

    The baseline depends on the context and on other rollouts only, never on what was sampled after the context. So the
    gradient is unbiased, as RLOO's is. If an agent program sends the same request twice, both turns have the same
    baseline, since they have one reward in common.

    A part of a reward that one turn caused (`Reward.turns`, such as a malformed call) is credited to that turn only:
    there the advantage is r' − b' + p − the mean of p over the turns of the other siblings, where p is the part of the
    turn, and r' and b' are as above, without the parts. A part of a turn that is not in `turns`, as of one after a fork
    (`group_credit`), is credited to none of them.

    Related: Tree-GRPO (Ji et al. 2025, arXiv 2509.21240) has trees of siblings, and GiGPO (Feng et al. 2025, arXiv
    2505.10978) groups of rollouts that reached the same state. Both add normalised advantages of several levels, which
    is biased. Here each turn has one baseline.
    """

    name, version = "fork", "2"

    def turn_advantages(self, rewards: Sequence[Reward], turns: Sequence[Sequence[TurnPlace]]) -> list[list[float]]:
        parts = [dict(reward.turns) for reward in rewards]
        found = self._whole(
            [one.value - math.fsum(own.values()) for one, own in zip(rewards, parts, strict=True)], turns
        )
        if len(rewards) < 2 or not any(parts):
            return found
        means = [
            math.fsum(part for j, own in enumerate(parts) if j != i for at, part in own.items() if at < len(turns[j]))
            / max(1, sum(len(own) for j, own in enumerate(turns) if j != i))
            for i in range(len(rewards))
        ]
        return [
            [advantage + own.get(at, 0.0) - mean for at, advantage in enumerate(some)]
            for some, own, mean in zip(found, parts, means, strict=True)
        ]

    def _whole(self, values: Sequence[float], turns: Sequence[Sequence[TurnPlace]]) -> list[list[float]]:
        """Return the advantages of the turns from rewards that belong to whole rollouts."""
        if not _differ(values):
            return [[0.0] * len(own) for own in turns]
        reached: dict[bytes, set[int]] = {}
        for i, own in enumerate(turns):
            for turn in own:
                reached.setdefault(turn.context, set()).add(i)
        everyone, total = frozenset(range(len(values))), math.fsum(values)
        found = list[list[float]]()
        for i, own in enumerate(turns):
            first: tuple[Set[int], float] = (everyone - {i}, (total - values[i]) / (len(values) - 1))
            baselines = list[tuple[Set[int], float]]()  # of each turn, with the siblings that it is from
            for turn in own:
                siblings, baseline = first if turn.parent is None else baselines[turn.parent]
                here = reached[turn.context] - {i}
                if here and here != siblings:
                    rewarded = math.fsum(values[j] for j in here)
                    siblings, baseline = here, (rewarded + FORK_PRIOR * baseline) / (len(here) + FORK_PRIOR)
                baselines.append((siblings, baseline))
            found.append([values[i] - baseline for _, baseline in baselines])
        return found


class AllPairs:
    """Preference pairs of all siblings with different rewards, for the DPO loss.

    The advantage of a rollout is (siblings with a lower reward − siblings with a higher one) / (rollouts − 1). On new
    samples, with the sampler as the reference, all pairs have the same weight in DPO, and its gradient is proportional
    to the policy gradient with these advantages. Only the sign of a difference of rewards counts.

    Rafailov et al. 2023, "Direct Preference Optimization" (arXiv 2305.18290); pairs of on-policy samples: Guo et al.
    2024, "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792).

    >>> rewards = [Reward(value=r, raw=r, reason="") for r in (0.5, 0.0, 1.0, 0.0)]
    >>> AllPairs().pairs(rewards)
    [(0, 1), (0, 3), (2, 0), (2, 1), (2, 3)]
    >>> [round(a, 3) for a in AllPairs().advantages(rewards)]
    [0.333, -0.667, 1.0, -0.667]
    """

    name, version = "all-pairs", "1"

    def pairs(self, rewards: Sequence[Reward]) -> list[tuple[int, int]]:
        values = [reward.value for reward in rewards]
        return [(i, j) for i, one in enumerate(values) for j, other in enumerate(values) if one > other]

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        wins = [0] * len(rewards)
        for better, worse in self.pairs(rewards):
            wins[better] += 1
            wins[worse] -= 1
        return [number / max(1, len(rewards) - 1) for number in wins]


class BestWorst(AllPairs):
    """Preference pairs of the siblings with the highest reward and those with the lowest, for the DPO loss.

    Siblings in between are not trained on. If the rewards have two values only, the pairs are those of `AllPairs`.

    Source: Dong et al. 2024, "RLHF Workflow" (arXiv 2405.07863).

    >>> BestWorst().pairs([Reward(value=r, raw=r, reason="") for r in (0.5, 0.0, 1.0, 0.0)])
    [(2, 1), (2, 3)]
    """

    name, version = "best-worst", "1"

    def pairs(self, rewards: Sequence[Reward]) -> list[tuple[int, int]]:
        values = [reward.value for reward in rewards]
        extremes = (max(values, default=0.0), min(values, default=0.0))
        return [(i, j) for i, j in super().pairs(rewards) if (values[i], values[j]) == extremes]


class Credit(enum.StrEnum):
    """The names of the credit schemes in configs."""

    DR_GRPO = "dr-grpo"
    GRPO = "grpo"
    RLOO = "rloo"
    FORK = "fork"
    ALL_PAIRS = "all-pairs"
    BEST_WORST = "best-worst"


DR_GRPO: CreditScheme = DrGrpo()
SCHEMES: Mapping[Credit, CreditScheme] = {
    Credit.DR_GRPO: DR_GRPO,
    Credit.GRPO: Grpo(),
    Credit.RLOO: Rloo(),
    Credit.FORK: Fork(),
    Credit.ALL_PAIRS: AllPairs(),
    Credit.BEST_WORST: BestWorst(),
}


def advantages(rewards: Sequence[Reward], scheme: CreditScheme = DR_GRPO) -> list[float]:
    """Return the advantages that a scheme computes from the rewards of one group, one per reward.

    Raises `PluginError`, which names the scheme, when it fails or returns anything but one finite number per reward."""
    [found] = _asked(scheme, rewards, lambda: [scheme.advantages(rewards)], [len(rewards)], "reward")
    return found


def turn_advantages(
    rewards: Sequence[Reward], turns: Sequence[Sequence[TurnPlace]], scheme: CreditScheme
) -> list[tuple[float, ...]]:
    """Return the advantages of the turns of each rollout of a group; empty tuples if the scheme computes one advantage
    per rollout.

    Raises `PluginError`, which names the scheme, when it fails or returns anything but one finite number per turn."""
    if not isinstance(scheme, TurnCreditScheme):
        return [()] * len(rewards)
    sizes = [len(own) for own in turns]
    return [
        tuple(own) for own in _asked(scheme, rewards, lambda: scheme.turn_advantages(rewards, turns), sizes, "turn")
    ]


def better_than(
    rewards: Sequence[Reward], ids: Sequence[str], scheme: CreditScheme, *, without: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Return for each rollout of a group the sorted ids of the siblings that it is preferred to.

    `ids`: the rollouts' ids, in the order of `rewards`. `without`: ids of rollouts that must not be in a pair. The
    tuples are empty if the scheme forms no pairs. Raises `PluginError`, which names the scheme, if the scheme fails or
    a pair does not have the higher reward first."""
    if not isinstance(scheme, PairCreditScheme):
        return [()] * len(rewards)
    found = list[list[str]]([] for _ in rewards)
    rows = [row for row, one in enumerate(ids) if one not in without]
    compared = [rewards[row] for row in rows]

    def ask() -> list[list[float]]:
        for better, worse in set(scheme.pairs(compared)):
            if min(better, worse) < 0 or not compared[better].value > compared[worse].value:
                raise ValueError(f"the first reward of the pair ({better}, {worse}) is not higher than the second one")
            found[rows[better]].append(ids[rows[worse]])
        return []

    _asked(scheme, compared, ask, [], "pair")
    return [tuple(sorted(worse)) for worse in found]


def paired(preferred: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Return the ids of all rollouts that are in a preference pair, as the better or the worse one.

    `preferred`: rollout id → ids of the siblings that it is preferred to, as `better_than` returns them."""
    return frozenset(one for better, worse in preferred.items() if worse for one in (better, *worse))


def _asked(
    scheme: CreditScheme,
    rewards: Sequence[Reward],
    ask: Callable[[], Sequence[Sequence[float]]],
    sizes: Sequence[int],
    each: str,
) -> list[list[float]]:
    """Return what a scheme answers: lists of these sizes, of finite numbers. Raises `PluginError`."""
    what = f"credit scheme {scheme.name!r} ({type(scheme).__module__}:{type(scheme).__qualname__})"
    hint = "fix the scheme, then resume the run: the group is kept"
    facts = f"the rewards of the group: {[reward.value for reward in rewards]}"
    try:
        found = [[float(advantage) for advantage in some] for some in ask()]
    except Exception as error:
        raise PluginError(f"{what} failed", f"{type(error).__name__}: {error}; {facts}", hint=hint) from error
    if [len(some) for some in found] != list(sizes) or not all(math.isfinite(one) for some in found for one in some):
        raise PluginError(f"{what} did not return one finite number per {each}", f"{found}; {facts}", hint=hint)
    return found


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _differ(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) != max(values)
