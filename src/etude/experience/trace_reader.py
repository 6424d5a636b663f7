"""Reads traces (`traces`), from which a step can be repeated bit for bit.

Files are read in the caller's thread (`pre_buffer`, `use_threads`): a pyarrow thread that still uses a Python file when
the interpreter exits would abort the process. This module knows nothing of databases, or of how the batch was made."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import LedgerError
from etude.experience.admission import mask_path
from etude.experience.traces import (
    ARRAYS,
    ERASED,
    FORMAT,
    METADATA_KEY,
    ROLLOUT,
    ROLLOUT_COLUMNS,
    SAMPLE,
    SAMPLING_2,
    SCHEMA,
    TURN,
    TraceFile,
    batch_digest,
    xor_routes,
)
from etude.file_checksums import verify_parquet
from etude.records.completion import Completion, Sampling, StopReason, Version, VersionSpan
from etude.records.reward import Term
from etude.records.rollout import Boundary, Fork, Graded, Invalid, Path, Start, Trace, Turn, TurnKind
from etude.records.sample import Batch, Origin, PlacedHint, Sample
from etude.records.summary import TurnPlace, turn_places
from etude.records.task import Trust
from etude.records.wire import Array, Routes, from_json

_SCHEMA_4 = pa.schema([field for field in SCHEMA if field.name != "hints"])
_SCHEMA_3 = pa.schema([field for field in _SCHEMA_4 if field.name not in ("start", "num_cached")])
_SCHEMA_2 = _SCHEMA_3.set(_SCHEMA_3.get_field_index("sampling"), pa.field("sampling", pa.struct(SAMPLING_2)))
_SCHEMAS = {2: _SCHEMA_2, 3: _SCHEMA_3, 4: _SCHEMA_4, FORMAT: SCHEMA}
_WITHOUT_ROUTES = {1: ["rollout_id"]} | {
    number: [name for name in schema.names if name != "routes"] for number, schema in _SCHEMAS.items()
}
_JUDGED = ["rollout_id", *ROLLOUT_COLUMNS]
_PARSE_ERRORS = (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError, IndexError)
_ARRAYS_1 = ("token_ids", "mask", "logprobs", "steps", "kv_epochs")


@dataclass(frozen=True)
class RecordedRollout:
    """One rollout of a recorded step, without its tokens.

    `task_id`, `family`, `attempt` and `ending` are None if the process that ran the rollout stored nothing. `outcome`:
    None if it was cancelled or quarantined. `reward`: the composed reward that credit was computed from; None unless
    graded. `places`: the places of its turns in the tree, for credit by turn; empty in files of format 1. `fork`:
    what it shares with other rollouts; None: nothing."""

    rollout_id: str
    group_id: str
    task_id: str | None
    family: str | None
    attempt: int | None
    ending: str | None
    outcome: Graded | Invalid | None
    reward: float | None = None
    places: tuple[TurnPlace, ...] = ()
    fork: Fork | None = None


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
class RecordedStep:
    """A recorded step with all turns of its rollouts, from which its rewards and its batch can be computed again.

    `rewards`: the settings from which rewards and advantages were computed (`BatchPlan.rewards`); empty in old files.
    `temperature`: the sampling temperature of the run. `digest`: the `batch_digest` of the batch. `erased`: ids of the
    rollouts whose turns and samples were erased since (`trace_erasure`); with such, the batch cannot be computed."""

    batch_id: str
    step: int
    num_loss_tokens: int
    trees: tuple[RecordedTree, ...]
    rewards: Mapping[str, Any]
    temperature: float
    digest: str
    erased: tuple[str, ...] = ()


@dataclass(frozen=True)
class Index:
    """The part of a trace file that an audit reads: the step, its batch, and its rollouts.

    `rollout_ids`: all rollouts. `trained`: those with a sample. `graded`: those with a grade."""

    path: TraceFile
    batch_id: str
    step: int
    rollout_ids: frozenset[str]
    trained: frozenset[str]
    graded: frozenset[str]


def _sampling(row: dict[str, Any]) -> Sampling:
    """The inverse of `trace_writer._sampling_columns`. Files of format 2 have no `others`."""
    others = json.loads(row.pop("others", None) or "{}")
    return msgspec.convert(others | row, Sampling)


def read_trace(path: TraceFile) -> RecordedBatch:
    """Read a trace file: the batch, equal to the one that was written, and every rollout's outcome.

    Raises `LedgerError` for a missing or damaged file, and for one from which rollouts were erased."""
    table, facts = read_table(path)
    if facts.get(ERASED):
        raise LedgerError(
            f"the batch of step {facts['step']} is not complete any more",
            f"{len(facts[ERASED])} of its rollouts were erased from {path}",
            hint="replay other steps; the weights of this one are not changed",
        )
    try:
        if facts["format"] == 1:
            rows = {row["rollout_id"]: row for row in table.select(_JUDGED).to_pylist()}
            judged, samples = [_recorded_rollout(row) for row in rows.values()], _samples_1(table)
        else:
            judged, samples, forks = [], [], _forks(facts)
            for row, trace, numbered in _rollouts(table):
                judged.append(_recorded_rollout(row, turn_places(trace), forks.get(row["rollout_id"])))
                samples += [_sample(one, table, i, trace) for i, one in numbered]
        batch = Batch(
            batch_id=facts["batch_id"],
            step=facts["step"],
            samples=tuple(samples),
            rollout_ids=tuple(one.rollout_id for one in judged),
            num_loss_tokens=facts["num_loss_tokens"],
            lr_share=_share(facts.get("lr_share", 1.0)),
            pairs=tuple((str(better), str(worse)) for better, worse in facts.get("pairs", ())),
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
    if not isinstance(value, float) or not 0.0 <= value < math.inf:
        raise ValueError(f"lr_share is {value!r}")
    return value


def read_rollout(path: TraceFile, rollout_id: str) -> RecordedTree | None:
    """Read one rollout with its turns and samples from a trace file, without their routes.

    In a file of format 1 each path is returned as one turn without sampled tokens. Returns None when the file does not
    have the rollout. Raises `LedgerError` for a missing or damaged file."""
    old = [*_JUDGED, "token_ids"]
    table, facts = read_table(path, _WITHOUT_ROUTES | {1: old})
    try:
        if facts["format"] == 1:
            return _read_rollout_1(table.select(old), rollout_id)
        return next((tree for tree in _trees(table, _forks(facts)) if tree.rollout.rollout_id == rollout_id), None)
    except _PARSE_ERRORS as error:
        raise _damaged(path, error) from error


def read_step(path: TraceFile, *, routes: bool = True) -> RecordedStep:
    """Read a step with all its turns. Raises `LedgerError` for a missing or damaged file, and for one of format 1.

    `routes`: whether the turns have their routes, which are most of the bytes."""
    table, facts = read_table(path, None if routes else _WITHOUT_ROUTES)
    try:
        if facts["format"] == 1:
            raise ValueError("format 1 has no turns")
        trees = tuple(_trees(table, _forks(facts)))
        rewards, temperature = facts.get("rewards", {}), facts.get("temperature", 1.0)
        if not isinstance(rewards, dict) or not isinstance(temperature, float):
            raise ValueError("its rewards or temperature are not as they are written")
        names = ("batch_id", "step", "num_loss_tokens")
        found = {name: facts[name] for name in names} | {"digest": str(facts.get("digest", ""))}
        erased = tuple(map(str, facts.get(ERASED, ())))
        return RecordedStep(**found, erased=erased, trees=trees, rewards=rewards, temperature=temperature)
    except _PARSE_ERRORS as error:
        raise _damaged(path, error) from error


def read_outcomes(path: TraceFile) -> tuple[Mapping[str, Any], list[RecordedRollout]]:
    """Read the outcomes of a step without its tokens: (settings of its rewards, rollouts).

    The settings are empty in old files. Raises `LedgerError` for a missing or damaged file."""
    table, facts = read_table(path, {key: [*_JUDGED, "row"] for key in _SCHEMAS} | {1: _JUDGED})
    try:
        rows = table.select([*_JUDGED, "row"] if "row" in table.column_names else _JUDGED).to_pylist()
        found = {row["rollout_id"]: row for row in rows if row.get("row", ROLLOUT) == ROLLOUT}
        forks = _forks(facts)
        rollouts = [_recorded_rollout(row, fork=forks.get(rollout_id)) for rollout_id, row in found.items()]
        return dict(facts.get("rewards", {})), rollouts
    except _PARSE_ERRORS as error:
        raise _damaged(path, error) from error


def _forks(facts: Mapping[str, Any]) -> dict[str, Fork]:
    return msgspec.convert(facts.get("rewards", {}).get("forks", {}), dict[str, Fork])


def _trees(table: pa.Table, forks: Mapping[str, Fork]) -> Iterator[RecordedTree]:
    num_rows = 0
    for row, trace, numbered in _rollouts(table):
        samples = [(one["leaf"], _sample(one, table, i, trace)) for i, one in numbered]
        rollout = _recorded_rollout(row, fork=forks.get(row["rollout_id"]))
        yield RecordedTree(rollout, trace, tuple(samples), first_row=num_rows)
        num_rows += len(numbered)


def read_index(path: TraceFile) -> Index:
    """Read which rollouts a trace file has, without their tokens.

    Raises `LedgerError` for a missing or damaged file."""
    columns = {key: ["rollout_id", "reward", "row"] for key in _SCHEMAS} | {1: ["rollout_id", "reward", "in_batch"]}
    table, facts = read_table(path, columns)
    rows = table.select(columns[facts["format"]]).to_pylist()
    return Index(
        path=path,
        batch_id=facts["batch_id"],
        step=facts["step"],
        rollout_ids=frozenset(row["rollout_id"] for row in rows),
        trained=frozenset(row["rollout_id"] for row in rows if row.get("in_batch", row.get("row") == SAMPLE)),
        graded=frozenset(row["rollout_id"] for row in rows if row["reward"] is not None),
    )


def read_table(path: TraceFile, columns: Mapping[int, list[str]] | None = None) -> tuple[pa.Table, dict[str, Any]]:
    """Return the table of a file, with these columns for its format (None: all), and its metadata.

    Raises `LedgerError` for a missing or damaged file."""
    try:
        with path.open("rb") as handle:
            has_digest = verify_parquet(handle, path, kind=LedgerError)
            return _table(handle, columns if has_digest else None)  # without a digest, read all pages: they have CRCs
    except FileNotFoundError as error:
        raise LedgerError(
            f"no trace at {path}", hint="name a step that was trained, or copy its file back if it was removed"
        ) from error
    except (*_PARSE_ERRORS, OSError, MemoryError) as error:
        raise _damaged(path, error) from error


def read_format(path: pathlib.Path) -> int:
    """Read the format number of a trace file. Raises `ValueError` if it is no trace."""
    facts = json.loads((pq.read_schema(path).metadata or {}).get(METADATA_KEY, b"{}"))
    if not isinstance(facts, dict) or not isinstance(facts.get("format"), int):
        raise ValueError("its metadata names no format of a trace")
    return int(facts["format"])


def _table(handle: BinaryIO, columns: Mapping[int, list[str]] | None) -> tuple[pa.Table, dict[str, Any]]:
    with pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=False) as file:
        schema = file.schema_arrow
        facts = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
        kinds = {"format": int, "batch_id": str, "step": int, "num_loss_tokens": int}
        if not isinstance(facts, dict) or any(not isinstance(facts.get(k), t) for k, t in kinds.items()):
            raise ValueError("its columns are not those of a trace, or its metadata is incomplete")
        if facts["format"] not in (1, *_SCHEMAS):
            raise LedgerError(
                f"a trace has format {facts['format']}",
                f"{getattr(handle, 'name', 'it')}; this version of etude reads formats 1 to {FORMAT}",
                hint="use the etude version that wrote it",
            )
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


def _recorded_rollout(
    row: dict[str, Any], places: tuple[TurnPlace, ...] = (), fork: Fork | None = None
) -> RecordedRollout:
    outcome: Graded | Invalid | None = None
    if row["terms"] is not None:
        outcome = _graded(row)
    elif row["boundary"] is not None:
        outcome = Invalid(boundary=Boundary(row["boundary"]), reason=row["reason"], evidence=row["evidence"])
    names = ("rollout_id", "group_id", "task_id", "family", "attempt", "ending", "reward")
    return RecordedRollout(**{name: row[name] for name in names}, outcome=outcome, places=places, fork=fork)


def _rollouts(table: pa.Table) -> Iterator[tuple[dict[str, Any], Trace, list[tuple[int, dict[str, Any]]]]]:
    """Yield the row of each rollout, its trace, and the numbered rows of its samples."""
    rows = enumerate(table.drop_columns([name for name in ARRAYS if name in table.column_names]).to_pylist())
    group_id, group = None, list[Turn]()
    for rollout_id, some in itertools.groupby(rows, key=lambda numbered: numbered[1]["rollout_id"]):
        (_, rollout), *others = some
        if rollout["row"] != ROLLOUT:
            raise ValueError(f"the rows of rollout {rollout_id} do not begin with its own")
        if rollout["group_id"] != group_id:
            group_id, group = rollout["group_id"], []
        turns = list[Turn]()
        for i, row in others:
            if row["row"] == TURN:
                turns.append(_turn(row, table, i, turns, group))
                group.append(turns[-1])
        yield rollout, Trace(tuple(turns)), [(i, row) for i, row in others if row["row"] == SAMPLE]


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
        routes = xor_routes(routes, other.completion.routes, min(len(routes), row["shared_routes"]))
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
        hints=tuple(_placed_hint(one) for one in row.get("hints") or ()),
    )


def _placed_hint(row: dict[str, Any]) -> PlacedHint:
    return PlacedHint(**row | {"token_ids": np.array(row["token_ids"], np.int32)})


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
