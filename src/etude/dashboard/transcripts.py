"""One task's transcript before and after, from the evaluations' Parquet files. Reads those, knows no tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.sums import Unproven, prove_parquet

_COLUMNS = ("task_id", "rollout_id", "reward", "family", "transcript")
_MESSAGE = re.compile(r"^\[(system|user|assistant|call|tool)\] ?", re.MULTILINE)
_MAX_CHARS = 20_000


@dataclass(frozen=True)
class Message:
    """One message of a transcript. Its `role` is "" for text in no known chat format."""

    role: str
    text: str


@dataclass(frozen=True)
class Try:
    """One rollout of the task."""

    rollout_id: str
    reward: float
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Pair:
    """The same task, tried by the policy before RL and after."""

    task_id: str
    family: str
    before: Try
    after: Try


def pair(evals: Path) -> Pair | None:
    """A task that failed before and is solved after, of middling length; None when there is no such task, or no files.

    The choice is of the content alone, so that a report written again shows the same task.
    """
    before = {row["task_id"]: row for row in reversed(_rows(evals / "before.parquet"))}
    solved_before = {row["task_id"] for row in _rows(evals / "before.parquet") if row["reward"] >= 1.0}
    found = [
        row
        for row in _rows(evals / "after.parquet")
        if row["reward"] >= 1.0 and row["task_id"] in before and row["task_id"] not in solved_before
    ]
    if not found:
        return None
    found.sort(key=lambda row: (len(row["transcript"]), row["task_id"], row["rollout_id"]))
    after = found[len(found) // 2]
    return Pair(after["task_id"], after["family"], _try(before[after["task_id"]]), _try(after))


def messages(transcript: str) -> tuple[Message, ...]:
    """The messages of a transcript, by the names that begin their paragraphs.

    >>> messages("[user] mend it\\n[call] test\\n[tool] 1 failed")
    (Message(role='user', text='mend it'), Message(role='call', text='test'), Message(role='tool', text='1 failed'))
    """
    cut = transcript[:_MAX_CHARS] + ("\n…" if len(transcript) > _MAX_CHARS else "")
    first, *rest = _MESSAGE.split(cut)
    found = [Message("", first.strip())] if first.strip() else []
    found += [Message(role, body.strip("\n")) for role, body in zip(rest[::2], rest[1::2], strict=True)]
    return tuple(found)


def _try(row: dict[str, Any]) -> Try:
    return Try(row["rollout_id"], row["reward"], messages(row["transcript"]))


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an evaluation; none when the file is missing or damaged."""
    try:
        with path.open("rb") as handle:
            prove_parquet(handle, path, kind=Unproven)
        file = pq.ParquetFile(path, pre_buffer=False)  # and no threads: one may abort the interpreter at its end
        rows: list[dict[str, Any]] = file.read(columns=list(_COLUMNS), use_threads=False).to_pylist()
    except (pa.ArrowException, OSError, ValueError, KeyError, Unproven):
        return []
    kinds = {name: float if name == "reward" else str for name in _COLUMNS}
    return [row for row in rows if all(isinstance(row.get(name), kind) for name, kind in kinds.items())]
