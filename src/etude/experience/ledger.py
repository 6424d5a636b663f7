"""The ledger: every rollout's state, durable, and what it produced. The conductor is its only writer.

It lives in an SQLite file of the run folder, or in a schema of a PostgreSQL server: the statements are the same.
A finished rollout and its transition are one transaction, so a kill at any moment leaves both or neither. "Trained"
means *in the lineage of the current weights*: after a restart `reconcile` is told the lineage and mends the rest.
Slots are rows of their own (double entry): a rollout in a holding state has exactly one, checked at every commit.
See `docs/formats/ledger.md`. Knows nothing of how rollouts are run, of weights, or of what a reward means.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from etude.errors import LedgerError
from etude.experience.database import open_database
from etude.experience.groups import Finished
from etude.experience.lineage import Lineage, by_step
from etude.experience.looking import FINISHED, SPEC, Looking
from etude.experience.rows import Row
from etude.experience.transitions import HOLDING, SETTLED, State, check
from etude.records.completion import Version
from etude.records.rollout import Graded, Invalid, Outcome, Rollout, RolloutSpec
from etude.records.sample import Batch
from etude.records.wire import pack

F = TypeVar("F", bound=Callable[..., Any])

_LINEAGE = frozenset({State.BATCHED, State.TRAINED, State.NO_SIGNAL})
_HOLD = ", ".join(f"'{state}'" for state in sorted(HOLDING))
_SLOTS = f"SELECT (SELECT count(*) FROM rollouts WHERE state IN ({_HOLD})), count(rollout_id), count(*) FROM slots"


@dataclass(frozen=True)
class Reconciled:
    """What a restart had to mend, in rollouts."""

    trained: int  # batched, and found in the lineage
    freed: int  # batched or trained, not in the lineage: graded again
    requeued: int  # were running


def _atomic(method: F) -> F:
    """All of a method's changes, or none; part of the transaction that it is called in, if there is one."""

    @functools.wraps(method)
    def whole(ledger: Ledger, *args: Any, **named: Any) -> Any:
        return ledger._db.transact(lambda: method(ledger, *args, **named))

    return cast("F", whole)


