"""Reads and writes results of suites: one JSON file for each suite and model (docs/formats/suites.md).

``FOLDER/SUITE/LABEL.json`` and ``FOLDER/SUITE/LABEL.parquet``, and ``FOLDER/SUITE/seeds/LABEL.json`` for several
training seeds of a recipe. The leaderboard reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from etude.errors import StoreError
from etude.evals.result import EvalResult
from etude.evals.rows import EvalRow, read_rows
from etude.evals.suites import Gate, Purpose, Suite
from etude.evals.training_seeds import SeedsResult
from etude.file_checksums import ChecksumMismatch, sealed, verify_json
from etude.run import write_durably

FORMAT = 1
SEEDS = "seeds"
"""Name of the subfolder of a suite's results that has the results over training seeds."""


class GateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking one gate.

    `value`: the value of the gate's metric; None if unknown. `failure`: why the value does not pass; "" if it does."""

    gate: Gate
    value: float | None
    failure: str


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a suite on one model.

    - `suite`, `purpose`, `suite_digest`: what was measured. Results can be compared if their digests are equal.
    - `label`: the model's name in tables. `model`: its checkpoint, or its name at `url`. `url`: "" for a checkpoint.
      `version`: the version of the weights; None: unknown. `prompted`: whether the model got the suite's prompt.
    - `price_name`: the model's name in the table of prices.
    - `result`: solve rate, intervals, costs and other numbers.
    - `general_bits_per_byte`: the loss on the general text; None: not measured. `general_digest`: 16 hex digits of that
      text; "": not measured.
    - `gates`: one report for each gate. `date`: when the evaluation ended, in ISO 8601.
    - `num_not_compared`: training tasks of the model's run that were not compared with those of the suite."""

    suite: str
    purpose: Purpose
    suite_digest: str
    label: str
    model: str
    url: str
    version: str | None
    prompted: bool
    price_name: str
    result: EvalResult
    general_bits_per_byte: float | None
    gates: tuple[GateReport, ...]
    date: str
    general_digest: str = ""
    num_not_compared: int = 0
    format: int = FORMAT


class SeedsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a suite on several models that one recipe trained with different seeds.

    - `suite`, `purpose`, `suite_digest`: what was measured. Results can be compared if their digests are equal.
    - `label`: the name of the recipe. The labels of the models are in `result.by_seed`, and each model also has an
      `EvalRecord` of its own.
    - `gates`: one report for each gate. Gates on `rate`, `low` and `high` use `result`; gates on other numbers use the
      mean over the models. `date`: when the last evaluation ended, in ISO 8601."""

    suite: str
    purpose: Purpose
    suite_digest: str
    label: str
    result: SeedsResult
    gates: tuple[GateReport, ...]
    date: str
    format: int = FORMAT


T = TypeVar("T", EvalRecord, SeedsRecord)


FILE_CHARACTERS = "letters, digits, '@', '.', '_' and '-'"
"""The characters that names of result files may have, in words."""


def record_path(folder: Path, suite: str, label: str) -> Path:
    """Return the JSON file of a suite's result on a model. The rollouts are beside it, with the suffix ".parquet".

    Characters of the label that are not in `FILE_CHARACTERS` are replaced by "-".

    >>> record_path(Path("evals"), "repair", "gpt-5 mini/high").as_posix()
    'evals/repair/gpt-5-mini-high.json'
    """
    return folder / suite / (re.sub(r"[^A-Za-z0-9@._-]+", "-", label).lstrip(".") + ".json")


def seeds_path(folder: Path, suite: str, label: str) -> Path:
    """Return the path of the JSON file with a suite's result over training seeds. `label`: the name of the recipe."""
    return record_path(folder, f"{suite}/{SEEDS}", label)


def write_record(folder: Path, record: EvalRecord | SeedsRecord) -> Path:
    """Write a result to its file below `folder`, and return the path. Raises `StoreError` if it cannot be written."""
    place = seeds_path if isinstance(record, SeedsRecord) else record_path
    path = place(folder, record.suite, record.label)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, json.dumps(sealed(msgspec.to_builtins(record, str_keys=True)), indent=2).encode())
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written", str(error), hint="free disk space, or check the permissions of the folder"
        ) from None
    return path


def read_record(path: Path) -> EvalRecord:
    """Read a result. Raises `StoreError` for a missing or damaged file, and for a file of another format version."""
    return _read(path, EvalRecord)


def _read(path: Path, kind: type[T]) -> T:
    try:
        raw = json.loads(path.read_bytes())
        verify_json(raw, path, must=True)
        found = msgspec.convert(raw, kind, strict=False)
    except FileNotFoundError:
        raise StoreError(f"no result at {path}", hint="evaluate first: etude eval SUITE") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be read", str(error), hint="check its permissions and the disk") from None
    except ChecksumMismatch as error:
        hint = "restore it from a backup, or evaluate again: etude eval SUITE"
        raise StoreError(f"{path} is damaged", error.facts, hint=hint) from None
    except (ValueError, RecursionError) as error:
        hint = "evaluate again: etude eval SUITE"
        raise StoreError(f"{path} is not the result of an evaluation", str(error), hint=hint) from None
    if found.format != FORMAT:
        raise StoreError(
            f"{path} has format version {found.format}",
            f"this version of etude supports format version {FORMAT}",
            hint="evaluate again: etude eval SUITE",
        )
    return found


def read_records(folder: Path) -> list[tuple[EvalRecord, Path]]:
    """Read all results below a folder with their paths, sorted by suite and label.

    Raises `StoreError` if there is none, or if a file cannot be read."""
    found = [(read_record(path), path) for path in sorted(folder.glob("*/*.json"))]
    if not found:
        raise StoreError(f"{folder} has no result", hint="evaluate first: etude eval SUITE --out FOLDER")
    return sorted(found, key=lambda one: (one[0].suite, one[0].label))


def read_seeds(folder: Path) -> list[SeedsRecord]:
    """Read all results over training seeds below a folder, sorted by suite and label.

    Raises `StoreError` for a file that cannot be read."""
    found = [_read(path, SeedsRecord) for path in folder.glob(f"*/{SEEDS}/*.json")]
    return sorted(found, key=lambda one: (one.suite, one.label))


def rows_beside(path: Path) -> list[EvalRow]:
    """Read the rollouts of the result at `path`, from the file beside it with the suffix ".parquet".

    Raises `StoreError` if the file cannot be read."""
    return read_rows(path.with_suffix(".parquet"))


def gate_reports(suite: Suite, values: Mapping[str, float | None]) -> tuple[GateReport, ...]:
    """Check the gates of a suite, and return a report for each. `values`: the value of each metric; None: unknown."""
    return tuple(
        GateReport(gate=gate, value=value, failure=gate.failure(value))
        for gate, value in ((gate, values.get(gate.metric)) for gate in suite.gates)
    )


def plain(record: EvalRecord | SeedsRecord) -> dict[str, Any]:
    """Return a result as dicts, lists and scalars, for JSON."""
    found: dict[str, Any] = msgspec.to_builtins(record, str_keys=True)
    return found
