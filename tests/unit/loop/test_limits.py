"""The limits of rollouts: what a checkpoint gives, and that tasks which no rollout could begin are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.harness.tokeniser import laptop_chat

from etude.errors import ConfigError, Exit
from etude.harness import ChatFormat, HarnessConfig, standard_tools
from etude.loop.limits import build_config, check_limits, first_tasks, with_limits
from etude.models.config import ModelConfig
from etude.records.task import Split
from etude.tasks import RepairSource

CHAT = laptop_chat()
TASKS = [
    msgspec.structs.replace(task, instruction="fix the failing test" * (1 + i // 8))
    for i, task in enumerate(first_tasks(RepairSource(seed=0, files=2), [Split.TRAIN, Split.HELDOUT]))
]
PROMPTS = sorted(len(CHAT.encode_prompt([{"role": "user", "content": task.instruction}])) for task in TASKS)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig(context_tokens=2048).to_hf()))
    return tmp_path


@pytest.mark.parametrize(
    ("engine", "harness", "derived"),
    [
        ({}, {}, (2048, 2048, 256)),
        ({"context_tokens": 512}, {}, (512, 512, 64)),
        ({}, {"context_tokens": 128}, (2048, 128, 24)),
        ({"context_tokens": 600}, {"context_tokens": 500, "turn_tokens": 9}, (600, 500, 9)),
        ({"context_tokens": 20}, {}, (20, 20, 19)),
    ],
)
def test_limits_that_nobody_gave_are_the_checkpoints(
    start: Path, engine: dict[str, int], harness: dict[str, int], derived: tuple[int, int, int]
) -> None:
    config = build_config({"start": str(start), "engine": engine, "harness": harness})
    assert (config.engine.context_tokens, config.harness.context_tokens, config.harness.turn_tokens) == derived


def test_a_long_context_is_taken_in_part_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ModelConfig(context_tokens=262_144).to_hf()))
    assert build_config({"start": str(tmp_path)}).engine.context_tokens == 4096
    asked = build_config({"start": str(tmp_path), "harness": {"context_tokens": 100_000}})
    assert (asked.engine.context_tokens, asked.harness.turn_tokens) == (100_000, 512)


@pytest.mark.parametrize("given", [{}, {"harness": {"max_turns": 3}}, {"start": "/nowhere"}, {"start": 3, "engine": 4}])
def test_without_a_checkpoint_that_can_be_read_nothing_is_filled_in(given: dict[str, Any]) -> None:
    assert with_limits(given) == given


def test_tasks_that_fit_pass_without_a_word() -> None:
    said: list[str] = []
    check_limits(HarnessConfig(), CHAT, TASKS, said.append)
    assert said == []


def test_prompts_that_leave_no_room_for_a_turn_are_refused_with_their_sizes() -> None:
    limits = HarnessConfig(context_tokens=PROMPTS[0] + 23, turn_tokens=24)
    with pytest.raises(ConfigError, match="too small for one turn of any of the first 16 tasks") as refused:
        check_limits(limits, CHAT, TASKS)
    assert refused.value.exit_code == Exit.BAD_INPUT
    assert f"{PROMPTS[0]} to {PROMPTS[-1]} tokens" in refused.value.facts
    enough = int(refused.value.hint.split("context_tokens to ")[1].split()[0])
    check_limits(dataclasses.replace(limits, context_tokens=enough), CHAT, TASKS)


def test_some_prompts_that_leave_no_room_are_told() -> None:
    said: list[str] = []
    check_limits(HarnessConfig(context_tokens=PROMPTS[0] + 24, turn_tokens=24), CHAT, TASKS, said.append)
    (words,) = said
    assert "too small for one turn of 8 of the first 16 tasks: their prompts have up to " in words


def _without_words(chat: ChatFormat, tools: Sequence[str]) -> int:
    from etude.harness import Call

    needs = {name: signature.parameters for name, signature in standard_tools(tuple(tools)).signatures.items()}
    return max(
        len(chat.encode_call(Call(name, {p.name: "x" for p in found if p.required}))) for name, found in needs.items()
    )


def test_turns_that_hold_no_call_are_refused_and_those_that_hold_some_are_told() -> None:
    with pytest.raises(ConfigError, match="too small for a call of any tool") as refused:
        check_limits(HarnessConfig(turn_tokens=1), CHAT, TASKS)
    assert "submit " in refused.value.facts
    said: list[str] = []
    longest = _without_words(CHAT, HarnessConfig().tools)
    check_limits(HarnessConfig(turn_tokens=longest - 1), CHAT, TASKS, said.append)
    assert "too small for the shortest call of some tools, in tokens: " in said[0]
    check_limits(HarnessConfig(turn_tokens=longest), CHAT, TASKS, said.append)
    assert len(said) == 1
