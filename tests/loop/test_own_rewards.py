"""A run with a reward term and a credit scheme of the user's own: recorded, computed again, and resumable after they
failed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples.plugins.credit import ByRank
from tests.played_run import PlayedRun, Players

from etude.errors import PluginError
from etude.experience import read_trace
from etude.experience.group_credit import staged_credit
from etude.experience.traces import trace_path
from etude.loop.reward_settings import RewardSettings
from etude.records import Graded, Rollout
from etude.records.reward import Measured, Score
from etude.records.summary import RolloutSummary
from etude.rewards import NamedTerm, measure_group
from etude.rewards.config import TermConfig

pytestmark = pytest.mark.timeout(1800)

STEPS = 3
SETS = (
    f"rl.steps={STEPS}",
    "rl.checkpoint_every=50",
    "evals.every=50",
    "experience.max_lag=0",
    "experience.groups_per_step=2",
    "experience.group_size=4",
    "experience.credit=examples.plugins.credit:ByRank",
    'rewards.terms=[{name = "place", weight = 0.25, kind = "examples.plugins.rewards:FewTurns"}]',
)


class Place:
    """The place among the siblings; it fails at the tenth rollout where it is told to."""

    version = "1"

    def __init__(self, failing: bool = False) -> None:
        self.failing, self.calls = failing, 0

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        self.calls += 1
        if self.failing and self.calls > 9:
            raise KeyError("no such place")
        return Score(value=float(rollout.rollout_id[-1]))


def players(term: Place) -> type[Players]:
    class Measuring(Players):
        async def measure(
            self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
        ) -> list[list[Measured]]:
            assert [one.name for one in terms] == ["place"]
            return await measure_group([NamedTerm("place", term)], [self.files.read(one) for one in summaries], graded)

    return Measuring


def train(run: PlayedRun) -> None:
    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())


def test_terms_and_scheme_of_the_users_own_are_trained_on_recorded_and_computed_again_to_the_bit(
    game: Any, tmp_path: Path
) -> None:
    made = PlayedRun.create(tmp_path / "r", game, *SETS)
    run = PlayedRun(made.folder, made.config, players=players(Place()))
    train(run)
    run.assert_sound(STEPS)
    for step in range(1, STEPS + 1):
        recorded = read_trace(trace_path(run.folder / "traces", step))
        given = {sample.rollout_id: sample for sample in recorded.batch.samples}
        groups = defaultdict(list)
        for one in recorded.rollouts:
            groups[one.group_id].append(one)
        for members in groups.values():
            graded = [one.outcome for one in members if isinstance(one.outcome, Graded)]
            assert [one.values["place"] for one in graded] == [0.0, 1.0, 2.0, 3.0]
            composition = RewardSettings(run.folder, run.config).composition(step)
            again = staged_credit(graded, [()] * len(graded), [True] * len(graded), composition, ByRank())
            assert [one.reward.value for one in again] == [0.0, 1.25, 0.5, 1.75], "the grade is the number's parity"
            advantages = [one.advantage for one in again]
            assert advantages == [-1.0, 1 / 3, -1 / 3, 1.0]
            stored = [float(given[one.rollout_id].advantages[0]) for one in members]
            assert stored == np.array(advantages, np.float32).tolist()


def test_a_term_that_fails_ends_the_run_by_name_and_the_mended_one_goes_on(game: Any, tmp_path: Path) -> None:
    made = PlayedRun.create(tmp_path / "r", game, *SETS)
    with pytest.raises(PluginError, match=r"reward term 'place'.*failed") as caught:
        train(PlayedRun(made.folder, made.config, players=players(Place(failing=True))))
    assert "KeyError: 'no such place'" in caught.value.facts
    mended = PlayedRun(made.folder, made.config, players=players(Place()))
    train(mended)
    mended.assert_sound(STEPS)
