"""Traces: what each step trained on, one Parquet file per step, from which the step can be repeated bit for bit.

A file has three kinds of rows. A *rollout* row has its outcome; rollouts without a sample are included, since the
baseline of the step depends on them. A *turn* row has the tokens that it adds to its parent turn, as its engine
returned them. A *sample* row is one row of the batch: the path that ends at a turn, with its mask and advantages.
Tokens and routes that turns of a group begin with in common are stored once.

The file contains the digest of the batch, so that a reader gets exactly the batch that was trained on, or an error; and
a digest of all its bytes (`etude.file_checksums`). `record_batch` makes the batch from the rollout files and writes
while it reads, so that besides the samples only a bounded part of the step is in memory. The format is in
`docs/formats/traces.md`. Files are read in the caller's thread (`pre_buffer`, `use_threads`): a pyarrow thread that
still uses a Python file when the interpreter exits would abort the process. This module knows nothing of databases, or
of how the batch was made."""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.admission import mask_path
from etude.experience.packing import Read, batch_of, num_not_plain, samples_of
from etude.file_checksums import PARQUET_KEY, seal_parquet, verify_parquet
from etude.records.completion import Completion, Sampling, StopReason, Version, VersionSpan
from etude.records.reward import Term
from etude.records.rollout import Boundary, Graded, Invalid, Path, Start, Trace, Turn, TurnKind
from etude.records.sample import Batch, Origin, Sample
from etude.records.summary import BatchPlan, BatchRef, Member, TurnPlace, turn_places, with_versions_of
from etude.records.task import Trust
from etude.records.wire import I32, Array, Routes, from_json, pack, to_json
from etude.seams import BlobStore

FORMAT = 4
ROW_GROUP_BYTES = 64 << 20
"""Rows are written when they reach this size, so that memory is bounded."""
MAX_COMPARED = 64
"""A turn is compared with at most this many earlier turns to find a common prefix."""
_KEY = b"etude.batch"
_ROLLOUT, _TURN, _SAMPLE = "rollout", "turn", "sample"

