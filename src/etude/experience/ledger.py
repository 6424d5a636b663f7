"""The ledger: a durable record of every rollout's state and results. The conductor is its only writer.

It is an SQLite file in the run folder, or a schema on a PostgreSQL server, by the same statements. A finished rollout
and its transition are one transaction, so a kill at any moment leaves both or neither. "Trained" means *in the lineage
of the current weights*: after a restart `reconcile` gets the lineage and corrects the states. Slots are rows of their
own (double entry): a rollout in a holding state has exactly one, which is checked at every commit. See
`docs/formats/ledger.md`. Knows nothing of how rollouts are run or of weights.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from etude.errors import LedgerError
from etude.experience.database import each, marks, open_database, parts
from etude.experience.groups import Finished
from etude.experience.lineage import Lineage, by_step, remembered
from etude.experience.looking import FINISHED, QUARANTINE, SPEC, Looking, Quarantined
from etude.experience.rows import Row
from etude.experience.transitions import HOLDING, SETTLED, State, check
from etude.records.completion import Version
from etude.records.rollout import Graded, Invalid, Outcome, RolloutSpec
from etude.records.sample import Batch
from etude.records.summary import BatchRef, RolloutSummary
from etude.records.wire import pack
from etude.rewards import AS_MEASURED, Composition

F = TypeVar("F", bound=Callable[..., Any])

_LINEAGE = frozenset({State.BATCHED, State.TRAINED, State.NO_SIGNAL})
_HOLD = ", ".join(f"'{state}'" for state in sorted(HOLDING))
_SLOTS = f"SELECT (SELECT count(*) FROM rollouts WHERE state IN ({_HOLD})), count(rollout_id), count(*) FROM slots"


_NULLABLE = {"reward": "double precision", "boundary": "text"}  # a null in VALUES has no type on a server


class _Move(NamedTuple):
    """One transition of a row that was just read, and columns that change with it."""

    row: Row
    to: State
    reason: str = ""
    facts: Mapping[str, Any] = MappingProxyType({})
    columns: Mapping[str, Any] = MappingProxyType({})

    @property
    def attempt(self) -> int:
        return self.row.attempt + (self.to is State.REQUEUED and self.row.state is State.RUNNING)


@dataclass(frozen=True)
class Reconciled:
    """The result of `Ledger.reconcile` after a restart: the rollouts whose states were corrected."""

    trained: int  # batched, and found in the lineage
    freed: int  # batched or trained, not in the lineage: graded again
    requeued: int  # were running
    gone: int  # batched or trained, not in the lineage, and their records were dropped: no step takes them any more


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

    def __init__(
        self,
        place: Path | str,
        *,
        capacity: int,
        composition: Composition = AS_MEASURED,
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open or create a ledger at a path or at `postgresql://host/database#run_id`. `capacity`: the number of slots.
        `composition`: of the rewards that rows show. `said` is called with a line when a server had to be waited for.
        Raises `LedgerError` for an existing ledger with another capacity, or one that another process writes."""
        self._capacity, self._composition = capacity, composition
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
        each(self._db, "INSERT INTO slots (slot) VALUES ?", [(slot,) for slot in range(self._capacity)])

    @classmethod
    def reading(cls, place: Path | str, *, still: bool = False) -> Ledger:
        """Open to read only, beside a writer; `still`: there is none now. Raises `NoLedger` when there is none."""
        ledger = cls.__new__(cls)
        ledger._db = open_database(place, readonly=True, still=still, said=lambda _: None)
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
        """Move a rollout to another state. Raises `LedgerError` when the table forbids it, or when it needs a slot and
        none is free."""
        self._move([_Move(self.row(rollout_id), State(to), reason, facts)])

    @_atomic
    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Keep bytes under a rollout's name, durable with the transaction; the last put wins."""
        self.row(rollout_id)
        self._put(name, [(rollout_id, data)])

    @_atomic
    def transaction(self, work: Callable[[], None]) -> None:
        """All of `work`'s changes, or none. May be nested. Where a server went away in between `work` is called again:
        it changes nothing but the ledger."""
        work()

    # The life of a rollout

    @_atomic
    def admit(self, *specs: RolloutSpec) -> None:
        """New rollouts take slots, all or none. Their places in the order of admission are final."""
        groups, ids = {spec.group_id for spec in specs}, [spec.rollout_id for spec in specs]
        sql = f"SELECT rollout_id, group_id FROM rollouts WHERE group_id IN ({marks(groups)})"
        there = self._db.rows(f"{sql} OR rollout_id IN ({marks(ids)})", *groups, *ids)
        again = [i for i, count in Counter([*ids, *{i for i, _ in there}.intersection(ids)]).items() if count > 1]
        if again:
            raise LedgerError(f"rollout {again[0]} was admitted before", hint="count groups on, never reuse")
        self.remember("groups", self.num_groups() + len(groups - {group_id for _, group_id in there}))
        born = [(spec.rollout_id, spec.group_id, State.ADMITTED, spec.attempt) for spec in specs]
        each(self._db, "INSERT INTO rollouts (rollout_id, group_id, state, attempt) VALUES ?", born)
        self._take_slots(ids, grow=False)
        self._log([(spec.rollout_id, None, State.ADMITTED, spec.attempt, "", {}) for spec in specs])
        self._put(SPEC, [(spec.rollout_id, pack(spec)) for spec in specs])

    @_atomic
    def start(
        self, limit: int, *, published: int | None = None, demand: Callable[[int], int] | None = None
    ) -> list[RolloutSpec]:
        """Move the first waiting rollouts, at most `limit`, to running, and return their specs. Stops at the first one
        that demands a later version step than `published` (None: no such check), which none overtakes.

        `demand`: the version step that the open group at a place, counted from 0, demands now (`Window.demand`). It
        counts where it is less than the one that the group was admitted with, which a lost lineage may have made too
        late: the steps that lead to that version might wait for this very group."""
        rows = self.next_waiting(limit)
        specs = self.specs(rows) if rows else []
        if published is not None:
            able = list(itertools.takewhile(lambda spec: spec.min_step <= published, specs))
            specs = able if able or demand is None else self._due(specs, published, demand)
        self._move([_Move(row, State.RUNNING) for row in rows[: len(specs)]])
        return specs

    def _due(self, specs: Sequence[RolloutSpec], published: int, demand: Callable[[int], int]) -> list[RolloutSpec]:
        """The first of some specs whose places among the open groups demand no later version than the published one,
        as specs that demand no later one either."""
        places = {group_id: place for place, group_id in enumerate(self.open_groups())} if specs else {}
        due = itertools.takewhile(lambda spec: demand(places[spec.group_id]) <= published, specs)
        return [msgspec.structs.replace(spec, min_step=min(spec.min_step, published)) for spec in due]

    def finish(self, rollout: RolloutSummary, outcome: Outcome) -> bool:
        """Store the summary of a rollout and how it was judged. False: of an attempt that no longer counts; nothing
        is changed (the answer of a worker given up for dead, or a second delivery)."""
        return self.finish_all([(rollout, outcome)])[0]

    @_atomic
    def finish_all(self, ended: Sequence[tuple[RolloutSummary, Outcome]]) -> list[bool]:
        """`finish` for several at once."""
        counts, ends = list[bool](), dict[str, tuple[Row, Finished]]()
        rows = self.known([rollout.rollout_id for rollout, _ in ended])
        for row, (rollout, outcome) in zip(rows, ended, strict=True):
            runs = row.state is State.RUNNING and row.attempt == rollout.attempt
            counts.append(runs and row.rollout_id not in ends)
            if counts[-1]:
                ends[row.rollout_id] = row, Finished(rollout_id=row.rollout_id, outcome=outcome, summary=rollout)
        self._end(list(ends.values()))
        return counts

    def quarantine(self, rollout_id: str, *, reason: str, graded: float) -> None:
        """Note that a rollout bears a sign of cheating, and what it was graded before that took its reward. It stays
        with its group: who cheats and earns nothing teaches its siblings that."""
        self.put(rollout_id, QUARANTINE, pack(Quarantined(reason=reason, graded=graded)))

    @_atomic
    def fail(self, rollout_id: str, invalid: Invalid) -> None:
        """A running or requeued rollout becomes invalid and left nothing: its worker died once too often."""
        self._end([(self.row(rollout_id), Finished(rollout_id=rollout_id, outcome=invalid))])

    def _end(self, ends: Sequence[tuple[Row, Finished]]) -> None:
        """Rollouts have ended. Their terms are stored; the columns `reward` and `reason` are derived from them."""
        self._put(FINISHED, [(row.rollout_id, pack(finished)) for row, finished in ends])
        moves = []
        for row, finished in ends:
            outcome, columns = finished.outcome, dict[str, float | str | None]()
            if isinstance(outcome, Graded):
                reward = self._composition.of(outcome)
                columns |= {"reward": reward.value, "boundary": None}
                moves.append(_Move(row, State.GRADED, reward.reason or State.GRADED, columns=columns))
            else:
                columns |= {"reward": None, "boundary": outcome.boundary}
                moves.append(_Move(row, State.INVALID, outcome.reason or State.INVALID, columns=columns))
        self._move(moves)

    # Groups and batches

    def batch(self, batch: Batch | BatchRef) -> None:
        """The batch takes its groups: graded members become batched. On the disk when it returns, so that what a
        version's manifest lists is known here even after a power cut."""

        def take() -> None:
            rows = self.known(batch.rollout_ids)
            for row in rows:
                _check_taken(row, batch)
            facts = {"batch_id": batch.batch_id, "step": batch.step}
            taken = {row.rollout_id: {**facts, "has_sample": int(row.rollout_id in batch.sampled)} for row in rows}
            graded = [row for row in rows if row.state is State.GRADED]
            self._move([_Move(row, State.BATCHED, "", facts, taken[row.rollout_id]) for row in graded])
            self._set({row.rollout_id: taken[row.rollout_id] for row in rows if row.state is not State.GRADED})

        self._db.transact(take, sync=True)

    @_atomic
    def commit(self, rollout_ids: Collection[str], version: Version) -> None:
        """The version that learned from these is published: batched becomes trained, or no-signal without a sample."""
        self._published(version)
        rows, said = self.known(rollout_ids), {"version": str(version)}
        self._trained(rows, f"in {version}", said)
        self._set({row.rollout_id: said for row in rows if row.state is not State.BATCHED})

    def _trained(self, rows: Collection[Row], reason: str, columns: Mapping[str, Any] = MappingProxyType({})) -> int:
        """Those of them that are batched end with this reason; how many."""
        batched = [row for row in rows if row.state is State.BATCHED]
        ends = [(row, State.TRAINED if row.has_sample else State.NO_SIGNAL) for row in batched]
        self._move([_Move(row, to, reason, {"step": row.step}, columns) for row, to in ends])
        return len(batched)

    @_atomic
    def reconcile(
        self, lineage: Lineage, *, believed: Callable[[], int] = lambda: 0, head: Version | None = None
    ) -> Reconciled:
        """Agree with the weights after a restart. `lineage` is what the manifests list of the lineage that the learner
        goes on from: it is read again where a server went away. What was trained only outside of it is free again; what
        was running runs again. `head`: the version that the learner published as it began. `believed`, asked once the
        lineage was read: a step up to which the ledger itself stands in for manifests."""
        if head is not None:
            self._published(head)
        trained, freed, gone, running = 0, 0, 0, self.rows(states=[State.RUNNING])
        self._move([_Move(row, State.REQUEUED, "the run was interrupted") for row in running])
        for step, kept in by_step(lineage, self.steps(), believed=believed):
            rows, wanted = self.rows(step=step), None if kept is None else set(kept)
            trained += self._trained(
                [row for row in rows if wanted is None or row.rollout_id in wanted], "found in the lineage"
            )
            outside = [row for row in rows if wanted is not None and row.rollout_id not in wanted]
            free, lost = self._free(step, outside)
            freed, gone = freed + free, gone + lost
        return Reconciled(trained=trained, freed=freed, requeued=len(running), gone=gone)

    def _free(self, step: int, rows: Sequence[Row]) -> tuple[int, int]:
        """The step that took these is not in the lineage: how many of those it had trained are free again, and how many
        have no record left. Groups with one of those stay closed: nothing of them can be trained."""
        if rows and step <= int(self.recall("pruned") or 0):
            self.remember("pruned", step - 1)  # the steps from here on will be made again
        taken = [row for row in rows if row.state in _LINEAGE]
        stored = self._stored([row.rollout_id for row in taken])
        self._move([_Move(row, State.REQUEUED, f"{row.batch_id} is not in the lineage") for row in taken])
        again = self.known([row.rollout_id for row in taken])
        gone = [row for row in again if row.rollout_id not in stored]
        self._move(
            [
                *(_Move(row, State.GRADED, "its stored outcome stands") for row in again if row.rollout_id in stored),
                *(_Move(row, State.QUARANTINED, "its record was dropped, and its step lost later") for row in gone),
            ]
        )
        closed = {row.group_id for row in gone}
        for kept, what in ((False, "batch_id = NULL, "), (True, "")):
            some = [(row.rollout_id,) for row in rows if (row.group_id in closed) is kept]
            sql = f"UPDATE rollouts SET {what}step = NULL, has_sample = NULL, version = NULL"
            each(self._db, f"{sql} WHERE rollout_id IN (VALUES ?)", some)
        return len(taken) - len(gone), len(gone)

    def _stored(self, rollout_ids: Sequence[str]) -> set[str]:
        """Those of some rollouts that have a record."""
        found = set[str]()
        for some in parts(rollout_ids):
            sql = f"SELECT rollout_id FROM blobs WHERE name = ? AND rollout_id IN ({marks(some)})"
            found |= {i for (i,) in self._db.rows(sql, FINISHED, *some)}
        return found

    @_atomic
    def prune(self, step: int) -> int:
        """Drop the blobs of rollouts consumed at or before a version step: call it with the oldest step that a
        restart can still go back to. Returns how many blobs went; their traces stay, and notes of quarantine do."""
        before, batched = int(self.recall("pruned") or 0), State.BATCHED
        spent = "SELECT rollout_id FROM rollouts WHERE step > ? AND step <= ? AND state != ?"
        sql = f"DELETE FROM blobs WHERE rollout_id IN ({spent}) AND name != ? RETURNING 1"
        gone = self._db.rows(sql, before, step, batched, QUARANTINE)
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

    def _published(self, version: Version) -> None:
        versions = remembered(self.versions(), version)
        self.remember("versions", [(v.step, v.incarnation, v.digest) for v in versions])

    # Writing

    def _put(self, name: str, blobs: Sequence[tuple[str, bytes]]) -> None:
        sql = "INSERT INTO blobs VALUES ? ON CONFLICT (rollout_id, name) DO UPDATE SET data = excluded.data"
        each(self._db, sql, [(rollout_id, name, data) for rollout_id, data in blobs])

    def _move(self, moves: Sequence[_Move]) -> None:
        """Transitions of rows that were just read, each once, inside a transaction of the caller."""
        for row, to, reason, *_ in moves:
            check(row.rollout_id, row.state, to, reason)
        self._set({
            m.row.rollout_id: {"state": m.to, "attempt": m.attempt, "reason": m.reason, **m.columns} for m in moves
        })  # fmt: skip
        takers = [row for row, to, *_ in moves if row.state not in HOLDING and to in HOLDING]
        self._take_slots([row.rollout_id for row in takers], grow=all(row.state in _LINEAGE for row in takers))
        self._release_slots([row.rollout_id for row, to, *_ in moves if row.state in HOLDING and to not in HOLDING])
        self._log([(m.row.rollout_id, m.row.state, m.to, m.attempt, m.reason, m.facts) for m in moves])

    def _set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Change the same columns of several rollouts, by their ids: one update of a row, since each costs its CRC."""
        if not values:
            return
        columns = list(next(iter(values.values())))
        typed = [
            f"CAST(column{n} AS {_NULLABLE[c]})" if c in _NULLABLE else f"column{n}" for n, c in enumerate(columns, 2)
        ]
        changed = ", ".join(f"{column} = {value}" for column, value in zip(columns, typed, strict=True))
        each(
            self._db,
            f"UPDATE rollouts SET {changed} FROM (VALUES ?) AS given WHERE rollout_id = column1",
            [(rollout_id, *(row[c] for c in columns)) for rollout_id, row in values.items()],
        )

    def _log(self, moves: Sequence[tuple[str, State | None, State, int, str, Mapping[str, Any]]]) -> None:
        each(
            self._db,
            "INSERT INTO transitions (t, rollout_id, origin, state, attempt, reason, facts) VALUES ?",
            [(time.time(), *move, json.dumps(dict(facts), default=str) if facts else "{}") for *move, facts in moves],
        )

    def _take_slots(self, rollout_ids: Sequence[str], *, grow: bool) -> None:
        if not rollout_ids:
            return
        sql = f"SELECT slot FROM slots WHERE rollout_id IS NULL ORDER BY slot LIMIT {len(rollout_ids)}"
        free = [slot for (slot,) in self._db.rows(sql)]
        sql = "UPDATE slots SET rollout_id = column2 FROM (VALUES ?) AS taken WHERE slot = column1"
        each(self._db, sql, list(zip(free, rollout_ids, strict=False)))
        beyond = rollout_ids[len(free) :]
        if beyond and not grow:
            raise LedgerError(
                f"no slot is free for rollout {beyond[0]}",
                f"all {self._capacity} are held",
                hint="admit only what the window has room for",
            )
        if beyond:
            last = self._value("SELECT max(slot) FROM slots")
            each(self._db, "INSERT INTO slots VALUES ?", [(last + 1 + n, i) for n, i in enumerate(beyond)])

    def _release_slots(self, rollout_ids: Sequence[str]) -> None:
        if not rollout_ids:
            return
        borrowed = max(0, self.slots()[1] - self._capacity)
        gone, freed = rollout_ids[:borrowed], rollout_ids[borrowed:]
        each(self._db, "DELETE FROM slots WHERE rollout_id IN (VALUES ?)", [(i,) for i in gone])
        each(self._db, "UPDATE slots SET rollout_id = NULL WHERE rollout_id IN (VALUES ?)", [(i,) for i in freed])

    def _check_slots(self) -> None:
        holding, held, count = self._db.rows(_SLOTS)[0]
        if held != holding or count != max(self._capacity, held):
            raise LedgerError(
                "the ledger's slots do not add up",
                f"{holding} rollouts hold a slot, {held} of {count} slots are taken, capacity {self._capacity}",
                hint="this is a defect: keep the run folder and report it with etude ledger audit",
            )


def _check_taken(row: Row, batch: Batch | BatchRef) -> None:
    """Raise unless a batch may take this rollout."""
    if row.batch_id is not None:
        raise LedgerError(
            f"rollout {row.rollout_id} is in batch {row.batch_id}",
            f"{batch.batch_id} wants it too",
            hint="a rollout is trained once: form batches from open_groups()",
        )
    if row.state not in SETTLED:
        raise LedgerError(
            f"batch {batch.batch_id} wants rollout {row.rollout_id}",
            f"which is {row.state}",
            hint="wait until its group is ready",
        )
