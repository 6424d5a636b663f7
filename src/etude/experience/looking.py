"""Looking at a ledger: what it answers, and what each question costs.

Whatever is asked while a run goes on looks at open work only, however long the run is: an index leads to it. The few
that look at all rollouts say so. Knows nothing of how a rollout's state changes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from etude.errors import LedgerError
from etude.experience.database import Database
from etude.experience.groups import Finished, Group
from etude.experience.rows import COLUMNS, Row, as_row
from etude.experience.transitions import SETTLED, State
from etude.records.rollout import RolloutSpec
from etude.records.wire import unpack

SPEC, FINISHED = "spec", "finished"
"""Names of the blobs that the ledger itself keeps: a packed `RolloutSpec` and a packed `Finished`."""

T = TypeVar("T")


class Looking:
    """The half of a ledger that changes nothing."""

    _db: Database

    def row(self, rollout_id: str) -> Row:
        """`LedgerError` when there is no such rollout."""
        found = self._db.rows(f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id = ?", rollout_id)
        if not found:
            raise LedgerError(f"rollout {rollout_id} is not in the ledger", hint="list them: etude rollouts list RUN")
        return as_row(found[0])

    def rows(
        self,
        *,
        step: int | None = None,
        states: Collection[State] | None = None,
        open_only: bool = False,
        limit: int | None = None,
    ) -> list[Row]:
        """Rollouts in order of admission: all, those that a step took, those in some states, those that no batch took;
        the last `limit` of them. In a long run all are many."""
        wanted: list[tuple[str, tuple[Any, ...]]] = [("step = ?", (step,))] if step is not None else []
        if states is not None:
            wanted.append((f"state IN ({', '.join('?' * len(states))})", tuple(states)))
        if open_only:
            wanted.append(("batch_id IS NULL", ()))
        where = " AND ".join(sql for sql, _ in wanted) or "position > 0"
        values = [value for _, found in wanted for value in found]
        newest = "ORDER BY +position DESC" if wanted else "ORDER BY position DESC"  # +: sorted, not read in this order
        newest += f" LIMIT {int(limit)}" if limit is not None else ""
        return [as_row(r) for r in self._db.rows(f"SELECT {COLUMNS} FROM rollouts WHERE {where} {newest}", *values)][
            ::-1
        ]

    def found(self, rollout_ids: Collection[str]) -> list[Row]:
        """The rows of those of some rollouts that there are."""
        marks = ", ".join("?" * len(rollout_ids))
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id IN ({marks})"
        return [as_row(r) for r in self._db.rows(sql, *rollout_ids)] if rollout_ids else []

    def count(self, *, after: int | None = None) -> int:
        """Rollouts ever admitted, by looking at all; with `after`, those that no step up to that one took."""
        if after is None:
            return int(self._value("SELECT count(*) FROM rollouts"))
        open_now = int(self._value("SELECT count(*) FROM rollouts WHERE batch_id IS NULL"))
        return open_now + int(self._value("SELECT count(*) FROM rollouts WHERE step > ?", after))

    def batched_again(self, rollout_ids: Collection[str]) -> set[str]:
        """Those of some rollouts that batches took more than once, of lost lineages included."""
        marks = ", ".join("?" * len(rollout_ids))
        sql = f"SELECT rollout_id FROM transitions WHERE rollout_id IN ({marks}) AND state = ? GROUP BY rollout_id"
        return {i for (i,) in self._db.rows(f"{sql} HAVING count(*) > 1", *rollout_ids, State.BATCHED)}

    def states(self) -> dict[str, int]:
        return dict(self._db.rows("SELECT state, count(*) FROM rollouts GROUP BY state"))

    def steps(self, after: int = 0) -> list[int]:
        """Every version step after one that a batch took rollouts for, in order."""
        sql = "SELECT step FROM rollouts WHERE step > ? GROUP BY step ORDER BY step"
        return [int(step) for (step,) in self._db.rows(sql, after)]

    def get(self, rollout_id: str, name: str) -> bytes | None:
        data: bytes | None = self._value("SELECT data FROM blobs WHERE rollout_id = ? AND name = ?", rollout_id, name)
        return data

    def spec(self, rollout_id: str) -> RolloutSpec:
        """What to run, at the attempt that the ledger counts."""
        spec = self._record(rollout_id, SPEC, RolloutSpec)
        if spec is None:
            raise LedgerError(f"rollout {rollout_id} has no spec left", "it was pruned", hint="it has ended: skip it")
        return msgspec.structs.replace(spec, attempt=self.row(rollout_id).attempt)

    def history(self, rollout_id: str) -> list[dict[str, Any]]:
        """Every transition of a rollout, oldest first."""
        sql = "SELECT t, origin, state, attempt, reason, facts FROM transitions WHERE rollout_id = ? ORDER BY number"
        names = ("t", "origin", "state", "attempt", "reason")
        return [
            {**dict(zip(names, values, strict=True)), **json.loads(facts)}
            for *values, facts in self._db.rows(sql, rollout_id)
        ]

    def waiting(self) -> list[str]:
        """Rollouts that want a worker, in order of admission."""
        return self._ids("state IN (?, ?)", State.ADMITTED, State.REQUEUED)

    def next_waiting(self) -> str | None:
        """The first of `waiting`, without looking at the others."""
        first = "SELECT min(position) AS position FROM rollouts WHERE state = ?"
        sql = f"SELECT rollout_id FROM rollouts WHERE position = (SELECT min(position) FROM ({first} UNION {first}) f)"
        found: str | None = self._value(sql, State.ADMITTED, State.REQUEUED)
        return found

    def open_groups(self) -> list[str]:
        """Groups that no batch has taken, in order of admission."""
        sql = "SELECT group_id FROM rollouts WHERE batch_id IS NULL GROUP BY group_id ORDER BY min(position)"
        return [group_id for (group_id,) in self._db.rows(sql)]

    def num_groups(self) -> int:
        """Groups ever admitted: the index of the next one."""
        counted = self.recall("groups")  # an earlier etude did not: then once, by looking at all
        return int(self._value("SELECT count(DISTINCT group_id) FROM rollouts") if counted is None else counted)

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

    def cursor(self, split: str) -> int:
        """Index of the next task of a split."""
        return int(self.recall(f"cursor.{split}") or 0)

    def recall(self, key: str) -> Any:
        """The value kept under `key`; None when there is none."""
        text = self._value("SELECT value FROM meta WHERE key = ?", key)
        return None if text is None else json.loads(text)

    def slots(self) -> tuple[int, int]:
        """(held, all). All is the capacity; it is more only while a lost lineage's rollouts are trained again."""
        held, count = self._db.rows("SELECT count(rollout_id), count(*) FROM slots")[0]
        return int(held), int(count)

    def slot_holders(self) -> list[str]:
        return [i for (i,) in self._db.rows("SELECT rollout_id FROM slots WHERE rollout_id IS NOT NULL")]

    def _value(self, sql: str, *values: Any) -> Any:
        """The first column of the first row; None when there is none."""
        rows = self._db.rows(sql, *values)
        return rows[0][0] if rows else None

    def _ids(self, where: str, *values: Any) -> list[str]:
        return [
            i for (i,) in self._db.rows(f"SELECT rollout_id FROM rollouts WHERE {where} ORDER BY +position", *values)
        ]

    def _record(self, rollout_id: str, name: str, kind: type[T]) -> T | None:
        data = self.get(rollout_id, name)
        try:
            return None if data is None else unpack(data, kind)
        except ValueError as error:
            raise LedgerError(
                f"the {name} of rollout {rollout_id} cannot be read", str(error), hint="quarantine it and go on"
            ) from error
