"""A credit scheme: the advantage depends on the rank of a rollout in its group, not on the size of the difference."""

from collections.abc import Sequence

from etude.records.reward import Reward


class ByRank:
    """The share of the group with a lower reward minus the share with a higher reward: from -1 to 1."""

    name, version = "by-rank", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        values = [reward.value for reward in rewards]
        others = max(1, len(values) - 1)
        return [(sum(v < mine for v in values) - sum(v > mine for v in values)) / others for mine in values]
