"""Credit schemes: pure functions from the rewards of a group of rollouts to their advantages.

A scheme gets the rewards of the *valid* siblings of a group. Without a signal, that is with fewer than two siblings or
equal rewards, all advantages are 0. A scheme that divides by a standard deviation uses that of the rewards before the
KL penalty (`Reward.raw`), so that differences in the penalty alone are not magnified. This module knows nothing of
tokens."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence

from etude.errors import PluginError
from etude.records.reward import Reward
from etude.records.rollout import Graded
from etude.rewards import Composition
from etude.seams import CreditScheme

GRPO_EPSILON = 1e-6


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


class Credit(enum.StrEnum):
    """The names of the credit schemes in configs."""

    DR_GRPO = "dr-grpo"
    GRPO = "grpo"
    RLOO = "rloo"


DR_GRPO: CreditScheme = DrGrpo()
SCHEMES: Mapping[Credit, CreditScheme] = {Credit.DR_GRPO: DR_GRPO, Credit.GRPO: Grpo(), Credit.RLOO: Rloo()}


def advantages(rewards: Sequence[Reward], scheme: CreditScheme = DR_GRPO) -> list[float]:
    """Return the advantages that a scheme computes from the rewards of one group, one per reward.

    Raises `PluginError`, which names the scheme, when it fails or returns anything but one finite number per reward."""
    what = f"credit scheme {scheme.name!r} ({type(scheme).__module__}:{type(scheme).__qualname__})"
    hint = "fix the scheme, then resume the run: the group is kept"
    facts = f"the rewards of the group: {[reward.value for reward in rewards]}"
    try:
        found = [float(advantage) for advantage in scheme.advantages(rewards)]
    except Exception as error:
        raise PluginError(f"{what} failed", f"{type(error).__name__}: {error}; {facts}", hint=hint) from error
    if len(found) != len(rewards) or not all(map(math.isfinite, found)):
        raise PluginError(f"{what} did not return one finite number per reward", f"{found}; {facts}", hint=hint)
    return found


def assign_credit(
    graded: Sequence[Graded], composition: Composition, scheme: CreditScheme = DR_GRPO
) -> list[tuple[Reward, float]]:
    """Return (reward, advantage) of each graded rollout of a group, in the given order.

    Only stored terms are needed, so credit can be computed again later with the same settings, to the same bits, or
    with other ones."""
    rewards = composition.rewards([one.terms for one in graded])
    return list(zip(rewards, advantages(rewards, scheme), strict=True))


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _differ(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) != max(values)
