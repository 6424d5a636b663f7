"""Format numbers: the table in the documentation, and that a number of the future is refused by name with a hint."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.golden.traces import test_golden_traces

from etude import privacy
from etude.backups import manifest as backup_manifest
from etude.backups import read_manifest as read_backup
from etude.corpus import shards
from etude.errors import EtudeError, RunRefused
from etude.evals import records as suite_records
from etude.experience import Ledger, database, rollout_files, traces
from etude.experience.trace_reader import read_format, read_index
from etude.file_checksums import sealed
from etude.loop import exported_settings
from etude.privacy import database as privacy_database
from etude.releases import Releases
from etude.releases import database as release_database
from etude.rewards.judges import store as judge_store
from etude.run import FORMAT, RunFolder
from etude.training import corpus, learner
from etude.weights.chain import manifest
from etude.weights.delta import delta_file
from etude.weights.files import folder

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "formats" / "versions.md"
WRITTEN = {
    "`run.json`": FORMAT,
    "[ledger]": database.FORMAT,
    "[traces]": traces.FORMAT,
    "stored [rollouts]": rollout_files.FORMAT,
    "weights: [deltas]": manifest.FORMAT,
    "[delta file]": delta_file.FORMAT,
    "[checkpoint folder]": folder.FORMAT,
    "`learner.json`": learner.METADATA_FORMAT,
    "a run's `corpus/`": corpus.FORMAT,
    "[corpus]": shards.VERSION,
    "results of [suites]": suite_records.FORMAT,
    "[releases]": release_database._FORMAT,
    "[privacy]": privacy_database.FORMAT,
    "judges' verdicts": judge_store._FORMAT,
    "`etude.json`": exported_settings.FORMAT,
    "[backup]": backup_manifest.FORMAT,
}


def rows() -> list[list[str]]:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_table_of_formats_has_every_kind_of_file_with_the_number_that_is_written() -> None:
    assert len(rows()) == len(WRITTEN)
    for name, number in WRITTEN.items():
        [row] = [row for row in rows() if row[0].startswith(name)]
        assert row[1] == str(number), name
    [ledger] = [row for row in rows() if row[0].startswith("[ledger]")]
    assert ledger[2] == f"{min(database.READABLE)} to {database.FORMAT}"


def test_a_golden_file_of_each_earlier_format_of_traces_is_there_and_names_it() -> None:
    for number in range(1, traces.FORMAT):
        [path] = (Path(test_golden_traces.__file__).parent / f"format-{number}").glob("*.parquet")
        assert read_format(path) == number
        assert read_index(path).step == 5


def make_run(path: Path) -> Callable[[], object]:
    run = RunFolder.create(path / "r", config_toml="", seed=0)
    told = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(sealed({**told, "format": 99})))
    return lambda: RunFolder.open(run.path)


def make_ledger(path: Path) -> Callable[[], object]:
    with closing(Ledger(path / "ledger.sqlite", capacity=4)) as ledger:
        ledger._db.execute("UPDATE meta SET value = '99' WHERE key = 'format'")
    return lambda: Ledger.open_readonly(path / "ledger.sqlite")


def make_releases(path: Path) -> Callable[[], object]:
    return lambda: Releases(_numbered(path / "releases.sqlite"))


def make_privacy(path: Path) -> Callable[[], object]:
    with privacy.PrivacyFolder(path / "p"):
        pass
    _numbered(path / "p" / "records.sqlite")
    return lambda: privacy.PrivacyFolder(path / "p")


def make_backup(path: Path) -> Callable[[], object]:
    (path / "manifest.json").write_text(json.dumps({"format": 99}))
    return lambda: read_backup(path)


def make_pointer(path: Path) -> Callable[[], object]:
    return lambda: manifest.read_pointer(b'{"format": 99}')


def make_delta_file(path: Path) -> Callable[[], object]:
    data = bytearray(delta_file._HEAD.pack(delta_file.MAGIC, 99, 0, 0, 0, 0, 0) + bytes(64))
    return lambda: delta_file.read(data)


def make_learner(path: Path) -> Callable[[], object]:
    from etude.training.config import LearnerConfig

    (path / "learner.json").write_text(json.dumps({"format": 99}))
    return lambda: learner._read_metadata(path / "learner.json", LearnerConfig())


def make_trace(path: Path) -> Callable[[], object]:
    import pyarrow.parquet as pq

    source = Path(test_golden_traces.__file__).parent / "format-1" / "batch-000005.parquet"
    table = pq.read_table(source)
    facts = json.loads(table.schema.metadata[traces.METADATA_KEY])
    told = {**table.schema.metadata, traces.METADATA_KEY: json.dumps({**facts, "format": 99})}
    told.pop(b"etude.sealed", None)
    pq.write_table(table.replace_schema_metadata(told), path / "batch-000005.parquet", write_page_checksum=True)
    return lambda: read_index(path / "batch-000005.parquet")


def _numbered(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 99")
    return path


@pytest.mark.parametrize(
    "make",
    [
        make_run, make_ledger, make_releases, make_privacy, make_backup, make_pointer, make_delta_file, make_learner,
        make_trace,
    ],
)  # fmt: skip
def test_a_file_of_another_format_is_refused_by_its_number_with_a_hint(
    tmp_path: Path, make: Callable[[Path], Callable[[], object]]
) -> None:
    read = make(tmp_path)
    with pytest.raises(EtudeError) as refused:
        read()
    assert re.search(r"format(?: version)? 99\b", f"{refused.value.what}: {refused.value.facts}")
    assert refused.value.hint
    assert isinstance(refused.value, RunRefused) is (make is make_run)


def test_a_privacy_folder_from_before_the_number_is_read(tmp_path: Path) -> None:
    with privacy.PrivacyFolder(tmp_path / "p"):
        pass
    with closing(sqlite3.connect(tmp_path / "p" / "consent.sqlite")) as file:
        file.execute("PRAGMA user_version = 0")
    with privacy.PrivacyFolder(tmp_path / "p") as again:
        assert again.records.counts() == {}
