"""A penalty that differs among siblings. A tiny model solves no task, and a step without a signal trains nothing."""

SPREAD = """
from etude.records.reward import Score


class Spread:
    version = "1"

    async def score(self, rollout, graded):
        return Score(value=-float(rollout.rollout_id.rpartition(".")[2]))
"""
"""The module `spread`, to be written beside a run's config; its term is `spread:Spread`."""
