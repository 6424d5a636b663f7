"""Traces: what each step trained on, one Parquet file a batch, so that the step can be redone bit for bit.

A row is one root-to-leaf path of one rollout; a rollout that left no path (it is invalid) has one row without
tokens. Rows of `in_batch` are the batch's samples as they were trained, masks included; the others are kept because
a step's baseline came from them. The batch's digest is kept beside them, so what is read back is what was trained on,
or an error; and the file has a digest of all its bytes (`etude.sums`). `record_batch` makes the batch from the
rollouts' files and writes as it reads: beside the samples it holds a bounded part of the step. See
`docs/formats/traces.md`. Files are read in the caller's thread (`pre_buffer`, `use_threads`): one of pyarrow's that
still holds a Python file when the interpreter ends aborts the process, after its work was done. Knows nothing of SQLite
and of what made the batch.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.packing import Read, batch_of, paths, samples_of
from etude.records.reward import Term
from etude.records.rollout import Boundary, Graded, Invalid, Path
from etude.records.sample import Batch, Sample
from etude.records.summary import BatchPlan, BatchRef, Member, as_seen
from etude.records.task import Trust
from etude.records.wire import I32, from_json, pack, to_json
from etude.seams import BlobStore
from etude.sums import PARQUET_KEY, prove_parquet, seal_parquet

FORMAT = 2
ROW_GROUP_BYTES = 64 << 20
"""Rows are written when they hold so much, whatever the step holds."""
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
_LISTS = ("token_ids", "mask", "logprobs", "steps", "kv_epochs")
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
    digest: str = ""  # `batch_digest` of the batch


@dataclass(frozen=True)
class Index:
    """The part of a trace file that an audit needs."""

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
    """64 hex characters over all that a learner reads of a batch, in its order: SHA-256 of ``(step, num_loss_tokens,
    rollout ids, samples)`` as msgpack, with ``lr_share`` after ``num_loss_tokens`` where it is not 1."""
    names = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    scaled = () if batch.lr_share == 1.0 else (batch.lr_share,)
    digest = hashlib.sha256(_array_head(4 + len(scaled)))
    for one in (batch.step, batch.num_loss_tokens, *scaled, batch.rollout_ids):
        digest.update(pack(one))
    digest.update(_array_head(len(batch.samples)))
    for sample in batch.samples:
        digest.update(pack((sample.rollout_id, sample.advantage, *(getattr(sample.path, name) for name in names))))
    return digest.hexdigest()


def _array_head(length: int) -> bytes:
    """What msgpack begins an array of this length with."""
    if length < 16:
        return bytes([0x90 | length])
    return struct.pack(">BH", 0xDC, length) if length < 1 << 16 else struct.pack(">BI", 0xDD, length)


def record_batch(
    folder: Folder,
    plan: BatchPlan,
    read: Read,
    *,
    computed_by: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    each: Callable[[], None] = lambda: None,
) -> tuple[Batch, BatchRef]:
    """Make the planned batch from the rollouts that `read` gives, and write its trace; complete or absent, and durable
    when it returns. `computed_by`: what the learner that will train on it says of itself; `settings`: those of its
    settings that are not the config's; `each` is called once a rollout. Raises `LedgerError`, `StoreError`."""
    samples = list[Sample]()

    def rows() -> Iterator[dict[str, Any]]:
        for member in plan.members:
            yield from _rows(plan, member, read, samples)
            each()

    @functools.cache
    def made() -> Batch:
        return batch_of(plan, samples)

    @functools.cache
    def digest() -> str:
        return batch_digest(made())

    def facts() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "batch_id": plan.batch_id,
            "step": plan.step,
            "num_loss_tokens": plan.num_loss_tokens,
            "lr_share": made().lr_share,
            "digest": digest(),
            "computed_by": dict(computed_by or {}),
            "settings": dict(settings or {}),
        }

    _write(trace_path(folder, plan.step), rows(), facts)
    batch = made()
    num_trained = sum(int(sample.path.mask.sum()) for sample in samples)
    credited = sum(member.summary.num_sampled for member in plan.members if member.summary and member.advantage)
    ref = BatchRef(
        batch_id=plan.batch_id,
        step=plan.step,
        rollout_ids=plan.rollout_ids,
        sampled=batch.sampled,
        num_trained=num_trained,
        num_masked=credited - num_trained,
        digest=digest(),
    )
    return batch, ref