class Ledger(Looking):
    """An `ExperienceStore` in one SQLite file, or in one schema of a PostgreSQL server.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(Path(folder) / "ledger.sqlite", capacity=8)
    ...     ledger.states(), ledger.slots()
    ...     ledger.close()
    ({}, (0, 8))
    """

    def __init__(self, place: Path | str, *, capacity: int, said: Callable[[str], None] = lambda _: None) -> None:
        """Open or create, at a path or at `postgresql://host/database#run_id`. `capacity` is the number of slots;
        reopening with another one is a `LedgerError`, as is a place that somebody else writes. `said` is told of a
        server that was waited for."""
        self._capacity = capacity
        self._db = open_database(place, check=self._check_slots, said=said)
        found = self.recall("capacity")
        if found is None:
            self._create_slots()
        elif found != capacity:
            self.close()
            raise LedgerError(
                f"{place} has {found} slots", f"asked for {capacity}", hint="resume a run with the config it began with"
            )

    @_atomic
    def _create_slots(self) -> None:
        self.remember("capacity", self._capacity)
        self._db.each("INSERT INTO slots VALUES (?, NULL)", [(slot,) for slot in range(self._capacity)])

    @classmethod
    def reading(cls, place: Path | str) -> Ledger:
        """Open to read only, beside a writer. Raises `NoLedger` when there is none."""
        ledger = cls.__new__(cls)
        ledger._db = open_database(place, readonly=True, said=lambda _: None)
        ledger._capacity = int(ledger.recall("capacity") or 0)
        return ledger

    def prove(self) -> None:
        """Look at every page once, a second for some hundred MB. Raises `LedgerError` where the file is damaged."""
        self._db.prove()

    def close(self) -> None:
        self._db.close()

    # The seam: ExperienceStore

    @_atomic
    def move(self, rollout_id: str, to: str, *, reason: str = "", **facts: Any) -> None:
        """One transition. `LedgerError` when the table forbids it, or when a slot is needed and none is free."""
        self._move(self.row(rollout_id), State(to), reason, facts)

    @_atomic
    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Keep bytes under a rollout's name, durable with the transaction; the last put wins."""
        self.row(rollout_id)
        self._put(rollout_id, name, data)

    @_atomic
    def transaction(self, work: Callable[[], None]) -> None:
        """All of `work`'s changes, or none. May be nested. Where a server went away in between `work` is called again:
        it changes nothing but the ledger."""
        work()

    # The life of a rollout

    @_atomic
    def admit(self, spec: RolloutSpec) -> None:
        """A new rollout takes a slot. Its place in the order of admission is final."""
        if self._value("SELECT 1 FROM rollouts WHERE rollout_id = ?", spec.rollout_id):
            raise LedgerError(f"rollout {spec.rollout_id} was admitted before", hint="count groups on, never reuse")
        if not self._value("SELECT 1 FROM rollouts WHERE group_id = ? LIMIT 1", spec.group_id):
            self.remember("groups", self.num_groups() + 1)
        self._db.execute(
            "INSERT INTO rollouts (rollout_id, group_id, state, attempt) VALUES (?, ?, ?, ?)",
            *(spec.rollout_id, spec.group_id, State.ADMITTED, spec.attempt),
        )
        self._take_slot(spec.rollout_id, grow=False)
        self._log(spec.rollout_id, None, State.ADMITTED, spec.attempt, "", {})
        self._put(spec.rollout_id, SPEC, pack(spec))

    @_atomic
    def finish(self, rollout: Rollout, outcome: Outcome) -> bool:
        """Store what a worker returned and how it was judged. False: of an attempt that no longer counts; nothing
        is changed (the answer of a worker given up for dead, or a second delivery)."""
        row = self.row(rollout.rollout_id)
        if row.state is not State.RUNNING or row.attempt != rollout.attempt:
            return False
        self._end(row, Finished(rollout_id=row.rollout_id, outcome=outcome, rollout=rollout))
        return True

    @_atomic
    def fail(self, rollout_id: str, invalid: Invalid) -> None:
        """A running or requeued rollout becomes invalid and left nothing: its worker died once too often."""
        self._end(self.row(rollout_id), Finished(rollout_id=rollout_id, outcome=invalid))

    def _end(self, row: Row, finished: Finished) -> None:
        outcome = finished.outcome
        graded = isinstance(outcome, Graded)
        to = State.GRADED if graded else State.INVALID
        self._put(row.rollout_id, FINISHED, pack(finished))
        self._db.execute(
            "UPDATE rollouts SET reward = ?, boundary = ? WHERE rollout_id = ?",
            outcome.reward if isinstance(outcome, Graded) else None,
            outcome.boundary if isinstance(outcome, Invalid) else None,
            row.rollout_id,
        )
        self._move(row, to, outcome.reason or to)

    # Groups and batches

    def batch(self, batch: Batch) -> None:
        """The batch takes its groups: graded members become batched. On the disk when it returns, so that what a
        version's manifest lists is known here even after a power cut."""
        sampled = {sample.rollout_id for sample in batch.samples}

        def take() -> None:
            for rollout_id in batch.rollout_ids:
                self._take(self.row(rollout_id), batch)
                self._db.execute(
                    "UPDATE rollouts SET batch_id = ?, step = ?, has_sample = ? WHERE rollout_id = ?",
                    *(batch.batch_id, batch.step, int(rollout_id in sampled), rollout_id),
                )

        self._db.transact(take, sync=True)

    def _take(self, row: Row, batch: Batch) -> None:
        if row.batch_id is not None:
            raise LedgerError(
                f"rollout {row.rollout_id} is in batch {row.batch_id}",
                f"{batch.batch_id} wants it too",
                hint="a rollout is trained once: form batches from open_groups()",
            )
        if row.state is State.GRADED:
            self._move(row, State.BATCHED, facts={"batch_id": batch.batch_id, "step": batch.step})
        elif row.state not in SETTLED:
            raise LedgerError(
                f"batch {batch.batch_id} wants rollout {row.rollout_id}",
                f"which is {row.state}",
                hint="wait until its group is ready",
            )

    @_atomic
    def commit(self, rollout_ids: Collection[str], version: Version) -> None:
        """The version that learned from these is published: batched becomes trained, or no-signal without a sample."""
        for row in map(self.row, rollout_ids):
            if row.state is State.BATCHED:
                self._trained(row, f"in {version}")
        self._db.each("UPDATE rollouts SET version = ? WHERE rollout_id = ?", [(str(version), i) for i in rollout_ids])

    def _trained(self, row: Row, reason: str) -> None:
        self._move(row, State.TRAINED if row.has_sample else State.NO_SIGNAL, reason, {"step": row.step})

    @_atomic
    def reconcile(self, lineage: Lineage, *, believed: Callable[[], int] = lambda: 0) -> Reconciled:
        """Agree with the weights after a restart. `lineage` is what the manifests list of the lineage that the learner
        goes on from: it is read again where a server went away. What was trained only outside of it is free again; what
        was running runs again. `believed`, asked once the lineage was read: a step up to which the ledger itself stands
        in for manifests."""
        trained, freed, running = 0, 0, self.rows(states=[State.RUNNING])
        for row in running:
            self._move(row, State.REQUEUED, "the run was interrupted")
        for step, kept in by_step(lineage, self.steps(), believed=believed):
            for row in self.rows(step=step):
                if kept is None or row.rollout_id in kept:
                    if row.state is State.BATCHED:
                        self._trained(row, "found in the lineage")
                        trained += 1
                else:
                    freed += row.state in _LINEAGE
                    self._free(row)
        return Reconciled(trained=trained, freed=freed, requeued=len(running))

    def _free(self, row: Row) -> None:
        """The step that took this rollout is not in the lineage: its group is open again."""
        if row.step is not None and row.step <= int(self.recall("pruned") or 0):
            self.remember("pruned", row.step - 1)  # the steps from here on will be made again
        if row.state in _LINEAGE:
            self._move(row, State.REQUEUED, f"{row.batch_id} is not in the lineage")
            self._move(self.row(row.rollout_id), State.GRADED, "its stored outcome stands")
        self._db.execute(
            "UPDATE rollouts SET batch_id = NULL, step = NULL, has_sample = NULL, version = NULL WHERE rollout_id = ?",
            row.rollout_id,
        )

    @_atomic
    def prune(self, step: int) -> int:
        """Drop the blobs of rollouts consumed at or before a version step: call it with the oldest step that a
        restart can still go back to. Returns how many blobs went; their traces stay."""
        before, batched = int(self.recall("pruned") or 0), State.BATCHED
        spent = "SELECT rollout_id FROM rollouts WHERE step > ? AND step <= ? AND state != ?"
        gone = self._db.rows(f"DELETE FROM blobs WHERE rollout_id IN ({spent}) RETURNING 1", before, step, batched)
        left = self._value("SELECT min(step) FROM rollouts WHERE state = ? AND step <= ?", batched, step)
        self.remember("pruned", max(before, step if left is None else left - 1))
        return len(gone)

    # Notes that must move together with the rollouts

    def move_cursor(self, split: str, index: int) -> None:
        """Call it in the transaction that admits the task at `index - 1`."""
        self.remember(f"cursor.{split}", index)

    def remember(self, key: str, value: Any) -> None:
        """Keep a small JSON value."""
        sql = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._db.execute(sql, key, json.dumps(value))

    # Writing

    def _put(self, rollout_id: str, name: str, data: bytes) -> None:
        sql = "INSERT INTO blobs VALUES (?, ?, ?) ON CONFLICT (rollout_id, name) DO UPDATE SET data = excluded.data"
        self._db.execute(sql, rollout_id, name, data)

    def _move(self, row: Row, to: State, reason: str = "", facts: Mapping[str, Any] = MappingProxyType({})) -> None:
        """One transition of a row that was just read, inside a transaction of the caller."""
        check(row.rollout_id, row.state, to, reason)
        attempt = row.attempt + (to is State.REQUEUED and row.state is State.RUNNING)
        self._db.execute(
            "UPDATE rollouts SET state = ?, attempt = ?, reason = ? WHERE rollout_id = ?",
            *(to, attempt, reason, row.rollout_id),
        )
        if row.state not in HOLDING and to in HOLDING:
            self._take_slot(row.rollout_id, grow=row.state in _LINEAGE)
        elif row.state in HOLDING and to not in HOLDING:
            self._release_slot(row.rollout_id)
        self._log(row.rollout_id, row.state, to, attempt, reason, facts)

    def _log(
        self, rollout_id: str, origin: State | None, to: State, attempt: int, reason: str, facts: Mapping[str, Any]
    ) -> None:
        self._db.execute(
            "INSERT INTO transitions (t, rollout_id, origin, state, attempt, reason, facts) VALUES (?,?,?,?,?,?,?)",
            *(
                time.time(),
                rollout_id,
                origin,
                to,
                attempt,
                reason,
                json.dumps(dict(facts), default=str) if facts else "{}",
            ),
        )

    def _take_slot(self, rollout_id: str, *, grow: bool) -> None:
        free = self._value("SELECT min(slot) FROM slots WHERE rollout_id IS NULL")
        if free is not None:
            self._db.execute("UPDATE slots SET rollout_id = ? WHERE slot = ?", rollout_id, free)
        elif grow:
            self._db.execute("INSERT INTO slots SELECT max(slot) + 1, CAST(? AS text) FROM slots", rollout_id)
        else:
            raise LedgerError(
                f"no slot is free for rollout {rollout_id}",
                f"all {self._capacity} are held",
                hint="admit only what the window has room for",
            )

    def _release_slot(self, rollout_id: str) -> None:
        if self._value("SELECT count(*) FROM slots") > self._capacity:
            self._db.execute("DELETE FROM slots WHERE rollout_id = ?", rollout_id)
        else:
            self._db.execute("UPDATE slots SET rollout_id = NULL WHERE rollout_id = ?", rollout_id)

    def _check_slots(self) -> None:
        holding, held, count = self._db.rows(_SLOTS)[0]
        if held != holding or count != max(self._capacity, held):
            raise LedgerError(
                "the ledger's slots do not add up",
                f"{holding} rollouts hold a slot, {held} of {count} slots are taken, capacity {self._capacity}",
                hint="this is a defect: keep the run folder and report it with etude ledger audit",
            )
