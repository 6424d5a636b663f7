"""One row a rollout of an evaluation, as Parquet: `evals/<name>.parquet` of a run folder.

Everything that reports and comparisons need, transcripts included, and nothing that training needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import StoreError
from etude.file_checksums import PARQUET_KEY, seal_parquet, verify_parquet
from etude.records.reward import Reward
from etude.records.rollout import Invalid
from etude.records.summary import RolloutSummary

MAX_ROWS = 10_000_000
LATER = {"sign"}  # columns that files of an earlier etude lack


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """A judged rollout. `reward` is NaN-free: 0.0 where it is invalid, which `outcome` says."""

    task_id: str
    rollout_id: str
    family: str
    problem: str  # variants of one problem share it; the task's id where the task is unique
    outcome: str  # "graded", or the boundary at which it became invalid
    reward: float
    ending: str
    reason: str
    turns: int
    sampled: int  # tokens the policy sampled
    malformed: int  # tool calls that could not be read
    wall_s: float
    tool_s: float
    transcript: str  # the whole context for people
    sign: str = ""  # of cheating, the gravest; "": none, or a file of an etude that did not look

    @property
    def valid(self) -> bool:
        return self.outcome == "graded"

    @property
    def solved(self) -> bool:
        return self.valid and self.reward >= 1.0


_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("rollout_id", pa.string()),
        ("family", pa.string()),
        ("problem", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("ending", pa.string()),
        ("reason", pa.string()),
        ("turns", pa.int32()),
        ("sampled", pa.int32()),
        ("malformed", pa.int32()),
        ("wall_s", pa.float64()),
        ("tool_s", pa.float64()),
        ("transcript", pa.string()),
        ("sign", pa.string()),
    ],
    metadata={PARQUET_KEY: "1"},
)


def make_row(rollout: RolloutSummary, judged: Reward | Invalid, *, transcript: str, sign: str = "") -> EvalRow:
    """The row of a rollout and its reward. `sign`: of cheating, which took the reward."""
    valid = isinstance(judged, Reward)
    return EvalRow(
        task_id=rollout.task_id,
        rollout_id=rollout.rollout_id,
        family=rollout.family,
        problem=rollout.problem,
        outcome="graded" if isinstance(judged, Reward) else judged.boundary.value,
        reward=judged.value if isinstance(judged, Reward) else 0.0,
        ending=rollout.ending.value if valid else "",
        reason=judged.reason,
        turns=rollout.num_turns,
        sampled=rollout.num_sampled,
        malformed=rollout.num_malformed,
        wall_s=rollout.wall_s,
        tool_s=rollout.tool_s,
        transcript=transcript,
        sign=sign,
    )


def write_rows(path: Path, rows: Iterable[EvalRow]) -> None:
    """Write rows, in order of task and rollout; the file is whole or absent. Raises `StoreError`."""
    ordered = sorted(rows, key=lambda r: (r.task_id, r.rollout_id))
    table = pa.Table.from_pylist([asdict(r) for r in ordered], schema=_SCHEMA)
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w+b") as file:
            pq.write_table(table, file, compression="zstd")
            seal_parquet(file)
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}", str(error), hint="free space, or check the folder's rights") from None


def read_rows(path: Path) -> list[EvalRow]:
    """The rows of a file; columns it has besides are skipped. Raises `StoreError` for a missing or damaged one."""
    try:
        with path.open("rb") as handle:
            verify_parquet(handle, path, kind=StoreError)
        file = pq.ParquetFile(path, pre_buffer=False)  # and no threads: one may abort the interpreter at its end
        if file.metadata.num_rows > MAX_ROWS:
            raise StoreError(f"{path} has {file.metadata.num_rows} rows", hint=f"at most {MAX_ROWS} are read")
        lacking = LATER - set(file.schema_arrow.names)
        names = [f.name for f in fields(EvalRow) if f.name not in lacking]
        read = file.read(columns=names, use_threads=False).select(names)
        values: list[dict[str, Any]] = read.cast(pa.schema([_SCHEMA.field(name) for name in names])).to_pylist()
    except FileNotFoundError:
        raise StoreError(
            f"no evaluation at {path}", hint="the run has not reached it yet; see its phases.json"
        ) from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path} is not an evaluation", str(error), hint=_HINT_DAMAGED) from None
    if any(v is None for row in values for v in row.values()):
        raise StoreError(f"{path} is not an evaluation", "a value is missing", hint=_HINT_DAMAGED)
    return [EvalRow(**row) for row in values]


_HINT_DAMAGED = "run the evaluation again"
