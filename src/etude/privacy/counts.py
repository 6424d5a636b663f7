"""Counts of consent and captured records, read without keys, names or content, and without writing a file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from etude.privacy.consent import Level
from etude.privacy.database import reported
from etude.sqlite_reading import open_readonly


class ConsentCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one privacy folder.

    - `organisations`, `users`: how many have set each level, by the level's name. The level that holds for a user is
      the lower one of its own and its organisation's.
    - `num_changes`: all levels that were ever set. `last_change`: when the last one was, Unix time in s; None: never.
    - `records`: captured records by the level that they were captured under. `answers`: what became of the served
      answers that were offered to the capture. `num_erasures`: subjects that were erased."""

    organisations: dict[str, int]
    users: dict[str, int]
    num_changes: int
    last_change: float | None
    records: dict[str, int]
    answers: dict[str, int]
    num_erasures: int


def read_counts(folder: Path) -> ConsentCounts:
    """Count the subjects of a privacy folder by level, and its records. Reads all changes and records once.

    Raises `PrivacyError` if a file is damaged, or `consent.sqlite` does not exist."""
    consent, records = folder / "consent.sqlite", folder / "records.sqlite"
    by_kind: dict[bool, dict[str, int]] = {True: {}, False: {}}
    with reported(consent), contextlib.closing(open_readonly(consent)) as db:
        newest = "SELECT max(id) FROM changes GROUP BY subject"
        sql = f"SELECT subject = organisation, level, count(*) FROM changes WHERE id IN ({newest}) GROUP BY 1, 2"
        for is_organisation, level, number in db.execute(sql):
            by_kind[bool(is_organisation)][_name(level)] = number
        num_changes, last = db.execute("SELECT count(*), max(at) FROM changes").fetchone()
    found: dict[str, int] = {}
    answers: dict[str, int] = {}
    num_erasures = 0
    if records.exists():
        with reported(records), contextlib.closing(open_readonly(records)) as db:
            rows = db.execute("SELECT level, count(*) FROM records GROUP BY level").fetchall()
            found = {_name(level): number for level, number in rows}
            answers = dict(db.execute("SELECT name, number FROM counts ORDER BY name").fetchall())
            num_erasures = db.execute("SELECT count(*) FROM erasures").fetchone()[0]
    return ConsentCounts(
        organisations=by_kind[True],
        users=by_kind[False],
        num_changes=num_changes,
        last_change=last,
        records=found,
        answers=answers,
        num_erasures=num_erasures,
    )


def _name(level: int) -> str:
    return str(Level(level)) if level in list(Level) else f"level {level}"
