"""Credit: what each sibling's reward says about it, as one small pure function a scheme.

A scheme maps the rewards of the *valid* siblings of a group to their advantages. Fewer than two valid siblings, or
rewards that are all the same, teach nothing: `advantages` gives zeros. Knows nothing of tokens.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence

Scheme = Callable[[Sequence[float]], list[float]]

GRPO_EPSILON = 1e-6


def dr_grpo(rewards: Sequence[float]) -> list[float]:
    """r − mean(r): no division by the deviation, which would favour groups that are nearly solved or nearly hopeless.

    Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective" (arXiv 2503.20783).

    >>> dr_grpo([1.0, 0.0, 0.0, 0.0])
    [0.75, -0.25, -0.25, -0.25]
    """
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def grpo(rewards: Sequence[float]) -> list[float]:
    """(r − mean(r)) / std(r), the population's deviation.

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300).

    >>> [round(a, 3) for a in grpo([1.0, 0.0])]
    [1.0, -1.0]
    """
    centred = dr_grpo(rewards)
    deviation = math.sqrt(math.fsum(a * a for a in centred) / len(centred))
    return [a / (deviation + GRPO_EPSILON) for a in centred]


def rloo(rewards: Sequence[float]) -> list[float]:
    """r − the mean of the *other* siblings: the leave-one-out baseline, unbiased for any number of siblings.

    Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024 (arXiv 2402.14740).

    >>> rloo([1.0, 0.0, 0.0])
    [1.0, -0.5, -0.5]
    """
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others for reward in rewards]


class Credit(enum.StrEnum):
    """The schemes by name, for configs."""

    DR_GRPO = "dr-grpo"
    GRPO = "grpo"
    RLOO = "rloo"


SCHEMES: Mapping[Credit, Scheme] = {Credit.DR_GRPO: dr_grpo, Credit.GRPO: grpo, Credit.RLOO: rloo}


def advantages(rewards: Sequence[float], scheme: Scheme = dr_grpo) -> list[float]:
    """The scheme's advantages, or zeros where the group has no signal.

    >>> advantages([1.0, 1.0, 1.0]), advantages([1.0]), advantages([])
    ([0.0, 0.0, 0.0], [0.0], [])
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    return scheme(rewards)


def with_k1_penalty(reward: float, k1: float, *, beta: float) -> float:
    """The reward minus `beta` times the k1 estimate of KL(policy ‖ reference): Σ log π − log π_ref over a rollout's
    sampled tokens. In the reward, where its gradient is right in expectation; as a loss k1 has none.

    Schulman 2020, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html); Ouyang et al. 2022
    (arXiv 2203.02155, eq. 2).

    >>> with_k1_penalty(1.0, 0.5, beta=0.1)
    0.95
    """
    return reward - beta * k1