_INTS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())
_SPAN = pa.struct(
    {
        "step": pa.int32(),
        "incarnation": pa.string(),
        "digest": pa.string(),
        "num_tokens": pa.int32(),
        "kv_epoch": pa.int32(),
    }
)
_SAMPLING_2 = {"max_tokens": pa.int32(), "stop_token_ids": _INTS, "temperature": pa.float64(), "seed": pa.int64()}
_SAMPLING = pa.struct(_SAMPLING_2 | {"others": pa.string()})
_ROLLOUT_COLUMNS = {
    "group_id": pa.string(),
    "task_id": pa.string(),
    "family": pa.string(),
    "attempt": pa.int32(),
    "ending": pa.string(),
    "reward": pa.float64(),
    "terms": pa.string(),
    "trust": pa.string(),
    "reason": pa.string(),
    "boundary": pa.string(),
    "evidence": pa.string(),
}
_TURN_COLUMNS = {
    "turn": pa.int32(),
    "parent": pa.int32(),
    "kind": pa.string(),
    "start": pa.string(),
    "sampling": _SAMPLING,
    "engine": pa.string(),
    "num_cached": pa.int32(),
    "stop_reason": pa.string(),
    "spans": pa.list_(_SPAN),
    "shared_with": pa.int32(),
    "shared_tokens": pa.int32(),
    "shared_routes": pa.int32(),
    "prompt_ids": _INTS,
    "token_ids": _INTS,
    "logprobs": _FLOATS,
    "routes": pa.binary(),
    "routes_shape": _INTS,
    "routes_start": pa.int32(),
}
_SAMPLE_COLUMNS = {
    "leaf": pa.int32(),
    "origin": pa.string(),
    "mask": pa.list_(pa.bool_()),
    "advantages": _FLOATS,
    "temperatures": _FLOATS,
}
_NAMED = [pa.field("row", pa.string(), nullable=False), pa.field("rollout_id", pa.string(), nullable=False)]
SCHEMA = pa.schema([*_NAMED, *_ROLLOUT_COLUMNS.items(), *_TURN_COLUMNS.items(), *_SAMPLE_COLUMNS.items()])
"""The columns; described in `docs/formats/traces.md`."""
_SCHEMA_3 = pa.schema([field for field in SCHEMA if field.name not in ("start", "num_cached")])
_SCHEMA_2 = _SCHEMA_3.set(_SCHEMA_3.get_field_index("sampling"), pa.field("sampling", pa.struct(_SAMPLING_2)))
_SCHEMAS = {2: _SCHEMA_2, 3: _SCHEMA_3, FORMAT: SCHEMA}
_ARRAYS = ("prompt_ids", "token_ids", "logprobs", "routes", "mask", "advantages", "temperatures")
"""Columns that are read as arrays: as Python numbers they would take ten times the memory."""
_JUDGED = ["rollout_id", *_ROLLOUT_COLUMNS]
_PARSE_ERRORS = (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, IndexError)
_ARRAYS_1 = ("token_ids", "mask", "logprobs", "steps", "kv_epochs")


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout of a recorded step, without its tokens.

    `task_id`, `family`, `attempt` and `ending` are None if the process that ran the rollout stored nothing. `outcome`:
    None if it was cancelled or quarantined. `reward`: the composed reward that credit was computed from; None unless
    graded. `places`: the places of its turns in the tree, for credit by turn; empty in files of format 1."""

    rollout_id: str
    group_id: str
    task_id: str | None
    family: str | None
    attempt: int | None
    ending: str | None
    outcome: Graded | Invalid | None
    reward: float | None = None
    places: tuple[TurnPlace, ...] = ()


@dataclass(frozen=True)
class RecordedBatch:
    """The content of a trace file: what one step trained on.

    `rollouts`: in order of rollout id. `computed_by`: facts about the learner's software and hardware
    (`learner.computed_by`); empty in old files. `settings`: learner settings that differed from the config. `digest`:
    the `batch_digest` of the batch."""

    batch: Batch
    rollouts: tuple[RecordedRollout, ...]
    computed_by: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True)
class RecordedTree:
    """One rollout of a recorded step with its turns.

    `samples`: pairs (number of the path's last turn, sample). `first_row`: the position of the first sample in the
    batch, from 0."""

    rollout: RecordedRollout
    trace: Trace
    samples: tuple[tuple[int, Sample], ...]
    first_row: int


@dataclass(frozen=True)
class Index:
    """What an audit reads of a trace file: the step, its batch, and its rollouts.

    `rollout_ids`: all rollouts. `trained`: those with a sample. `graded`: those with a grade."""

    path: TraceFile
    batch_id: str
    step: int
    rollout_ids: frozenset[str]
    trained: frozenset[str]
    graded: frozenset[str]


@dataclass(frozen=True)
class StoredTrace:
    """The trace file of one step in a blob store, with the methods of `pathlib.Path` that this module uses."""

    store: BlobStore
    name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.store!r}"

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return the trace's bytes as a file. Raises `FileNotFoundError` when it does not exist."""
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
        """Write the trace, and replace a different one.

        Objects are immutable, so different bytes are deleted first. A kill in between loses nothing: such a step has
        not been trained yet."""
        if self.exists() and self.store.get(self.name) != data:
            self.store.delete(self.name)
        self.store.put(self.name, data)


TraceFolder = FilePath | BlobStore
TraceFile = FilePath | StoredTrace


def trace_path(folder: TraceFolder, step: int) -> TraceFile:
    """Return the place of the trace file of a version step, in a folder or a blob store."""
    name = f"batch-{step:06d}.parquet"
    return folder / name if isinstance(folder, FilePath) else StoredTrace(folder, name)


def recorded_steps(folder: TraceFolder) -> list[int]:
    """Return the steps that have a trace, ascending."""
    names = [path.name for path in folder.glob("batch-*")] if isinstance(folder, FilePath) else folder.list("batch-")
    found = [name.removeprefix("batch-").removesuffix(".parquet") for name in names if name.endswith(".parquet")]
    return sorted(int(digits) for digits in found if digits.isdigit())


def batch_digest(batch: Batch) -> str:
    """Return the SHA-256 of everything that a learner reads of a batch, as 64 hex characters.

    Hashed is `(step, num_loss_tokens, rollout ids, samples)` as msgpack, with `lr_share` after `num_loss_tokens` if it
    is not 1."""
    names = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    scaled = () if batch.lr_share == 1.0 else (batch.lr_share,)
    digest = hashlib.sha256(_array_head(4 + len(scaled)))
    for one in (batch.step, batch.num_loss_tokens, *scaled, batch.rollout_ids):
        digest.update(pack(one))
    digest.update(_array_head(len(batch.samples)))
    for sample in batch.samples:
        own = (sample.rollout_id, sample.origin, sample.advantages, sample.temperatures)
        digest.update(pack((*own, *(getattr(sample.path, name) for name in names))))
    return digest.hexdigest()


def _array_head(length: int) -> bytes:
    """Return the first bytes of a msgpack array of this length."""
    if length < 16:
        return bytes([0x90 | length])
    return struct.pack(">BH", 0xDC, length) if length < 1 << 16 else struct.pack(">BI", 0xDD, length)


def record_batch(
    folder: TraceFolder,
    plan: BatchPlan,
    read: Read,
    *,
    temperature: float = 1.0,
    computed_by: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    each: Callable[[], None] = lambda: None,
) -> tuple[Batch, BatchRef]:
    """Make the planned batch, write its trace atomically and durably, and return the batch and its reference.

    - `read`: returns the full rollout of a summary.
    - `temperature`: the sampling temperature of the run.
    - `computed_by`: facts of the learner that will train on the batch. `settings`: its settings that differ from the
      config.
    - `each`: called after each rollout.

    Raises `LedgerError` when a rollout cannot be read, `StoreError` when the trace cannot be written."""
    samples = list[Sample]()

    not_plain = 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal not_plain
        prefixes = _Prefixes()
        for member in plan.members:
            trace = _trace(member, read)
            not_plain += num_not_plain(trace) if member.credited else 0
            yield from _rows(plan, member, trace, prefixes, samples, temperature)
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
            "temperature": temperature,
            "digest": digest(),
            "computed_by": dict(computed_by or {}),
            "settings": dict(settings or {}),
        }

    _write(trace_path(folder, plan.step), rows(), facts)
    batch = made()
    num_trained = sum(int(sample.path.mask.sum()) for sample in samples)
    credited = sum(member.summary.num_sampled for member in plan.members if member.summary and member.credited)
    ref = BatchRef(
        batch_id=plan.batch_id,
        step=plan.step,
        rollout_ids=plan.rollout_ids,
        sampled=batch.sampled,
        num_trained=num_trained,
        num_masked=credited - num_trained - not_plain,
        digest=digest(),
        num_not_plain=not_plain,
    )
    return batch, ref


