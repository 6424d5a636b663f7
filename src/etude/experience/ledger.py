"""The ledger: a durable record of every rollout's state and result. The conductor is its only writer.

It is an SQLite file in the run folder, or a schema on a PostgreSQL server, with the same statements. A finished rollout
and its change of state are one transaction, so a kill at any moment leaves both or neither. "Trained" means *in the
lineage of the current weights*: consumed by a step that these weights were trained by. After a restart `reconcile` gets
the lineage and corrects the states. Slots are rows of their own: a rollout in a state of `HOLDING` has exactly one
slot, which is checked at every commit.

The queries are in `LedgerQueries`, and the format in `docs/formats/ledger.md`. This module knows nothing of how
rollouts are run, or of weights."""

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
from etude.experience.database import each
from etude.experience.groups import Finished, Row
from etude.experience.ledger_queries import FINISHED, QUARANTINE, SPEC, LedgerQueries, Quarantined
from etude.experience.lineage import Lineage, append_version, by_step
from etude.experience.open_database import open_database
from etude.experience.transitions import ENDED, HOLDING, State, check
from etude.records.completion import Version
from etude.records.rollout import Graded, Invalid, Outcome, RolloutSpec
from etude.records.sample import Batch
from etude.records.summary import BatchRef, RolloutSummary
from etude.records.wire import pack
from etude.rewards import DEFAULT_COMPOSITION, Composition

F = TypeVar("F", bound=Callable[..., Any])

_LINEAGE = frozenset({State.BATCHED, State.TRAINED, State.NO_SIGNAL})
_HOLD = ", ".join(f"'{state}'" for state in sorted(HOLDING))
_FREE, _ALL = "SELECT count(*) FROM slots WHERE rollout_id IS NULL", "SELECT count(*) FROM slots"
_SLOTS = f"SELECT (SELECT count(*) FROM rollouts WHERE state IN ({_HOLD})), ({_ALL}) - ({_FREE}), ({_ALL})"


_Logged = tuple[str, str | None, str, int, str, Mapping[str, Any]]
"""A row of the table of transitions: rollout id, origin, state, attempt, reason, facts."""
AGREE = "the rewards of its first siblings are equal"
LOST = "its record was deleted, and its step was lost later"
_NULLABLE = {"reward": "double precision", "boundary": "text"}  # on a server, a null in VALUES has no type


class _Move(NamedTuple):
    """A transition of a row that was just read, and columns that change with it."""

    row: Row
    to: State
    reason: str = ""
    facts: Mapping[str, Any] = MappingProxyType({})
    columns: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Reconciled:
    """The numbers of rollouts that `Ledger.reconcile` has corrected after a restart, by kind of correction.

    - `trained`: rollouts in a batch that the current weights were trained on.
    - `freed`: rollouts in a batch that the current weights were not trained on. Their state is *graded* again, so a
      later batch can take them.
    - `requeued`: rollouts that were running, and will be run again.
    - `gone`: rollouts that should be freed but are spent, or have no stored record, so they are never trained on
      again."""

    trained: int
    freed: int
    requeued: int
    gone: int


def _atomic(method: F) -> F:
    """Make a method run as one transaction, or as part of the current one."""

    @functools.wraps(method)
    def whole(ledger: Ledger, *args: Any, **named: Any) -> Any:
        return ledger._db.transact(lambda: method(ledger, *args, **named))

    return cast("F", whole)


