"""Advantages of single rollouts: the reward minus a running mean of the reward of the same kind of work.

Production episodes have no siblings. The baseline of an episode is computed from the other episodes of its step and
from earlier steps, never from the episode itself, so the direction of the gradient stays unbiased (REINFORCE with a
baseline: Williams 1992). A kind with few episodes is shrunk towards the mean of all kinds. The advantages of a step are
divided by their standard deviation, as in REINFORCE++ (arXiv 2501.03262)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

PRIOR = 8.0
"""Weight of the mean over all kinds in the baseline of a kind, in episodes."""
MEMORY = 512.0
"""The most earlier episodes that count in a mean, so that it follows the policy."""
MAX_KINDS = 4096
"""Number of kinds that are remembered: those with the most episodes."""
_EPSILON = 1e-6


class Baselines:
    """Mean rewards by kind of work, over the steps of a run. `state` is what an earlier object's `state` returned.

    >>> new = Baselines()
    >>> [round(one, 2) for one in new.advantages([("a", 1.0), ("a", 0.0), ("b", 0.5)])]
    [1.22, -1.22, 0.0]
    >>> new.advantages([("a", 1.0), ("a", 1.0)])
    [0.0, 0.0]
    """

    def __init__(self, state: Mapping[str, Sequence[float]] | None = None) -> None:
        self._means = {kind: (float(count), float(mean)) for kind, (count, mean) in (state or {}).items()}

    @property
    def state(self) -> dict[str, list[float]]:
        """For each kind [number of episodes, mean reward], as plain JSON data."""
        most = sorted(self._means.items(), key=lambda one: (-one[1][0], one[0]))[:MAX_KINDS]
        return {kind: [count, mean] for kind, (count, mean) in sorted(most)}

    def baselines(self, rewards: Sequence[tuple[str, float]]) -> list[float]:
        """Return the baseline of each episode of a step. It does not depend on the episode's own reward.

        `rewards`: (kind of work, reward) of each episode. The only episode of a run has its own reward as the
        baseline."""
        own, sums = Counter(kind for kind, _ in rewards), defaultdict[str, float](float)
        for kind, reward in rewards:
            sums[kind] += reward
        past = math.fsum(count for count, _ in self._means.values())
        earlier = math.fsum(count * mean for count, mean in self._means.values())
        total, number = math.fsum(reward for _, reward in rewards), len(rewards)
        found = []
        for kind, reward in rewards:
            others = past + number - 1
            overall = (earlier + total - reward) / others if others else reward
            count, mean = self._means.get(kind, (0.0, 0.0))
            weight = count + own[kind] - 1
            found.append((count * mean + sums[kind] - reward + PRIOR * overall) / (weight + PRIOR))
        return found

    def advantages(self, rewards: Sequence[tuple[str, float]]) -> list[float]:
        """Return the advantage of each episode of a step: (reward - baseline) / standard deviation of the differences.

        `rewards`: (kind of work, reward) of each episode. All advantages are 0 if the differences are equal, or the
        step has only one episode."""
        pairs = zip(rewards, self.baselines(rewards), strict=True)
        raw = [reward - baseline for (_, reward), baseline in pairs]
        centre = math.fsum(raw) / len(raw) if raw else 0.0
        deviation = math.sqrt(math.fsum((one - centre) ** 2 for one in raw) / len(raw)) if raw else 0.0
        return [one / deviation if deviation > _EPSILON else 0.0 for one in raw]

    def count(self, rewards: Sequence[tuple[str, float]]) -> None:
        """Add the episodes of a step to the means. `rewards`: (kind of work, reward) of each episode."""
        for kind, reward in rewards:
            count, mean = self._means.get(kind, (0.0, 0.0))
            kept = min(count, MEMORY - 1)
            self._means[kind] = (kept + 1, (kept * mean + reward) / (kept + 1))
