"""Runs whose reward terms drift: held before the step, resumed, or ended and evaluated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun

from etude import cli as etude
from etude.errors import ConfigError, RewardDrift
from etude.records import Graded, Rollout
from etude.records.reward import Score
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(1800)

SETS = ("rl.checkpoint_every=50", "evals.every=50", "experience.max_lag=0", "experience.groups_per_step=3")


class Says:
    """A term that says the grade, and from a group on always `then`."""

    version = "1"

    def __init__(self, from_group: int = 1000, then: float = 1.0) -> None:
        self.from_group, self.then = from_group, then

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        return Score(value=self.then if int(rollout.group_id[1:]) >= self.from_group else graded.grade)


def terms(on_drift: str, from_group: int) -> tuple[str, str]:
    judge = f"{{name='clear', kind={{kind='tests.loop.test_drift:Says', from_group={from_group}}}, weight=0.5}}"
    auditor = "{name='auditor', kind='tests.loop.test_drift:Says', weight=0.0}"
    audit = f"{{term='clear', by='auditor', tolerance=0.1, on_drift='{on_drift}'}}"
    return f"rewards.terms=[{judge},{auditor}]", f"rewards.audits=[{audit}]"


def train(run: PlayedRun) -> int:
    async def main() -> int:
        async with run.conductor() as conductor:
            await conductor.reinforce()
            return conductor.step

    return asyncio.run(main())


def events(run: PlayedRun, kind: str) -> list[dict[str, Any]]:
    found = read_events(run.folder / "events")
    return [one for one in found if one["kind"] == kind]


def test_an_alarm_holds_the_run_before_the_step_and_resuming_begins_the_test_anew(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=8", *terms("hold", 6))
    with pytest.raises(RewardDrift, match="'clear' drifts from 'auditor'") as held:
        train(run)
    assert "before step 4" in held.value.facts or "before step 3" in held.value.facts
    [alarm] = events(run, "rewards.drift")
    assert (alarm["audit"], alarm["action"]) == ("clear by auditor", "hold")
    assert alarm["e_value"] >= 100
    steps = [one["step"] for one in events(run, "rl.step")]
    assert steps == list(range(1, alarm["step"]))
    with pytest.raises(RewardDrift):
        train(PlayedRun(run.folder, run.config))
    again = [one["step"] for one in events(run, "rewards.drift")]
    assert len(again) == 2
    assert again[1] > again[0] - 1


def test_a_run_that_an_alarm_held_goes_on_with_weight_0(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2", *terms("hold", 0))
    with pytest.raises(RewardDrift):
        train(run)
    assert etude.main(["rewards", "set", str(run.folder.path), "clear.weight=0"]) == 0
    assert train(PlayedRun(run.folder, run.config)) == 2
    assert [one["action"] for one in events(run, "rewards.drift")] == ["hold", "report"]


def test_an_alarm_ends_training_and_the_weights_of_the_step_before_are_the_result(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=8", *terms("end", 3))
    step = train(run)
    assert 0 < step < 8
    assert (run.folder / "checkpoints" / "final").is_dir()
    run.assert_sound(step)
    assert train(PlayedRun(run.folder, run.config)) == step, "it does not train again"
    assert len(events(run, "rewards.drift")) == 1


def test_an_honest_term_raises_no_alarm_and_its_distance_is_in_each_step(tmp_path: Path, game: Any) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=3", *terms("hold", 1000))
    assert train(run) == 3
    audits = [one["audits"]["clear by auditor"] for one in events(run, "rl.step")]
    assert [one["distance"] for one in audits] == [0.0] * 3
    assert [one["num_groups"] for one in audits] == [3, 6, 9]
    assert not events(run, "rewards.drift")


@pytest.mark.parametrize(
    ("audit", "named"),
    [
        ("term='clear', by='nobody', tolerance=0.1", "'nobody', which is neither 'grade' nor one of the terms"),
        ("term='auditor', by='clear', tolerance=0.1", "set its weight and its hints to 0.0"),
        ("term='clear', by='auditor'", "etude judge calibrate"),
    ],
)
def test_an_audit_without_an_independent_auditor_is_refused(tmp_path: Path, game: Any, audit: str, named: str) -> None:
    plain, _ = terms("hold", 1)
    with pytest.raises(ConfigError) as refused:
        PlayedRun.create(tmp_path / "r", game, *SETS, plain, f"rewards.audits=[{{{audit}}}]")
    assert named in str(refused.value)
