"""Which database stands behind a place, and statements of many rows."""

from __future__ import annotations

import sys

import pytest

from etude.errors import LedgerError
from etude.experience.database import AT_ONCE, each
from etude.experience.open_database import check_server, open_database


@pytest.mark.parametrize("opened", [check_server, lambda url: open_database(f"{url}#a-run", log=print)])
def test_a_server_without_its_client_installed_says_what_to_install(monkeypatch, opened):
    for name in [name for name in sys.modules if name.startswith(("etude.experience.postgres", "etude.experience.s"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(LedgerError, match="names a PostgreSQL server") as caught:
        opened("postgresql://nowhere/db")
    assert caught.value.hint == "pip install 'etude[postgres]'"


@pytest.mark.parametrize("many", [0, 1, AT_ONCE, 2 * AT_ONCE + 1])
def test_every_row_of_many_is_written_once(tmp_path, many):
    database = open_database(tmp_path / "ledger.sqlite", log=print)
    each(database, "INSERT INTO meta VALUES ?", [(str(i), "value") for i in range(many)])
    assert database.rows("SELECT count(*) FROM meta WHERE value = 'value'") == [(many,)]
    database.close()