def _trace(member: Member, read: Read) -> Trace:
    """Return the trace of a member; empty if nothing was stored, or if an invalid rollout can no longer be read."""
    if member.summary is None or member.summary.stored is None:
        return Trace(())
    try:
        return with_versions_of(read(member.summary), member.summary).trace
    except LedgerError:
        if isinstance(member.outcome, Invalid):
            return Trace(())
        raise


def _rows(
    plan: BatchPlan, member: Member, trace: Trace, prefixes: _Prefixes, samples: list[Sample], temperature: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one rollout; its samples are appended to `samples`."""
    yield {"row": _ROLLOUT, "rollout_id": member.rollout_id} | _rollout_columns(member)
    prefixes.begin(member.group_id)
    for number, turn in enumerate(trace.turns):
        found = _turn_columns(turn, prefixes.add(turn))
        yield {"row": _TURN, "rollout_id": member.rollout_id, "turn": number} | found
    for leaf, sample in samples_of(plan, member, trace, temperature=temperature):
        samples.append(sample)
        yield {
            "row": _SAMPLE,
            "rollout_id": member.rollout_id,
            "leaf": leaf,
            "origin": str(sample.origin),
            "mask": sample.path.mask,
            "advantages": sample.advantages,
            "temperatures": sample.temperatures,
        }


def _rollout_columns(member: Member) -> dict[str, Any]:
    found: dict[str, Any] = {"group_id": member.group_id}
    summary, outcome = member.summary, member.outcome
    if summary is not None:
        found |= {"task_id": summary.task_id, "family": summary.family, "attempt": summary.attempt}
        found["ending"] = str(summary.ending)
    if outcome is not None:
        found["reason"] = outcome.reason
    if isinstance(outcome, Graded):
        found |= {"terms": to_json(outcome.terms).decode(), "trust": str(outcome.trust)}
        if member.reward is not None:
            found |= {"reward": member.reward.value, "reason": member.reward.reason}
    elif isinstance(outcome, Invalid):
        found |= {"boundary": str(outcome.boundary), "evidence": outcome.evidence}
    return found


@dataclass(frozen=True)
class _Shared:
    """An earlier turn of the group with a common prefix, after the same context."""

    number: int  # index of that turn among the turns of its group
    turn: Turn
    num_tokens: int  # length of the common prefix of both prompts


class _Prefixes:
    """Finds common prefixes among the turns of a group.

    It compares first turns of its rollouts, and turns that follow the same turn of a rollout."""

    def __init__(self) -> None:
        self._group_id, self._num_turns = "", 0
        self._after: dict[int | None, deque[tuple[int, Turn]]] = {}

    def begin(self, group_id: str) -> None:
        """Begin a rollout. The rollouts of a group must be consecutive."""
        if group_id != self._group_id:
            self._group_id, self._num_turns, self._after = group_id, 0, {}
        self._after = {None: self._after.get(None, deque(maxlen=MAX_COMPARED))}

    def add(self, turn: Turn) -> _Shared | None:
        """Add the rollout's next turn. Returns the earlier turn with the longest common prefix."""
        known = self._after.setdefault(turn.parent, deque(maxlen=MAX_COMPARED))
        found = [_Shared(number, one, _num_common(one.prompt_ids, turn.prompt_ids)) for number, one in known]
        alike = [_first_version(one.turn) == _first_version(turn) for one in found]
        best, same_version = max(
            zip(found, alike, strict=True), key=lambda pair: (pair[0].num_tokens, pair[1]), default=(None, False)
        )
        if best is None or not same_version or best.num_tokens < len(turn.prompt_ids):
            known.append((self._num_turns, turn))  # otherwise the earlier turn already contains it
        self._num_turns += 1
        return best if best is not None and best.num_tokens else None


def _num_common(one: I32, other: I32) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _first_version(turn: Turn) -> Version | None:
    return turn.completion.spans[0].version if turn.completion.spans else None


def _turn_columns(turn: Turn, shared: _Shared | None) -> dict[str, Any]:
    done, prompt_ids, routes = turn.completion, turn.prompt_ids, turn.completion.routes
    found: dict[str, Any] = {}
    if shared is not None:
        other, num_routes = shared.turn.completion, 0
        kinds = [(one.routes.dtype, one.routes.shape[1:], one.routes_start) for one in (done, other)]
        if kinds[0] == kinds[1]:
            num_routes = min(shared.num_tokens, len(routes), len(other.routes))
        prompt_ids, routes = prompt_ids[shared.num_tokens :], _differences(routes, other.routes, num_routes)
        found = {"shared_with": shared.number, "shared_tokens": shared.num_tokens, "shared_routes": num_routes}
    versions = [{name: getattr(one.version, name) for name in ("step", "incarnation", "digest")} for one in done.spans]
    counts = [{"num_tokens": one.num_tokens, "kv_epoch": one.kv_epoch} for one in done.spans]
    return found | {
        "parent": turn.parent,
        "kind": str(turn.kind),
        "start": None if turn.start is None else str(turn.start),
        "sampling": _sampling_columns(turn.sampling),
        "engine": done.engine,
        "num_cached": done.num_cached,
        "stop_reason": str(done.stop_reason),
        "spans": [version | count for version, count in zip(versions, counts, strict=True)],
        "prompt_ids": prompt_ids,
        "token_ids": done.token_ids,
        "logprobs": done.logprobs,
        "routes": routes.tobytes(),
        "routes_shape": list(routes.shape),
        "routes_start": done.routes_start,
    }


def _sampling_columns(sampling: Sampling) -> dict[str, Any]:
    """The struct of a turn's sampling: `others` is a JSON object of all further parameters that are not neutral, or
    null."""
    found = {name: getattr(sampling, name) for name in _SAMPLING_2}
    if sampling.plain and not sampling.top_logprobs:
        return found | {"others": None}
    others = {name: value for name, value in json.loads(to_json(sampling)).items() if name not in _SAMPLING_2}
    return found | {"others": json.dumps(others)}


def _sampling(row: dict[str, Any]) -> Sampling:
    """The inverse of `_sampling_columns`. Files of format 2 have no `others`."""
    others = json.loads(row.pop("others", None) or "{}")
    return msgspec.convert(others | row, Sampling)


def _differences(routes: Routes, other: Routes, count: int) -> Routes:
    """Return the routes with the first `count` XOR those of another turn. Applied twice, it restores the routes."""
    return np.concatenate([routes[:count] ^ other[:count], routes[count:]]) if count else routes


def _write(path: TraceFile, rows: Iterator[dict[str, Any]], facts: Callable[[], dict[str, Any]]) -> None:
    if isinstance(path, StoredTrace):
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
    """Write rows as they come. `facts` is called after the last row."""
    with pq.ParquetWriter(file, SCHEMA, compression="zstd", write_page_checksum=True, store_schema=False) as writer:
        waiting, size = list[dict[str, Any]](), 0
        for row in rows:
            waiting.append(row)
            held = [value for name in _ARRAYS if (value := row.get(name)) is not None]
            size += sum(len(value) if isinstance(value, bytes) else value.nbytes for value in held)
            if size >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
                waiting, size = [], 0
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
        writer.add_key_value_metadata({_KEY.decode(): json.dumps(facts()), PARQUET_KEY: "1"})


def read_trace(path: TraceFile) -> RecordedBatch:
    """Read a trace file: the batch, equal to the one that was written, and every rollout's outcome.

    Raises `LedgerError` for a missing or damaged file."""
    table, facts = _read(path)
    try:
        if facts["format"] == 1:
            rows = {row["rollout_id"]: row for row in table.select(_JUDGED).to_pylist()}
            judged, samples = [_recorded_rollout(row) for row in rows.values()], _samples_1(table)
        else:
            judged, samples = [], []
            for row, trace, numbered in _rollouts(table):
                judged.append(_recorded_rollout(row, turn_places(trace)))
                samples += [_sample(one, table, i, trace) for i, one in numbered]
        batch = Batch(
            batch_id=facts["batch_id"],
            step=facts["step"],
            samples=tuple(samples),
            rollout_ids=tuple(one.rollout_id for one in judged),
            num_loss_tokens=facts["num_loss_tokens"],
            lr_share=_share(facts.get("lr_share", 1.0)),
        )
    except _PARSE_ERRORS as error:
        raise _damaged(path, error) from error
    computed_by, settings = facts.get("computed_by", {}), facts.get("settings", {})
    if not isinstance(computed_by, dict) or not isinstance(settings, dict):
        raise _damaged(path, ValueError("computed_by or settings is no object"))
    found, recorded = batch_digest(batch), facts.get("digest")
    if facts["format"] != 1 and recorded not in (None, found):
        raise _damaged(path, ValueError(f"its digest is {found[:12]}, recorded was {str(recorded)[:12]}"))
    computed_by = {name: str(value) for name, value in computed_by.items()}
    return RecordedBatch(batch, tuple(judged), computed_by, settings, found)


def _share(value: object) -> float:
    """Check an `lr_share`; files of earlier versions do not have one. Raises `ValueError`."""
    if not isinstance(value, float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"lr_share is {value!r}")
    return value


def read_rollout(path: TraceFile, rollout_id: str) -> RecordedTree | None:
    """Read one rollout with its turns and samples from a trace file, without their routes.

    In a file of format 1 each path is returned as one turn without sampled tokens. Returns None when the file does not
    have the rollout. Raises `LedgerError` for a missing or damaged file."""
    old = [*_JUDGED, "token_ids"]
    columns = {number: [name for name in schema.names if name != "routes"] for number, schema in _SCHEMAS.items()}
    table, facts = _read(path, {1: old, **columns})
    try:
        if facts["format"] == 1:
            return _read_rollout_1(table.select(old), rollout_id)
        num_rows = 0
        for row, trace, numbered in _rollouts(table):
            if row["rollout_id"] == rollout_id:
                samples = [(one["leaf"], _sample(one, table, i, trace)) for i, one in numbered]
                return RecordedTree(_recorded_rollout(row), trace, tuple(samples), first_row=num_rows)
            num_rows += len(numbered)
    except _PARSE_ERRORS as error:
        raise _damaged(path, error) from error
    return None


def read_index(path: TraceFile) -> Index:
    """Read which rollouts a trace file has, without their tokens.

    Raises `LedgerError` for a missing or damaged file."""
    columns = {key: ["rollout_id", "reward", "row"] for key in _SCHEMAS} | {1: ["rollout_id", "reward", "in_batch"]}
    table, facts = _read(path, columns)
    rows = table.select(columns[facts["format"]]).to_pylist()
    return Index(
        path=path,
        batch_id=facts["batch_id"],
        step=facts["step"],
        rollout_ids=frozenset(row["rollout_id"] for row in rows),
        trained=frozenset(row["rollout_id"] for row in rows if row.get("in_batch", row.get("row") == _SAMPLE)),
        graded=frozenset(row["rollout_id"] for row in rows if row["reward"] is not None),
    )


def _read(path: TraceFile, columns: Mapping[int, list[str]] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table of a file, with these columns for its format (None: all), and its metadata."""
    try:
        with path.open("rb") as handle:
            has_digest = verify_parquet(handle, path, kind=LedgerError)
            return _table(handle, columns if has_digest else None)  # without a digest, read all pages: they have CRCs
    except FileNotFoundError as error:
        raise LedgerError(f"no trace at {path}", hint="the step was not recorded, or its trace was removed") from error
    except (*_PARSE_ERRORS, OSError, MemoryError) as error:
        raise _damaged(path, error) from error


def _table(handle: BinaryIO, columns: Mapping[int, list[str]] | None) -> tuple[pa.Table, dict[str, Any]]:
    with pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=False) as file:
        schema = file.schema_arrow
        facts = json.loads((schema.metadata or {}).get(_KEY, b"{}"))
        kinds = {"format": int, "batch_id": str, "step": int, "num_loss_tokens": int}
        if not isinstance(facts, dict) or any(not isinstance(facts.get(k), t) for k, t in kinds.items()):
            raise ValueError("its columns are not those of a trace, or its metadata is incomplete")
        if facts["format"] not in (1, *_SCHEMAS):
            raise ValueError(f"it has format {facts['format']}, this etude reads 1 to {FORMAT}")
        if facts["format"] != 1 and not schema.equals(_SCHEMAS[facts["format"]], check_metadata=False):
            raise ValueError("its columns are not those of a trace")
        table = file.read(columns=columns and columns[facts["format"]], use_threads=False)
        table.validate(full=True)
        return table, facts


def _damaged(path: TraceFile, error: Exception) -> LedgerError:
    return LedgerError(
        f"{path} is not a valid trace",
        f"{type(error).__name__}: {error}",
        hint="restore it from a copy; training continues without it, only a replay of that step needs it",
    )


def _recorded_rollout(row: dict[str, Any], places: tuple[TurnPlace, ...] = ()) -> RecordedRollout:
    outcome: Graded | Invalid | None = None
    if row["terms"] is not None:
        outcome = _graded(row)
    elif row["boundary"] is not None:
        outcome = Invalid(boundary=Boundary(row["boundary"]), reason=row["reason"], evidence=row["evidence"])
    names = ("rollout_id", "group_id", "task_id", "family", "attempt", "ending", "reward")
    return RecordedRollout(**{name: row[name] for name in names}, outcome=outcome, places=places)


def _rollouts(table: pa.Table) -> Iterator[tuple[dict[str, Any], Trace, list[tuple[int, dict[str, Any]]]]]:
    """Yield the row of each rollout, its trace, and the numbered rows of its samples."""
    rows = enumerate(table.drop_columns([name for name in _ARRAYS if name in table.column_names]).to_pylist())
    group_id, group = None, list[Turn]()
    for rollout_id, some in itertools.groupby(rows, key=lambda numbered: numbered[1]["rollout_id"]):
        (_, rollout), *others = some
        if rollout["row"] != _ROLLOUT:
            raise ValueError(f"the rows of rollout {rollout_id} do not begin with its own")
        if rollout["group_id"] != group_id:
            group_id, group = rollout["group_id"], []
        turns = list[Turn]()
        for i, row in others:
            if row["row"] == _TURN:
                turns.append(_turn(row, table, i, turns, group))
                group.append(turns[-1])
        yield rollout, Trace(tuple(turns)), [(i, row) for i, row in others if row["row"] == _SAMPLE]


def _turn(row: dict[str, Any], table: pa.Table, i: int, turns: Sequence[Turn], group: Sequence[Turn]) -> Turn:
    """Return a turn as it was written.

    `turns`: the earlier turns of its rollout; `group`: the earlier turns of its group. It has no routes if that column
    was not read."""
    if row["turn"] != len(turns) or not (row["parent"] is None or 0 <= row["parent"] < len(turns)):
        raise ValueError(f"rollout {row['rollout_id']} has no turn that turn {row['turn']} could follow")
    prompt_ids = _array(table, "prompt_ids", i)
    routes: Routes = np.zeros((0, 0, 0), np.uint8)
    if "routes" in table.column_names:
        routes = _routes(table.column("routes")[i].as_buffer(), row["routes_shape"])
    if row["shared_with"] is not None:
        other = group[row["shared_with"]]
        prompt_ids = np.concatenate([other.prompt_ids[: row["shared_tokens"]], prompt_ids])
        routes = _differences(routes, other.completion.routes, min(len(routes), row["shared_routes"]))
    versions = [Version(one["step"], one["incarnation"], one["digest"]) for one in row["spans"]]
    counts = [(one["num_tokens"], one["kv_epoch"]) for one in row["spans"]]
    return Turn(
        parent=row["parent"],
        prompt_ids=prompt_ids,
        completion=Completion(
            request_id=f"{row['rollout_id']}/{row['turn']}",
            token_ids=_array(table, "token_ids", i),
            logprobs=_array(table, "logprobs", i),
            routes=routes,
            routes_start=row["routes_start"],
            spans=tuple(VersionSpan(version, *count) for version, count in zip(versions, counts, strict=True)),
            stop_reason=StopReason(row["stop_reason"]),
            engine=row["engine"],
            num_cached=row.get("num_cached") or 0,
        ),
        sampling=_sampling(row["sampling"]),
        kind=TurnKind(row["kind"]),
        start=Start(row["start"]) if row.get("start") else None,
    )


def _sample(row: dict[str, Any], table: pa.Table, i: int, trace: Trace) -> Sample:
    path, mask = trace.path(row["leaf"]), _array(table, "mask", i)
    if len(mask) != len(path.mask) or (mask & ~path.mask).any():
        raise ValueError(f"the mask of a sample of rollout {row['rollout_id']} is not of its path")
    has_own = table.column("temperatures")[i].is_valid
    return Sample(
        rollout_id=row["rollout_id"],
        path=path if (mask == path.mask).all() else mask_path(path, mask),
        advantages=_array(table, "advantages", i).copy(),
        temperatures=_array(table, "temperatures", i).copy() if has_own else None,
        origin=Origin(row["origin"]),
    )


def _array(table: pa.Table, name: str, i: int) -> Array:
    """Return a list value of a row, as an array over the table's memory."""
    found: Array = table.column(name)[i].values.to_numpy(zero_copy_only=False)
    return found


def _routes(data: pa.Buffer | bytes, shape: Sequence[int]) -> Routes:
    """Return [R, MoE layers, top_k] routes. Their dtype follows from the number of bytes."""
    found: Routes = np.frombuffer(data, "<u2" if len(data) > math.prod(shape) else np.uint8).reshape(shape)
    return found


# Format 1: a row is a path of a rollout with all its tokens; a rollout without a path has a row without tokens.


def _samples_1(table: pa.Table) -> list[Sample]:
    samples = list[Sample]()
    for i, row in enumerate(table.drop_columns(_ARRAYS_1).to_pylist()):
        if row["in_batch"]:
            found = {name: _array(table, name, i) for name in _ARRAYS_1}
            routes, num_tokens = _routes(row["routes"], row["routes_shape"]), len(found["token_ids"])
            if {len(values) for values in found.values()} != {num_tokens} or len(routes) not in (0, num_tokens):
                raise ValueError(f"the columns of rollout {row['rollout_id']} have different lengths")
            path = Path(**found, routes=routes, digest=row["digest"])
            samples.append(Sample.uniform(row["rollout_id"], path, row["advantage"]))
    return samples


def _read_rollout_1(table: pa.Table, rollout_id: str) -> RecordedTree | None:
    rows = [i for i, name in enumerate(table.column("rollout_id").to_pylist()) if name == rollout_id]
    if not rows:
        return None
    none, sampling = np.zeros(0, np.int32), Sampling(max_tokens=0, stop_token_ids=())
    turns = [
        Turn(
            parent=None,
            prompt_ids=_array(table, "token_ids", i),
            completion=Completion(
                request_id="", token_ids=none, logprobs=none.astype(np.float32), routes=np.zeros((0, 0, 0), np.uint8),
                routes_start=0, spans=(), stop_reason=StopReason.STOP, engine="",
            ),
            sampling=sampling,
        )
        for i in rows
        if table.column("token_ids")[i].is_valid
    ]  # fmt: skip
    row = table.select(_JUDGED).slice(rows[0], 1).to_pylist()[0]
    return RecordedTree(_recorded_rollout(row), Trace(tuple(turns)), (), first_row=0)


def _graded(row: dict[str, Any]) -> Graded:
    """Return the verdict of a row. In format 1 the terms are numbers by name, and the reward is the grade."""
    trust = Trust(row["trust"])
    if row["terms"].startswith("{"):
        measures = {str(name): float(value) for name, value in json.loads(row["terms"]).items()}
        return Graded.of(row["reward"], measures, trust=trust, reason=row["reason"])
    return Graded(terms=from_json(row["terms"], tuple[Term, ...]), trust=trust)
