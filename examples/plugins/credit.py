"""A credit scheme: the place among the siblings counts, not by how much one is better."""

from collections.abc import Sequence

from etude.records.reward import Reward


class ByRank:
    """The share of the siblings with a lower reward minus the share with a higher one: from -1 to 1."""

    name, version = "by-rank", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        values = [reward.value for reward in rewards]
        others = max(1, len(values) - 1)
        return [(sum(v < mine for v in values) - sum(v > mine for v in values)) / others for mine in values]
