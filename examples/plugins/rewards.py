"""A reward term: a solution in fewer turns gets more reward. A short rollout that fails gets nothing."""

from etude.records import Graded, Rollout
from etude.records.reward import Score


class FewTurns:
    """The share of `most` turns that was not used if the task is solved; else 0."""

    version = "1"

    def __init__(self, most: int = 8) -> None:
        self.most = most

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        used = rollout.num_turns
        if graded.grade < 1.0:
            return Score(value=0.0, evidence="not solved")
        return Score(value=max(0.0, 1.0 - used / self.most), evidence=f"{used} of {self.most} turns")
