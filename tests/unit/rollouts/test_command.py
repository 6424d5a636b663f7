"""Agent programs that ask over HTTP: what they ask is attributed, how they end is typed, and nothing of them is left."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.unit.harness.test_tools import TASK
from tests.unit.harness.tokeniser import laptop_chat

from etude.config import build
from etude.harness import Call, Episode, HarnessConfig, RequestOptions, run_program, standard_tools
from etude.harness.episode import AgentRun
from etude.records.rollout import Ending
from etude.testing import EnginePolicy, MemoryMachine, ScriptedEngine

CHAT = laptop_chat()
EXAMPLE = Path(__file__).parents[3] / "examples" / "command" / "agent.py"


def say(name: str, **arguments: str) -> list[int]:
    return CHAT.encode_call(Call(name, arguments)).tolist()


def play(
    argv: Sequence[str],
    answers: Sequence[Sequence[int]],
    *,
    machine: Any = None,
    policy: Any = None,
    settings: dict[str, Any] | None = None,
    **limits: Any,
) -> AgentRun:
    program = {"kind": "command", "argv": [*argv], **(settings or {})}
    sizes = {"turn_tokens": 48, "context_tokens": 2048, "max_turns": 8, "rollout_deadline_s": 30.0, **limits}
    config = build(HarnessConfig, {"program": program, **sizes})
    episode = Episode(
        TASK,
        machine or MemoryMachine({p: t.encode() for p, t in TASK.files.items()}),
        policy=policy or EnginePolicy(ScriptedEngine(answers)),
        chat=CHAT,
        tools=standard_tools(),
        limits=config,
        options=RequestOptions(session_id="g000001.0/0", seed=7),
    )
    return asyncio.run(run_program(episode))


def test_the_example_repairs_and_submits_and_its_turns_are_recorded() -> None:
    run = play([sys.executable, str(EXAMPLE)], [say("run", command="python tests.py"), say("submit")])
    assert run.ending is Ending.SUBMITTED, run.log.decode()
    first, second = run.trace.turns
    assert second.parent == 0
    assert first.calls[0].name == "run"
    assert "of 4" in first.calls[0].output
    assert b"$ python tests.py" in run.log
