from __future__ import annotations

import sqlite3

import pytest

from etude.errors import LedgerError, StoreError
from etude.experience import Ledger


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


def test_a_ledger_that_kept_rollouts_itself_can_be_looked_at_and_not_gone_on_with(ledger, tmp_path, finish_group):
    finish_group("g000000", [1.0])
    ledger._db.execute("UPDATE meta SET value = '1' WHERE key = 'format'")
    ledger.close()
    reading = Ledger.reading(tmp_path / "ledger.sqlite")
    assert reading.states() == {"graded": 1}
    reading.close()
    with pytest.raises(LedgerError, match="has ledger format 1"):
        Ledger(tmp_path / "ledger.sqlite", capacity=8)
