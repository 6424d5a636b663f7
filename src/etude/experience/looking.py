"""The queries of a ledger, and what each costs.

A query that is made while a run goes on reads open work only, by an index, however long the run is. The few that read
all rollouts say so. Knows nothing of how a rollout's state changes.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec

from etude.errors import LedgerError
from etude.experience.database import FORMAT, Database, marks, parts
from etude.experience.groups import Finished, Group
from etude.experience.lineage import Branches, seen_from
from etude.experience.rows import COLUMNS, Row, as_row
from etude.experience.transitions import SETTLED, State
from etude.records.completion import Version
from etude.records.rollout import RolloutSpec
from etude.records.summary import RolloutSummary
from etude.records.wire import unpack

_HIDDEN = (State.QUARANTINED, State.CANCELLED)
SPEC, FINISHED, QUARANTINE = "spec", "finished", "quarantine"
"""Names of the blobs that the ledger itself keeps: packed, a `RolloutSpec`, a `Finished`, a `Quarantined`."""

T = TypeVar("T")


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """Why a graded rollout got the reward 0: a sign of cheating."""

    reason: str  # the sign of cheating: "rule: what was seen (where)"
    graded: float  # the reward that the grader gave


class Looking:
    """The read-only half of a ledger."""

    _db: Database

    def row(self, rollout_id: str) -> Row:
        """The row of one rollout. Raises `LedgerError` when there is no such rollout."""
        return self.known([rollout_id])[0]

    def known(self, rollout_ids: Collection[str]) -> list[Row]:
        """The rows of these rollouts, in the order given. Raises `LedgerError` when one does not exist."""
        found = {row.rollout_id: row for row in self.found(rollout_ids)}
        for rollout_id in rollout_ids:
            if rollout_id not in found:
                hint = "list them: etude rollouts list RUN"
                raise LedgerError(f"rollout {rollout_id} is not in the ledger", hint=hint)
        return [found[rollout_id] for rollout_id in rollout_ids]

    def rows(
        self,
        *,
        step: int | None = None,
        states: Collection[State] | None = None,
        open_only: bool = False,
        limit: int | None = None,
    ) -> list[Row]:
        """Rollouts in order of admission: all; or those that `step` took, those in some `states`, those that no batch
        took; of these the last `limit`. Reads all rollouts where nothing narrows it down."""
        wanted: list[tuple[str, tuple[Any, ...]]] = [("step = ?", (step,))] if step is not None else []
        if states is not None:
            wanted.append((f"state IN ({marks(states)})", tuple(states)))
        if open_only:
            wanted.append(("batch_id IS NULL", ()))
        where = " AND ".join(sql for sql, _ in wanted) or "position > 0"
        values = [value for _, found in wanted for value in found]
        newest = "ORDER BY +position DESC" if wanted else "ORDER BY position DESC"  # +: sort, do not use this index
        newest += f" LIMIT {int(limit)}" if limit is not None else ""
        return [as_row(r) for r in self._db.rows(f"SELECT {COLUMNS} FROM rollouts WHERE {where} {newest}", *values)][
            ::-1
        ]

    def found(self, rollout_ids: Collection[str]) -> list[Row]:
        """The rows of those of these rollouts that exist, in no order."""
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id IN"
        return [as_row(r) for some in parts(rollout_ids) for r in self._db.rows(f"{sql} ({marks(some)})", *some)]

    def quarantined(self) -> dict[str, Quarantined]:
        """Rollouts with a sign of cheating, by id. Reads the blobs of all rollouts that are kept."""
        found = self._db.rows("SELECT rollout_id, data FROM blobs WHERE name = ?", QUARANTINE)
        return {i: _read(i, QUARANTINE, data, Quarantined) for i, data in sorted(found)}

    def count(self, *, after: int | None = None) -> int:
        """Number of rollouts ever admitted (reads all of them); with `after`, of those that no step up to it took."""
        if after is None:
            return int(self._value("SELECT count(*) FROM rollouts"))
        open_now = int(self._value("SELECT count(*) FROM rollouts WHERE batch_id IS NULL"))
        return open_now + int(self._value("SELECT count(*) FROM rollouts WHERE step > ?", after))

    def batched_again(self, rollout_ids: Collection[str]) -> set[str]:
        """Those of these rollouts that batches took more than once, batches of lost lineages included."""
        again = set[str]()
        for some in parts(rollout_ids):
            mine = f"rollout_id IN ({marks(some)})"
            sql = f"SELECT rollout_id FROM transitions WHERE {mine} AND state = ? GROUP BY rollout_id"
            again |= {i for (i,) in self._db.rows(f"{sql} HAVING count(*) > 1", *some, State.BATCHED)}
        return again

    def states(self) -> dict[str, int]:
        return dict(self._db.rows("SELECT state, count(*) FROM rollouts GROUP BY state"))

    def steps(self, after: int = 0) -> list[int]:
        """Every step after `after` that a batch took rollouts for, ascending."""
        sql = "SELECT step FROM rollouts WHERE step > ? GROUP BY step ORDER BY step"
        return [int(step) for (step,) in self._db.rows(sql, after)]

    def get(self, rollout_id: str, name: str) -> bytes | None:
        data: bytes | None = self._value("SELECT data FROM blobs WHERE rollout_id = ? AND name = ?", rollout_id, name)
        return data

    def spec(self, rollout_id: str) -> RolloutSpec:
        """The spec of a rollout, with the ledger's current attempt. Raises `LedgerError` where it was pruned."""
        return self.specs([self.row(rollout_id)])[0]

    def specs(self, rows: Collection[Row]) -> list[RolloutSpec]:
        """The specs of rollouts whose rows were just read, in the same order."""
        sql = f"SELECT rollout_id, data FROM blobs WHERE name = ? AND rollout_id IN ({marks(rows)})"
        stored = dict(self._db.rows(sql, SPEC, *(row.rollout_id for row in rows)))
        return [_spec(row, stored.get(row.rollout_id)) for row in rows]

    def history(self, rollout_id: str) -> list[dict[str, Any]]:
        """Every transition of a rollout, oldest first."""
        sql = "SELECT t, origin, state, attempt, reason, facts FROM transitions WHERE rollout_id = ? ORDER BY number"
        names = ("t", "origin", "state", "attempt", "reason")
        return [
            {**dict(zip(names, values, strict=True)), **json.loads(facts)}
            for *values, facts in self._db.rows(sql, rollout_id)
        ]

    def waiting(self) -> list[str]:
        """Rollouts that wait for a worker, in order of admission."""
        return self._ids("state IN (?, ?)", State.ADMITTED, State.REQUEUED)

    def next_waiting(self, limit: int) -> list[Row]:
        """The first `limit` rows of `waiting`; the others are not read."""
        first = f"SELECT position, {COLUMNS} FROM rollouts WHERE state = ? ORDER BY position LIMIT {int(limit)}"
        both = f"SELECT * FROM ({first}) AS a UNION ALL SELECT * FROM ({first}) AS b ORDER BY 1 LIMIT {int(limit)}"
        return [as_row(values[1:]) for values in self._db.rows(both, State.ADMITTED, State.REQUEUED)]

    def open_groups(self) -> list[str]:
        """Groups that no batch has taken, in order of admission."""
        sql = "SELECT group_id FROM rollouts WHERE batch_id IS NULL GROUP BY group_id ORDER BY min(position)"
        return [group_id for (group_id,) in self._db.rows(sql)]

    def num_groups(self) -> int:
        """Groups ever admitted: the index of the next one."""
        counted = self.recall("groups")  # None in a ledger of an earlier etude: all rollouts are read
        return int(self._value("SELECT count(DISTINCT group_id) FROM rollouts") if counted is None else counted)

    def ready_groups(self, group_ids: Collection[str]) -> set[str]:
        """Those of these groups of which no member is still waited for."""
        settled = f"count(*) = sum(CASE WHEN state IN ({marks(SETTLED)}) THEN 1 ELSE 0 END)"
        ready = set[str]()
        for some in parts(group_ids):
            sql = f"SELECT group_id FROM rollouts WHERE group_id IN ({marks(some)}) GROUP BY group_id HAVING {settled}"
            ready |= {group_id for (group_id,) in self._db.rows(sql, *some, *SETTLED)}
        return ready

    def with_signal(self, group_ids: Collection[str]) -> set[str]:
        """Those of these groups whose graded members do not all have the same reward in their rows."""
        having = set[str]()
        for some in parts(group_ids):
            sql = f"SELECT group_id FROM rollouts WHERE group_id IN ({marks(some)}) AND state = ?"
            sql += " GROUP BY group_id HAVING min(reward) < max(reward)"
            having |= {group_id for (group_id,) in self._db.rows(sql, *some, State.GRADED)}
        return having

    def batched_groups(self, group_ids: Collection[str]) -> set[str]:
        """Those of these groups that any batch ever took, batches of lost lineages included."""
        sql = "SELECT DISTINCT group_id FROM rollouts JOIN transitions USING (rollout_id) WHERE transitions.state = ?"
        batched = set[str]()
        for some in parts(group_ids):
            rows = self._db.rows(f"{sql} AND group_id IN ({marks(some)})", State.BATCHED, *some)
            batched |= {group_id for (group_id,) in rows}
        return batched

    def group(self, group_id: str) -> Group:
        """A group with its stored records, versions as seen from the current weights (`lineage.seen_from`). Raises
        `LedgerError` for a record that cannot be read."""
        of = f"b.rollout_id = r.rollout_id AND b.name = ? AND r.state NOT IN ({marks(_HIDDEN)})"
        sql = f"SELECT r.rollout_id, b.data FROM rollouts r LEFT JOIN blobs b ON {of} WHERE r.group_id = ?"
        stored = sorted(self._db.rows(sql, FINISHED, *_HIDDEN, group_id))
        ids = tuple(rollout_id for rollout_id, _ in stored)
        found = [_read(i, FINISHED, data, Finished) for i, data in stored if data is not None]
        return seen_from(Branches(self.versions()), Group(group_id, ids, tuple(found)))

    def versions(self) -> list[Version]:
        """The latest published versions in order of publishing, those of lost lineages included."""
        return [Version(*facts) for facts in self.recall("versions") or []]

    def wanted_files(self) -> set[tuple[str, int]]:
        """(rollout id, attempt) of every rollout whose file a batch or a grade may still ask for."""
        stored = "rollout_id IN (SELECT rollout_id FROM blobs WHERE name = ?)"
        sql = f"SELECT rollout_id, attempt FROM rollouts WHERE {stored} OR state = ?"
        return {(rollout_id, int(attempt)) for rollout_id, attempt in self._db.rows(sql, FINISHED, State.RUNNING)}

    def stored(self) -> list[RolloutSummary]:
        """Of every rollout whose file was stored and is still wanted, by looking at all that are kept. None of a
        ledger of an earlier etude, in which rollouts lie themselves."""
        if self.recall("format") != FORMAT:
            return []
        found = self._db.rows("SELECT rollout_id, data FROM blobs WHERE name = ?", FINISHED)
        summaries = (_read(rollout_id, FINISHED, data, Finished).summary for rollout_id, data in found)
        return [one for one in summaries if one is not None and one.stored is not None]

    def finished(self, rollout_id: str) -> Finished | None:
        """The stored record of an ended rollout; None where there is none or it was pruned. Raises `LedgerError` for a
        record that cannot be read."""
        data = self.get(rollout_id, FINISHED)
        return None if data is None else _read(rollout_id, FINISHED, data, Finished)

    def is_kept(self, rollout_id: str) -> bool:
        """Whether the record of a finished rollout is still wanted."""
        return self.get(rollout_id, FINISHED) is not None

    def cursor(self, split: str) -> int:
        """Index of the next task to draw from a split of the task source; it is 0 at the start."""
        return int(self.recall(f"cursor.{split}") or 0)

    def recall(self, key: str) -> Any:
        """The value kept under `key`; None when there is none."""
        text = self._value("SELECT value FROM meta WHERE key = ?", key)
        return None if text is None else json.loads(text)

    def slots(self) -> tuple[int, int]:
        """(slots held, all slots). The latter is the capacity; it is larger only while rollouts of a lost lineage are
        trained again."""
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


def _spec(row: Row, data: bytes | None) -> RolloutSpec:
    if data is None:
        raise LedgerError(f"rollout {row.rollout_id} has no spec left", "it was pruned", hint="it has ended: skip it")
    return msgspec.structs.replace(_read(row.rollout_id, SPEC, data, RolloutSpec), attempt=row.attempt)


def _read(rollout_id: str, name: str, data: bytes, kind: type[T]) -> T:
    try:
        return unpack(data, kind)
    except ValueError as error:
        raise LedgerError(
            f"the {name} of rollout {rollout_id} cannot be read", str(error), hint="quarantine it and go on"
        ) from error
