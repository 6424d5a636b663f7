"""The ledger under any sequence of moves, restarts and lost lineages, beside a model that keeps plain dicts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from etude.errors import LedgerError
from etude.experience import Ledger, RolloutFiles, audit, plan_batch, record_batch
from etude.experience.transitions import HOLDING, MOVES, TERMINAL, State
from etude.records import Graded, Invalid, Rollout, RolloutSpec, Task, Trace, Version
from etude.records.rollout import Boundary, Ending
from etude.records.summary import summary_of
from etude.records.task import Split, Trust

CAPACITY, SIBLINGS = 8, 2
TASK = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=())
ALLOWED = {(move.origin, move.to) for move in MOVES}


def spec(rollout_id: str) -> RolloutSpec:
    group_id = rollout_id.partition(".")[0]
    return RolloutSpec(rollout_id=rollout_id, group_id=group_id, attempt=0, task=TASK, seed=0, temperature=1.0)


def rollout(rollout_id: str, attempt: int) -> Rollout:
    return Rollout(
        rollout_id=rollout_id,
        group_id=rollout_id.partition(".")[0],
        attempt=attempt,
        task=TASK,
        trace=Trace(()),
        ending=Ending.SUBMITTED,
        exports={},
        wall_s=0.0,
        tool_s=0.0,
    )


OUTCOMES = st.one_of(
    st.sampled_from([0.0, 1.0]).map(lambda r: Graded(reward=r, terms={}, trust=Trust.DATA, reason="judged")),
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

    def pick(self, data: st.DataObject, *states: State) -> str | None:
        names = sorted(i for i, s in self.state.items() if s in states)
        return data.draw(st.sampled_from(names)) if names else None

    @rule()
    def admit_a_group(self) -> None:
        ids = [f"g{self.groups:06d}.{i}" for i in range(SIBLINGS)]
        room = self.ledger.slots()[1] - self.ledger.slots()[0] >= SIBLINGS

        def work() -> None:
            for i in ids:
                self.ledger.admit(spec(i))
            self.ledger.move_cursor("train", self.groups + 1)

        if room:
            self.ledger.transaction(work)
            self.state |= dict.fromkeys(ids, State.ADMITTED)
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

    @rule(data=st.data(), outcome=OUTCOMES, late=st.booleans())
    def finish(self, data: st.DataObject, outcome: Graded | Invalid, late: bool) -> None:
        name = self.pick(data, State.RUNNING)
        if name is None:
            return
        attempt = self.ledger.row(name).attempt
        played = rollout(name, attempt - late)
        stored = self.files.write(played, durable=False)
        assert self.ledger.finish(summary_of(played, stored), outcome) is not late
        if not late:
            self.state[name] = State.GRADED if isinstance(outcome, Graded) else State.INVALID

    @rule(data=st.data(), to=st.sampled_from(State))
    def try_any_move(self, data: st.DataObject, to: State) -> None:
        name = self.pick(data, *(set(State) - {State.BATCHED, State.TRAINED, State.NO_SIGNAL}))
        # What only finish, batch, commit and reconcile may do is theirs; the table alone decides about the rest.
        if name is None or to in (State.GRADED, State.BATCHED, State.INVALID, State.QUARANTINED):
            return
        origin = self.state[name]
        free = self.ledger.slots()[1] > self.ledger.slots()[0]
        if (origin, to) in ALLOWED and (free or origin in HOLDING or to not in HOLDING):
            self.ledger.move(name, to, reason="because")
            self.state[name] = to
        else:
            with pytest.raises(LedgerError):
                self.ledger.move(name, to, reason="because")

    @precondition(lambda self: self.open_step is None)
    @rule()
    def batch(self) -> None:
        ready = sorted(self.ledger.ready_groups(self.ledger.open_groups()))[:2]
        groups = [self.ledger.group(g) for g in ready]
        if not groups:
            return
        step = len(self.lineage) + 1
        plan = plan_batch(groups, batch_id=f"b{step:06d}", step=step, max_lag=9)
        _, made = record_batch(self.folder / "traces", plan, self.files.read)
        self.ledger.batch(made)
        self.open_step, self.published = list(made.rollout_ids), False
        for i in made.rollout_ids:
            if self.state[i] is State.GRADED:
                self.state[i] = State.BATCHED

    @precondition(lambda self: self.open_step is not None)
    @rule()
    def publish(self) -> None:
        if not self.published:
            assert self.open_step is not None
            self.lineage.append(self.open_step)
            self.published = True

    @precondition(lambda self: self.published)
    @rule()
    def commit(self) -> None:
        assert self.open_step is not None
        self.ledger.commit(self.open_step, Version(len(self.lineage), "0" * 8, "0" * 64))
        self.settle(self.open_step)
        self.open_step, self.published = None, False

    def settle(self, ids: list[str]) -> None:
        for i in ids:
            if self.state[i] is State.BATCHED:
                self.state[i] = State.NO_SIGNAL  # an empty trace has no sample

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The conductor dies; the learner goes on from the head or from an older checkpoint."""
        self.ledger.close()
        self.ledger = Ledger(self.folder / "ledger.sqlite", capacity=CAPACITY)
        self.lineage = self.lineage[: data.draw(st.integers(max(0, len(self.lineage) - 2), len(self.lineage)))]
        self.ledger.reconcile([*enumerate(self.lineage, 1)])
        kept = {i for step in self.lineage for i in step}
        self.settle(sorted(kept))
        for i, state in self.state.items():
            if state is State.RUNNING:
                self.state[i] = State.REQUEUED
            elif state in (State.BATCHED, State.NO_SIGNAL) and i not in kept:
                self.state[i] = State.GRADED
        self.open_step, self.published = None, False
        self.files.keep_only(self.files.names(), self.ledger.wanted_files())
        report = audit(self.ledger, self.folder / "traces", [*enumerate(self.lineage, 1)], files=self.files)
        report.require_sound()

    @invariant()
    def the_ledger_agrees_with_the_model(self) -> None:
        rows = {row.rollout_id: row for row in self.ledger.rows()}
        assert {i: row.state for i, row in rows.items()} == self.state
        assert all(row.reason for row in rows.values() if row.state in TERMINAL)
        holding = sum(state in HOLDING for state in self.state.values())
        held, count = self.ledger.slots()
        assert (held, count) == (holding, max(CAPACITY, holding))
        assert self.ledger.states() == {s: n for s in State if (n := list(self.state.values()).count(s))}

    def teardown(self) -> None:
        self.ledger.close()
        self.scratch.cleanup()


LedgerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase
