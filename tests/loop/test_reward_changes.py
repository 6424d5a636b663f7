"""Reward settings that a user changes in a real run: while its processes are running, and when it is resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.running import Running

from etude.errors import Exit
from etude.experience.trace_reader import read_outcomes
from etude.experience.traces import trace_path
from etude.records import Graded

pytestmark = pytest.mark.timeout(1800)

OWN = """
import asyncio
from pathlib import Path

from etude.records.reward import Score


class Held:
    "0; groups of steps 3 and 5 and later ones have no value before a file says so."
    version = "1"

    async def score(self, rollout, graded):
        for first in (6, 12):
            while int(rollout.group_id[1:]) >= first and not Path(f"go{first}").exists():
                await asyncio.sleep(0.02)
        return Score(value=0.0)


class Place:
    "The place among the siblings."
    version = "1"

    async def score(self, rollout, graded):
        return Score(value=float(rollout.rollout_id[-1]))
"""
HELD = '\n[[rewards.terms]]\nname = "held"\nkind = "own:Held"\nweight = 0.0\n'
PLACE = '\n[[rewards.terms]]\nname = "place"\nkind = "own:Place"\nweight = 0.25\nwhen = "grade"\n'


@dataclass(frozen=True)
class Played:
    """A run that has ended, and what the commands that changed its rewards said."""

    cli: Any
    path: Path
    set: str
    resumed: str

    def rewards(self, step: int) -> tuple[dict[str, float], dict[str, str]]:
        """The weights and gates by which a step was composed."""
        found, _ = read_outcomes(trace_path(self.path / "traces", step))
        return found["weights"], found["when"]

    def says(self, *args: str) -> str:
        done = self.cli("rewards", *args)
        assert done.returncode == Exit.DONE, done.stderr
        return str(done.stdout)


@pytest.fixture(scope="module")
def played(game: Any, tmp_path_factory: pytest.TempPathFactory, cli_in: Callable[[Path], Any]) -> Played:
    """A run whose rewards are set while it runs; then it is stopped, and resumed with a changed config."""
    cwd = tmp_path_factory.mktemp("changes")
    (cwd / "own.py").write_text(OWN)
    config = game.config.read_text().replace("steps = 4", "steps = 6").replace("\nevery = 2\n", "\nevery = 0\n")
    (cwd / "first.toml").write_text(config + HELD)
    (cwd / "second.toml").write_text(config + HELD + PLACE)
    cli = cli_in(cwd)
    cli = replace(cli, env=cli.env | {"COLUMNS": "200"})
    run = Running(cli, Path("first.toml")).begin()
    run.until(lambda: run.step == 2, "step 2")
    changed = cli("rewards", "set", run.path, "place.kind=own:Place", "place.weight=0.5")
    assert changed.returncode == Exit.DONE, changed.stderr
    (cwd / "go6").touch()
    run.until(lambda: run.step == 4, "step 4")
    assert cli("stop", run.path).returncode == Exit.DONE
    assert run.process is not None
    assert run.process.wait(600.0) == Exit.INTERRUPTED, run.said
    (cwd / "go12").touch()
    resumed = cli("run", "second.toml", "--resume", run.path)
    assert resumed.returncode == Exit.DONE, resumed.stderr
    return Played(cli, run.path, changed.stdout, resumed.stdout)


def test_rewards_that_are_set_while_a_run_runs_count_from_the_step_that_the_command_names(played: Played) -> None:
    assert "from step 4 on:" in played.set
    assert "place (own:Place): weight 0.5" in played.set
    assert [played.rewards(step) for step in (1, 2, 3)] == [({}, {})] * 3
    assert played.rewards(4) == ({"place": 0.5}, {})
    _, rollouts = read_outcomes(trace_path(played.path / "traces", 4))
    graded = {one.rollout_id: one for one in rollouts if isinstance(one.outcome, Graded)}
    assert graded
    for rollout_id, one in graded.items():
        assert isinstance(one.outcome, Graded)
        assert one.reward == one.outcome.grade + 0.5 * float(rollout_id[-1])


def test_a_run_that_is_resumed_with_other_rewards_has_them_from_its_next_step_on(played: Played) -> None:
    assert "other rewards from step 5 on, as the settings say" in played.resumed
    assert [played.rewards(step) for step in (5, 6)] == [({"place": 0.25}, {"place": "grade"})] * 2
    assert "equal bit for bit: rewards, advantages and batches of 6 steps" in played.says("recompute", str(played.path))
    [row] = [line for line in played.says("list", str(played.path)).splitlines() if "own:Place" in line]
    assert "0.5 -> 0.25" in row
