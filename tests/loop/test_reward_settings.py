"""Reward settings that change in a run, and rewards that are computed again: the real conductor, ledger and learner."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.loop.test_group_rewards import SETS, values
from tests.played_run import PlayedRun, Players

from etude import cli
from etude.errors import InputError
from etude.experience import Ledger
from etude.experience.trace_reader import read_outcomes, read_step, read_trace
from etude.experience.traces import trace_path
from etude.loop.replay import replay_step
from etude.loop.reward_settings import RewardSettings, record_change
from etude.loop.rollout_result import RolloutResult
from etude.records import Rollout, RolloutSpec
from etude.records.rollout import ToolCall
from etude.rewards.config import RewardsConfig

pytestmark = pytest.mark.timeout(1800)

RANK = '{name = "rank", weight = 0.5, kind = "tests.loop.test_group_rewards:Rank"}'
WATCHED = '{name = "rank", weight = 0.0, kind = "tests.loop.test_group_rewards:Rank"}'


class Faulty(Players):
    """Every third rollout makes a malformed call in its only turn, and takes longer."""

    def made(self, spec: RolloutSpec) -> Rollout:
        rollout = super().made(spec)
        if int(spec.rollout_id[-1]) % 3:
            return rollout
        [turn] = rollout.trace.turns
        call = ToolCall(name="", arguments={}, output="not a call", malformed=True)
        return replace(rollout, trace=type(rollout.trace)((replace(turn, calls=(call,)),)))


def run_of(path: Path, game: Any, *sets: str) -> PlayedRun:
    made = PlayedRun.create(path, game, *SETS, *sets)
    return PlayedRun(made.folder, made.config, players=Faulty)


def train(run: PlayedRun, meanwhile: Callable[[], None] | None = None) -> PlayedRun:
    async def main() -> None:
        async with run.conductor() as conductor:
            training = asyncio.create_task(conductor.reinforce())
            if meanwhile is not None:
                await run.until(1, ("end", "record"))
                await asyncio.to_thread(meanwhile)
            await training

    asyncio.run(main())
    return run


def say(capsys: pytest.CaptureFixture[str], *args: object, code: int = 0) -> str:
    capsys.readouterr()
    found = cli.main(["rewards", *map(str, args)])
    out, err = capsys.readouterr()
    assert found == code, err + out
    return out + err


def digests(out: str) -> list[str]:
    return [step["digest"] for step in json.loads(out)["steps"]]


@pytest.mark.parametrize("credit", ["dr-grpo", "fork"])
def test_a_run_is_recomputed_to_the_bit_and_under_other_weights_as_a_run_that_had_them(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], credit: str
) -> None:
    faults = '{name = "faults", weight = 0.25, kind = "malformed-calls"}'
    sets = (f"experience.credit={credit}", "experience.kl=0.1")
    watched = train(run_of(tmp_path / "watched", game, *sets, f"rewards.terms=[{WATCHED}, {faults}]"))
    weighted = train(run_of(tmp_path / "weighted", game, *sets, f"rewards.terms=[{RANK}, {faults}]"))
    for run in (watched, weighted):
        assert "equal bit for bit: rewards, advantages and batches of 2 steps" in say(
            capsys, "recompute", run.folder.path
        )
    recorded = read_step(trace_path(weighted.folder / "traces", 1)).digest
    again = say(capsys, "recompute", watched.folder.path, "--set", "rank.weight=0.5", "--step", 1, "--json")
    assert digests(again) == [recorded], "step 1 of a run that had this weight from the start"
    shown = say(capsys, "recompute", watched.folder.path, "--set", "rank.weight=0.5")
    assert "2 of 2 steps would have been other ones" in shown
    assert "g000000.1: reward" in shown


def test_a_stored_reward_that_is_not_that_of_its_terms_is_listed(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(run_of(tmp_path / "r", game))
    monkeypatch.setattr("etude.rewards.composition._value", lambda term: 0.5 * (term.value or 0.0))
    said = say(capsys, "recompute", run.folder.path, code=1)
    assert "2 of 2 steps differ from what was recorded" in said
    assert "g000000.1: reward 1.0 recorded, 0.5 recomputed" in said


def test_a_term_that_is_added_while_a_run_runs_counts_from_its_step_on_with_one_version_a_group(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "r", game, "rl.steps=5", "experience.max_lag=2")
    changed = threading.Event()

    class Held(Faulty):
        """The groups of steps after the second end once the settings are changed."""

        async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
            while int(spec.group_id[1:]) > 3 and not changed.is_set():  # noqa: ASYNC110  set by a thread
                await asyncio.sleep(0.01)
            return await super().rollout(spec, kept=kept)

    run = PlayedRun(run.folder, run.config, players=Held)

    def change() -> None:
        run.folder.lock()
        try:
            said = say(
                capsys, "set", run.folder.path, "rank.kind=tests.loop.test_group_rewards:Rank", "rank.weight=0.5",
                "--from-step", 4,
            )  # fmt: skip
        finally:
            run.folder.unlock()
            changed.set()
        assert "from step 4 on:" in said

    train(run, change)
    run.assert_sound(5)
    weights = [read_outcomes(trace_path(run.folder / "traces", step))[0]["weights"] for step in range(1, 6)]
    assert weights == [{}, {}, {}, {"rank": 0.5}, {"rank": 0.5}]
    for step in (4, 5):
        assert list(values(run, step, "rank").values()) == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert [one.equal for one in replay_step(run.folder, 5).steps] == [True] * 5
    assert "equal bit for bit: rewards, advantages and batches of 5 steps" in say(capsys, "recompute", run.folder.path)
    refused = say(capsys, "recompute", run.folder.path, "--set", "rank.weight=1", code=2)
    assert "step 1 cannot be recomputed with --set rank" in refused
    first = next(
        step for step in range(1, 6) if any(one != [None] * len(one) for one in values(run, step, "rank").values())
    )
    assert f"the first step with values is {first}, the last one 5" in refused
    assert f"--step {first}" in refused
    say(capsys, "recompute", run.folder.path, "--set", "rank.weight=1", "--step", first)
    assert "is not a finite number" in say(capsys, "recompute", run.folder.path, "--set", "rank.weight=nan", code=2)
    listed = say(capsys, "list", run.folder.path)
    row = next(line for line in listed.splitlines() if "rank" in line)
    assert "0.5" in row
    assert "4" in row.split("│")[5]


def test_how_a_reward_came_to_be_is_explained(game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gated = RANK.replace("kind", 'when = "tests", kind')
    faults = '{name = "faults", weight = 0.25, kind = "malformed-calls"}'
    run = train(run_of(tmp_path / "r", game, f"rewards.terms=[{gated}, {faults}]"))
    said = say(capsys, "explain", run.folder.path, "g000000.3")
    assert "g000000.3, step 1" in said
    assert "tests: open" in said
    assert "+0.5" in said, "the second of two siblings whose gate is open"
    assert "reward 1.25 " in said
    assert "turn 0: -0.25" in said
    assert "by dr-grpo among the rewards g000000.0 -0.25, g000000.1 1, g000000.2 0, g000000.3 1.25" in said
    closed = say(capsys, "explain", run.folder.path, "g000000.2")
    assert "tests: closed" in closed


def test_charges_that_are_bounded_are_explained_as_they_count(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = '{name = "faults", weight = 3.0, kind = "malformed-calls"}'
    run = train(run_of(tmp_path / "r", game, f"rewards.terms=[{faults}]"))
    said = say(capsys, "explain", run.folder.path, "g000000.3")
    assert "reward 0.1 " in said
    assert "-0.9" in next(line for line in said.splitlines() if "faults" in line).split("│")[5]
    assert "charges of faults are reduced" in said


def test_advantages_by_turn_are_explained(game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = '{name = "faults", weight = 0.25, kind = "malformed-calls"}'
    run = train(run_of(tmp_path / "r", game, "experience.credit=fork", f"rewards.terms=[{faults}]"))
    step = read_step(trace_path(run.folder / "traces", 1))
    tree = next(one for one in step.trees if one.rollout.rollout_id == "g000000.3")
    [(_, sample)] = tree.samples
    said = say(capsys, "explain", run.folder.path, "g000000.3")
    [shown] = re.findall(r"turn 0: advantage (\S+)", said)
    assert float(shown) == pytest.approx(sample.advantages[0], rel=1e-4), "what the step trained with"
    assert "by fork among the rewards" in said


def test_pairs_of_a_preference_loss_are_explained(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ("learner.policy_loss=dpo", "experience.credit=best-worst")
    run = train(run_of(tmp_path / "r", game, *sets, f"rewards.terms=[{RANK}]"))
    pairs = read_trace(trace_path(run.folder / "traces", 1)).batch.pairs
    own = [pair for pair in pairs if pair[0].startswith("g000000.")]
    assert own == [("g000000.3", "g000000.0")]
    assert "preferred to g000000.0; none preferred to it" in say(capsys, "explain", run.folder.path, "g000000.3")
    assert "preferred to none; g000000.3 preferred to it" in say(capsys, "explain", run.folder.path, "g000000.0")
    assert "preferred to none; none preferred to it" in say(capsys, "explain", run.folder.path, "g000000.1")
    monkeypatch.setattr("etude.cli.rewards.exceeds_lag", lambda steps, step, most: True)
    late = say(capsys, "explain", run.folder.path, "g000000.3")
    assert "preferred to none" in late
    assert "it is in no pair: some of its tokens are older than experience.max_lag allows" in late


def test_settings_of_steps_that_were_formed_are_refused_and_unknown_terms_are_named(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(run_of(tmp_path / "r", game, f"rewards.terms=[{RANK}]"))
    refused = say(capsys, "set", run.folder.path, "rank.weight=1.0", "--from-step", 2, code=2)
    assert "the rewards of step 2 cannot be changed" in refused
    assert "the run has 2 steps, and batches are formed up to step 2" in refused
    assert "step 3 cannot" in say(capsys, "set", run.folder.path, "rank.weight=1.0", code=2), "nor the one after it"
    assert "there is no reward term 'rnak'" in say(capsys, "set", run.folder.path, "rnak.weight=1.0", code=2)
    assert "the change has no effect" in say(capsys, "set", run.folder.path, "rank.weight=0.5", code=2)
    assert "cannot be recomputed" in say(capsys, "recompute", run.folder.path, "--set", "rnak.weight=1", code=2)


def test_of_several_changes_the_last_one_recorded_holds(game: Any, tmp_path: Path) -> None:
    run = PlayedRun.create(tmp_path / "r", game, f"rewards.terms=[{RANK}]")
    [term] = run.config.rewards.terms
    settings = RewardSettings(run.folder, run.config)

    def change(weight: float, from_step: int) -> None:
        new = RewardsConfig((type(term)(name="rank", kind=term.kind, weight=weight),))
        record_change(run.folder, new, from_step=from_step, last_step=lambda: 2, num_steps=20)

    change(1.0, 10)
    change(2.0, 5)
    assert settings.composition(10).weights == {"rank": 0.5}, "as they were when they were read"
    assert settings.refresh()
    assert [settings.composition(step).weights["rank"] for step in (1, 4, 5, 12)] == [0.5, 0.5, 2.0, 2.0]
    with pytest.raises(InputError, match="the rewards of step 2 cannot be changed") as refused:
        change(3.0, 2)
    assert "--from-step 3" in refused.value.hint
    with pytest.raises(InputError, match="the rewards of step 21 cannot be changed"):
        change(3.0, 21)


def test_a_self_tuned_weight_is_recorded_by_step_and_resumed(game: Any, tmp_path: Path) -> None:
    effort = '{name = "effort", weight = 0.5, target = 0.5, kind = "effort"}'
    sets = ("rl.steps=4", "rl.checkpoint_every=2", f"rewards.terms=[{effort}]")
    whole = train(run_of(tmp_path / "whole", game, *sets))

    def weights(run: PlayedRun) -> list[float]:
        found = [read_outcomes(trace_path(run.folder / "traces", step))[0]["weights"] for step in range(1, 5)]
        return [one.get("effort", 0.0) for one in found]

    expected = [0.0, 0.1, 0.2, 0.3]  # twice the target: the largest step each time
    assert weights(whole) == pytest.approx(expected)
    assert [one.equal for one in replay_step(whole.folder, 4).steps] == [True] * 2, "from the checkpoint of step 2"
    parted = run_of(tmp_path / "parted", game, *sets)

    async def stop_after(count: int) -> None:
        async with parted.conductor() as conductor:
            training = asyncio.create_task(conductor.reinforce())
            await parted.until(count, ("end", "optim_step"))
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)

    asyncio.run(stop_after(3))
    train(parted)
    assert weights(parted) == pytest.approx(expected)
    with_state = Ledger.open_readonly(parted.folder / "ledger.sqlite")
    assert max(map(int, with_state.recall("reward_weights"))) == 5
    with_state.close()
