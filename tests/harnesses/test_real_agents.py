"""Agents as their makers publish them, with the configs of the guide: everything they ask is attributed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import ANSWERS, GUIDE, config_of, play

from etude.harness import HarnessConfig


def test_the_guide_has_a_config_for_each_agent_that_is_tried() -> None:
    assert AGENTS.keys() == ANSWERS.keys()
    for name in AGENTS:
        assert isinstance(config_of(name), HarnessConfig)
        assert GUIDE.read_text().count(f"\n## {name}\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", AGENTS)
def test_a_real_agent_does_its_task_and_all_it_asks_is_attributed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := AGENTS[name].why_not():
        pytest.skip(why)
    monkeypatch.chdir(Path(FOLDER))
    played = play(config_of(name), ANSWERS[name])
    assert (played.fixed, played.ending) == (True, "submitted"), played.log
    assert played.attributed == 1.0, played.statuses
    assert (played.num_failed, played.num_resampled) == (0, 0), played.statuses
    assert played.rows == played.branches == 1, played.starts
