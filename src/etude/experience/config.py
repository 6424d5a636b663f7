"""The settings of experience: how a group is credited and how far rollouts may run ahead."""

from __future__ import annotations

from dataclasses import dataclass

from etude.config import Plugin, ranged
from etude.experience.admission import LittleSignal, Straggler, Window
from etude.experience.credit import Credit
from etude.experience.curriculum import Curriculum
from etude.experience.database import check_url


@dataclass(frozen=True)
class ExperienceConfig:
    """The `[experience]` section."""

    groups_per_step: int = ranged(16, low=1, high=4096)
    signal_groups: int = ranged(0, low=0, high=4096)  # so many of a step's groups are to have a signal; 0: any will do
    little_signal: LittleSignal = LittleSignal.FILL  # where fewer have: take more groups, or scale the learning rate
    group_size: int = ranged(8, low=2, high=1024)
    ledger: str = ""  # a file in the run folder; or a server that runs share: "postgresql://host/database"
    max_lag: int = ranged(2, low=0, high=64)
    straggler: Straggler = Straggler.WAIT
    credit: Credit | Plugin = Credit.DR_GRPO
    curriculum: Curriculum = Curriculum.SIGNAL
    kl: float = ranged(
        0.0, low=0.0
    )  # of k1 to the starting checkpoint, taken off each reward (grpo: where a group has a signal)
    max_attempts: int = ranged(3, low=1, high=100)  # of a rollout whose worker dies, before it is invalid
    quarantine: bool = True  # what bears signs of cheating earns nothing, and is trained on as that
    review_share: float = ranged(0.0, low=0.0, high=1.0)  # of solved, unsuspicious ones, shown to a person

    def __post_init__(self) -> None:
        if self.ledger:
            check_url(self.ledger)
        if self.signal_groups > self.groups_per_step:
            raise ValueError(
                f"signal_groups = {self.signal_groups} is over groups_per_step = {self.groups_per_step}: "
                "a step takes at least groups_per_step, and goes on where too few of them have a signal"
            )

    @property
    def window(self) -> Window:
        """Who may start, and which groups a step takes."""
        fills = self.little_signal is LittleSignal.FILL
        return Window(self.max_lag, self.groups_per_step, self.straggler, self.signal_groups if fills else 0)
