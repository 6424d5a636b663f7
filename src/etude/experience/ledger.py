"""The ledger: every rollout's state, durable, and what it produced. The conductor is its only writer.

A finished rollout and its transition are one transaction, so a kill at any moment leaves both or neither. "Trained"
means *in the lineage of the current weights*: after a restart `reconcile` is told the lineage and mends the rest.
Slots are rows of their own (double entry): a rollout in a holding state has exactly one, checked at every commit.
See `docs/formats/ledger.md`. Knows nothing of how rollouts are run, of weights, or of what a reward means.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from etude.errors import LedgerError
from etude.experience.database import Database
from etude.experience.groups import Finished, Group
from etude.experience.rows import COLUMNS, Row, as_row
from etude.experience.transitions import HOLDING, SETTLED, State, check
from etude.records.completion import Version
from etude.records.rollout import Graded, Invalid, Outcome, Rollout, RolloutSpec
from etude.records.sample import Batch
from etude.records.wire import pack, unpack

SPEC, FINISHED = "spec", "finished"
"""Names of the blobs that the ledger itself keeps: a packed `RolloutSpec` and a packed `Finished`."""

T = TypeVar("T")

_LINEAGE = frozenset({State.BATCHED, State.TRAINED, State.NO_SIGNAL})
_HOLD = ", ".join(f"'{state}'" for state in sorted(HOLDING))
_SLOTS = f"SELECT (SELECT count(*) FROM rollouts WHERE state IN ({_HOLD})), count(rollout_id), count(*) FROM slots"


@dataclass(frozen=True)
class Reconciled:
    """What a restart had to mend, in rollouts."""

    trained: int  # batched, and found in the lineage
    freed: int  # batched or trained, not in the lineage: graded again
    requeued: int  # were running


class Ledger:
    """An `ExperienceStore` in one SQLite file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(Path(folder) / "ledger.sqlite", capacity=8)
    ...     ledger.states(), ledger.slots()
    ...     ledger.close()
    ({}, (0, 8))
    """

    def __init__(self, path: Path, *, capacity: int) -> None:
        """Open or create. `capacity` is the number of slots; reopening with another one is a `LedgerError`."""
        self._capacity = capacity
        self._db = Database(path, check=self._check_slots)
        found = self.recall("capacity")
        if found is None:
            self._create_slots()
        elif found != capacity:
            self.close()
            raise LedgerError(
                f"{path} has {found} slots", f"asked for {capacity}", hint="resume a run with the config it began with"
            )

    def _create_slots(self) -> None:
        with self._db.atomic():
            self.remember("capacity", self._capacity)
            for slot in range(self._capacity):
                self._db.execute("INSERT INTO slots VALUES (?, NULL)", slot)

    @classmethod
    def reading(cls, path: Path) -> Ledger:
        """Open to read only, beside a writer. Raises `LedgerError` when there is none."""
        ledger = cls.__new__(cls)
        ledger._db = Database(path, readonly=True)
        ledger._capacity = int(ledger.recall("capacity") or 0)
        return ledger

    def prove(self) -> None:
        """Look at every page once, a second for some hundred MB. Raises `LedgerError` where the file is damaged."""
        self._db.prove()

    def close(self) -> None:
        self._db.close()

    # The seam: ExperienceStore

    def move(self, rollout_id: str, to: str, *, reason: str = "", **facts: Any) -> None:
        """One transition. `LedgerError` when the table forbids it, or when a slot is needed and none is free."""
        with self._db.atomic():
            self._move(self.row(rollout_id), State(to), reason, facts)

    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Keep bytes under a rollout's name, durable with the transaction; the last put wins."""
        with self._db.atomic():
            self.row(rollout_id)
            self._put(rollout_id, name, data)

    def get(self, rollout_id: str, name: str) -> bytes | None:
        data: bytes | None = self._db.value(
            "SELECT data FROM blobs WHERE rollout_id = ? AND name = ?", rollout_id, name
        )
        return data

    def states(self) -> dict[str, int]:
        return dict(self._db.rows("SELECT state, count(*) FROM rollouts GROUP BY state"))

    def transaction(self, work: Callable[[], None]) -> None:
        """All of `work`'s changes, or none. May be nested."""
        with self._db.atomic():
            work()

    # The life of a rollout

    def admit(self, spec: RolloutSpec) -> None:
        """A new rollout takes a slot. Its place in the order of admission is final."""
        with self._db.atomic():
            if self._db.value("SELECT 1 FROM rollouts WHERE rollout_id = ?", spec.rollout_id):
                raise LedgerError(f"rollout {spec.rollout_id} was admitted before", hint="count groups on, never reuse")
            self._db.execute(
                "INSERT INTO rollouts (rollout_id, group_id, state, attempt) VALUES (?, ?, ?, ?)",
                *(spec.rollout_id, spec.group_id, State.ADMITTED, spec.attempt),
            )
            self._take_slot(spec.rollout_id, grow=False)
            self._log(spec.rollout_id, None, State.ADMITTED, spec.attempt, "", {})
            self._put(spec.rollout_id, SPEC, pack(spec))

    def spec(self, rollout_id: str) -> RolloutSpec:
        """What to run, at the attempt that the ledger counts."""
        spec = self._record(rollout_id, SPEC, RolloutSpec)
        if spec is None:
            raise LedgerError(f"rollout {rollout_id} has no spec left", "it was pruned", hint="it has ended: skip it")
        return msgspec.structs.replace(spec, attempt=self.row(rollout_id).attempt)

    def waiting(self) -> list[str]:
        """Rollouts that want a worker, in order of admission."""
        return self._ids("state IN (?, ?)", State.ADMITTED, State.REQUEUED)

    def next_waiting(self) -> str | None:
        """The first of `waiting`, without looking at the others."""
        first = "SELECT min(position) AS position FROM rollouts WHERE state = ?"
        sql = f"SELECT rollout_id FROM rollouts WHERE position = (SELECT min(position) FROM ({first} UNION {first}))"
        found: str | None = self._db.value(sql, State.ADMITTED, State.REQUEUED)
        return found

    def finish(self, rollout: Rollout, outcome: Outcome) -> bool:
        """Store what a worker returned and how it was judged. False: of an attempt that no longer counts; nothing
        is changed (the answer of a worker given up for dead, or a second delivery)."""
        with self._db.atomic():
            row = self.row(rollout.rollout_id)
            if row.state is not State.RUNNING or row.attempt != rollout.attempt:
                return False
            self._end(row, Finished(rollout_id=row.rollout_id, outcome=outcome, rollout=rollout))
        return True

    def fail(self, rollout_id: str, invalid: Invalid) -> None:
        """A running or requeued rollout becomes invalid and left nothing: its worker died once too often."""
        with self._db.atomic():
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

    def open_groups(self) -> list[str]:
        """Groups that no batch has taken, in order of admission."""
        sql = "SELECT group_id FROM rollouts WHERE batch_id IS NULL GROUP BY group_id ORDER BY min(position)"
        return [group_id for (group_id,) in self._db.rows(sql)]

    def num_groups(self) -> int:
        """Groups ever admitted: the index of the next one."""
        return int(self._db.value("SELECT count(DISTINCT group_id) FROM rollouts"))

    def group_ready(self, group_id: str) -> bool:
        """Whether nothing is awaited any more from any member."""
        states = [state for (state,) in self._db.rows("SELECT state FROM rollouts WHERE group_id = ?", group_id)]
        return bool(states) and all(State(state) in SETTLED for state in states)

    def was_batched(self, group_id: str) -> bool:
        """Whether any batch ever took the group, one of a lost lineage included."""
        sql = "SELECT 1 FROM rollouts JOIN transitions USING (rollout_id) WHERE group_id = ? AND transitions.state = ?"
        return bool(self._db.rows(f"{sql} LIMIT 1", group_id, State.BATCHED))

    def group(self, group_id: str) -> Group:
        """The group with what is stored of it. A record that cannot be read is a `LedgerError`."""
        ids = sorted(self._ids("group_id = ?", group_id))
        hidden = set(self._ids("group_id = ? AND state IN (?, ?)", group_id, State.QUARANTINED, State.CANCELLED))
        found = [self._record(i, FINISHED, Finished) for i in ids if i not in hidden]
        return Group(group_id=group_id, rollout_ids=tuple(ids), finished=tuple(f for f in found if f is not None))

    def batch(self, batch: Batch) -> None:
        """The batch takes its groups: graded members become batched. On the disk when it returns, so that what a
        version's manifest lists is known here even after a power cut."""
        sampled = {sample.rollout_id for sample in batch.samples}
        with self._db.atomic(sync=True):
            for rollout_id in batch.rollout_ids:
                row = self.row(rollout_id)
                if row.batch_id is not None:
                    raise LedgerError(
                        f"rollout {rollout_id} is in batch {row.batch_id}",
                        f"{batch.batch_id} wants it too",
                        hint="a rollout is trained once: form batches from open_groups()",
                    )
                if row.state is State.GRADED:
                    self._move(row, State.BATCHED, facts={"batch_id": batch.batch_id, "step": batch.step})
                elif row.state not in SETTLED:
                    raise LedgerError(
                        f"batch {batch.batch_id} wants rollout {rollout_id}",
                        f"which is {row.state}",
                        hint="wait until its group is ready",
                    )
                self._db.execute(
                    "UPDATE rollouts SET batch_id = ?, step = ?, has_sample = ? WHERE rollout_id = ?",
                    *(batch.batch_id, batch.step, int(rollout_id in sampled), rollout_id),
                )

    def commit(self, rollout_ids: Iterable[str], version: Version) -> None:
        """The version that learned from these is published: batched becomes trained, or no-signal without a sample."""
        ids = list(rollout_ids)
        with self._db.atomic():
            for row in map(self.row, ids):
                if row.state is State.BATCHED:
                    self._trained(row, f"in {version}")
            self._db.each("UPDATE rollouts SET version = ? WHERE rollout_id = ?", [(str(version), i) for i in ids])

    def _trained(self, row: Row, reason: str) -> None:
        self._move(row, State.TRAINED if row.has_sample else State.NO_SIGNAL, reason, {"step": row.step})

    def reconcile(self, lineage: Iterable[str]) -> Reconciled:
        """Agree with the weights after a restart. `lineage` is every rollout id in the manifests of the lineage that
        the learner goes on from. What was trained only outside of it is free again; what was running runs again."""
        kept, trained, freed, requeued = set(lineage), 0, 0, 0
        with self._db.atomic():
            for row in self.rows():
                if row.state is State.RUNNING:
                    self.move(row.rollout_id, State.REQUEUED, reason="the run was interrupted")
                    requeued += 1
                elif row.batch_id is None:
                    continue
                elif row.rollout_id in kept:
                    if row.state is State.BATCHED:
                        self._trained(row, "found in the lineage")
                        trained += 1
                else:
                    freed += row.state in _LINEAGE
                    self._free(row)
        return Reconciled(trained=trained, freed=freed, requeued=requeued)

    def consumed(self, step: int) -> list[str]:
        """Rollouts that a batch of this version step or an older one took, in order of admission."""
        return self._ids("batch_id IS NOT NULL AND step <= ?", step)

    def _free(self, row: Row) -> None:
        """The step that took this rollout is not in the lineage: its group is open again."""
        if row.state in _LINEAGE:
            self.move(row.rollout_id, State.REQUEUED, reason=f"{row.batch_id} is not in the lineage")
            self.move(row.rollout_id, State.GRADED, reason="its stored outcome stands")
        self._db.execute(
            "UPDATE rollouts SET batch_id = NULL, step = NULL, has_sample = NULL, version = NULL WHERE rollout_id = ?",
            row.rollout_id,
        )

    def prune(self, step: int) -> int:
        """Drop the blobs of rollouts consumed at or before a version step: call it with the oldest step that a
        restart can still go back to. Returns how many blobs went; their traces stay."""
        sql = "DELETE FROM blobs WHERE rollout_id IN (SELECT rollout_id FROM rollouts WHERE step <= ? AND state != ?)"
        with self._db.atomic():
            return self._db.execute(sql, step, State.BATCHED).rowcount

    # Notes that must move together with the rollouts

    def cursor(self, split: str) -> int:
        """Index of the next task of a split."""
        return int(self.recall(f"cursor.{split}") or 0)

    def move_cursor(self, split: str, index: int) -> None:
        """Call it in the transaction that admits the task at `index - 1`."""
        self.remember(f"cursor.{split}", index)

    def remember(self, key: str, value: Any) -> None:
        """Keep a small JSON value."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, json.dumps(value))

    def recall(self, key: str) -> Any:
        """The value kept under `key`; None when there is none."""
        text = self._db.value("SELECT value FROM meta WHERE key = ?", key)
        return None if text is None else json.loads(text)

    # Looking

    def row(self, rollout_id: str) -> Row:
        """`LedgerError` when there is no such rollout."""
        found = self._db.rows(f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id = ?", rollout_id)
        if not found:
            raise LedgerError(f"rollout {rollout_id} is not in the ledger", hint="list them: etude rollouts list RUN")
        return as_row(found[0])

    def rows(self) -> list[Row]:
        """Every rollout, in order of admission."""
        return [as_row(r) for r in self._db.rows(f"SELECT {COLUMNS} FROM rollouts ORDER BY position")]

    def history(self, rollout_id: str) -> list[dict[str, Any]]:
        """Every transition of a rollout, oldest first."""
        sql = "SELECT t, origin, state, attempt, reason, facts FROM transitions WHERE rollout_id = ? ORDER BY number"
        names = ("t", "origin", "state", "attempt", "reason")
        return [
            {**dict(zip(names, values, strict=True)), **json.loads(facts)}
            for *values, facts in self._db.rows(sql, rollout_id)
        ]

    def slots(self) -> tuple[int, int]:
        """(held, all). All is the capacity; it is more only while a lost lineage's rollouts are trained again."""
        held, count = self._db.rows("SELECT count(rollout_id), count(*) FROM slots")[0]
        return int(held), int(count)

    def slot_holders(self) -> list[str]:
        return [i for (i,) in self._db.rows("SELECT rollout_id FROM slots WHERE rollout_id IS NOT NULL")]

    def _ids(self, where: str, *values: Any) -> list[str]:
        return [
            i for (i,) in self._db.rows(f"SELECT rollout_id FROM rollouts WHERE {where} ORDER BY position", *values)
        ]

    def _record(self, rollout_id: str, name: str, kind: type[T]) -> T | None:
        data = self.get(rollout_id, name)
        try:
            return None if data is None else unpack(data, kind)
        except ValueError as error:
            raise LedgerError(
                f"the {name} of rollout {rollout_id} cannot be read", str(error), hint="quarantine it and go on"
            ) from error

    # Writing

    def _put(self, rollout_id: str, name: str, data: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?, ?)", rollout_id, name, data)

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
        free = self._db.value("SELECT min(slot) FROM slots WHERE rollout_id IS NULL")
        if free is not None:
            self._db.execute("UPDATE slots SET rollout_id = ? WHERE slot = ?", rollout_id, free)
        elif grow:
            self._db.execute("INSERT INTO slots (rollout_id) VALUES (?)", rollout_id)
        else:
            raise LedgerError(
                f"no slot is free for rollout {rollout_id}",
                f"all {self._capacity} are held",
                hint="admit only what the window has room for",
            )

    def _release_slot(self, rollout_id: str) -> None:
        if self._db.value("SELECT count(*) FROM slots") > self._capacity:
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
