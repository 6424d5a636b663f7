"""Backups of a run while it runs: conductor, ledger and learner are the real ones; rollouts are made up."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun
from tests.postgres_server import PostgresServer, programs

from etude import cli
from etude.backups import check_backup, read_manifest
from etude.backups.writer import BackupWriter, backups_in
from etude.errors import Exit
from etude.experience import Ledger
from etude.file_checksums import write_sums
from etude.loop import backup as backing
from etude.loop.backup import back_up
from etude.loop.conductor import Conductor
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.weights import lineage

pytestmark = pytest.mark.timeout(1800)
STEPS = 8
SETS = (
    f"rl.steps={STEPS}",
    "rl.checkpoint_every=2",
    "evals.every=50",
    "experience.groups_per_step=2",
    "experience.group_size=2",
    "experience.max_lag=0",
)


def copied(run: RunFolder, backups: Path) -> Path:
    with BackupWriter(backups) as writer:
        left_out, damaged = back_up(writer, {"r": run.path})
        assert damaged == ()
        return writer.finish((), left_out=left_out)


def digests(run: RunFolder) -> dict[int, str]:
    found = lineage(DirectoryStore(run / "weights"), "policy")
    return {manifest.version.step: manifest.version.digest for manifest in found}


def continued(run: PlayedRun) -> None:
    async def main() -> None:
        async with run.conductor() as conductor, asyncio.timeout(600):
            await conductor.reinforce()

    asyncio.run(main())


def test_a_backup_of_a_live_run_is_sound_and_resumes_to_the_same_bytes(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS)
    backups, checkpointed = tmp_path / "backups", list[int]()

    async def main() -> None:
        run.folder.lock()  # as `etude run` does: the run is live

        async def forever() -> None:
            while True:
                await asyncio.to_thread(copied, run.folder, backups)

        async with run.conductor() as conductor, asyncio.timeout(600):
            copying = asyncio.create_task(forever())
            await conductor.reinforce()
            checkpointed.append(conductor.step)
            copying.cancel()
            await asyncio.wait([copying])
            assert copying.cancelled(), copying.exception()
        run.folder.unlock()

    asyncio.run(main())
    assert checkpointed == [STEPS]
    for _ in range(200):  # the thread of the last copy may still be in it
        if not (backups / ".unfinished").exists():
            break
        asyncio.run(asyncio.sleep(0.1))
    found = [place for place in backups_in(backups) if (place / "r" / "weights" / "pointers" / "policy").exists()]
    assert len(found) > 2
    whole = digests(run.folder)
    tried = {len(found) // 4, len(found) // 2, len(found) - 1}
    heads = set()
    for number in sorted(tried):
        assert check_backup(found[number]) == []
        again = tmp_path / f"again-{number}"
        assert cli.main(["restore", str(found[number]), str(again)]) == 0
        restored = PlayedRun(RunFolder.open(again / "r"), run.config)
        heads.add(max(digests(restored.folder)))
        assert cli.main(["fsck", str(again / "r")]) == 0, capsys.readouterr().out
        out = capsys.readouterr().out
        assert re.search("^formats: (ledger 3; (rollouts 2; )?)?run 1; (traces 5; )?weights 2$", out, re.M), out
        if (again / "r" / "ledger.sqlite").exists():
            capsys.readouterr()
            assert cli.main(["ledger", "audit", str(again / "r")]) == 0, capsys.readouterr().out
            assert capsys.readouterr().out.startswith("0 lost, 0 trained twice, 0 slots leaked;")
        continued(restored)
        restored.assert_sound(STEPS)
        assert digests(restored.folder) == whole
    assert len(heads) > 1, "the backups were of different steps"


def test_rollouts_that_the_run_prunes_between_checkpoints_and_ledger_make_the_pass_repeat(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS)
    passes, copy_ledger = list[int](), backing._RunCopy._ledger
    monkeypatch.setattr(backing, "PAUSE_S", 0.0)

    async def main() -> None:
        behind, may_go_on = asyncio.Event(), asyncio.Event()
        checkpoint, loop = Conductor._checkpoint, asyncio.get_running_loop()
        run.folder.lock()

        async def watched(conductor: Conductor) -> None:
            await checkpoint(conductor)
            if conductor.step == 2:
                behind.set()
                await may_go_on.wait()

        def late(copy: Any) -> Any:
            """The first pass copies the ledger of the end of the run, beside the checkpoints of its middle."""
            passes.append(len(passes))
            if len(passes) == 1:
                loop.call_soon_threadsafe(may_go_on.set)
                trained.result(600)
            return copy_ledger(copy)

        monkeypatch.setattr(Conductor, "_checkpoint", watched)
        monkeypatch.setattr(backing._RunCopy, "_ledger", late)
        async with run.conductor() as conductor, asyncio.timeout(600):
            trained = asyncio.run_coroutine_threadsafe(conductor.reinforce(), loop)
            await behind.wait()
            await asyncio.to_thread(copied, run.folder, tmp_path / "backups")
        run.folder.unlock()

    asyncio.run(main())
    assert len(passes) > 1
    assert cli.main(["restore", str(tmp_path / "backups"), str(tmp_path / "again")]) == 0
    restored = RunFolder.open(tmp_path / "again" / "r")
    with closing(Ledger.open_readonly(restored / "ledger.sqlite")) as ledger:
        newest = max(int(path.name.removeprefix("step-")) for path in (restored / "checkpoints").glob("step-*"))
        assert int(ledger.recall("pruned") or 0) <= newest
    assert cli.main(["fsck", str(restored.path)]) == 0


def test_a_backup_names_what_was_damaged_before_it(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2")
    continued(run)
    checkpoint = run.folder / "checkpoints" / "step-000002" / "config.json"
    checkpoint.write_bytes(checkpoint.read_bytes() + b" ")
    assert cli.main(["backup", str(run.folder.path), str(tmp_path / "backups")]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "damaged before: r/checkpoints/step-000002/config.json: its SHA-256 is" in told
    [place] = backups_in(tmp_path / "backups")
    assert len(read_manifest(place).damaged) == 1
    assert not (place / "r" / "lock").exists()


def test_a_run_whose_ledger_is_on_a_server_is_dumped_and_loaded_again(
    game: Any, tmp_path: Path, postgres: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.steps=2", f"experience.ledger={postgres.url}")
    continued(run)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["backup", str(run.folder.path), str(tmp_path / "backups")]) == Exit.BAD_INPUT
    assert "postgresql-client" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("PGPASSWORD", "a-password")
    bin = programs()
    assert bin is not None
    monkeypatch.setenv("PATH", str(bin), prepend=os.pathsep)
    if shutil.which("pg_dump") != str(bin / "pg_dump"):
        pytest.skip("no pg_dump of the server's version here")
    assert cli.main(["backup", str(run.folder.path), str(tmp_path / "backups")]) == 0
    out = "".join(capsys.readouterr())
    assert "r: the ledger's server; load ledger.pgdump into an empty database with pg_restore --dbname=URL" in out
    assert "a-password" not in out
    assert cli.main(["restore", str(tmp_path / "backups"), str(tmp_path / "again")]) == 0
    import psycopg

    with psycopg.connect(postgres.url, password="a-password", autocommit=True) as server:
        server.execute("CREATE DATABASE again")
    other = postgres.url.removesuffix("/postgres") + "/again"
    dump = tmp_path / "again" / "r" / "ledger.pgdump"
    subprocess.run([bin / "pg_restore", f"--dbname={other}", dump], check=True, timeout=300)
    run_id = run.folder.identity()["run_id"]
    rows = []
    for url in (postgres.url, other):
        with closing(Ledger.open_readonly(f"{url}#{run_id}")) as ledger:
            ledger.verify()
            rows.append([(row.rollout_id, row.state, row.step, row.version) for row in ledger.rows()])
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 8


def test_checkpoints_of_a_mid_training_that_goes_on_are_copied_and_hidden_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path / "r", config_toml="", seed=0)
    for name in ("mid.partial/step-000010", "mid.partial/.step-000020.ab", "mid"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "state").write_text(name)
    write_sums(run / "checkpoints" / "mid.partial" / "step-000010")
    copied(run, tmp_path / "backups")
    assert cli.main(["restore", str(tmp_path / "backups"), str(tmp_path / "again")]) == 0
    again = tmp_path / "again" / "r"
    found = sorted(path.relative_to(again).as_posix() for path in (again / "checkpoints").rglob("*") if path.is_file())
    assert found == [f"checkpoints/mid.partial/step-000010/{name}" for name in ("SHA256SUMS", "state")]
    capsys.readouterr()
    assert cli.main(["fsck", str(again)]) == 0
    assert "0 problems, 0 notices" in capsys.readouterr().out