def _rows(plan: BatchPlan, member: Member, read: Read, samples: list[Sample]) -> Iterator[dict[str, Any]]:
    """The rows of one rollout, whose samples are added to `samples`."""
    base: dict[str, Any] = {"rollout_id": member.rollout_id, "group_id": member.group_id, "in_batch": False}
    summary, outcome = member.summary, member.outcome
    if summary is not None:
        base |= {
            "task_id": summary.task_id,
            "family": summary.family,
            "attempt": summary.attempt,
            "ending": str(summary.ending),
        }
    if outcome is not None:
        base["reason"] = outcome.reason
    if isinstance(outcome, Graded):
        base |= {"terms": to_json(outcome.terms).decode(), "trust": str(outcome.trust)}
        if member.reward is not None:
            base |= {"reward": member.reward.value, "reason": member.reward.reason}
    elif isinstance(outcome, Invalid):
        base |= {"boundary": str(outcome.boundary), "evidence": outcome.evidence}
    found = _paths(member, read)
    for path in found:
        mine = samples_of(plan, member, [path])
        samples += mine
        if mine:
            yield base | {"in_batch": True, "advantage": mine[0].advantage} | _columns(mine[0].path)
        else:
            yield base | _columns(path)
    if not found:
        yield base


def _paths(member: Member, read: Read) -> list[Path]:
    """The paths of a member: none where nothing was stored, or where what is invalid cannot be read any more."""
    if member.summary is None or member.summary.stored is None:
        return []
    try:
        return list(paths(as_seen(read(member.summary), member.summary).trace))
    except LedgerError:
        if isinstance(member.outcome, Invalid):
            return []
        raise


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


def _write(path: File, rows: Iterator[dict[str, Any]], facts: Callable[[], dict[str, Any]]) -> None:
    if isinstance(path, InStore):
        buffer = io.BytesIO()
        _write_rows(buffer, rows, facts)
        seal_parquet(buffer)
        return path.replace(buffer.getvalue())
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            _write_rows(file, rows, facts)
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
    except EtudeError:
        temporary.unlink(missing_ok=True)
        raise


def _write_rows(file: BinaryIO, rows: Iterator[dict[str, Any]], facts: Callable[[], dict[str, Any]]) -> None:
    """`facts` is asked once all rows are written."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True, store_schema=False) as writer:
        waiting, size = list[dict[str, Any]](), 0
        for row in rows:
            waiting.append(row)
            size += sum(len(row[name]) * 4 for name in _LISTS if name in row) + len(row.get("routes", b""))
            if size >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
                waiting, size = [], 0
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
        writer.add_key_value_metadata({_KEY.decode(): json.dumps(facts()), PARQUET_KEY: "1"})


def read_trace(path: File) -> Recorded:
    """The batch, equal to what was written, and every rollout's outcome. A damaged file is a `LedgerError`."""
    table, facts = _read(path)
    try:
        rows = table.drop_columns(_LISTS).to_pylist()  # as Python's numbers the lists would take ten times their room
        arrays = {name: table.column(name) for name in _LISTS}
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
            lr_share=_share(facts.get("lr_share", 1.0)),
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
    return Recorded(batch, tuple(judged.values()), computed_by, settings, found)


def _share(value: object) -> float:
    """Raises `ValueError` for what is no share; a file of an earlier etude has none."""
    if not isinstance(value, float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"lr_share is {value!r}")
    return value


def read_rollout(path: File, rollout_id: str) -> tuple[Graded | Invalid | None, list[I32]] | None:
    """A rollout's outcome and the tokens of each of its paths, [T] int32; None when the file has none of that name. A
    damaged file is a `LedgerError`."""
    table, _ = _read(path, columns=[*_JUDGED, "token_ids"])
    names = table.column("rollout_id").to_pylist()
    rows = [row for i, name in enumerate(names) if name == rollout_id for row in table.slice(i, 1).to_pylist()]
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
    if row["terms"] is not None:
        terms = from_json(row["terms"], tuple[Term, ...])
        outcome = Graded(terms=terms, trust=Trust(row["trust"]))
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
