"""The ledger under any sequence of moves, restarts and lost lineages, beside a model that keeps plain dicts.

Rollouts have tokens of the versions that were published when they ran, so steps have samples, and each trained token
has a lag. The model has its own list of the states that need a slot, and counts the distance between versions itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etude.errors import LedgerError
from etude.experience import Ledger, RolloutFiles, Straggler, audit, plan_batch, record_batch
from etude.experience.groups import Group
from etude.experience.transitions import MOVES, State
from etude.records import Completion, Graded, Invalid, Rollout, RolloutSpec, Sampling, Task, Trace, Version
from etude.records.completion import StopReason, VersionSpan
from etude.records.rollout import Boundary, Ending, Turn
from etude.records.summary import summary_of
from etude.records.task import Split, Trust

CAPACITY, SIBLINGS, MAX_LAG, PROMPT = 8, 2, 1, 2
NEED_A_SLOT = {State.HELD, State.ADMITTED, State.RUNNING, State.REQUEUED, State.GRADED, State.BATCHED}
ENDED = {State.TRAINED, State.NO_SIGNAL, State.INVALID, State.QUARANTINED, State.CANCELLED}
READY = {State.GRADED, State.INVALID, State.QUARANTINED, State.CANCELLED}
TASK = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=())
ALLOWED = {(move.origin, move.to) for move in MOVES}


def spec(rollout_id: str) -> RolloutSpec:
    group_id = rollout_id.partition(".")[0]
    return RolloutSpec(rollout_id=rollout_id, group_id=group_id, attempt=0, task=TASK, seed=0, temperature=1.0)


def trace(versions: list[Version], *, kept: bool) -> Trace:
    """One turn with a token of each version; `kept`: each but the first attends to keys of those before it."""
    spans = [VersionSpan(version, 1, kv_epoch=i if kept else 0) for i, version in enumerate(versions)]
    ids = np.arange(len(spans), dtype=np.int32)
    completion = Completion(
        request_id="r",
        token_ids=ids,
        logprobs=np.full(len(ids), -1.0, np.float32),
        routes=np.zeros((0, 0, 0), np.uint8),
        routes_start=len(ids),
        spans=tuple(spans),
        stop_reason=StopReason.STOP,
        engine="e",
    )
    prompt_ids, sampling = np.arange(PROMPT, dtype=np.int32), Sampling(max_tokens=len(ids), stop_token_ids=())
    return Trace((Turn(parent=None, prompt_ids=prompt_ids, completion=completion, sampling=sampling),))


def rollout(rollout_id: str, attempt: int, of: Trace) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id.partition(".")[0],
        attempt=attempt,
        task=TASK,
        trace=of,
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=0.0,
        tool_s=0.0,
    )


OUTCOMES = st.one_of(
    st.sampled_from([0.0, 1.0]).map(lambda r: Graded.of(r, trust=Trust.DATA, reason="judged")),
    st.sampled_from(Boundary).map(lambda b: Invalid(boundary=b, reason="it broke", evidence="errno 5")),
)


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = Path(self.scratch.name)
        self.files = RolloutFiles(self.folder / "rollouts")
        self.ledger = Ledger(self.folder / "ledger.sqlite", capacity=CAPACITY)
        self.state: dict[str, State] = {}
        self.lineage: list[list[str]] = []  # committed steps
        self.open_step: list[str] | None = None  # batched, not committed
        self.published = False  # the pointer moved, the ledger does not know yet
        self.groups = 0
        self.lives = 0  # restarts so far
        self.versions = [self.version(0)]  # of the lineage, by step
        self.played: dict[str, tuple[list[Version], bool]] = {}  # of each rollout that ended, its `trace`
        self.grade: dict[str, float] = {}  # of each rollout that was graded
        self.has_sample: dict[str, bool] = {}  # of each rollout that a batch took
        self.ancestors: dict[Version, int] = {}  # of versions that were lost: the last step they share with the lineage
        self.ledger.reconcile([], head=self.versions[0])

    def version(self, step: int) -> Version:
        """A version of this life, whose bytes no other has."""
        return Version(step, f"{self.lives:08x}", f"{1 + self.lives * 1000 + step:064x}")

    def lag(self, version: Version, step: int) -> int:
        """Optimiser steps between a version and the lineage's weights at a step, back and forth."""
        ancestor = self.ancestors.get(version, version.step)
        return (version.step - ancestor) + (step - ancestor)

    def lags(self, name: str, step: int) -> list[int]:
        """Of each token of a rollout: the lag of the oldest version behind it."""
        versions, kept = self.played[name]
        own = [self.lag(version, step) for version in versions]
        return [max(own[: i + 1]) for i in range(len(own))] if kept else own

    def fresh(self, name: str, step: int) -> list[int]:
        """Which tokens of a rollout may be trained at a step."""
        return [i for i, lag in enumerate(self.lags(name, step)) if lag <= MAX_LAG]

    def is_lost(self, name: str) -> bool:
        return any(self.ancestors.get(version, version.step) != version.step for version in self.played[name][0])

    def weighed(self, group: Group, *, lost: bool = False) -> list[str]:
        """Members with an advantage; `lost`: those of a lost lineage, too."""
        uneven = len({graded.grade for _, graded in group.valid}) > 1
        return [one.rollout_id for one, _ in group.valid if uneven and (lost or not self.is_lost(one.rollout_id))]

    def pick(self, data: st.DataObject, *states: State) -> str | None:
        names = sorted(i for i, s in self.state.items() if s in states)
        return data.draw(st.sampled_from(names)) if names else None

    @rule(later=st.integers(0, 2))
    def admit_a_group(self, later: int = 0) -> None:
        """`later`: how many siblings are held until the first ones have ended."""
        ids = [f"g{self.groups:06d}.{i}" for i in range(SIBLINGS + later)]
        room = self.ledger.slots()[1] - self.ledger.slots()[0] >= len(ids)

        def work() -> None:
            for i in ids:
                self.ledger.admit(spec(i), held=ids[SIBLINGS:])
            self.ledger.move_cursor("train", self.groups + 1)

        if room:
            self.ledger.transaction(work)
            self.state |= dict.fromkeys(ids[:SIBLINGS], State.ADMITTED) | dict.fromkeys(ids[SIBLINGS:], State.HELD)
            self.groups += 1
        else:
            with pytest.raises(LedgerError, match="no slot is free"):
                self.ledger.transaction(work)
        assert self.ledger.cursor("train") == self.groups

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        waiting = self.ledger.waiting()
        assert set(waiting) == {i for i, s in self.state.items() if s in (State.ADMITTED, State.REQUEUED)}
        if waiting:
            self.ledger.move(waiting[0], "running")
            self.state[waiting[0]] = State.RUNNING

    @rule(data=st.data(), outcome=OUTCOMES, late=st.booleans(), kept=st.booleans())
    def finish(self, data: st.DataObject, outcome: Graded | Invalid, late: bool, kept: bool) -> None:
        name = self.pick(data, State.RUNNING)
        if name is not None:
            self.end(name, data, outcome, late=late, kept=kept)

    def end(self, name: str, data: st.DataObject, outcome: Graded | Invalid, *, late: bool, kept: bool) -> None:
        attempt = self.ledger.row(name).attempt
        behind = data.draw(st.lists(st.integers(0, len(self.versions) - 1), min_size=1, max_size=3).map(sorted))
        versions = [self.versions[step] for step in behind]
        played = rollout(name, attempt - late, trace(versions, kept=kept))
        stored = self.files.write(played, durable=False)
        assert self.ledger.finish(summary_of(played, stored), outcome) is not late
        if not late:
            self.played[name] = versions, kept
            self.state[name] = State.GRADED if isinstance(outcome, Graded) else State.INVALID
            if isinstance(outcome, Graded):
                self.grade[name] = outcome.grade
            self.release(name)

    def release(self, name: str) -> None:
        """What becomes of held siblings when a rollout has ended."""
        members = [i for i in self.state if i.partition(".")[0] == name.partition(".")[0]]
        first = [i for i in members if self.state[i] is not State.HELD]
        if all(self.state[i] in READY for i in first):
            grades = [self.grade[i] for i in first if self.state[i] is State.GRADED]
            agree = len(grades) > 1 and len(set(grades)) == 1
            self.state |= dict.fromkeys(set(members) - set(first), State.CANCELLED if agree else State.ADMITTED)

    @rule(data=st.data(), kept=st.booleans(), rewards=st.permutations([0.0, 1.0]))
    def play_a_group(self, data: st.DataObject, kept: bool, rewards: list[float]) -> None:
        """What mostly happens to a group: every sibling is graded, and they differ."""
        self.admit_a_group()
        while self.ledger.waiting():
            self.start(data)
        running = sorted(i for i, state in self.state.items() if state is State.RUNNING)
        for i, name in enumerate(running):
            outcome = Graded.of(rewards[i % SIBLINGS], trust=Trust.DATA, reason="judged")
            self.end(name, data, outcome, late=False, kept=kept)

    @precondition(lambda self: self.open_step is None)
    @rule(straggler=st.sampled_from(Straggler))
    def train_a_step(self, straggler: Straggler) -> None:
        """What mostly happens to a step."""
        self.batch(straggler)
        if self.open_step is not None:
            self.publish()
            self.commit()

    @rule(data=st.data())
    def lose_a_worker_for_good(self, data: st.DataObject) -> None:
        name = self.pick(data, State.RUNNING, State.REQUEUED)
        if name is not None:
            self.ledger.fail(name, Invalid(boundary=Boundary.WORKER, reason="its worker died", evidence="twice"))
            self.state[name] = State.INVALID
            self.release(name)

    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        name = self.pick(data, State.GRADED, State.REQUEUED)
        if name is not None:
            self.ledger.move(name, "quarantined", reason="its record cannot be believed")
            self.state[name] = State.QUARANTINED
            self.release(name)

    @rule(data=st.data(), to=st.sampled_from(State))
    def try_any_move(self, data: st.DataObject, to: State) -> None:
        name = self.pick(data, *(set(State) - {State.BATCHED, State.TRAINED, State.NO_SIGNAL}))
        # What only finish, batch, commit and reconcile may do is theirs; the table alone decides about the rest.
        if name is None or to in (State.GRADED, State.BATCHED, State.INVALID, State.QUARANTINED):
            return
        origin = self.state[name]
        free = self.ledger.slots()[1] > self.ledger.slots()[0]
        if (origin, to) in ALLOWED and (free or origin in NEED_A_SLOT or to not in NEED_A_SLOT):
            self.ledger.move(name, to, reason="because")
            self.state[name] = to
            self.release(name)
        else:
            with pytest.raises(LedgerError):
                self.ledger.move(name, to, reason="because")

    @precondition(lambda self: self.open_step is None)
    @rule(straggler=st.sampled_from(Straggler))
    def batch(self, straggler: Straggler) -> None:
        ready = sorted(self.ledger.ready_groups(self.ledger.open_groups()))[:2]
        groups = [self.ledger.group(g) for g in ready]
        if not groups:
            return
        step = len(self.lineage) + 1
        stale = any(max(self.lags(name, step - 1)) > MAX_LAG for group in groups for name in self.weighed(group))
        plan = plan_batch(groups, batch_id=f"b{step:06d}", step=step, max_lag=MAX_LAG, straggler=straggler)
        if straggler is Straggler.WAIT and stale:
            with pytest.raises(LedgerError, match=f"would be trained at step {step - 1}"):
                record_batch(self.folder / "traces", plan, self.files.read)
            return
        whole, made = record_batch(self.folder / "traces", plan, self.files.read)
        trained = {sample.rollout_id: (np.flatnonzero(sample.path.mask) - PROMPT).tolist() for sample in whole.samples}
        fresh = {name: self.fresh(name, step - 1) for group in groups for name in self.weighed(group, lost=True)}
        assert trained == {name: tokens for name, tokens in fresh.items() if tokens}
        self.ledger.batch(made)
        self.open_step, self.published = list(made.rollout_ids), False
        self.has_sample |= {name: name in trained for name in made.rollout_ids}
        for i in made.rollout_ids:
            if self.state[i] is State.GRADED:
                self.state[i] = State.BATCHED

    @precondition(lambda self: self.open_step is not None)
    @rule()
    def publish(self) -> None:
        if not self.published:
            assert self.open_step is not None
            self.lineage.append(self.open_step)
            self.versions.append(self.version(len(self.lineage)))
            self.published = True

    @precondition(lambda self: self.published)
    @rule()
    def commit(self) -> None:
        assert self.open_step is not None
        self.ledger.commit(self.open_step, self.versions[-1])
        self.settle(self.open_step)
        self.open_step, self.published = None, False

    def settle(self, ids: list[str]) -> None:
        for i in ids:
            if self.state[i] is State.BATCHED:
                self.state[i] = State.TRAINED if self.has_sample[i] else State.NO_SIGNAL

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The conductor dies; the learner goes on from the head or from an older checkpoint."""
        self.begin_again(data.draw(st.integers(max(0, len(self.lineage) - 2), len(self.lineage))))

    @rule(data=st.data(), kept=st.booleans(), rewards=st.permutations([0.0, 1.0]), straggler=st.sampled_from(Straggler))
    def lose_two_steps(self, data: st.DataObject, kept: bool, rewards: list[float], straggler: Straggler) -> None:
        """What was graded before is trained after the learner went back."""
        self.play_a_group(data, kept, rewards)
        self.begin_again(max(0, len(self.lineage) - 2))
        self.train_a_step(straggler)

    def begin_again(self, last: int) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite", capacity=CAPACITY)
        self.ancestors |= {version: last for version in self.versions[last:]}
        self.ancestors = {version: min(last, ancestor) for version, ancestor in self.ancestors.items()}
        self.lives += 1
        self.lineage, self.versions = self.lineage[:last], [*self.versions[:last], self.version(last)]
        self.ledger.reconcile([*enumerate(self.lineage, 1)], head=self.versions[-1])
        kept = {i for step in self.lineage for i in step}
        self.settle(sorted(kept))
        for i, state in self.state.items():
            if state is State.RUNNING:
                self.state[i] = State.REQUEUED
            elif state in (State.BATCHED, State.TRAINED, State.NO_SIGNAL) and i not in kept:
                self.state[i] = State.GRADED
        self.open_step, self.published = None, False
        self.files.keep_only(self.files.names(), self.ledger.wanted_files())
        report = audit(self.ledger, self.folder / "traces", [*enumerate(self.lineage, 1)], files=self.files)
        report.require_sound()

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        rows = {row.rollout_id: row for row in self.ledger.rows()}
        assert {i: row.state for i, row in rows.items()} == self.state
        assert all(row.reason for row in rows.values() if row.state in ENDED)
        holding = {i for i, state in self.state.items() if state in NEED_A_SLOT}
        assert set(self.ledger.slot_holders()) == holding
        assert self.ledger.slots() == (len(holding), max(CAPACITY, len(holding)))
        assert self.ledger.states() == {s: n for s in State if (n := list(self.state.values()).count(s))}

    def teardown(self) -> None:
        self.ledger.close()
        self.scratch.cleanup()


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase
