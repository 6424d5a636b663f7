"""Deletes the tokens of rollouts from the trace of a step. The trace still names them, so that it agrees with the
ledger and with the manifests of the weights; the step cannot be replayed any more."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etude.errors import LedgerError
from etude.experience.trace_reader import read_table
from etude.experience.trace_writer import replace_trace
from etude.experience.traces import ERASED, METADATA_KEY, ROLLOUT, StoredTrace, TraceFile
from etude.file_checksums import PARQUET_KEY


def erase_rollouts(path: TraceFile, rollout_ids: Collection[str]) -> list[str]:
    """Delete the turns and samples of rollouts from a trace, and the texts of their outcomes.

    All rollouts of their groups are erased with them: they were given the same prompt. Outcomes, rewards and ids stay.
    The file is replaced atomically; in a store that cannot replace, it is deleted first. Returns the sorted ids of all
    rollouts that the file has without their tokens; none if it has none of `rollout_ids`.

    Raises `LedgerError` for a missing or damaged file and for one of format 1, which has no turns, and `StoreError` if
    the file cannot be written."""
    table, facts = read_table(path)
    if facts["format"] == 1:
        hint = "delete the file"
        raise LedgerError(f"{path} has format 1", "rollouts cannot be erased from it", hint=hint)
    groups = {
        row["rollout_id"]: row["group_id"]
        for row in table.select(["row", "rollout_id", "group_id"]).to_pylist()
        if row["row"] == ROLLOUT
    }
    before = set(facts.get(ERASED, ()))
    wanted = groups.keys() & set(rollout_ids)
    gone = {one for one, group in groups.items() if group in {groups[i] for i in wanted}}
    told = sorted(before | gone)
    if not gone <= before:
        facts[ERASED] = told
        left = _without(table, gone)

        def write(file: BinaryIO) -> None:
            with pq.ParquetWriter(
                file, left.schema, compression="zstd", write_page_checksum=True, store_schema=False
            ) as writer:
                writer.write_table(left)
                writer.add_key_value_metadata({METADATA_KEY.decode(): json.dumps(facts), PARQUET_KEY: "1"})

        replace_trace(path, write)
    _drop_unfinished(path)
    return told if gone else []


def _without(table: pa.Table, gone: Collection[str]) -> pa.Table:
    """Return the table without the turns and samples of rollouts, and without the texts of their outcomes."""
    is_gone = pc.is_in(table.column("rollout_id"), pa.array(sorted(gone), pa.string()))
    is_rollout = pc.equal(table.column("row"), ROLLOUT)
    left = table.filter(pc.or_(is_rollout, pc.invert(is_gone))).replace_schema_metadata(None)
    erased = left.column("rollout_id").to_pylist()
    changed: dict[str, Callable[[str], str | None]] = {
        "terms": _numbers, "reason": lambda _: "erased", "evidence": lambda _: ""
    }  # fmt: skip
    for name, change in changed.items():
        values = left.column(name).to_pylist()
        new = [change(one) if i in gone and one is not None else one for i, one in zip(erased, values, strict=True)]
        left = left.set_column(left.schema.get_field_index(name), left.schema.field(name), pa.array(new, pa.string()))
    return left


def _numbers(terms: str) -> str:
    """Return terms without their texts."""
    found: list[dict[str, Any]] | Mapping[str, float] = json.loads(terms)
    if isinstance(found, list):
        found = [{key: value for key, value in one.items() if key not in ("evidence", "hints")} for one in found]
    return json.dumps(found)


def _drop_unfinished(path: TraceFile) -> None:
    """Delete what a killed process left of a file that it wrote."""
    if not isinstance(path, StoredTrace):
        path.with_suffix(".tmp").unlink(missing_ok=True)
