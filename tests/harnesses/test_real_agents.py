"""Agents as their makers publish them, with the configs of the guide: everything they ask is attributed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harnesses.agents import AGENTS, FOLDER
from tests.harnesses.played import ANSWERS, GUIDE, Answers, by_sub_agent, by_summaries, by_text, config_of, play

from etude.harness import HarnessConfig
from etude.loop.limits import build_config
from etude.models import ModelConfig

Given = tuple[HarnessConfig, Answers]


def codex_that_summarises() -> Given:
    return config_of("Codex", "-c", "model_auto_compact_token_limit=27000"), by_summaries()


def claude_code_that_summarises() -> Given:
    return config_of("Claude Code", env={"CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "14"}), by_summaries()


def claude_code_with_a_sub_agent() -> Given:
    agents = {"reader": {"description": "reads files", "prompt": "You read files.", "tools": ["Bash"]}}
    return config_of("Claude Code", "--agents", json.dumps(agents), tools="Bash,Agent"), by_sub_agent


def test_the_guide_has_a_config_for_each_agent_that_is_tried() -> None:
    assert AGENTS.keys() == ANSWERS.keys()
    for name in AGENTS:
        assert isinstance(config_of(name), HarnessConfig)
        assert GUIDE.read_text().count(f"\n## {name}\n") == 1


def test_the_configs_of_the_guide_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(ModelConfig(context_tokens=1 << 17).to_hf()))
    monkeypatch.chdir(tmp_path)
    configs = re.findall(r"```toml\n(start = .*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(configs) >= len(AGENTS)
    for text in configs:
        config = build_config(tomllib.loads(text))
        assert config.engine.context_tokens >= config.harness.context_tokens >= 8192


@pytest.mark.slow
@pytest.mark.timeout(1800)
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


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("limit", "answers", "ending", "status"),
    [
        ("agent.step_limit=1", ANSWERS["mini-swe-agent"], "turns", "LimitsExceeded"),
        ("agent.max_consecutive_format_errors=2", by_text("I think", "so"), "stopped", "RepeatedFormatError"),
    ],
)
def test_limits_of_mini_swe_agents_own_are_no_submissions(
    limit: str, answers: Answers, ending: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := AGENTS["mini-swe-agent"].why_not():
        pytest.skip(why)
    monkeypatch.chdir(Path(FOLDER))
    played = play(config_of("mini-swe-agent", "-c", limit), answers)
    assert played.ending == ending, played.log
    assert f'etude: exit code 0\netude: info.exit_status = "{status}": {ending}\n' in played.log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "given", "starts", "num_resampled"),
    [
        # the request for the summary has no tools, so the reply in it is read in another prompt
        ("Codex", codex_that_summarises, {"first": 1, "tools": 1, "history": 1, "next": 1}, 1),
        # the summary is asked for beside the next turn, whose reply then stands behind the summary in another prompt
        ("Claude Code", claude_code_that_summarises, {"first": 1, "next": 1, "fork": 1, "history": 1}, 1),
        ("Claude Code", claude_code_with_a_sub_agent, {"first": 1, "tools": 1, "next": 3}, 0),
    ],
    ids=["Codex summarises", "Claude Code summarises", "Claude Code has a sub-agent"],
)
def test_summaries_and_sub_agents_of_a_real_agent_are_branches_that_are_trained_once(
    name: str, given: Callable[[], Given], starts: dict[str, int], num_resampled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := AGENTS[name].why_not():
        pytest.skip(why)
    monkeypatch.chdir(Path(FOLDER))
    played = play(*given())
    assert (played.fixed, played.ending) == (True, "submitted"), played.log
    assert (played.attributed, played.num_failed, played.num_side) == (1.0, 0, 0), played.statuses
    assert played.starts == starts
    assert played.rows == played.branches == sum(starts.values()) - starts["next"], played.log
    assert played.num_resampled == num_resampled
