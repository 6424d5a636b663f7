"""Steps that go on until enough groups have a signal: the real conductor, ledger and learner, rollouts made up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.played_run import PlayedRun, Players

from etude.experience import Ledger
from etude.loop.replay import replay_step
from etude.loop.rollout_result import RolloutResult
from etude.records import Graded, Rollout, RolloutSpec
from etude.records.reward import Measured, Reward, Term
from etude.records.summary import RolloutSummary
from etude.records.task import Trust
from etude.rewards.config import TermConfig
from etude.stores import DirectoryStore
from etude.telemetry import read_events
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)

GROUPS, SIZE, STEPS = 4, 4, 3


class Some(Players):
    """Of every four groups, the first has a signal; the others are solved by every member."""

    async def grade(self, rollout: RolloutResult) -> Graded:
        graded = await super().grade(rollout)
        return graded if int(rollout.summary.group_id[1:]) % 4 == 0 else Graded.of(1.0, trust=graded.trust, reason="")


@pytest.fixture
def run(game: Any, tmp_path: Path) -> Callable[..., PlayedRun]:
    def make(name: str, *sets: str, players: type[Players] = Some) -> PlayedRun:
        sizes = (
            f"rl.steps={STEPS}",
            f"experience.groups_per_step={GROUPS}",
            "experience.signal_groups=2",
            f"experience.group_size={SIZE}",
        )
        made = PlayedRun.create(tmp_path / name, game, "rl.checkpoint_every=50", "evals.every=50", *sizes, *sets)
        return PlayedRun(made.folder, made.config, players=players)

    return make


def played(this: PlayedRun) -> dict[str, Any]:
    """Train to the end; the steps' events, the versions' digests, and what the ledger says."""

    async def main() -> None:
        async with this.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    this.assert_sound(STEPS)
    replay = replay_step(this.folder, STEPS)
    assert [one.equal for one in replay.steps] == [True] * STEPS, "what is recorded is what was trained, to the bit"
    ledger = Ledger.open_readonly(this.folder / "ledger.sqlite")
    states, slots = ledger.states(), ledger.slots()
    ledger.close()
    steps = [e for e in read_events(this.folder / "events") if e["kind"] == "rl.step"]
    versions = lineage(DirectoryStore(this.folder / "weights"), "policy")
    return {
        "groups": [e["num_groups"] for e in steps],
        "no_signal": [e["no_signal_share"] for e in steps],
        "lr": [e["lr"] for e in steps],
        "lag": {int(lag) for e in steps for lag in e["token_lag"]},
        "digests": [one.version.digest for one in versions],
        "states": states,
        "slots": slots,
    }


def test_a_synchronous_step_goes_on_until_enough_groups_have_a_signal_and_repeats_to_the_byte(
    run: Callable[..., PlayedRun],
) -> None:
    first, second = (played(run(name, "experience.max_lag=0")) for name in "ab")
    assert first["groups"] == [8, 8, 8], "1 of 4 had a signal: 4 more give the second"
    assert first["no_signal"] == [0.75] * STEPS
    assert first["lag"] == {0}
    assert first["digests"] == second["digests"]
    assert first["states"] == second["states"] == {"trained": 3 * 2 * SIZE, "no-signal": 3 * 6 * SIZE}
    assert first["slots"][0] == 0, "every state has given its slot back"


def test_beside_training_no_token_is_staler_than_the_bound_and_every_slot_comes_back(
    run: Callable[..., PlayedRun],
) -> None:
    found = played(run("r", "experience.max_lag=2"))
    assert found["groups"] == [8, 8, 8]
    assert found["lag"] <= {0, 1, 2}
    assert found["states"]["trained"] == 3 * 2 * SIZE
    held = sum(found["states"].get(state, 0) for state in ("admitted", "running", "graded", "batched", "requeued"))
    assert found["slots"][0] == held


class Absolute:
    """A credit scheme without a baseline: equal rewards have advantages, too."""

    name, version = "absolute", "1"

    def advantages(self, rewards: Sequence[Reward]) -> list[float]:
        return [reward.value for reward in rewards]


def test_a_scheme_that_gives_advantages_to_equal_rewards_has_its_signal(run: Callable[..., PlayedRun]) -> None:
    found = played(run("r", "experience.max_lag=0", f"experience.credit={__name__}:Absolute"))
    assert found["groups"] == [GROUPS] * STEPS, "every group has a signal: no further ones are taken"
    assert found["states"]["trained"] > 3 * 3 * SIZE


def test_rewards_that_differ_once_a_term_is_left_out_are_a_signal(run: Callable[..., PlayedRun]) -> None:
    """The rows of the siblings have equal rewards; composed together, the term that one lacks counts for none."""

    class Unknown(Players):
        async def measure(
            self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
        ) -> list[list[Measured]]:
            values = [None if i == SIZE - 1 else 1.0 - one.grade for i, one in enumerate(graded)]
            evidence = "as its number says"
            return [[Measured(term=Term(name="even", value=v, version="1", evidence=evidence))] for v in values]

        async def grade(self, rollout: RolloutResult) -> Graded:
            return Graded.of(float(int(rollout.summary.rollout_id[-1]) % 2), trust=Trust.DATA, reason="")

    terms = 'rewards.terms=[{name = "even", weight = 1.0, kind = "examples.plugins.rewards:FewTurns"}]'
    found = played(run("r", "experience.max_lag=0", terms, players=Unknown))
    assert found["groups"] == [GROUPS] * STEPS


def test_where_no_group_has_a_signal_a_step_ends_at_four_times_its_groups_and_moves_no_weight(
    run: Callable[..., PlayedRun],
) -> None:
    class Nobody(Players):
        async def grade(self, rollout: RolloutResult) -> Graded:
            return Graded.of(0.0, trust=(await super().grade(rollout)).trust, reason="")

    found = played(run("r", "experience.max_lag=0", players=Nobody))
    assert found["groups"] == [16, 16, 16]
    assert len(set(found["digests"])) == 1
    assert set(found["states"]) == {"no-signal"}


def test_a_step_with_little_signal_takes_that_share_of_the_learning_rate_and_is_redone_to_the_bit(
    run: Callable[..., PlayedRun],
) -> None:
    whole = played(run("whole", "experience.max_lag=0", "experience.signal_groups=0"))
    scaled = played(run("scaled", "experience.max_lag=0", "experience.little_signal=scale"))
    assert whole["groups"] == scaled["groups"] == [GROUPS] * STEPS, "it takes no more groups"
    assert scaled["lr"] == [0.5 * lr for lr in whole["lr"]], "1 of 4 has a signal, of 2 that are wanted"
    assert scaled["digests"][0] == whole["digests"][0]
    assert not set(scaled["digests"][1:]) & set(whole["digests"][1:])


def test_a_step_that_takes_more_groups_does_not_count_one_whose_tokens_are_all_past_the_bound(
    run: Callable[..., PlayedRun],
) -> None:
    class Stale(Players):
        def made(self, spec: RolloutSpec) -> Rollout:
            """Every other group was sampled by the first version."""
            is_stale = int(spec.group_id[1:]) % 2
            return super().made(replace(spec, min_step=0) if is_stale else spec)

    settings = ("experience.max_lag=0", "experience.straggler=mask", f"experience.signal_groups={GROUPS}")
    assert played(run("r", *settings, players=Stale))["groups"] == [GROUPS, 2 * GROUPS, 2 * GROUPS]
