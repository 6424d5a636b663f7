"""`SessionSource`: the task source over the sessions of a privacy folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from etude.errors import NoSource, TaskError, TaskWithdrawn
from etude.records.task import Answer, Split, Task
from etude.tasks.sessions.store import SessionStore

NAME = "sessions"


class SessionSource:
    """A `WithdrawingSource` over the proven sessions of a privacy folder, ``sessions:DIR``.

    Consent is asked at every call. In the place of a task that was withdrawn, `task` returns the next one of the split.
    Raises `NoSource` if the folder has no task that may be trained on."""

    def __init__(self, path: Path | str) -> None:
        self.name, self._path = NAME, Path(path)
        with SessionStore(self._path) as store:
            self._records = {split: store.records(split) for split in Split}
        if not any(self._records.values()):
            hint = "make tasks of sessions: etude tasks sessions FOLDER... --privacy DIR"
            raise NoSource(f"{path} has no session task that may be trained on", hint=hint)

    def size(self, split: Split) -> int | None:
        return len(self._records[split])

    def task(self, split: Split, index: int) -> Task:
        records = self._records[split]
        if not 0 <= index < len(records):
            hint = f"give an index from 0 to {len(records) - 1}" if records else "give another split"
            raise TaskError(f"no task {index} in {split}", f"{self._path} has {len(records)}", hint=hint)
        with SessionStore(self._path) as store:
            for record_id in (*records[index:], *records[:index]):
                session = store.read(record_id)
                if session is not None and session.task is not None:
                    return msgspec.structs.replace(session.task, index=index)
        what = f"no {split} task of {self._path} may be trained on any more"
        raise TaskWithdrawn(what, "its sessions were withdrawn, erased, or have expired", hint="import new sessions")

    def answer(self, task: Task) -> Answer:
        with SessionStore(self._path) as store:
            session = store.read_task(task.task_id)
        if session is None or session.answer is None:
            facts = "its consent was withdrawn, it was erased or imported again, or it has expired"
            raise TaskWithdrawn(f"task {task.task_id} has no answer any more", facts, hint="leave the task out")
        return session.answer

    def withdrawn(self, task_ids: Collection[str]) -> set[str]:
        with SessionStore(self._path) as store:
            return store.withdrawn(task_ids)
