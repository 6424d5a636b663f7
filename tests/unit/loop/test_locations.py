"""Where a run keeps its ledger, weights and traces, and what is found out about those places before it starts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.faults.s3_proxy import Proxy

from etude.config import build, to_toml
from etude.errors import ConfigError, LedgerError, RunError, StoreError
from etude.experience import Ledger
from etude.experience.traces import recorded_steps, trace_path
from etude.loop.config import RunConfig
from etude.loop.locations import check_store, has_published, ledger_location, traces_folder, weights_location
from etude.loop.preflight import preflight
from etude.loop.retention import delete_oldest
from etude.run import RunFolder
from etude.stores import BucketStore, MemoryStore


def run_of(folder: Path, **sections: dict[str, str]) -> RunFolder:
    return RunFolder.create(folder / "run", config_toml=to_toml(build(RunConfig, sections)), seed=0)


def test_a_run_keeps_everything_in_its_folder_unless_told(tmp_path):
    run = run_of(tmp_path)
    assert (ledger_location(run), weights_location(run)) == (run / "ledger.sqlite", run / "weights")
    assert traces_folder(run) == run / "traces"
    assert not has_published(run)
    assert not (run / "weights").exists()


def test_runs_that_share_a_server_and_a_bucket_have_places_of_their_own(tmp_path):
    sections = {
        "experience": {"ledger": "postgresql://db.internal/etude"},
        "stores": {"weights": "s3://models/team-a/", "traces": "s3://models/team-a"},
    }
    first, second = run_of(tmp_path / "a", **sections), run_of(tmp_path / "b", **sections)
    run_id = first.identity()["run_id"]
    assert ledger_location(first) == f"postgresql://db.internal/etude#{run_id}"
    assert weights_location(first) == f"s3://models/team-a/{run_id}/weights"
    assert isinstance(traces_folder(first), BucketStore)
    assert ledger_location(first) != ledger_location(second)


def test_a_run_of_an_etude_that_had_no_such_settings_is_looked_at(tmp_path):
    run = RunFolder.create(tmp_path / "run", config_toml="seed = 0\nno_longer = 1\n", seed=0)
    assert weights_location(run) == run / "weights"
    (run / "config.toml").write_text("seed = ")
    with pytest.raises(RunError, match="is damaged"):
        weights_location(run)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"experience": {"ledger": "postgresql://me:a-secret@db/etude"}}, "PGPASSWORD"),
        ({"experience": {"ledger": "postgresql://db/etude?password=a-secret"}}, "PGPASSWORD"),
        ({"experience": {"ledger": "postgresql://db/etude#mine"}}, "postgresql://host/database"),
        ({"experience": {"ledger": "postgresql://db:a-secret/etude"}}, "cannot be read"),
        ({"experience": {"ledger": "mysql://db/etude"}}, "postgresql://host/database"),
        ({"stores": {"weights": "s3://a-secret@bucket/x"}}, "credentials or options is refused"),
        ({"stores": {"traces": "ftp://bucket/x"}}, "unknown store scheme 'ftp'"),
        ({"stores": {"weights": "s3:///x"}}, "not a valid bucket name"),
        (
            {"stores": {"weights": "memory://x"}},
            "stores.weights: memory:// is lost when the process ends; write file:///path",
        ),
        (
            {"stores": {"weights": "/a-secret/dir"}},
            "stores.weights: this is a path, not a bucket URL; write file:///path",
        ),
    ],
)
def test_a_place_that_cannot_be_or_holds_a_secret_is_refused(section, says):
    with pytest.raises(ConfigError) as refused:
        build(RunConfig, section)
    assert says in str(refused.value)
    assert "a-secret" not in str(refused.value)


def test_a_directory_that_is_not_there_yet_is_told_and_not_made_by_a_check(tmp_path):
    said, folder = [], tmp_path / "mistyped" / "deep"
    check_store(f"file://{folder}", said.append)
    assert said == [f"{folder} does not exist yet: the run will create it"]
    assert not folder.parent.exists()
    check_store(f"file://{tmp_path}", said.append)
    assert len(said) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be created"):
        check_store(f"file://{tmp_path}/file/deep")


def test_a_bucket_without_rights_ends_a_run_before_it_starts(s3, monkeypatch):
    with Proxy(s3) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        for method in ("PUT", "POST"):  # POST: what deletes
            proxy.play("forbidden", on=method)
            with pytest.raises(StoreError, match="HTTP 403") as refused:
                preflight(build(RunConfig, {"stores": {"weights": "s3://etude/runs"}}))
            assert "AWS_ACCESS_KEY_ID" in refused.value.hint
            assert "a-secret" not in str(refused.value)
        proxy.shutdown()
        thread.join()


def test_a_bucket_that_is_not_there_ends_a_run_before_it_starts(s3):
    with pytest.raises(StoreError, match="nowhere"):
        preflight(build(RunConfig, {"stores": {"traces": "s3://nowhere/runs"}}))


def test_a_server_that_is_not_there_ends_a_run_before_it_starts():
    with pytest.raises(StoreError, match="does not answer") as refused:
        preflight(build(RunConfig, {"experience": {"ledger": "postgresql://127.0.0.1:1/etude"}}))
    assert "experience.ledger" in refused.value.hint


def test_traces_in_a_bucket_go_with_the_checkpoints_of_their_stretch_and_count_no_disk(tmp_path):
    run, store = run_of(tmp_path), MemoryStore()
    for step in range(1, 7):
        store.put(trace_path(store, step).name, b"x" * 1000)
        if step % 2 == 0:
            (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
            (run / "checkpoints" / f"step-{step:06d}" / "weights").write_bytes(b"x" * 100)
    ledger = Ledger(run / "ledger.sqlite", capacity=1)
    assert delete_oldest(run, ledger, store, disk_gb=301e-9) == 0
    assert delete_oldest(run, ledger, store, disk_gb=0.0) == 100
    assert recorded_steps(store) == [5, 6] or recorded_steps(store) == [3, 4, 5, 6]
    ledger.close()


def test_a_ledger_that_its_server_does_not_have_is_told_apart_from_one_that_is_damaged(postgres, tmp_path):
    run = run_of(tmp_path, experience={"ledger": postgres.url})
    with pytest.raises(LedgerError, match="has no such ledger") as refused:
        Ledger.open_readonly(ledger_location(run))
    assert "etude_run_" in refused.value.facts
