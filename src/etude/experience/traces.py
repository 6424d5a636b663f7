"""Traces: what each step trained on, one Parquet file a batch, so that the step can be redone bit for bit.

A row is one root-to-leaf path of one rollout; a rollout that left no path (it is invalid) has one row without
tokens. Rows of `in_batch` are the batch's samples as they were trained, masks included; the others are kept because
a step's baseline came from them. The batch's digest is kept beside them, so what is read back is what was trained on,
or an error; and the file has a digest of all its bytes (`etude.sums`). See `docs/formats/traces.md`. Files
are read in the caller's thread (`pre_buffer`, `use_threads`): one of pyarrow's that still holds a Python file when the
interpreter ends aborts the process, after its work was done. Knows nothing of SQLite and of what made the batch.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import LedgerError, StoreError
from etude.experience.groups import Finished, Group
from etude.experience.packing import paths
from etude.records.rollout import Boundary, Graded, Invalid, Path
from etude.records.sample import Batch, Sample
from etude.records.task import Trust
from etude.records.wire import I32, pack
from etude.seams import BlobStore
from etude.sums import PARQUET_KEY, prove_parquet, seal_parquet

FORMAT = 1
_KEY = b"etude.batch"

SCHEMA = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string()),
        pa.field("family", pa.string()),
        pa.field("attempt", pa.int32()),
        pa.field("ending", pa.string()),
        pa.field("reward", pa.float64()),
        pa.field("terms", pa.string()),
        pa.field("trust", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("boundary", pa.string()),
        pa.field("evidence", pa.string()),
        pa.field("in_batch", pa.bool_(), nullable=False),
        pa.field("advantage", pa.float64()),
        pa.field("token_ids", pa.list_(pa.int32())),
        pa.field("mask", pa.list_(pa.bool_())),
        pa.field("logprobs", pa.list_(pa.float32())),
        pa.field("steps", pa.list_(pa.int32())),
        pa.field("kv_epochs", pa.list_(pa.int32())),
        pa.field("routes", pa.binary()),
        pa.field("routes_shape", pa.list_(pa.int32())),
        pa.field("digest", pa.string()),
    ]
)
"""The columns; `docs/formats/traces.md` says what each holds."""
_JUDGED = [*SCHEMA.names[: SCHEMA.names.index("in_batch")]]


@dataclass(frozen=True)
class Judged:
    """One rollout of a recorded step, without its tokens."""

    rollout_id: str
    group_id: str
    task_id: str | None  # None, as family, attempt and ending: the process that ran it left nothing
    family: str | None
    attempt: int | None
    ending: str | None
    outcome: Graded | Invalid | None  # None: cancelled or quarantined


@dataclass(frozen=True)
class Recorded:
    """A trace file, read back."""

    batch: Batch
    rollouts: tuple[Judged, ...]  # in order of rollout id
    computed_by: Mapping[str, str] = field(default_factory=dict)  # what its learner said of itself; empty: an old file
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its learner, where they were not the config's


@dataclass(frozen=True)
class Index:
    """What an audit needs of a trace file."""

    path: File
    batch_id: str
    step: int
    rollout_ids: frozenset[str]
    trained: frozenset[str]  # those with a sample
    graded: frozenset[str]


@dataclass(frozen=True)
class InStore:
    """A trace in a blob store: as much of a path as is asked of one here."""

    store: BlobStore
    name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.store!r}"

    def open(self, mode: str = "rb") -> BinaryIO:
        """All of its bytes. `FileNotFoundError` when it is not there."""
        try:
            return io.BytesIO(self.store.get(self.name))
        except KeyError:
            raise FileNotFoundError(self.name) from None

    def exists(self) -> bool:
        try:
            self.store.get(self.name, 0, 1)
        except KeyError:
            return False
        return True

    def unlink(self, missing_ok: bool = True) -> None:
        self.store.delete(self.name)

    def replace(self, data: bytes) -> None:
        """Objects are immutable: other bytes are put once the old ones are gone. A step whose trace is neither has not
        been trained yet."""
        if self.exists() and self.store.get(self.name) != data:
            self.store.delete(self.name)
        self.store.put(self.name, data)


Folder = FilePath | BlobStore
File = FilePath | InStore


def trace_path(folder: Folder, step: int) -> File:
    """Where the batch of a version step is kept, in a folder or a store."""
    name = f"batch-{step:06d}.parquet"
    return folder / name if isinstance(folder, FilePath) else InStore(folder, name)


def recorded(folder: Folder) -> list[int]:
    """The steps that there are traces of, in order."""
    names = [path.name for path in folder.glob("batch-*")] if isinstance(folder, FilePath) else folder.list("batch-")
    found = [name.removeprefix("batch-").removesuffix(".parquet") for name in names if name.endswith(".parquet")]
    return sorted(int(digits) for digits in found if digits.isdigit())


def batch_digest(batch: Batch) -> str:
    """64 hex characters over all that a learner reads of a batch, in its order."""
    arrays = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    samples = [(s.rollout_id, s.advantage, *(getattr(s.path, name) for name in arrays)) for s in batch.samples]
    return hashlib.sha256(pack((batch.step, batch.num_loss_tokens, batch.rollout_ids, samples))).hexdigest()


def write_trace(
    folder: Folder,
    batch: Batch,
    groups: Sequence[Group],
    *,
    computed_by: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> File:
    """Write a batch and the groups it was made of; complete or absent, and durable when it returns. `computed_by`: what
    the learner that will train on it says of itself; `settings`: those of its settings that are not the config's."""
    samples: dict[str, list[Sample]] = {}
    for sample in batch.samples:
        samples.setdefault(sample.rollout_id, []).append(sample)
    members = {i: (group.group_id, None) for group in groups for i in group.rollout_ids}
    members |= {one.rollout_id: (group.group_id, one) for group in groups for one in group.finished}  # type: ignore[misc]
    rows = [row for i in batch.rollout_ids for row in _rows(i, *members[i], samples.get(i, []))]
    facts = {
        "format": FORMAT,
        "batch_id": batch.batch_id,
        "step": batch.step,
        "num_loss_tokens": batch.num_loss_tokens,
        "digest": batch_digest(batch),
        "computed_by": dict(computed_by or {}),
        "settings": dict(settings or {}),
    }
    metadata = {_KEY: json.dumps(facts).encode(), PARQUET_KEY.encode(): b"1"}
    table = pa.Table.from_pylist(rows, SCHEMA.with_metadata(metadata))
    path = trace_path(folder, batch.step)
    _write(path, table)
    return path


