"""A run with hints is trained, recorded, replayed and computed again to the bit: real conductor, ledger and learner."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.loop.test_reward_settings import say
from tests.played_run import PlayedRun, Players

from etude.experience import read_trace
from etude.experience.traces import trace_path
from etude.harness import ChatFormat
from etude.loop.hint_format import hint_format, message_ends
from etude.loop.replay import replay_step
from etude.records import Rollout, RolloutSpec
from etude.records.rollout import ToolCall, Trace
from etude.telemetry import read_events

pytestmark = pytest.mark.timeout(1800)

STEPS = 2
FAULTS = '{name = "faults", weight = 0.0, hints = 0.5, kind = {kind = "malformed-calls", hint = "call edit"}}'
SETS = (
    f"rl.steps={STEPS}",
    "rl.checkpoint_every=50",
    "evals.every=50",
    "experience.max_lag=0",
    "experience.groups_per_step=2",
    "experience.group_size=4",
    f"rewards.terms=[{FAULTS}]",
)


class Faulty(Players):
    """The first rollout of each group makes a malformed call; the prompts are those of a user's message."""

    def made(self, spec: RolloutSpec) -> Rollout:
        rollout = super().made(spec)
        [turn] = rollout.trace.turns
        chat = ChatFormat.load(self.run / "tokenizer")
        prompt_ids = chat.encode_prompt([{"role": "user", "content": "m1 2"}])
        routes = np.tile(np.array([0, 1], np.uint8), (len(prompt_ids) + self.sampled - 1, 2, 1))
        call = ToolCall(name="", arguments={}, output="not a call", malformed=True)
        calls = (call,) if spec.rollout_id.endswith(".0") else ()
        done = replace(turn.completion, routes=routes)
        return replace(rollout, trace=Trace((replace(turn, prompt_ids=prompt_ids, completion=done, calls=calls),)))


def test_a_run_with_hints_is_replayed_and_computed_again_to_the_bit(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = PlayedRun.create(tmp_path / "r", game, *SETS)
    run = PlayedRun(made.folder, made.config, players=Faulty)

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    run.assert_sound(STEPS)
    events = [event for event in read_events(run.folder / "events") if event["kind"] == "rl.step"]
    assert [(event["hints"], event["unplaced_hints"]) for event in events] == [(2, 0)] * STEPS
    assert all(event["hint_kl"] != 0.0 for event in events)
    samples = read_trace(trace_path(run.folder / "traces", 1)).batch.samples
    placed = {sample.rollout_id: sample.hints for sample in samples if sample.hints}
    assert list(placed) == ["g000000.0", "g000001.0"]
    chat = ChatFormat.load(run.folder / "tokenizer")
    assert all(chat.decode(hint.token_ids) == "\ncall edit" for [hint] in placed.values())
    assert replay_step(run.folder, STEPS).equal
    assert f"of {STEPS} steps" in say(capsys, "recompute", run.folder.path)
    without = say(capsys, "recompute", run.folder.path, "--set", "faults.hints=0")
    assert f"{STEPS} of {STEPS} steps would have been other ones" in without
    assert "hint for turn 0, weight 0.5: call edit" in say(capsys, "explain", run.folder.path, "g000000.0")


def test_a_message_ends_with_its_stop_token_and_the_beginning_of_the_reply(game: Any, tmp_path: Path) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS)
    chat = ChatFormat.load(run.folder / "tokenizer")
    assert [chat.decode(end, special=True) for end in message_ends(chat)] == ["<|end|><|assistant|>"]
    assert hint_format(run.folder, run.config).context_tokens == run.config.engine.context_tokens