class Ledger(LedgerQueries):
    """The durable record of a run's rollouts, in an SQLite file or a schema of a PostgreSQL server.

    One process writes it; others can read it meanwhile.

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
        composition: Composition = DEFAULT_COMPOSITION,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open or create a ledger at a path or at `postgresql://host/database#run_id`.

        `capacity`: number of slots, that is of rollouts that are waiting, running, or not yet trained. `composition`:
        computes the rewards in the rows. `log`: called with a line when the server was unreachable for a while. Raises
        `LedgerError` for a ledger with another capacity, or one that another process writes."""
        self._capacity, self._composition = capacity, composition
        self.grades_decide: Callable[[], bool] = lambda: True  # about held rollouts, at once; else `decide` is called
        self._db = open_database(place, check=self._check_slots, log=log)
        found = self.recall("capacity")
        if found is None:
            self._create_slots()
        elif found != capacity:
            self.close()
            raise LedgerError(
                f"{place} has {found} slots",
                f"the config needs {capacity}",
                hint="resume a run with its original config",
            )

    @_atomic
    def _create_slots(self) -> None:
        self.remember("capacity", self._capacity)
        each(self._db, "INSERT INTO slots (slot) VALUES ?", [(slot,) for slot in range(self._capacity)])

    @classmethod
    def open_readonly(cls, place: Path | str, *, immutable: bool = False) -> Ledger:
        """Open a ledger for reading, also while another process writes it.

        `immutable`: promises that nothing writes it now, so that no files are created beside it. Raises `NoLedger` when
        it does not exist."""
        ledger = cls.__new__(cls)
        ledger._db = open_database(place, readonly=True, immutable=immutable, log=lambda _: None)
        ledger._capacity = int(ledger.recall("capacity") or 0)
        return ledger

    def verify(self) -> None:
        """Read the whole database once. Raises `LedgerError` when it is damaged. Takes about a second for a few hundred
        MB."""
        self._db.verify()

    def close(self) -> None:
        """Close the database connection."""
        self._db.close()

    @_atomic
    def move(self, rollout_id: str, to: str, *, reason: str = "", **facts: Any) -> None:
        """Move a rollout to the state `to`, with a reason and further facts for its history.

        Raises `LedgerError` when `transitions.MOVES` does not allow the move, or no slot is free."""
        self._move([_Move(row := self.row(rollout_id), State(to), reason, facts)])
        if to in ENDED:
            self._release_held({row.group_id})

    @_atomic
    def put(self, rollout_id: str, name: str, data: bytes) -> None:
        """Store bytes under a rollout and a name, as part of the current transaction. They replace bytes that were
        stored there before."""
        self.row(rollout_id)
        self._put(name, [(rollout_id, data)])

    @_atomic
    def transaction(self, work: Callable[[], None]) -> None:
        """Run `work` as one transaction, which may be nested.

        If the connection to a server fails, `work` is called again, so it must change nothing but the ledger."""
        work()

    # States of a rollout

    @_atomic
    def admit(self, *specs: RolloutSpec, held: Collection[str] = ()) -> None:
        """Admit new rollouts, all or none. Each takes one of the `capacity` slots.

        The order of admission never changes. `held`: ids of the rollouts that wait until the other rollouts of their
        group have ended. They run if the rewards of the others differ; otherwise they are cancelled. Raises
        `LedgerError` for a rollout that was admitted before, or when too few slots are free."""
        groups, ids = {spec.group_id for spec in specs}, [spec.rollout_id for spec in specs]
        known = self._among(groups, "SELECT DISTINCT group_id FROM rollouts WHERE group_id IN (*)")
        there = self._among(ids, "SELECT rollout_id FROM rollouts WHERE rollout_id IN (*)")
        again = [i for i, count in Counter([*ids, *there]).items() if count > 1]
        if again:
            raise LedgerError(f"rollout {again[0]} was admitted before", hint="give each group a new id")
        self.remember("groups", self.num_groups() + len(groups - known))
        state = {i: (State.HELD if i in held else State.ADMITTED).value for i in ids}
        born = [(spec.rollout_id, spec.group_id, state[spec.rollout_id], spec.attempt) for spec in specs]
        each(self._db, "INSERT INTO rollouts (rollout_id, group_id, state, attempt) VALUES ?", born)
        self._take_slots(ids, grow=False)
        self._log([(spec.rollout_id, None, state[spec.rollout_id], spec.attempt, "", {}) for spec in specs])
        self._put(SPEC, [(spec.rollout_id, pack(spec)) for spec in specs])

    @_atomic
    def start(
        self, limit: int, *, published: int | None = None, required_step: Callable[[int], int] | None = None
    ) -> list[RolloutSpec]:
        """Move the first waiting rollouts, at most `limit`, to the state running, and return their specs.

        - `published`: the step of the newest weights. Only rollouts before the first one that requires weights of a
          later step are started. None: no such check.
        - `required_step`: returns the step of the weights that an open group requires now, by the group's position
          (from 0) among the open groups. If a group was admitted with a lower step, the lower step is used. The step
          with which a group was admitted may be too high after a restart from an earlier checkpoint, since these
          weights may not exist before the group is trained on."""
        rows = self.next_waiting(limit)
        specs = self.specs(rows) if rows else []
        if published is not None:
            able = list(itertools.takewhile(lambda spec: spec.min_step <= published, specs))
            specs = able if able or required_step is None else self._startable(specs, published, required_step)
        self._move([_Move(row, State.RUNNING) for row in rows[: len(specs)]])
        return specs

    def _startable(
        self, specs: Sequence[RolloutSpec], published: int, required_step: Callable[[int], int]
    ) -> list[RolloutSpec]:
        """Return the first specs whose groups require no later version than `published` now, with lower `min_step`."""
        places = {group_id: place for place, group_id in enumerate(self.open_groups())} if specs else {}
        due = itertools.takewhile(lambda spec: required_step(places[spec.group_id]) <= published, specs)
        return [msgspec.structs.replace(spec, min_step=min(spec.min_step, published)) for spec in due]

    def finish(self, rollout: RolloutSummary, outcome: Outcome) -> bool:
        """Store the summary and outcome of a rollout, and return whether they were stored.

        It returns False, and changes nothing, if the attempt is no longer valid, since its worker was considered dead,
        or if its result was stored before."""
        return self.finish_all([(rollout, outcome)])[0]

    @_atomic
    def finish_all(self, ended: Sequence[tuple[RolloutSummary, Outcome]]) -> list[bool]:
        """Store several finished rollouts in one transaction, and return for each what `finish` returns.

        Rollouts that share their first turns (`Fork`) must be given together. Those that continue the fork of another
        one are admitted here, since only now their number is known; they count if the other one does."""
        self._admit_continuations([rollout for rollout, _ in ended])
        counts, ends = list[bool](), dict[str, tuple[Row, Finished]]()
        known = {row.rollout_id: row for row in self.find_rows([rollout.rollout_id for rollout, _ in ended])}
        for rollout, outcome in ended:
            row = known.get(rollout.rollout_id)
            if row is None and not _continues(rollout):
                row = self.row(rollout.rollout_id)  # raises the error
            runs = row is not None and row.state is State.RUNNING and row.attempt == rollout.attempt
            counts.append(runs and rollout.rollout_id not in ends)
            if row is not None and counts[-1]:
                ends[row.rollout_id] = row, Finished(rollout_id=row.rollout_id, outcome=outcome, summary=rollout)
        self._store_ended(list(ends.values()))
        return counts

    def _admit_continuations(self, ended: Sequence[RolloutSummary]) -> None:
        """Admit those of these rollouts that continue the fork of another rollout which is running, as running."""
        new = {one.rollout_id: one.fork.origin for one in ended if one.fork is not None and _continues(one)}
        attempts = {one.rollout_id: one.attempt for one in ended}
        origins = {row.rollout_id: row for row in self.require_rows(sorted({*new.values()}))}
        specs = list[RolloutSpec]()
        for rollout_id, origin in new.items():
            if origins[origin].state is State.RUNNING and origins[origin].attempt == attempts[rollout_id]:
                specs.append(self.spec(origin).continuation(int(rollout_id.rpartition(".")[2])))
        if specs:
            self.admit(*specs)
            self._move([_Move(row, State.RUNNING) for row in self.require_rows([one.rollout_id for one in specs])])

    def quarantine(self, rollout_id: str, *, reason: str, graded: float) -> None:
        """Record that a rollout has a sign of cheating.

        It stays in its group with reward 0, so that the policy learns that cheating earns nothing. `reason`: the sign,
        as "rule: finding (where)". `graded`: the grade that the rollout got from the grader."""
        self.put(rollout_id, QUARANTINE, pack(Quarantined(reason=reason, graded=graded)))

    @_atomic
    def fail(self, rollout_id: str, invalid: Invalid) -> None:
        """Make a running or requeued rollout invalid without a stored result, since its workers died too often."""
        self._store_ended([(self.row(rollout_id), Finished(rollout_id=rollout_id, outcome=invalid))])

    def _store_ended(self, ends: Sequence[tuple[Row, Finished]]) -> None:
        """Store ended rollouts. The terms are stored; the columns `reward` and `reason` are derived from them."""
        self._put(FINISHED, [(row.rollout_id, pack(finished)) for row, finished in ends])
        moves = []
        for row, finished in ends:
            outcome, columns = finished.outcome, dict[str, float | str | None]()
            if isinstance(outcome, Graded):
                reward = self._composition.of(outcome)
                columns |= {"reward": reward.value, "boundary": None}
                moves.append(_Move(row, State.GRADED, reward.reason or State.GRADED.value, columns=columns))
            else:
                columns |= {"reward": None, "boundary": outcome.boundary.value}
                moves.append(_Move(row, State.INVALID, outcome.reason or State.INVALID.value, columns=columns))
        self._move(moves)
        self._release_held({row.group_id for row, _ in ends})

    def _release_held(self, group_ids: Collection[str]) -> None:
        """Decide about the held rollouts of groups whose other rollouts have all ended, if grades decide.

        They run if the rewards of the others differ, or if fewer than two of these were graded. Otherwise they are
        cancelled. The rewards are those of the rows. Of groups without a held rollout nothing is read."""
        if not self.grades_decide():
            return
        sql = f"SELECT DISTINCT group_id FROM rollouts WHERE state = '{State.HELD}'"
        for group_id in sorted(self._among(group_ids, f"{sql} AND group_id IN (*)")):
            rows = self.group_rows(group_id)
            others = [row for row in rows if row.state is not State.HELD]
            if all(row.state in ENDED for row in others):
                self._release(rows, [row.reward for row in others if row.state is State.GRADED])

    def _release(self, rows: Sequence[Row], rewards: Sequence[float | None]) -> bool:
        """Let the held ones of these rows run, or cancel them where the rewards of the others agree. Returns whether
        some run."""
        agree, held = len(rewards) > 1 and len(set(rewards)) == 1, [row for row in rows if row.state is State.HELD]
        to, reason = (State.CANCELLED, AGREE) if agree else (State.ADMITTED, "")
        self._move([_Move(row, to, reason) for row in held])
        return bool(held) and not agree

    @_atomic
    def decide(self, group_id: str, changed: Mapping[str, tuple[Graded, float]], rewards: Sequence[float]) -> bool:
        """Let the held rollouts of a group run, or cancel them. Returns whether they run. The others must have ended.

        They are cancelled if `rewards` has at least two values and all are equal. `rewards`: one for each valid rollout
        of the group. `changed`: the outcomes with the terms that were measured for this decision, as in `add_terms`.
        They are stored in the same transaction, so a kill leaves both or neither. Raises `LedgerError` as `add_terms`
        does."""
        self.add_terms(changed)
        return self._release(self.group_rows(group_id), rewards)

    @_atomic
    def add_terms(self, changed: Mapping[str, tuple[Graded, float]]) -> None:
        """Replace the outcomes of graded rollouts by outcomes with further reward terms.

        `changed`: rollout id → (outcome, reward of this rollout as if it were alone in its group). Raises `LedgerError`
        for a rollout that is not graded."""
        rows = self.require_rows(changed)
        ended = [(row, self.finished(row.rollout_id)) for row in rows]
        for row, had in ended:
            if row.state is not State.GRADED or had is None:
                hint = "measure terms after grading, and before a batch takes the rollout"
                what = f"rollout {row.rollout_id} cannot get further terms"
                raise LedgerError(what, f"its state is {row.state}, not graded", hint=hint)
        self._put(
            FINISHED,
            [
                (row.rollout_id, pack(msgspec.structs.replace(had, outcome=changed[row.rollout_id][0])))
                for row, had in ended
                if had is not None
            ],
        )
        self._set(("reward",), [(rollout_id, reward) for rollout_id, (_, reward) in changed.items()])

    # Groups and batches

    def batch(self, batch: Batch | BatchRef) -> None:
        """Record that a batch consumes the rollouts of its groups. Graded rollouts get the state batched.

        The record is synced to disk when this returns, so that after a power failure the ledger knows all rollouts that
        a version's manifest lists. Raises `LedgerError` when a member has not ended or is in another batch."""

        def take() -> None:
            rows = self.require_rows(batch.rollout_ids)
            for row in rows:
                _check_taken(row, batch)
            facts = {"batch_id": batch.batch_id, "step": batch.step}
            taken = [(row, {**facts, "has_sample": int(row.rollout_id in batch.sampled)}) for row in rows]
            self._move([_Move(row, State.BATCHED, "", facts, new) for row, new in taken if row.state is State.GRADED])
            others = [(row.rollout_id, *new.values()) for row, new in taken if row.state is not State.GRADED]
            self._set((*facts, "has_sample"), others)

        self._db.transact(take, sync=True)

    @_atomic
    def commit(self, rollout_ids: Collection[str], version: Version) -> None:
        """Record that `version`, which was trained on these rollouts, is published.

        Batched rollouts become trained, or no-signal if they had no sample. The others keep their state."""
        self._published(version)
        rows, columns = self.require_rows(rollout_ids), {"version": str(version)}
        self._trained(rows, f"in {version}", columns)
        others = [(row.rollout_id, *columns.values()) for row in rows if row.state is not State.BATCHED]
        self._set(tuple(columns), others)

    def _trained(self, rows: Collection[Row], reason: str, columns: Mapping[str, Any] = MappingProxyType({})) -> int:
        """End the batched ones among these rows with this reason. Returns their number."""
        batched = [row for row in rows if row.state is State.BATCHED]
        ends = [(row, State.TRAINED if row.has_sample else State.NO_SIGNAL) for row in batched]
        self._move([_Move(row, to, reason, {"step": row.step}, columns) for row, to in ends])
        return len(batched)

    @_atomic
    def reconcile(
        self,
        lineage: Lineage,
        *,
        believed: Callable[[], int] = lambda: 0,
        head: Version | None = None,
        spent: Callable[[str], str] = lambda _: "",
    ) -> Reconciled:
        """Correct the states after a restart, and return how many rollouts were corrected.

        Running rollouts are requeued. Rollouts that no step of the current weights has trained on can be trained on
        again. `Reconciled` lists all corrections.

        - `lineage`: for each step of the current weights, the ids of the rollouts that its manifest lists. It is read
          again if the connection to a server failed.
        - `believed`: a function that returns a step. For steps up to it, the ledger's own records are used instead of
          manifests. It is called after `lineage` was read.
        - `head`: the version that the learner published when it started.
        - `spent`: returns for a group id why its rollouts may not be trained on again; "": they may."""
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
            free, lost = self._free(step, outside, spent)
            freed, gone = freed + free, gone + lost
        return Reconciled(trained=trained, freed=freed, requeued=len(running), gone=gone)

    def _free(self, step: int, rows: Sequence[Row], spent: Callable[[str], str]) -> tuple[int, int]:
        """Free the rollouts of a step that is not in the lineage.

        Returns how many of its trained rollouts are free again, and how many are spent or have no stored record. Groups
        with one of the latter stay closed: nothing of them can be trained."""
        if rows and step <= int(self.recall("pruned") or 0):
            self.remember("pruned", step - 1)  # steps from here on will be trained again
        taken = [row for row in rows if row.state in _LINEAGE]
        stored = self._stored([row.rollout_id for row in taken])
        self._move([_Move(row, State.REQUEUED, f"{row.batch_id} is not in the lineage") for row in taken])
        again = self.require_rows([row.rollout_id for row in taken])
        whys = {row.rollout_id: spent(row.group_id) or ("" if row.rollout_id in stored else LOST) for row in again}
        gone = [row for row in again if whys[row.rollout_id]]
        self._move(
            [
                *(_Move(row, State.GRADED, "its stored outcome stands") for row in again if not whys[row.rollout_id]),
                *(_Move(row, State.QUARANTINED, whys[row.rollout_id]) for row in gone),
            ]
        )
        closed = {row.group_id for row in gone}
        for kept, what in ((False, "batch_id = NULL, "), (True, "")):
            some = [(row.rollout_id,) for row in rows if (row.group_id in closed) is kept]
            sql = f"UPDATE rollouts SET {what}step = NULL, has_sample = NULL, version = NULL"
            each(self._db, f"{sql} WHERE rollout_id IN (VALUES ?)", some)
        return len(taken) - len(gone), len(gone)

    def _stored(self, rollout_ids: Sequence[str]) -> set[str]:
        return self._among(rollout_ids, "SELECT rollout_id FROM blobs WHERE rollout_id IN (*) AND name = ?", FINISHED)

    @_atomic
    def prune(self, step: int) -> int:
        """Delete the stored bytes of rollouts that steps up to `step` consumed. Returns the number of deleted entries.

        Call it with the oldest step that a restart can go back to. Traces and quarantine records are kept."""
        before, batched = int(self.recall("pruned") or 0), State.BATCHED
        spent = "SELECT rollout_id FROM rollouts WHERE step > ? AND step <= ? AND state != ?"
        sql = f"DELETE FROM blobs WHERE rollout_id IN ({spent}) AND name != ? RETURNING 1"
        gone = self._db.rows(sql, before, step, batched, QUARANTINE)
        left = self._value("SELECT min(step) FROM rollouts WHERE state = ? AND step <= ?", batched, step)
        self.remember("pruned", max(before, step if left is None else left - 1))
        return len(gone)

    # Values that change together with the rollouts

    def move_cursor(self, split: str, index: int) -> None:
        """Set the index of the next task to draw from a split.

        Call it in the transaction that admits the task at `index - 1`."""
        self.remember(f"cursor.{split}", index)

    def remember(self, key: str, value: Any) -> None:
        """Store a small JSON value under a key."""
        sql = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
        self._db.execute(sql, key, json.dumps(value))

    def _published(self, version: Version) -> None:
        versions = append_version(self.versions(), version)
        self.remember("versions", [(v.step, v.incarnation, v.digest) for v in versions])

    # Writing

    def _put(self, name: str, blobs: Sequence[tuple[str, bytes]]) -> None:
        sql = "INSERT INTO blobs VALUES ? ON CONFLICT (rollout_id, name) DO UPDATE SET data = excluded.data"
        each(self._db, sql, [(rollout_id, name, data) for rollout_id, data in blobs])

    def _move(self, moves: Sequence[_Move]) -> None:
        """Write transitions of rows that were just read, each once, in a transaction of the caller."""
        if not moves:
            return
        takers, leavers, rows, log = list[Row](), list[str](), list[tuple[Any, ...]](), list[_Logged]()
        for row, to, reason, facts, columns in moves:
            check(row.rollout_id, row.state, to, reason)
            attempt = row.attempt + (to is State.REQUEUED and row.state is State.RUNNING)
            if (held := row.state in HOLDING) is not (to in HOLDING):
                leavers.append(row.rollout_id) if held else takers.append(row)
            rows.append((row.rollout_id, to.value, attempt, reason, *columns.values()))
            log.append((row.rollout_id, row.state.value, to.value, attempt, reason, facts))
        self._set(("state", "attempt", "reason", *moves[0].columns), rows)
        self._take_slots([row.rollout_id for row in takers], grow=all(row.state in _LINEAGE for row in takers))
        self._release_slots(leavers)
        self._log(log)

    def _set(self, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> None:
        """Update these columns of several rollouts to (rollout id, value, value …): one update per row, since each
        costs a CRC."""
        typed = [
            f"CAST(column{n} AS {_NULLABLE[c]})" if c in _NULLABLE else f"column{n}" for n, c in enumerate(columns, 2)
        ]
        changed = ", ".join(f"{column} = {value}" for column, value in zip(columns, typed, strict=True))
        each(
            self._db,
            f"UPDATE rollouts SET {changed} FROM (VALUES ?) AS given WHERE rollout_id = column1",
            rows,
        )

    def _log(self, moves: Sequence[_Logged]) -> None:
        now = time.time()
        each(
            self._db,
            "INSERT INTO transitions (t, rollout_id, origin, state, attempt, reason, facts) VALUES ?",
            [(now, *move, json.dumps(dict(facts), default=str) if facts else "{}") for *move, facts in moves],
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
                f"all {self._capacity} are in use",
                hint="admit only as many groups as Window.free_groups allows",
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
                "the slots in the ledger are inconsistent",
                f"{holding} rollouts need a slot, {held} of {count} slots are in use, capacity {self._capacity}",
                hint="this is a bug in etude: keep the run folder, and report it with the output of etude ledger audit",
            )


def _continues(rollout: RolloutSummary) -> bool:
    """Whether a rollout continues the fork of another rollout."""
    return rollout.fork is not None and rollout.fork.origin != rollout.rollout_id


def _check_taken(row: Row, batch: Batch | BatchRef) -> None:
    """Raise `LedgerError` unless a batch may take this rollout."""
    if row.batch_id is not None:
        raise LedgerError(
            f"rollout {row.rollout_id} is in batch {row.batch_id}",
            f"batch {batch.batch_id} contains it too",
            hint="a rollout is trained on once: form batches from open_groups()",
        )
    if row.state not in ENDED:
        raise LedgerError(
            f"batch {batch.batch_id} contains rollout {row.rollout_id}, which has not ended",
            f"its state is {row.state}",
            hint="wait until its group is ready",
        )
