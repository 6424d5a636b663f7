"""Queries of a ledger: rollouts by id, state, step and group, with their stored records.

The queries that a live run makes use an index and read only rollouts that are not yet trained, so their cost does not
grow with the run. Each query that reads all rollouts says so."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import msgspec

from etude.errors import LedgerError
from etude.experience.database import FORMAT, Database, marks, parts
from etude.experience.groups import COLUMNS, Finished, Group, Row, as_row
from etude.experience.lineage import Branches, with_apparent_steps
from etude.experience.transitions import ENDED, State
from etude.records.completion import Version
from etude.records.rollout import RolloutSpec
from etude.records.summary import RolloutSummary
from etude.records.wire import unpack

T = TypeVar("T")

_HIDDEN = (State.QUARANTINED, State.CANCELLED)
SPEC, FINISHED, QUARANTINE = "spec", "finished", "quarantine"
"""Names of the blobs that the ledger writes: a packed `RolloutSpec`, `Finished`, `Quarantined`."""


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """Why a graded rollout got reward 0: a sign of cheating.

    `reason`: the sign as "rule: finding (where)". `graded`: the reward that the grader gave."""

    reason: str
    graded: float


class StepCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of the batch that produces one version step.

    `states`: number of rollouts by state. `reward_mean`: over those with a reward; None without one. `batch_id`: the
    batch."""

    step: int
    batch_id: str
    states: dict[str, int]
    reward_mean: float | None


