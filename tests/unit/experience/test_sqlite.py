from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from etude.errors import LedgerError, StoreError
from etude.experience import Ledger, sqlite_integrity
from etude.experience.database import READABLE
from etude.experience.ledger_queries import FINISHED
from etude.experience.sqlite import SqliteDatabase
from etude.records.wire import pack


@pytest.mark.parametrize("content", [b"not sqlite at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_file_that_is_no_ledger_is_an_error_with_a_hint(tmp_path, content):
    (tmp_path / "ledger.sqlite").write_bytes(content)
    with pytest.raises((LedgerError, StoreError)) as caught:
        Ledger(tmp_path / "ledger.sqlite", capacity=8)
    assert caught.value.hint


def test_a_ledger_of_an_earlier_etude_is_given_the_indexes_that_it_lacks_and_counts_on(ledger, tmp_path, finish_group):
    finish_group("g000000", [1.0, 0.0])
    finish_group("g000001", [1.0])
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        file.execute("DELETE FROM meta WHERE key = 'groups'")
        for (name,) in file.execute(
            "SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL"
        ).fetchall():
            file.execute(f"DROP INDEX {name}")
    file.close()
    reopened = Ledger(tmp_path / "ledger.sqlite", capacity=8)
    assert reopened.num_groups() == 2
    with sqlite3.connect(tmp_path / "ledger.sqlite") as file:
        found = file.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    file.close()
    assert ("rollouts_open",) in found
    reopened.close()


@pytest.mark.parametrize("earlier", READABLE)
def test_a_ledger_of_an_earlier_format_can_be_listed_and_not_gone_on_with(ledger, tmp_path, finish_group, earlier):
    finish_group("g000000", [1.0])
    ledger._db.execute("UPDATE meta SET value = ? WHERE key = 'format'", earlier)
    ledger.close()
    reading = Ledger.open_readonly(tmp_path / "ledger.sqlite")
    assert reading.states() == {"graded": 1}
    reading.close()
    with pytest.raises(LedgerError, match=f"has ledger format {earlier}"):
        Ledger(tmp_path / "ledger.sqlite", capacity=8)


def test_an_outcome_of_format_2_is_an_error_in_words(ledger, finish_group):
    finish_group("g000000", [1.0])
    old = {"type": "graded", "reward": 1.0, "terms": {"tests": 1.0}, "trust": "data-graded", "reason": "all pass"}
    ledger.put("g000000.0", FINISHED, pack({"rollout_id": "g000000.0", "outcome": old, "summary": None}))
    for read in (lambda: ledger.finished("g000000.0"), lambda: ledger.group("g000000")):
        with pytest.raises(LedgerError, match=r"the finished of rollout g000000\.0 cannot be read"):
            read()


def test_a_ledger_with_checksums_of_an_earlier_form_is_read_and_gets_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path, capacity=2).close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        name = sqlite_integrity.SUMS
        db.execute("CREATE TABLE sums (name TEXT, row INTEGER, crc INTEGER, PRIMARY KEY (name, row)) WITHOUT ROWID")
        db.execute(f"INSERT INTO sums SELECT name, row, crc + 1 FROM {name}")
        db.execute(f"DROP TABLE {name}")
    with contextlib.closing(SqliteDatabase(path, readonly=True)) as old:
        old.verify()
    Ledger(path, capacity=2).close()
    with contextlib.closing(sqlite3.connect(path)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert sqlite_integrity.SUMS in tables
        assert "sums" not in tables
        assert not list(sqlite_integrity.wrong_rows(db))
