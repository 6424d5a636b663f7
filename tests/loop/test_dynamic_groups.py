"""Groups of two stages: the real conductor, ledger and learner, rollouts made up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from msgspec.structs import replace
from tests.judge_server import ScriptedJudge, judge_in_a_thread, work
from tests.played_run import PlayedRun, Players, cut_off

from etude.errors import DeadlineExceeded
from etude.experience import SCHEMES, Credit, Ledger
from etude.experience.recomputing import recompute, recorded_composition
from etude.experience.trace_reader import read_step, read_trace
from etude.experience.traces import trace_path
from etude.loop import group_scoring
from etude.loop.replay import replay_step
from etude.loop.rollout_result import RolloutResult
from etude.records import Graded, Rollout, RolloutSpec
from etude.records.reward import Measured, Score
from etude.records.summary import RolloutSummary
from etude.rewards.config import TermConfig
from etude.stores import DirectoryStore
from etude.telemetry import read_events
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)

GROUPS, FIRST, SIZE, STEPS = 4, 2, 4, 3


class Some(Players):
    """Of every four groups, the siblings of the first one fail and succeed in turn; all others succeed."""

    async def grade(self, rollout: RolloutResult) -> Graded:
        graded = await super().grade(rollout)
        return graded if int(rollout.summary.group_id[1:]) % 4 == 0 else Graded.of(1.0, trust=graded.trust, reason="")


class Stuck(Some):
    """The first later sibling of the second step's first group never ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Stuck.reached = asyncio.Event()

    reached: asyncio.Event

    async def rollout(self, spec: RolloutSpec, *, kept: bool = True) -> RolloutResult:
        if spec.rollout_id == f"g{GROUPS:06d}.{FIRST}":
            self.reached.set()
            await asyncio.sleep(3600)
        return await super().rollout(spec, kept=kept)


class OneThread:
    """A task source that only this thread may ask: a plug-in need not be safe for several."""

    def __init__(self, source: Any) -> None:
        self._source, self._thread = source, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        assert threading.get_ident() == self._thread, f"another thread asks for {name}"
        return getattr(self._source, name)


@pytest.fixture
def run(game: Any, tmp_path: Path) -> Callable[..., PlayedRun]:
    def make(name: str, *sets: str) -> PlayedRun:
        sizes = (
            f"rl.steps={STEPS}",
            f"experience.groups_per_step={GROUPS}",
            f"experience.group_size={SIZE}",
            f"experience.min_group_size={FIRST}",
        )
        made = PlayedRun.create(tmp_path / name, game, "rl.checkpoint_every=50", "evals.every=50", *sizes, *sets)
        return PlayedRun(made.folder, made.config, players=Some)

    return make


def played(this: PlayedRun) -> dict[str, Any]:
    """Train to the end: the versions' digests, the lags, and what the ledger has."""

    async def main() -> None:
        async with this.conductor() as conductor:
            conductor.admission.source = OneThread(conductor.source)
            await conductor.reinforce()

    asyncio.run(main())
    this.assert_sound(STEPS)
    assert [one.equal for one in replay_step(this.folder, STEPS).steps] == [True] * STEPS
    ledger = Ledger.open_readonly(this.folder / "ledger.sqlite")
    states, slots = ledger.states(), ledger.slots()
    ledger.close()
    events = read_events(this.folder / "events")
    return {
        "digests": [one.version.digest for one in lineage(DirectoryStore(this.folder / "weights"), "policy")],
        "lag": {int(lag) for event in events if event["kind"] == "rl.step" for lag in event["token_lag"]},
        "states": states,
        "slots": slots,
    }


def test_only_undecided_groups_go_on_and_a_synchronous_run_repeats_to_the_byte(run: Callable[..., PlayedRun]) -> None:
    first, second = (played(run(name, "experience.max_lag=0")) for name in "ab")
    agreed = STEPS * (GROUPS - 1)
    assert first["states"] == {"trained": STEPS * SIZE, "no-signal": agreed * FIRST, "cancelled": agreed * FIRST}
    assert first["lag"] == {0}
    assert first["slots"][0] == 0, "every state has given its slot back"
    assert first == second


def test_beside_training_a_second_stage_keeps_the_bound_of_lag(run: Callable[..., PlayedRun]) -> None:
    found = played(run("r", "experience.max_lag=2"))
    assert found["lag"] <= {0, 1, 2}
    assert found["states"]["trained"] == STEPS * SIZE


def test_credit_by_stage_is_in_the_batch_and_computed_again_to_the_bit(run: Callable[..., PlayedRun]) -> None:
    made = run("r", "experience.max_lag=0", "experience.credit=rloo")
    played(made)
    for step in range(1, STEPS + 1):
        path = trace_path(made.folder / "traces", step)
        given = {s.rollout_id[-1]: float(s.advantages[0]) for s in read_trace(path).batch.samples}
        later = [float(np.float32(value)) for value in (-2 / 3, 2 / 3)]
        assert list(given.values()) == [-1.0, 1.0, *later], "the first two among themselves, then against all others"
        recorded = read_step(path)
        how = recorded_composition(recorded.rewards, made.config.composition)
        assert recompute(recorded, how, SCHEMES[Credit.RLOO], max_lag=0).equal


def test_a_run_that_is_cut_off_between_the_stages_goes_on_to_the_same_weights(run: Callable[..., PlayedRun]) -> None:
    whole = played(run("whole", "experience.max_lag=0"))
    made = run("cut", "experience.max_lag=0")

    asyncio.run(cut_off(PlayedRun(made.folder, made.config, players=Stuck), lambda: Stuck.reached))
    again = played(made)
    assert again["digests"][-1] == whole["digests"][-1]
    assert again["states"] == whole["states"]