class LedgerQueries:
    """The read methods of a `Ledger`."""

    _db: Database

    def row(self, rollout_id: str) -> Row:
        """Return the row of a rollout. Raises `LedgerError` when it does not exist."""
        return self.require_rows([rollout_id])[0]

    def require_rows(self, rollout_ids: Collection[str]) -> list[Row]:
        """Return the rows of these rollouts, in the given order. Raises `LedgerError` when one does not exist."""
        found = {row.rollout_id: row for row in self.find_rows(rollout_ids)}
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
        """Return rows in order of admission. Without a filter it reads all rollouts.

        The filters combine: `step` keeps rollouts in the batch that produces this version step, `states` those in one
        of these states, `open_only` those in no batch. `limit` keeps only the last rows of these."""
        wanted: list[tuple[str, tuple[Any, ...]]] = [("step = ?", (step,))] if step is not None else []
        if states is not None:
            wanted.append((f"state IN ({marks(states)})", tuple(states)))
        if open_only:
            wanted.append(("batch_id IS NULL", ()))
        where = " AND ".join(sql for sql, _ in wanted) or "position > 0"
        values = [value for _, found in wanted for value in found]
        newest = "ORDER BY +position DESC" if wanted else "ORDER BY position DESC"  # +: sort, do not use an index
        newest += f" LIMIT {int(limit)}" if limit is not None else ""
        found = self._db.rows(f"SELECT {COLUMNS} FROM rollouts WHERE {where} {newest}", *values)
        return [as_row(row) for row in reversed(found)]

    def page(
        self, *, limit: int, before: int | None = None, step: int | None = None, state: State | None = None
    ) -> list[tuple[int, Row]]:
        """Return (position, row) of at most `limit` rollouts, the newest first. Reads no others: it uses an index.

        `before`: only rollouts admitted before this position, to get the next page. `step` and `state` as in `rows`;
        with both, all rollouts of the step may be read."""
        wanted: list[tuple[str, Any]] = [("position < ?", before)] if before is not None else []
        if step is not None:
            wanted.append(("step = ?", step))
        if state is not None:  # with a step, "state ||" keeps the index of states from being used
            wanted.append(("state = ?" if step is None else "state || '' = ?", state))
        where = " AND ".join(sql for sql, _ in wanted) or "position > 0"
        sql = f"SELECT position, {COLUMNS} FROM rollouts WHERE {where} ORDER BY position DESC LIMIT {int(limit)}"
        found = self._db.rows(sql, *(value for _, value in wanted))
        return [(int(position), as_row(tuple(values))) for position, *values in found]

    def last_steps(self, *, limit: int, before: int | None = None) -> list[int]:
        """Return the newest version steps that have a batch, descending, at most `limit`; only those below `before`.

        Reads the index of these steps only."""
        upper = 1 << 62 if before is None else before
        sql = f"SELECT step FROM rollouts WHERE step < ? GROUP BY step ORDER BY step DESC LIMIT {int(limit)}"
        return [int(step) for (step,) in self._db.rows(sql, upper)]

    def step_counts(self, steps: Collection[int]) -> dict[int, StepCounts]:
        """Return the states and the mean reward of the rollouts in the batches of these steps. Reads these rollouts.

        Steps without a batch are left out."""
        sql = "SELECT step, state, max(batch_id), count(*), count(reward), sum(reward) FROM rollouts WHERE step IN"
        found: dict[int, list[tuple[Any, ...]]] = {}
        for some in parts(steps):
            for step, *values in self._db.rows(f"{sql} ({marks(some)}) GROUP BY step, state", *some):
                found.setdefault(int(step), []).append(tuple(values))
        counts = dict[int, StepCounts]()
        for step, rows in found.items():
            num_rewards = sum(int(row[3]) for row in rows)
            total = sum(float(row[4] or 0.0) for row in rows)
            counts[step] = StepCounts(
                step=step,
                batch_id=max(str(row[1] or "") for row in rows),
                states={str(row[0]): int(row[2]) for row in rows},
                reward_mean=total / num_rewards if num_rewards else None,
            )
        return counts

    def find_rows(self, rollout_ids: Collection[str]) -> list[Row]:
        """Return the rows of these rollouts, in no particular order. Ids that do not exist are left out."""
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE rollout_id IN"
        return [as_row(r) for some in parts(rollout_ids) for r in self._db.rows(f"{sql} ({marks(some)})", *some)]

    def group_rows(self, group_id: str) -> list[Row]:
        """Return the rows of all rollouts of a group, in order of admission."""
        sql = f"SELECT {COLUMNS} FROM rollouts WHERE group_id = ? ORDER BY position"
        return [as_row(values) for values in self._db.rows(sql, group_id)]

    def quarantined(self) -> dict[str, Quarantined]:
        """Return for each rollout with a sign of cheating, by id, the sign and the grade."""
        found = self._db.rows("SELECT rollout_id, data FROM blobs WHERE name = ?", QUARANTINE)
        return {i: _read(i, QUARANTINE, data, Quarantined) for i, data in sorted(found)}

    def quarantine_of(self, rollout_id: str) -> Quarantined | None:
        """Return the sign of cheating of a rollout, and its grade; None if there is no sign."""
        data = self.get(rollout_id, QUARANTINE)
        return None if data is None else _read(rollout_id, QUARANTINE, data, Quarantined)

    def count(self, *, after: int | None = None) -> int:
        """Return the number of rollouts ever admitted. Reads all rollouts.

        With `after`, count only those in no batch and those in batches of later steps."""
        if after is None:
            return int(self._value("SELECT count(*) FROM rollouts"))
        open_now = int(self._value("SELECT count(*) FROM rollouts WHERE batch_id IS NULL"))
        return open_now + int(self._value("SELECT count(*) FROM rollouts WHERE step > ?", after))

    def batched_repeatedly(self, rollout_ids: Collection[str]) -> set[str]:
        """Return the ids of those rollouts that were in more than one batch. Batches that a restart undid count too."""
        sql = "SELECT rollout_id FROM transitions WHERE rollout_id IN (*) AND state = ? GROUP BY rollout_id"
        return self._among(rollout_ids, f"{sql} HAVING count(*) > 1", State.BATCHED)

    def states(self) -> dict[str, int]:
        """Return the number of rollouts by state. Reads all rollouts."""
        return dict(self._db.rows("SELECT state, count(*) FROM rollouts GROUP BY state"))

    def steps(self, after: int = 0) -> list[int]:
        """Return the version steps above `after` that have a batch with rollouts, ascending."""
        sql = "SELECT step FROM rollouts WHERE step > ? GROUP BY step ORDER BY step"
        return [int(step) for (step,) in self._db.rows(sql, after)]

    def get(self, rollout_id: str, name: str) -> bytes | None:
        """Return the bytes stored under a rollout and a name; None if there are none."""
        data: bytes | None = self._value("SELECT data FROM blobs WHERE rollout_id = ? AND name = ?", rollout_id, name)
        return data

    def spec(self, rollout_id: str) -> RolloutSpec:
        """Return the spec of a rollout, with its current attempt. Raises `LedgerError` when `prune` deleted it."""
        return self.specs([self.row(rollout_id)])[0]

    def specs(self, rows: Collection[Row]) -> list[RolloutSpec]:
        """Return the specs (descriptions from which a worker runs a rollout) of these rows, in the same order.

        Raises `LedgerError` for a spec that `prune` deleted."""
        sql, stored = "SELECT rollout_id, data FROM blobs WHERE name = ? AND rollout_id IN", dict[str, bytes]()
        for some in parts([row.rollout_id for row in rows]):
            stored |= dict(self._db.rows(f"{sql} ({marks(some)})", SPEC, *some))
        return [_spec(row, stored.get(row.rollout_id)) for row in rows]

    def history(self, rollout_id: str) -> list[dict[str, Any]]:
        """Return all transitions of a rollout, oldest first.

        The keys are t (Unix time in seconds), origin, state, attempt, reason, and further facts."""
        sql = "SELECT t, origin, state, attempt, reason, facts FROM transitions WHERE rollout_id = ? ORDER BY number"
        names = ("t", "origin", "state", "attempt", "reason")
        return [
            {**dict(zip(names, values, strict=True)), **json.loads(facts)}
            for *values, facts in self._db.rows(sql, rollout_id)
        ]

    def waiting(self) -> list[str]:
        """Return the ids of rollouts that wait for a worker, in order of admission."""
        sql = "SELECT rollout_id FROM rollouts WHERE state IN (?, ?) ORDER BY +position"
        return [rollout_id for (rollout_id,) in self._db.rows(sql, State.ADMITTED, State.REQUEUED)]

    def next_waiting(self, limit: int) -> list[Row]:
        """Return the rows of the first `limit` rollouts that wait for a worker, in order of admission."""
        first = f"SELECT position, {COLUMNS} FROM rollouts WHERE state = ? ORDER BY position LIMIT {int(limit)}"
        both = f"SELECT * FROM ({first}) AS a UNION ALL SELECT * FROM ({first}) AS b ORDER BY 1 LIMIT {int(limit)}"
        return [as_row(values[1:]) for values in self._db.rows(both, State.ADMITTED, State.REQUEUED)]

    def open_groups(self) -> list[str]:
        """Return the ids of the groups of rollouts that no batch has taken, in order of admission."""
        sql = "SELECT group_id FROM rollouts WHERE batch_id IS NULL GROUP BY group_id ORDER BY min(position)"
        return [group_id for (group_id,) in self._db.rows(sql)]

    def num_groups(self) -> int:
        """Return the number of groups ever admitted."""
        counted = self.recall("groups")  # None in ledgers of earlier versions: then all rollouts are read
        return int(self._value("SELECT count(DISTINCT group_id) FROM rollouts") if counted is None else counted)

    def ready_groups(self, group_ids: Collection[str]) -> set[str]:
        """Return the ids of those groups in which all members have ended."""
        settled = f"count(*) = sum(CASE WHEN state IN ({marks(ENDED)}) THEN 1 ELSE 0 END)"
        sql = f"SELECT group_id FROM rollouts WHERE group_id IN (*) GROUP BY group_id HAVING {settled}"
        return self._among(group_ids, sql, *ENDED)

    def ended_groups(self, group_ids: Collection[str]) -> set[str]:
        """Return the ids of those groups in which every rollout has ended or is held."""
        settled = f"count(*) = sum(CASE WHEN state IN ({marks(ENDED)}, ?) THEN 1 ELSE 0 END)"
        sql = f"SELECT group_id FROM rollouts WHERE group_id IN (*) GROUP BY group_id HAVING {settled}"
        return self._among(group_ids, sql, *ENDED, State.HELD)

    def batched_groups(self, group_ids: Collection[str]) -> set[str]:
        """Return the ids of those groups that were ever in a batch. Batches that a restart undid count too."""
        sql = "SELECT DISTINCT group_id FROM rollouts JOIN transitions USING (rollout_id) WHERE group_id IN (*)"
        return self._among(group_ids, f"{sql} AND transitions.state = ?", State.BATCHED)

    def group(self, group_id: str) -> Group:
        """Return a group with its stored records. Raises `LedgerError` for a record that cannot be read.

        The steps of versions that a restart abandoned are corrected (`lineage.with_apparent_steps`), so that lags are
        counted to the current weights."""
        return self.groups([group_id])[0]

    def groups(self, group_ids: Sequence[str]) -> list[Group]:
        """Return several groups with their stored records, in the given order.

        Raises `LedgerError` for a record that cannot be read."""
        of = f"b.rollout_id = r.rollout_id AND b.name = ? AND r.state NOT IN ({marks(_HIDDEN)})"
        sql = f"SELECT r.group_id, r.rollout_id, b.data FROM rollouts r LEFT JOIN blobs b ON {of} WHERE r.group_id IN"
        stored: dict[str, dict[str, bytes | None]] = {group_id: {} for group_id in group_ids}
        for some in parts(group_ids):
            for group_id, rollout_id, data in self._db.rows(f"{sql} ({marks(some)})", FINISHED, *_HIDDEN, *some):
                stored[group_id][rollout_id] = data
        branches, groups = Branches(self.versions()), list[Group]()
        for group_id in group_ids:
            members = sorted(stored[group_id].items())
            found = (_read(i, FINISHED, data, Finished) for i, data in members if data is not None)
            group = Group(group_id, tuple(i for i, _ in members), tuple(found))
            groups.append(with_apparent_steps(branches, group))
        return groups

    def versions(self) -> list[Version]:
        """Return the latest published versions in order of publishing, with those that a restart abandoned."""
        return [Version(*facts) for facts in self.recall("versions") or []]

    def wanted_files(self) -> set[tuple[str, int]]:
        """Return (rollout id, attempt) of every rollout whose file is still needed, for grading or for a batch."""
        stored = "rollout_id IN (SELECT rollout_id FROM blobs WHERE name = ?)"
        sql = f"SELECT rollout_id, attempt FROM rollouts WHERE {stored} OR state = ?"
        return {(rollout_id, int(attempt)) for rollout_id, attempt in self._db.rows(sql, FINISHED, State.RUNNING)}

    def stored_summaries(self) -> list[RolloutSummary]:
        """Return the summaries of all rollouts whose file is stored and still needed. Reads all stored records.

        The list is empty for ledgers of earlier versions, which contain the rollouts themselves."""
        if self.recall("format") != FORMAT:
            return []
        found = self._db.rows("SELECT rollout_id, data FROM blobs WHERE name = ?", FINISHED)
        summaries = (_read(rollout_id, FINISHED, data, Finished).summary for rollout_id, data in found)
        return [one for one in summaries if one is not None and one.stored is not None]

    def finished(self, rollout_id: str) -> Finished | None:
        """Return the stored record of an ended rollout; None if there is none or `prune` deleted it.

        Raises `LedgerError` for a record that cannot be read."""
        data = self.get(rollout_id, FINISHED)
        return None if data is None else _read(rollout_id, FINISHED, data, Finished)

    def rollouts_of_tasks(self, task_ids: Collection[str]) -> list[str]:
        """Return the ids of the ended rollouts of these tasks, sorted. Reads all records that are stored.

        Raises `LedgerError` for a record that cannot be read."""
        wanted, found = set(task_ids), list[str]()
        for rollout_id, data in self._db.rows("SELECT rollout_id, data FROM blobs WHERE name = ?", FINISHED):
            summary = _read(rollout_id, FINISHED, data, Finished).summary
            if summary is not None and summary.task_id in wanted:
                found.append(rollout_id)
        return sorted(found)

    def is_kept(self, rollout_id: str) -> bool:
        """Return whether the record of a finished rollout is still stored."""
        return self.get(rollout_id, FINISHED) is not None

    def cursor(self, split: str) -> int:
        """Return the index of the next task to draw from a split of the task source; 0 at the start."""
        return int(self.recall(f"cursor.{split}") or 0)

    def recall(self, key: str) -> Any:
        """Return the value stored under `key` by `remember`; None if there is none."""
        text = self._value("SELECT value FROM meta WHERE key = ?", key)
        return None if text is None else json.loads(text)

    def slots(self) -> tuple[int, int]:
        """Return (slots in use, all slots). A rollout that is waiting, running or not yet trained has a slot.

        The number of all slots is the capacity. It is larger only while rollouts of steps that a restart undid are
        trained again."""
        held, count = self._db.rows("SELECT count(rollout_id), count(*) FROM slots")[0]
        return int(held), int(count)

    def slot_holders(self) -> list[str]:
        """Return the ids of the rollouts that have a slot."""
        return [i for (i,) in self._db.rows("SELECT rollout_id FROM slots WHERE rollout_id IS NOT NULL")]

    def _value(self, sql: str, *values: Any) -> Any:
        """Return the first column of the first row; None if there is none."""
        rows = self._db.rows(sql, *values)
        return rows[0][0] if rows else None

    def _among(self, ids: Collection[str], sql: str, *values: Any) -> set[str]:
        """Return the first column of all rows of a query, in which `IN (*)` stands for the ids."""
        found = set[str]()
        for some in parts(ids):
            rows = self._db.rows(sql.replace("IN (*)", f"IN ({marks(some)})"), *some, *values)
            found |= {row[0] for row in rows}
        return found


def _spec(row: Row, data: bytes | None) -> RolloutSpec:
    if data is None:
        raise LedgerError(
            f"the spec of rollout {row.rollout_id} is no longer stored",
            "the run deleted it, since no restart can go back to its step",
            hint="skip this rollout: it has ended",
        )
    return msgspec.structs.replace(_read(row.rollout_id, SPEC, data, RolloutSpec), attempt=row.attempt)


def _read(rollout_id: str, name: str, data: bytes, kind: type[T]) -> T:
    try:
        return unpack(data, kind)
    except ValueError as error:
        raise LedgerError(
            f"the {name} of rollout {rollout_id} cannot be read",
            str(error),
            hint="restore the ledger from a copy, or use the etude version that wrote it",
        ) from error
