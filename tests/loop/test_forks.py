"""Groups whose rollouts have several continuations: the real conductor, ledger and learner, rollouts made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.played_run import PlayedRun, Players, cut_off

from etude.experience import SCHEMES, Credit, Ledger
from etude.experience.recomputing import recompute, recorded_composition
from etude.experience.trace_reader import read_step, read_trace
from etude.experience.traces import trace_path
from etude.loop.replay import replay_step
from etude.loop.rollout_result import RolloutResult, store_rollout
from etude.records import Graded, Rollout, RolloutSpec, Trace
from etude.records.rollout import Fork, TurnKind
from etude.records.task import Trust
from etude.stores import DirectoryStore
from etude.telemetry import read_events
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)

GROUPS, SIZE, FORKS, STEPS = 2, 2, 3, 2


class Forking(Players):
    """Every second rollout of a group has continuations: a summary, then another turn. A reward is the square of the
    last digit of the id."""

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        if int(spec.rollout_id.rpartition(".")[2]) % 2:
            return await super().rollout(spec, kept=kept)
        first, *others = [
            store_rollout(self._continued(spec, number), self.files, kept=kept).with_task(spec.task)
            for number in range(spec.forks)
        ]
        return msgspec.structs.replace(first, continuations=tuple(others))

    def _continued(self, spec: RolloutSpec, number: int) -> Rollout:
        (shared,) = self.made(spec).trace.turns
        own = self.made(msgspec.structs.replace(spec.continuation(number), seed=spec.continuation(number).seed + 1))
        fork = Fork(origin=spec.rollout_id, num_turns=1, num_sampled=self.sampled)
        summary = msgspec.structs.replace(shared, kind=TurnKind.SUMMARY)
        return msgspec.structs.replace(own, trace=Trace((summary, *own.trace.turns)), fork=fork)

    async def grade(self, rollout: RolloutResult) -> Graded:
        return Graded.of(float(rollout.summary.rollout_id[-1]) ** 2, trust=Trust.DATA, reason="")


class Stuck(Forking):
    """A rollout of the second step never ends."""

    reached: asyncio.Event

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Stuck.reached = asyncio.Event()

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        if spec.rollout_id == f"g{GROUPS:06d}.0":
            self.reached.set()
            await asyncio.sleep(3600)
        return await super().rollout(spec, kept=kept)


def run(game: Any, path: Path) -> PlayedRun:
    sizes = (
        f"rl.steps={STEPS}", f"experience.groups_per_step={GROUPS}", f"experience.group_size={SIZE}",
        "experience.max_lag=0", "experience.credit=fork", "harness.summary_tokens=16", f"harness.forks={FORKS}",
    )  # fmt: skip
    made = PlayedRun.create(path, game, "rl.checkpoint_every=50", "evals.every=50", *sizes)
    return PlayedRun(made.folder, made.config, players=Forking)


def played(this: PlayedRun) -> tuple[list[str], dict[str, int]]:
    """Train to the end. Returns the digests of the versions, and the states of the rollouts."""

    async def main() -> None:
        async with this.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    this.assert_sound(STEPS)
    ledger = Ledger.open_readonly(this.folder / "ledger.sqlite")
    states, slots = ledger.states(), ledger.slots()
    ledger.close()
    assert slots == (0, GROUPS * SIZE * FORKS)
    return [one.version.digest for one in lineage(DirectoryStore(this.folder / "weights"), "policy")], states


def test_a_run_with_continuations_trains_shared_turns_once_and_goes_on_to_the_same_weights(
    game: Any, tmp_path: Path
) -> None:
    whole, made = run(game, tmp_path / "whole"), run(game, tmp_path / "cut")
    digests, states = played(whole)
    assert states == {"trained": STEPS * GROUPS * (SIZE - 1 + FORKS)}
    for step in range(1, STEPS + 1):
        path = trace_path(whole.folder / "traces", step)
        batch, recorded = read_trace(path).batch, read_step(path)
        group = [sample for sample in batch.samples if sample.rollout_id.startswith(f"g{GROUPS * (step - 1):06d}")]
        given = [(sample.rollout_id[8:], float(one)) for sample in group for one in set(sample.advantages)]
        # V = (0 + 1 + 4) / 3, and the sibling's reward is 1; the means of the other continuations are 2.5, 2 and 0.5
        value = 5 / 3
        later = [("0", -2.5 / 3), ("0.1", -1 / 3), ("0.2", 3.5 / 3)]
        assert given == [(i, pytest.approx(one)) for i, one in [("0", value - 1), *later, ("1", 1 - value)]]
        sampled = Forking.sampled
        assert batch.num_loss_tokens == GROUPS * sampled * (SIZE + FORKS), "shared turns count once"
        how = recorded_composition(recorded.rewards, whole.config.composition)
        assert recompute(recorded, how, SCHEMES[Credit.FORK], max_lag=0).equal
    assert [one.equal for one in replay_step(whole.folder, STEPS).steps] == [True] * STEPS
    steps = [event for event in read_events(whole.folder / "events") if event["kind"] == "rl.step"]
    assert [event["continuations"] for event in steps] == [GROUPS * (FORKS - 1)] * STEPS
    assert [event["reward_mean"] for event in steps] == [0.5] * STEPS, "one continuation counts for the mean"

    asyncio.run(cut_off(PlayedRun(made.folder, made.config, players=Stuck), lambda: Stuck.reached))
    assert played(made) == (digests, states)
