"""The settings of training on production use: a TOML file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import config
from etude.config import ranged


@dataclass(frozen=True)
class LearnSettings:
    """The settings of `etude learn`.

    - `outcomes`: the weight of each signal by name, such as {"kept": 1.0, "dissatisfied": -0.5}. Signals of other names
      do not count.
    - `silent`: the reward of an episode without a signal that counts; None: such episodes are not trained on.
    - `episodes`: the number of episodes of one step.
    - `max_wait_s`: if the oldest episode has waited for so many seconds, a step is made with fewer, at least two.
    - `settle_s`: an episode is used when its last answer is so many seconds old. Signals that come later do not count.
    - `user_share`: at most this share of a step's episodes is of one user.
    - `max_lag`: tokens that were sampled by a version more than so many steps old get no loss.
    - `kl`: the weight of the KL penalty (k1) in the reward, to the deployed version: that of the branch `stable`, or
      else the newest when the program starts."""

    outcomes: Mapping[str, float]
    silent: float | None = ranged(None, low=-1.0, high=1.0)
    episodes: int = ranged(64, low=2, high=65_536)
    max_wait_s: float = ranged(6 * 3600.0, low=0.0)
    settle_s: float = ranged(3600.0, low=0.0)
    user_share: float = ranged(0.25, low=0.001, high=1.0)
    max_lag: int = ranged(8, low=0, high=256)
    kl: float = ranged(0.0, low=0.0)

    def __post_init__(self) -> None:
        known = [weight for weight in self.outcomes.values() if math.isfinite(weight) and weight]
        if not known or len(known) < len(self.outcomes):
            raise ValueError(
                f"outcomes = {dict(self.outcomes)}: give at least one signal, each with a finite weight that is not 0"
            )

    @property
    def per_user(self) -> int:
        """The largest number of episodes of one user in a step.

        >>> LearnSettings(outcomes={"kept": 1.0}, episodes=64, user_share=0.25).per_user
        16
        """
        return max(1, int(self.user_share * self.episodes))


def read_settings(path: Path, overrides: Sequence[str] = ()) -> LearnSettings:
    """Read the settings of `etude learn`. `overrides` are settings such as "episodes=32".

    Raises `ConfigError` for a file that cannot be read, and for unknown, missing and invalid settings."""
    raw = config.read(path, overrides, noun="file of learning settings", example="docs/guides/production.md")
    return config.build(LearnSettings, raw)
