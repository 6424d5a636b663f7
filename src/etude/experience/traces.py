"""The format of traces: what each step trained on, one Parquet file per step.

A file has three kinds of rows. A *rollout* row has its outcome; rollouts without a sample are included, since the
baseline of the step depends on them. A *turn* row has the tokens that it adds to its parent turn, as its engine
returned them. A *sample* row is one row of the batch: the path that ends at a turn, with its mask and advantages.
Tokens and routes that turns of a group begin with in common are stored once.

The file contains the digest of the batch, so that a reader gets exactly the batch that was trained on, or an error; and
a digest of all its bytes (`etude.file_checksums`). This module has the columns, the places of the files and the digest;
`trace_writer` writes files, and `trace_reader` reads them. The format is in `docs/formats/traces.md`."""

from __future__ import annotations

import hashlib
import io
import struct
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from etude.records.sample import Batch
from etude.records.wire import Routes, pack
from etude.seams import BlobStore

FORMAT = 5
METADATA_KEY = b"etude.batch"
ERASED = "erased"
"""The key in the metadata whose value lists the rollouts without tokens (`trace_erasure`)."""
ROLLOUT, TURN, SAMPLE = "rollout", "turn", "sample"
PRODUCTION_SCHEME = "production-baselines"
"""The `scheme` in a step's `rewards` whose rollouts are captured answers to users."""

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
SAMPLING_2 = {"max_tokens": pa.int32(), "stop_token_ids": _INTS, "temperature": pa.float64(), "seed": pa.int64()}
_SAMPLING = pa.struct(SAMPLING_2 | {"others": pa.string()})
ROLLOUT_COLUMNS = {
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
HINT = {"at": pa.int32(), "stop": pa.int32(), "token_ids": _INTS, "weight": pa.float64()}
_SAMPLE_COLUMNS = {
    "leaf": pa.int32(),
    "origin": pa.string(),
    "mask": pa.list_(pa.bool_()),
    "advantages": _FLOATS,
    "temperatures": _FLOATS,
    "hints": pa.list_(pa.struct(HINT)),
}
_NAMED = [pa.field("row", pa.string(), nullable=False), pa.field("rollout_id", pa.string(), nullable=False)]
SCHEMA = pa.schema([*_NAMED, *ROLLOUT_COLUMNS.items(), *_TURN_COLUMNS.items(), *_SAMPLE_COLUMNS.items()])
"""The columns; described in `docs/formats/traces.md`."""
ARRAYS = ("prompt_ids", "token_ids", "logprobs", "routes", "mask", "advantages", "temperatures")
"""Columns that are read as arrays: as Python numbers they would take ten times the memory."""


@dataclass(frozen=True)
class StoredTrace:
    """The trace file of one step in a blob store, with those methods of `pathlib.Path` that `etude.experience` uses."""

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
        """Return whether the store has the trace."""
        try:
            self.store.get(self.name, 0, 1)
        except KeyError:
            return False
        return True

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the trace; a missing one is no error."""
        self.store.delete(self.name)

    def replace(self, data: bytes) -> None:
        """Write the trace. A trace with other bytes is replaced.

        Objects are immutable, so different bytes are deleted first. If the process is killed in between, nothing is
        lost, since the step has not been trained on yet."""
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
    is not 1, and with `pairs` at the end if there are any. The hints of a sample, if any, are its last element."""
    names = ("token_ids", "mask", "logprobs", "steps", "kv_epochs", "routes", "digest")
    scaled = () if batch.lr_share == 1.0 else (batch.lr_share,)
    digest = hashlib.sha256(_array_head(4 + len(scaled) + bool(batch.pairs)))
    for one in (batch.step, batch.num_loss_tokens, *scaled, batch.rollout_ids):
        digest.update(pack(one))
    digest.update(_array_head(len(batch.samples)))
    for sample in batch.samples:
        own = (sample.rollout_id, sample.origin, sample.advantages, sample.temperatures)
        hints = (sample.hints,) if sample.hints else ()
        digest.update(pack((*own, *(getattr(sample.path, name) for name in names), *hints)))
    digest.update(pack(batch.pairs) if batch.pairs else b"")
    return digest.hexdigest()


def _array_head(length: int) -> bytes:
    """Return the first bytes of a msgpack array of this length."""
    if length < 16:
        return bytes([0x90 | length])
    return struct.pack(">BH", 0xDC, length) if length < 1 << 16 else struct.pack(">BI", 0xDD, length)


def xor_routes(routes: Routes, other: Routes, count: int) -> Routes:
    """Return the routes with the first `count` XOR those of another turn. Applied twice, it restores the routes."""
    return np.concatenate([routes[:count] ^ other[:count], routes[count:]]) if count else routes
