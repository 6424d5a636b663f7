"""The settings of experience: credit, group sizes, and how far rollouts may run ahead."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import Plugin, ranged
from etude.experience.admission import LittleSignal, Straggler, Window
from etude.experience.credit import Credit
from etude.experience.curriculum import Curriculum
from etude.experience.database import check_url


@dataclass(frozen=True)
class ExperienceConfig:
    """The `[experience]` section of a run's config: groups, lag, credit and rewards.

    - `groups_per_step`, `group_size`: groups that a step takes, and rollouts of each group.
    - `min_group_size`: how many rollouts of a group run first. The others run only if the rewards of these differ. Here
      the rewards are the grades alone, since the terms of `[rewards]` are measured when the whole group has ended. 0:
      all run at once.
    - `straggler`: what a step does when a group is late. `curriculum`: how tasks are drawn.
    - `signal_groups`: the wanted number of groups with a signal (rewards that differ) per step; 0: no minimum.
      `little_signal`: what to do if there are fewer: take more groups, or scale the learning rate.
    - `ledger`: "" for a file in the run folder, or a shared server: "postgresql://host/database".
    - `max_lag`: the largest number of steps between the sampling of a token and the training on it.
    - `kl`: the weight of the KL penalty (k1 to the starting checkpoint) in each reward.
    - `max_attempts`: how often a rollout whose worker dies is run before it is invalid.
    - `quarantine`: rollouts with signs of cheating get reward 0, and are trained on with it.
    - `review_share`: the share of solved rollouts without such signs that are listed for review."""

    groups_per_step: int = ranged(16, low=1, high=4096)
    signal_groups: int = ranged(0, low=0, high=4096)
    little_signal: LittleSignal = LittleSignal.FILL
    group_size: int = ranged(8, low=2, high=1024)
    min_group_size: int = ranged(0, low=0, high=1024)
    ledger: str = ""
    max_lag: int = ranged(2, low=0, high=64)
    straggler: Straggler = Straggler.WAIT
    credit: Credit | Plugin = Credit.DR_GRPO
    curriculum: Curriculum = Curriculum.SIGNAL
    kl: float = ranged(0.0, low=0.0)
    max_attempts: int = ranged(3, low=1, high=100)
    quarantine: bool = True
    review_share: float = ranged(0.0, low=0.0, high=1.0)

    def __post_init__(self) -> None:
        if self.ledger:
            check_url(self.ledger)
        if self.min_group_size == 1 or self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size = {self.min_group_size} is neither 0 nor from 2 to group_size = {self.group_size}: "
                "whether the other rollouts run depends on the first rewards, and it takes two rewards to differ"
            )
        if self.signal_groups > self.groups_per_step:
            raise ValueError(
                f"signal_groups = {self.signal_groups} is over groups_per_step = {self.groups_per_step}: "
                "a step takes at least groups_per_step groups, and more when too few of them have a signal"
            )

    @property
    def window(self) -> Window:
        """The `Window` that decides by these settings which groups may start and which are trained next."""
        fills = self.little_signal is LittleSignal.FILL
        return Window(self.max_lag, self.groups_per_step, self.straggler, self.signal_groups if fills else 0)
