"""Makes the batch of a step from its rollout files, and writes the step's trace (`traces`) while it reads them.

So at any time only the samples and a bounded part of the rollouts are in memory."""

from __future__ import annotations

import functools
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import EtudeError, LedgerError, StoreError
from etude.experience.hints import HintFormat
from etude.experience.packing import Read, batch_of, num_not_plain, samples_of
from etude.experience.traces import (
    ARRAYS,
    FORMAT,
    HINT,
    METADATA_KEY,
    ROLLOUT,
    SAMPLE,
    SAMPLING_2,
    SCHEMA,
    TURN,
    StoredTrace,
    TraceFile,
    TraceFolder,
    batch_digest,
    trace_path,
    xor_routes,
)
from etude.file_checksums import PARQUET_KEY, seal_parquet
from etude.records.completion import Sampling, Version
from etude.records.rollout import Graded, Invalid, Trace, Turn
from etude.records.sample import Batch, Sample
from etude.records.summary import BatchPlan, BatchRef, Member, with_versions_of
from etude.records.wire import I32, to_json

ROW_GROUP_BYTES = 64 << 20
"""Rows are written to the file when they reach this size in bytes, so that memory is bounded."""
MAX_COMPARED = 64
"""A turn is compared with at most this many earlier turns to find a common prefix."""


def record_batch(
    folder: TraceFolder,
    plan: BatchPlan,
    read: Read,
    *,
    temperature: float = 1.0,
    computed_by: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    hint_format: HintFormat | None = None,
    each: Callable[[], None] = lambda: None,
) -> tuple[Batch, BatchRef]:
    """Make the planned batch, write its trace atomically and durably, and return the batch and its reference.

    - `read`: returns the full rollout of a summary.
    - `temperature`: the sampling temperature of the run.
    - `computed_by`: facts of the learner that will train on the batch. `settings`: its settings that differ from the
      config.
    - `hint_format`: needed if the plan has hints.
    - `each`: called after each rollout.

    Raises `LedgerError` when a rollout cannot be read, `StoreError` when the trace cannot be written."""
    samples, not_plain = list[Sample](), 0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal not_plain
        prefixes = _Prefixes()
        for member in plan.members:
            trace = _trace(member, read)
            not_plain += num_not_plain(trace, member.num_context_turns) if member.credited else 0
            made_of = samples_of(plan, member, trace, temperature=temperature, hint_format=hint_format)
            samples.extend(sample for _, sample in made_of)
            yield from _rows(member, trace, prefixes, made_of)
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
            **({"pairs": made().pairs} if made().pairs else {}),
            "temperature": temperature,
            "digest": digest(),
            "computed_by": dict(computed_by or {}),
            "settings": dict(settings or {}),
            "rewards": plan.rewards,
        }

    replace_trace(trace_path(folder, plan.step), lambda file: _write_rows(file, rows(), facts))
    return made(), _reference(plan, made(), samples, digest=digest(), num_not_plain=not_plain)


def _reference(
    plan: BatchPlan, batch: Batch, samples: Sequence[Sample], *, digest: str, num_not_plain: int
) -> BatchRef:
    num_trained = sum(int(sample.path.mask.sum()) for sample in samples)
    credited = sum(member.num_own for member in plan.members if member.credited)
    num_hints = sum(len(member.hints) for member in plan.members)
    return BatchRef(
        batch_id=plan.batch_id,
        step=plan.step,
        rollout_ids=plan.rollout_ids,
        sampled=batch.sampled,
        num_trained=num_trained,
        num_masked=credited - num_trained - num_not_plain,
        digest=digest,
        num_not_plain=num_not_plain,
        num_hints=num_hints,
        num_unplaced_hints=num_hints - sum(len(sample.hints) for sample in samples),
    )


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
    member: Member, trace: Trace, prefixes: _Prefixes, samples: Sequence[tuple[int, Sample]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one rollout, given its `samples_of`."""
    yield {"row": ROLLOUT, "rollout_id": member.rollout_id} | _rollout_columns(member)
    prefixes.begin(member.group_id)
    for number, turn in enumerate(trace.turns):
        found = _turn_columns(turn, prefixes.add(turn))
        yield {"row": TURN, "rollout_id": member.rollout_id, "turn": number} | found
    for leaf, sample in samples:
        yield {
            "row": SAMPLE,
            "rollout_id": member.rollout_id,
            "leaf": leaf,
            "origin": str(sample.origin),
            "mask": sample.path.mask,
            "advantages": sample.advantages,
            "temperatures": sample.temperatures,
            "hints": [{name: getattr(hint, name) for name in HINT} for hint in sample.hints] or None,
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
        prompt_ids, routes = prompt_ids[shared.num_tokens :], xor_routes(routes, other.routes, num_routes)
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
    found = {name: getattr(sampling, name) for name in SAMPLING_2}
    if sampling.plain and not sampling.top_logprobs:
        return found | {"others": None}
    others = {name: value for name, value in json.loads(to_json(sampling)).items() if name not in SAMPLING_2}
    return found | {"others": json.dumps(others)}


def replace_trace(path: TraceFile, write: Callable[[BinaryIO], None]) -> None:
    """Write a trace and its digest atomically and durably. `write` writes the Parquet file.

    Raises `StoreError` if it cannot be written."""
    if isinstance(path, StoredTrace):
        buffer = io.BytesIO()
        write(buffer)
        seal_parquet(buffer)
        return path.replace(buffer.getvalue())
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w+b") as file:
            write(file)
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
            f"{path} cannot be written", str(error), hint="free disk space, then resume: etude run --resume"
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
            held = [value for name in ARRAYS if (value := row.get(name)) is not None]
            size += sum(len(value) if isinstance(value, bytes) else value.nbytes for value in held)
            if size >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
                waiting, size = [], 0
        if waiting:
            writer.write_table(pa.Table.from_pylist(waiting, SCHEMA))
        writer.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(facts()), PARQUET_KEY: "1"})
