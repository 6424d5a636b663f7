"""The settings of training on production use: a TOML file."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude import config
from etude.config import ranged


class Undecided(enum.StrEnum):
    """What happens to a canary about which the rules made no decision within `max_s` of its release.

    ROLL_BACK: all users get the stable version again. PROMOTE: it is promoted if it has reached the last share of users
    below 100 % and at least `subjects` of its users were compared there; otherwise it is rolled back. A canary reaches
    that share only if it passed its gate and no metric was shown to be worse."""

    ROLL_BACK = "roll back"
    PROMOTE = "promote"


@dataclass(frozen=True)
class LoopSettings:
    """The section `[loop]`: how windows of episodes become releases.

    - `release`: the file with the settings of each release (`docs/formats/releases.md`), relative to this file.
    - `steps`: the number of optimiser steps of a window, so a window has `steps` x `episodes` episodes.
    - `own_share`: at least this share of a window's sampled tokens is of the deployed version, or of the one that was
      deployed before it. Further episodes of other versions are left out.
    - `undecided`: what happens to a canary without a decision.
    - `prices`: a table of prices (TOML), for gates with `cost_rise`; relative to this file."""

    release: Path
    steps: int = ranged(1, low=1, high=256)
    own_share: float = ranged(0.95, low=0.0, high=1.0)
    undecided: Undecided = Undecided.ROLL_BACK
    prices: Path | None = None


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
      else the newest when the program starts.
    - `lr_share`: the learning rate of production steps, as a share of the run's peak rate (`learner.lr`). It is
      constant, after a warm-up over `learner.warmup_steps` from the deployed version on.
    - `simulated`: the share of a step's rollouts that are of tasks from the run's task source, in whole groups; 0:
      none.
    - `simulated_wait_s`: the program ends with an error if no simulated rollout has ended for so many seconds.
    - `loop`: the settings of the endless loop; None: steps only, without releases."""

    outcomes: Mapping[str, float]
    silent: float | None = ranged(None, low=-1.0, high=1.0)
    episodes: int = ranged(64, low=2, high=65_536)
    max_wait_s: float = ranged(6 * 3600.0, low=0.0)
    settle_s: float = ranged(3600.0, low=0.0)
    user_share: float = ranged(0.25, low=0.001, high=1.0)
    max_lag: int = ranged(8, low=0, high=256)
    kl: float = ranged(0.0, low=0.0)
    lr_share: float = ranged(0.1, low=0.0, high=10.0)
    simulated: float = ranged(0.0, low=0.0, high=0.95)
    simulated_wait_s: float = ranged(3600.0, low=1.0)
    loop: LoopSettings | None = None

    def __post_init__(self) -> None:
        known = [weight for weight in self.outcomes.values() if math.isfinite(weight) and weight]
        if not known or len(known) < len(self.outcomes):
            raise ValueError(
                f"outcomes = {dict(self.outcomes)}: give at least one signal, each with a finite weight that is not 0"
            )
        if self.loop is not None and self.max_lag < self.loop.steps - 1:
            raise ValueError(
                f"max_lag = {self.max_lag} is below loop.steps - 1 = {self.loop.steps - 1}: the last steps of a window "
                "would train on none of its tokens; raise max_lag, or lower loop.steps"
            )

    @property
    def window(self) -> int:
        """The number of episodes of a window: those of its steps; without the section `[loop]`, of one step."""
        return self.episodes * (1 if self.loop is None else self.loop.steps)

    @property
    def per_user(self) -> int:
        """The largest number of episodes of one user in a window.

        >>> LearnSettings(outcomes={"kept": 1.0}, episodes=64, user_share=0.25).per_user
        16
        """
        return max(1, int(self.user_share * self.window))

    def simulated_groups(self, num_episodes: int, group_size: int) -> int:
        """Return how many groups of simulated rollouts a step with so many episodes has: at least one with a share.

        >>> LearnSettings(outcomes={"kept": 1.0}, simulated=0.5).simulated_groups(64, 8)
        8
        >>> LearnSettings(outcomes={"kept": 1.0}, simulated=0.2).simulated_groups(3, 8)
        1
        """
        if not self.simulated or not num_episodes:
            return 0
        return max(1, round(num_episodes * self.simulated / (1.0 - self.simulated) / group_size))


def read_settings(path: Path, overrides: Sequence[str] = ()) -> LearnSettings:
    """Read the settings of `etude learn`. `overrides` are settings such as "episodes=32".

    Raises `ConfigError` for a file that cannot be read, and for unknown, missing and invalid settings."""
    raw = config.read(path, overrides, noun="file of learning settings", example="docs/guides/production.md")
    found = config.build(LearnSettings, raw)
    if found.loop is None:
        return found
    prices = found.loop.prices
    loop = dataclasses.replace(
        found.loop,
        release=path.parent / found.loop.release,
        prices=None if prices is None else path.parent / prices,
    )
    return dataclasses.replace(found, loop=loop)