def _rows(rollout_id: str, group_id: str, finished: Finished | None, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    base: dict[str, Any] = {"rollout_id": rollout_id, "group_id": group_id, "in_batch": False}
    rollout = finished.rollout if finished else None
    outcome = finished.outcome if finished else None
    if rollout is not None:
        base |= {
            "task_id": rollout.task.task_id,
            "family": rollout.task.family,
            "attempt": rollout.attempt,
            "ending": str(rollout.ending),
        }
    if isinstance(outcome, Graded):
        base |= {"reward": outcome.reward, "terms": json.dumps(outcome.terms), "trust": str(outcome.trust)}
    elif isinstance(outcome, Invalid):
        base |= {"boundary": str(outcome.boundary), "evidence": outcome.evidence}
    if outcome is not None:
        base["reason"] = outcome.reason
    found = list(paths(rollout.trace)) if rollout else []
    todo = list(samples)
    for path in found:
        if todo and np.array_equal(todo[0].path.token_ids, path.token_ids):
            sample = todo.pop(0)
            yield base | {"in_batch": True, "advantage": sample.advantage} | _columns(sample.path)
        else:
            yield base | _columns(path)
    if not found:
        yield base


def _columns(path: Path) -> dict[str, Any]:
    return {
        "token_ids": path.token_ids,
        "mask": path.mask,
        "logprobs": path.logprobs,
        "steps": path.steps,
        "kv_epochs": path.kv_epochs,
        "routes": path.routes.tobytes(),
        "routes_shape": list(path.routes.shape),
        "digest": path.digest,
    }


def _write(path: File, table: pa.Table) -> None:
    if isinstance(path, InStore):
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        seal_parquet(buffer)
        return path.replace(buffer.getvalue())
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            pq.write_table(table, file, compression="zstd", write_page_checksum=True)
            seal_parquet(file)
            os.fsync(file.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(
            f"{path} cannot be written", str(error), hint="free disk space, then etude run --resume"
        ) from error


def read_trace(path: File) -> Recorded:
    """The batch, equal to what was written, and every rollout's outcome. A damaged file is a `LedgerError`."""
    table, facts = _read(path)
    try:
        rows = table.to_pylist()
        arrays = {name: table.column(name) for name in ("token_ids", "mask", "logprobs", "steps", "kv_epochs")}
        samples = tuple(
            Sample(rollout_id=row["rollout_id"], path=_path(row, arrays, i), advantage=row["advantage"])
            for i, row in enumerate(rows)
            if row["in_batch"]
        )
        judged = {row["rollout_id"]: _judged(row) for row in rows}
        batch = Batch(
            batch_id=facts["batch_id"],
            step=facts["step"],
            samples=samples,
            rollout_ids=tuple(judged),
            num_loss_tokens=facts["num_loss_tokens"],
        )
    except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    computed_by, settings = facts.get("computed_by", {}), facts.get("settings", {})
    if not isinstance(computed_by, dict) or not isinstance(settings, dict):
        raise _damaged(path, ValueError("computed_by or settings is no object"))
    found, recorded = batch_digest(batch), facts.get("digest")
    if recorded not in (None, found):
        raise _damaged(path, ValueError(f"its digest is {found[:12]}, recorded was {str(recorded)[:12]}"))
    computed_by = {name: str(value) for name, value in computed_by.items()}
    return Recorded(batch, tuple(judged.values()), computed_by, settings)


def read_rollout(path: File, rollout_id: str) -> tuple[Graded | Invalid | None, list[I32]] | None:
    """A rollout's outcome and the tokens of each of its paths, [T] int32; None when the file has none of that name. A
    damaged file is a `LedgerError`."""
    table, _ = _read(path, columns=[*_JUDGED, "token_ids"])
    rows = [row for row in table.to_pylist() if row["rollout_id"] == rollout_id]
    if not rows:
        return None
    try:
        tokens = [np.array(row["token_ids"], np.int32) for row in rows if row["token_ids"] is not None]
        return _judged(rows[0]).outcome, tokens
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error


def read_index(path: File) -> Index:
    """Which rollouts a trace file holds, without reading their tokens."""
    table, facts = _read(path, columns=["rollout_id", "in_batch", "reward"])
    rows = table.to_pylist()
    return Index(
        path=path,
        batch_id=facts["batch_id"],
        step=facts["step"],
        rollout_ids=frozenset(row["rollout_id"] for row in rows),
        trained=frozenset(row["rollout_id"] for row in rows if row["in_batch"]),
        graded=frozenset(row["rollout_id"] for row in rows if row["reward"] is not None),
    )


def _read(path: File, columns: list[str] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    try:
        with path.open("rb") as handle:
            has_digest = prove_parquet(handle, path, kind=LedgerError)
            return _table(handle, columns if has_digest else None)  # else all of its pages are read, which have a CRC
    except FileNotFoundError as error:
        raise LedgerError(f"no trace at {path}", hint="the step was not recorded, or its trace was removed") from error
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise _damaged(path, error) from error


def _table(handle: BinaryIO, columns: list[str] | None) -> tuple[pa.Table, dict[str, Any]]:
    with pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=False) as file:
        schema = file.schema_arrow
        if not schema.equals(SCHEMA, check_metadata=False):
            raise ValueError("its columns are not those of a trace")
        facts = json.loads((schema.metadata or {})[_KEY])
        kinds = {"format": int, "batch_id": str, "step": int, "num_loss_tokens": int}
        if not isinstance(facts, dict) or any(not isinstance(facts.get(k), t) for k, t in kinds.items()):
            raise ValueError("its facts about the batch are incomplete")
        if facts["format"] != FORMAT:
            raise ValueError(f"it has format {facts['format']}, this etude reads {FORMAT}")
        table = file.read(columns=columns, use_threads=False)
        table.validate(full=True)
        return table, facts


def _damaged(path: File, error: Exception) -> LedgerError:
    return LedgerError(
        f"{path} is not a sound trace",
        f"{type(error).__name__}: {error}",
        hint="restore it from a copy; training goes on without it, only a replay of that step needs it",
    )


def _judged(row: dict[str, Any]) -> Judged:
    outcome: Graded | Invalid | None = None
    if row["reward"] is not None:
        terms = {str(k): float(v) for k, v in json.loads(row["terms"]).items()}
        outcome = Graded(reward=row["reward"], terms=terms, trust=Trust(row["trust"]), reason=row["reason"])
    elif row["boundary"] is not None:
        outcome = Invalid(boundary=Boundary(row["boundary"]), reason=row["reason"], evidence=row["evidence"])
    names = ("rollout_id", "group_id", "task_id", "family", "attempt", "ending")
    return Judged(**{name: row[name] for name in names}, outcome=outcome)


def _path(row: dict[str, Any], arrays: dict[str, Any], i: int) -> Path:
    found = {name: column[i].values.to_numpy(zero_copy_only=False) for name, column in arrays.items()}
    shape, num_tokens = tuple(row["routes_shape"]), len(found["token_ids"])
    if (
        any(len(values) != num_tokens for values in found.values())
        or shape[0] not in (0, num_tokens)
        or row["advantage"] is None
    ):
        raise ValueError(f"the columns of rollout {row['rollout_id']} have different lengths")
    dtype = "<u2" if len(row["routes"]) > math.prod(shape) else np.uint8
    return Path(**found, routes=np.frombuffer(row["routes"], dtype).reshape(shape), digest=row["digest"])
