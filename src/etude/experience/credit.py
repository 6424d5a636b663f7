"""Credit schemes: each is a pure function from the rewards of a group to advantages.

A scheme gets the rewards of the *valid* siblings of a group. With fewer than two valid siblings, or rewards that are
all the same, there is no signal: `advantages` gives zeros. A scheme that divides by a deviation takes the deviation of
the rewards as they were graded, before penalties, so that a penalty alone is not magnified. Knows nothing of tokens.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence

Scheme = Callable[[Sequence[float]], list[float]]

GRPO_EPSILON = 1e-6


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r − mean(r). It does not divide by the deviation, which would favour groups that are nearly solved or hopeless.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv 2503.20783).

    >>> dr_grpo([1.0, 0.0, 0.0, 0.0])
    [0.75, -0.25, -0.25, -0.25]
    """
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float], raw: Sequence[float] | None = None) -> list[float]:
    """(r − mean(r)) / std(raw): the population standard deviation of the rewards before penalties (None: of
    `rewards`).

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300). There the KL penalty is in the loss, so no penalty is in std.

    >>> [round(a, 3) for a in grpo([1.0, 0.0])]
    [1.0, -1.0]
    >>> [round(a, 3) for a in grpo([0.9, -0.2], raw=[1.0, 0.0])]
    [1.1, -1.1]
    """
    centred = dr_grpo(raw or rewards)
    deviation = math.sqrt(math.fsum(a * a for a in centred) / len(centred))
    return [a / (deviation + GRPO_EPSILON) for a in dr_grpo(rewards)]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r − the mean of the *other* siblings: the leave-one-out baseline, unbiased for any number of siblings.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024 (arXiv 2402.14740).

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


class Credit(enum.StrEnum):
    """Names of the credit schemes, for configs."""

    DR_GRPO = "dr-grpo"
    GRPO = "grpo"
    RLOO = "rloo"


SCHEMES: Mapping[Credit, Scheme] = {Credit.DR_GRPO: dr_grpo, Credit.GRPO: grpo, Credit.RLOO: rloo}


def advantages(
    rewards: Sequence[float], scheme: Scheme = dr_grpo, *, raw: Sequence[float] | None = None
) -> list[float]:
    """The scheme's advantages, one per reward; zeros where the group has no signal. `raw`: the rewards before a
    penalty, where there is one. With `grpo` a group has no signal where all of `raw` are the same; schemes that do not
    divide use the penalised rewards.

    >>> advantages([1.0, 1.0, 1.0]), advantages([1.0]), advantages([])
    ([0.0, 0.0, 0.0], [0.0], [])
    >>> advantages([0.99, 1.01], grpo, raw=[1.0, 1.0]), [round(a, 3) for a in advantages([0.99, 1.01], raw=[1.0, 1.0])]
    ([0.0, 0.0], [-0.01, 0.01])
    """
    divides = scheme is grpo
    signal = raw if divides and raw is not None else rewards
    if len(rewards) < 2 or min(signal) == max(signal):
        return [0.0] * len(rewards)
    return grpo(rewards, raw) if divides else scheme(rewards)


def with_k1_penalty(reward: float, k1: float, *, beta: float) -> float:
    """The reward minus `beta` times the k1 estimate of KL(policy ‖ reference): Σ log π − log π_ref over a
    rollout's sampled tokens. As part of the reward its gradient is right in expectation; as a loss k1 has no gradient
    in expectation.

    Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); Ouyang et al. 2022
    (arXiv 2203.02155, eq. 2).

    >>> with_k1_penalty(1.0, 0.5, beta=0.1)
    0.95
    """
    return reward - beta * k1