def test_a_first_stage_of_one_rollout_is_refused(run: Callable[..., PlayedRun]) -> None:
    for size in (1, SIZE + 1):
        with pytest.raises(Exception, match=f"min_group_size = {size} is neither 0 nor from 2 to group_size = {SIZE}"):
            run(f"r{size}", f"experience.min_group_size={size}")


class Alike(Players):
    """All grades are 0, and the files of the siblings of every fourth group, from the first one on, differ."""

    away: ClassVar[asyncio.Event]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        Alike.away = asyncio.Event()

    def made(self, spec: RolloutSpec) -> Rollout:
        differs = int(spec.group_id[1:]) % GROUPS == 0
        text = work(1 + int(spec.rollout_id[-1]) % 2 if differs else 3, more=spec.rollout_id)
        return replace(super().made(spec), exports={"a.md": text.encode()})

    async def grade(self, rollout: RolloutResult) -> Graded:
        graded = await super().grade(rollout)
        return Graded.of(0.0, trust=graded.trust, reason="")

    async def measure(
        self, terms: Sequence[TermConfig], summaries: Sequence[RolloutSummary], graded: Sequence[Graded]
    ) -> list[list[Measured]]:
        found = await super().measure(terms, summaries, graded)
        if any(new.retry for some in found for new in some):
            self.away.set()
        return found


class Facts:
    """The number of facts in the files of a rollout. With `late`, it is unknown for the second group of a run until all
    rollouts of the first one were measured."""

    version = "1"
    seen: ClassVar[set[str]] = set()

    def __init__(self, late: str = "no") -> None:
        self.late = late

    async def score(self, rollout: Rollout, graded: Graded) -> Score:
        if rollout.group_id == "g000001" and (self.late == "always" or (self.late == "yes" and len(self.seen) < SIZE)):
            return Score(value=None, evidence="it is away", retry=True)
        self.seen |= {rollout.rollout_id} if rollout.group_id == "g000000" else set()
        return Score(value=float(rollout.exports["a.md"].count(b"fact")))


def facts(late: str = "no") -> str:
    kind = f'{{kind = "tests.loop.test_dynamic_groups:Facts", late = "{late}"}}'
    return f'rewards.terms=[{{name = "facts", weight = 0.5, missing = "wait", kind = {kind}}}]'


@pytest.fixture
def judge() -> Iterator[ScriptedJudge]:
    yield from judge_in_a_thread()


def judged(folder: Path, judge: ScriptedJudge, cache: str) -> str:
    (folder / "facts.toml").write_text('[[aspects]]\nname = "facts"\nquestion = "How many facts?"\n')
    kind = f"kind='judge', rubric='{folder}/facts.toml', url='{judge.url}/v1', model='m', evidence=['files']"
    own = f"{kind}, deadline_s=0.5, cache='{folder}/{cache}.sqlite'"
    return f"rewards.terms=[{{name='facts', missing='wait', kind={{{own}}}}}]"


def alike(run: PlayedRun) -> PlayedRun:
    return PlayedRun(run.folder, run.config, players=Alike)


TOGETHER = {
    "trained": STEPS * SIZE,
    "no-signal": STEPS * (GROUPS - 1) * FIRST,
    "cancelled": STEPS * (GROUPS - 1) * FIRST,
}


def test_terms_decide_which_groups_go_on_and_one_that_is_late_delays_its_own_group_alone(
    run: Callable[..., PlayedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    monkeypatch.setattr(group_scoring, "WAIT_S", 60.0)
    monkeypatch.setattr(Facts, "seen", set())
    known = played(alike(run("known", "experience.max_lag=0", facts())))
    assert known["states"] == TOGETHER, "grades alone would have cancelled all"
    Facts.seen.clear()
    assert played(alike(run("late", "experience.max_lag=0", facts("yes")))) == known


def test_a_group_whose_decision_waits_for_a_term_ends_the_run_at_its_deadline_by_name(
    run: Callable[..., PlayedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    monkeypatch.setattr(group_scoring, "WAIT_S", 0.2)
    with pytest.raises(DeadlineExceeded, match="reward term 'facts' of group g000001 is unknown"):
        played(alike(run("r", "experience.max_lag=0", facts("always"))))


def test_a_run_that_is_cut_off_while_a_judge_that_decides_is_away_goes_on_to_the_same_weights(
    run: Callable[..., PlayedRun], judge: ScriptedJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_scoring, "FIRST_S", 0.01)
    whole = played(alike(run("whole", "experience.max_lag=0", judged(tmp_path, judge, "whole"))))
    assert whole["states"] == TOGETHER
    num_asked = len(judge.bodies)
    assert num_asked == STEPS * (SIZE + (GROUPS - 1) * FIRST), "each rollout that ran is judged once"
    made = run("cut", "experience.max_lag=0", judged(tmp_path, judge, "cut"))
    judge.fault = lambda number: (503, 0) if number > num_asked else None
    asyncio.run(cut_off(alike(made), lambda: Alike.away))
    with contextlib.closing(Ledger.open_readonly(made.folder / "ledger.sqlite")) as ledger:
        assert ledger.states()["held"] > 0, "no decision without a verdict"
    judge.fault = lambda _: None
    again = played(alike(made))
    assert again["digests"][-1] == whole["digests"][-1]
    assert again["states"] == whole["states"]
