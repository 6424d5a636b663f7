"""The rollouts of an evaluation as Parquet, one row each: `evals/<name>.parquet` in a run folder.

A row has everything that reports and comparisons need, including the transcript, but no training data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import StoreError
from etude.file_checksums import PARQUET_KEY, seal_parquet, verify_parquet
from etude.records.reward import Reward
from etude.records.rollout import Invalid
from etude.records.summary import RolloutSummary
from etude.records.view import TurnView, transcript
from etude.records.wire import to_json

MAX_ROWS = 10_000_000
ADDED_LATER = {"sign", "tree", "prompt", "cached", "terms"}  # columns that files of earlier versions do not have
NULLABLE = {"prompt", "cached"}
NO_TERMS: Mapping[str, float | None] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRow:
    """A finished rollout of an evaluation: one row of its Parquet file.

    - `problem`: equal for variants of one problem; the task id for a unique task. `family`: the kind of task.
    - `outcome`: "graded", or the component that failed and made the rollout invalid.
    - `reward`: never NaN; 0.0 if invalid. `reason`: why the reward is what it is.
    - `ending`: how the rollout ended, such as by submitting; "" if invalid.
    - `turns`, `sampled`, `malformed`: numbers of model requests, sampled tokens, and unparsable tool calls.
    - `wall_s`, `tool_s`: duration of the rollout, and of its tool calls, in seconds.
    - `transcript`: all conversations as text. `tree`: the turns as a JSON list of `etude.records.view.TurnView`. In
      files of earlier versions `tree` is "" and `transcript` has only the last conversation.
    - `sign`: the most serious sign of cheating, or "".
    - `terms`: the values of the reward terms that the evaluation measured, as a JSON object of numbers by name; null:
      unknown. A term is not in it where its gate is closed.
    - `prompt`: prompt tokens of all its model requests together. `cached`: those of them that the server had in its
      cache. None: unknown."""

    task_id: str
    rollout_id: str
    family: str
    problem: str
    outcome: str
    reward: float
    ending: str
    reason: str
    turns: int
    sampled: int
    malformed: int
    wall_s: float
    tool_s: float
    transcript: str
    sign: str = ""
    tree: str = ""
    prompt: int | None = None
    cached: int | None = None
    terms: str = "{}"

    @property
    def valid(self) -> bool:
        """Whether the attempt was graded. An invalid one failed for a reason outside the agent."""
        return self.outcome == "graded"

    @property
    def solved(self) -> bool:
        """Whether the attempt was graded with a reward of at least 1."""
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
        ("tree", pa.string()),
        ("prompt", pa.int64()),
        ("cached", pa.int64()),
        ("terms", pa.string()),
    ],
    metadata={PARQUET_KEY: "1"},
)


def make_row(
    rollout: RolloutSummary,
    judged: Reward | Invalid,
    *,
    turns: Sequence[TurnView],
    sign: str = "",
    terms: Mapping[str, float | None] = NO_TERMS,
) -> EvalRow:
    """Make the row of a rollout from its summary, its reward, and its turns as text.

    `judged` is the result of grading. `sign` is the sign of cheating because of which the reward is 0; "" if there is
    none. `terms`: the values of measured reward terms by name."""
    valid = isinstance(judged, Reward)
    cached = [turn.num_cached for turn in turns if turn.num_cached is not None]
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
        transcript=transcript(turns),
        sign=sign,
        tree=to_json(turns).decode(),
        prompt=sum(turn.num_prompt for turn in turns),
        cached=sum(cached) if len(cached) == len(turns) else None,
        terms=json.dumps(dict(terms), sort_keys=True),
    )


def write_rows(path: Path, rows: Iterable[EvalRow]) -> None:
    """Write rows to a Parquet file, sorted by task and rollout. Raises `StoreError`.

    The file is written completely or not at all."""
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
        raise StoreError(
            f"cannot write {path}", str(error), hint="free disk space, or check the permissions of the folder"
        ) from None


def read_rows(path: Path) -> list[EvalRow]:
    """Read the rows of a Parquet file. Columns of later etude versions are ignored.

    Raises `StoreError` if the file is missing or damaged."""
    try:
        with path.open("rb") as handle:
            verify_parquet(handle, path, kind=StoreError)
        file = pq.ParquetFile(path, pre_buffer=False)  # no threads: they can abort the interpreter at exit
        if file.metadata.num_rows > MAX_ROWS:
            raise StoreError(
                f"{path} has {file.metadata.num_rows} rows",
                hint=f"at most {MAX_ROWS} rows are read: split the evaluation",
            )
        missing = ADDED_LATER - set(file.schema_arrow.names)
        names = [f.name for f in fields(EvalRow) if f.name not in missing]
        read = file.read(columns=names, use_threads=False).select(names)
        values: list[dict[str, Any]] = read.cast(pa.schema([_SCHEMA.field(name) for name in names])).to_pylist()
    except FileNotFoundError:
        raise StoreError(
            f"no evaluation at {path}", hint="the run may not have reached it yet; see its phases.json"
        ) from None
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path} is not an evaluation", str(error), hint=_HINT_DAMAGED) from None
    if any(v is None and name not in NULLABLE for row in values for name, v in row.items()):
        raise StoreError(f"{path} is not an evaluation", "a value is missing", hint=_HINT_DAMAGED)
    return [EvalRow(**row) for row in values]


_HINT_DAMAGED = "run the evaluation again"
