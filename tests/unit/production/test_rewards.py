"""Rewards from signals, baselines of kinds of work, and the choice of a step's episodes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.production import Baselines, LearnSettings, choose, graded_of, read_settings, reward_of
from etude.production.baselines import MAX_KINDS

REWARDS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1)), max_size=20)


def test_a_reward_is_the_weighted_mean_of_the_signals_that_count() -> None:
    weights = {"kept": 1.0, "dissatisfied": -0.5}
    assert reward_of({"kept": [1.0, 0.0]}, weights) == 0.5
    assert reward_of({"kept": [1.0], "dissatisfied": [1.0]}, weights) == pytest.approx(1 / 3)
    assert reward_of({"dissatisfied": [1.0]}, weights) == -1.0
    assert reward_of({"other": [1.0], "kept": []}, weights) is None
    graded = graded_of({"kept": [1.0, 0.0]}, 0.5)
    assert (graded.grade, graded.values["signal.kept"], graded.reason) == (0.5, 0.5, "signals: kept 0.5")


@given(REWARDS, REWARDS)
def test_a_baseline_does_not_depend_on_the_reward_of_its_own_episode(
    before: list[tuple[str, float]], now: list[tuple[str, float]]
) -> None:
    baselines = Baselines()
    baselines.count(before)
    if len(before) + len(now) < 2 or not now:
        return
    moved = [(now[0][0], now[0][1] + 0.5), *now[1:]]
    assert baselines.baselines(moved)[0] == pytest.approx(baselines.baselines(now)[0], abs=1e-9)
    assert all(map(math.isfinite, baselines.advantages(now)))
    assert all(abs(one) <= 1.0 + 1e-9 for one in baselines.baselines(now))  # a mean of rewards, but for rounding


def test_equal_rewards_of_all_kinds_give_no_advantage_and_a_better_one_is_positive() -> None:
    assert Baselines().advantages([("a", 0.3)] * 4 + [("b", 0.3)]) == [0.0] * 5
    found = Baselines().advantages([("a", 1.0), ("a", 0.0), ("a", 0.0)])
    assert found[0] > 0 > found[1] == found[2]
    assert Baselines().advantages([]) == []


def test_a_kind_that_is_always_hard_is_compared_with_itself() -> None:
    baselines = Baselines()
    baselines.count([("hard", 0.0)] * 200 + [("easy", 1.0)] * 200)
    hard, easy = baselines.advantages([("hard", 0.5), ("easy", 0.5)])
    assert hard > 0 > easy


def test_the_state_is_plain_data_and_bounded() -> None:
    baselines = Baselines()
    baselines.count([(f"kind-{i}", 1.0) for i in range(MAX_KINDS + 10)])
    state = json.loads(json.dumps(baselines.state))
    assert len(state) == MAX_KINDS
    assert Baselines(state).state == state
    for _ in range(2000):
        baselines.count([("one", 0.0)])
    assert baselines.state["one"][0] == 512.0
    baselines.count([("one", 1.0)] * 1000)
    assert baselines.state["one"][1] > 0.8, "the mean follows what is new"


class Fake:
    """What `choose` reads of an episode."""

    def __init__(self, at: float, subject: str, *, own: int = 10) -> None:
        self.last_at, self.subject, self.record_ids = at, subject, (f"{at}",)
        self.num_sampled, self._own = 10, own

    def tokens_of(self, digests: Collection[str]) -> int:
        """How many of its 10 tokens are of the version "mine"."""
        return self._own if "mine" in digests else 10 - self._own


def test_the_oldest_episodes_are_chosen_and_no_user_has_more_than_its_share() -> None:
    ready: list[Any] = [Fake(float(i), "loud") for i in range(10)] + [Fake(20.0 + i, f"u{i}") for i in range(5)]
    chosen = choose(ready, episodes=6, per_user=2)
    assert [one.subject for one in chosen] == ["loud", "loud", "u0", "u1", "u2", "u3"]
    assert [one.last_at for one in chosen[:2]] == [0.0, 1.0]


def test_at_least_a_share_of_the_tokens_is_of_the_deployed_versions() -> None:
    old: list[Any] = [Fake(float(i), f"old{i}", own=0) for i in range(5)]
    mixed, new = [Fake(10.0, "mixed", own=5)], [Fake(20.0 + i, f"new{i}") for i in range(19)]
    chosen = choose([*old, *mixed, *new], episodes=64, per_user=1, own={"mine"}, own_share=0.95)
    assert [one.subject for one in chosen] == [*(one.subject for one in new), "old0"], "190 of 200 tokens"
    chosen = choose([*old, *mixed, *new], episodes=64, per_user=1, own={"mine"}, own_share=0.9)
    assert [one.subject for one in chosen[19:]] == ["old0", "old1"], "190 of 210 tokens; not of 220"
    assert choose(old, episodes=64, per_user=1, own={"mine"}, own_share=0.95) == []
    assert len(choose(old, episodes=64, per_user=1, own={"mine"}, own_share=0.0)) == 5
    assert len(choose([*new, *old], episodes=19, per_user=1, own={"mine"}, own_share=0.5)) == 19
    assert len(choose(old, episodes=64, per_user=1)) == 5, "without releases, all are the run's own"


def test_a_release_is_named_beside_the_settings_and_unknown_keys_of_its_section_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "learn.toml"
    path.write_text('episodes = 8\n[outcomes]\nkept = 1.0\n[loop]\nrelease = "release.toml"\nsteps = 3\n')
    found = read_settings(path)
    assert found.loop is not None
    assert (found.loop.release, found.window, found.per_user) == (tmp_path / "release.toml", 24, 6)
    with pytest.raises(ConfigError, match=r"unknown key 'loop.step'"):
        read_settings(path, ["loop.step=3"])


def test_settings_that_cannot_work_are_refused_with_what_to_write(tmp_path: Path) -> None:
    path = tmp_path / "learn.toml"
    path.write_text("[outcomes]\nkept = 1.0\n")
    assert read_settings(path) == LearnSettings(outcomes={"kept": 1.0})
    assert read_settings(path, ["episodes=8", "user_share=0.5"]).per_user == 4
    for text, word in (
        ("episodes = 4", "outcomes"),
        ("[outcomes]\nkept = 0.0", "finite weight that is not 0"),
        ("[outcomes]\nkept = nan", "not a finite number"),
        ("epsiodes = 4\n[outcomes]\nkept = 1.0", "episodes"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=word):
            read_settings(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("simulated = 1.0", "simulated = 1.0 is out of range"),
        ("simulated = -0.1", "simulated = -0.1 is out of range"),
        ("simulated_wait_s = 0.0", "simulated_wait_s = 0.0 is out of range"),
        ('[loop]\nrelease = "r.toml"\nsteps = 12', "max_lag = 8 is below loop.steps - 1 = 11"),
    ],
)
def test_settings_under_which_a_step_cannot_be_made_are_refused(tmp_path: Path, settings: str, said: str) -> None:
    (tmp_path / "learn.toml").write_text(f"outcomes = {{ kept = 1.0 }}\n{settings}\n")
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_settings(tmp_path / "learn.toml")
