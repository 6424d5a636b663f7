"""A bit flips on the disk: in every kind of file of a run, `etude fsck` finds it and readers refuse it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.played_run import PlayedRun
from tests.tiers import first_few

from etude.cli import main
from etude.dashboard import RunView
from etude.errors import EtudeError
from etude.evals.rows import EvalRow, read_rows, write_rows
from etude.experience import Ledger
from etude.experience.trace_reader import read_index, read_rollout, read_trace
from etude.harness import ChatFormat
from etude.loop.checkpoints import copy_start_checkpoint
from etude.loop.config import check_config_unchanged, read_config
from etude.loop.export import export_checkpoint
from etude.loop.fsck import FsckReport, checks_of
from etude.loop.learner import make_learner
from etude.loop.phases import write_run_report
from etude.loop.preflight import check_ledger
from etude.models import load_model
from etude.run import RunFolder
from etude.training.corpus import read_corpus, write_corpus
from etude.weights.chain.manifest import read_pointer

pytestmark = pytest.mark.timeout(1800)
FLIPS = 4  # in each file


def prove(path: Path) -> FsckReport:
    proof = FsckReport()
    for step in checks_of(path):
        step(proof)
    return proof


@pytest.fixture(scope="module")
def sound(game: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps and all that it leaves."""
    this = PlayedRun.create(tmp_path_factory.mktemp("runs") / "r", game, "rl.checkpoint_every=2", "evals.every=50")
    folder = this.folder
    copy_start_checkpoint(game.start, folder)
    write_corpus(folder / "corpus", [np.arange(9, dtype=np.int32)])

    async def play() -> None:
        async with this.conductor() as conductor:
            await conductor.resume()
            await conductor.reinforce()

    asyncio.run(play())
    names = ("task_id", "rollout_id", "problem", "family", "outcome", "ending", "reason", "transcript")
    numbers = {name: 1 for name in ("turns", "sampled", "malformed", "wall_s", "tool_s", "reward")}
    write_rows(folder / "evals" / "before.parquet", [EvalRow(**dict.fromkeys(names, "graded"), **numbers)])
    for phase in ("corpus", "mid-training", "rl"):
        folder.end_phase(phase, wall_s=1.0)
    write_run_report(folder)
    assert main(["ledger", "audit", str(folder.path)]) == 0
    return folder.path


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "r"))


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def found(path: Path, name: str) -> bool:
    """Whether a proof names the file, or the folder whose chain it is part of; of checksums, a file that they list."""
    proof, name = prove(path), name.removesuffix("/SHA256SUMS")
    said = [*proof.problems, *(proof.notices if name.startswith("weights/") else [])]
    return any(one.place == name or name.startswith(f"{one.place}/") or one.place.startswith(name) for one in said)


def learner_of(run: Path) -> Any:
    return make_learner(read_config(RunFolder.open(run)), None, None, refuse_mismatch=False)


def refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except EtudeError as error:
        return bool(error.hint)
    return False


STEP = "checkpoints/step-000002"
READERS: dict[str, Callable[[Path], object]] = {
    "checkpoints/mid/model.safetensors": lambda run: load_model(run / "checkpoints/mid"),
    "checkpoints/mid/config.json": lambda run: load_model(run / "checkpoints/mid"),
    "checkpoints/mid/tokenizer.json": lambda run: ChatFormat.load(run / "checkpoints/mid"),
    f"{STEP}/model.safetensors": lambda run: export_checkpoint(run / STEP, run.parent / "out", dtype="bf16"),
    f"{STEP}/learner.state": lambda run: learner_of(run).load(run / STEP),
    f"{STEP}/learner.json": lambda run: learner_of(run).load(run / STEP),
    f"{STEP}/SHA256SUMS": lambda run: learner_of(run).load(run / STEP) or ChatFormat.load(run / STEP),
    "corpus/documents.bin": lambda run: read_corpus(run / "corpus", vocab_size=320),
    "tokenizer/tokenizer.json": lambda run: ChatFormat.load(run / "tokenizer"),
    "tokenizer/chat_template.jinja": lambda run: ChatFormat.load(run / "tokenizer"),
    "traces/batch-000002.parquet": lambda run: read_trace(run / "traces/batch-000002.parquet"),
    "evals/before.parquet": lambda run: read_rows(run / "evals/before.parquet"),
    "run.json": lambda run: RunFolder.open(run),
    "phases.json": lambda run: RunFolder(run).phases(),
    "config.toml": lambda run: check_config_unchanged(RunFolder(run)),
    "summary.json": lambda run: None,  # written for people
    "report.html": lambda run: None,
    "audit.json": lambda run: None,  # believed nowhere without its digest
}
SEEN_BY_NOBODY = {"summary.json", "report.html", "audit.json"}


@pytest.mark.parametrize("name", first_few(READERS, 6))
def test_a_flipped_bit_is_found_and_who_reads_the_file_refuses_it(copy: Path, name: str) -> None:
    whole, draw = (copy / name).read_bytes(), random.Random(name)
    for _ in range(FLIPS):
        flip(copy / name, draw.randrange(len(whole)), draw.randrange(8))
        assert found(copy, name)
        if name not in SEEN_BY_NOBODY:
            assert refused(lambda: READERS[name](copy))
        (copy / name).write_bytes(whole)
    assert not prove(copy).problems


def test_an_exponent_a_moment_and_a_token_are_found(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stays a sound file of its format: only the values are others."""
    for name in (f"{STEP}/model.safetensors", f"{STEP}/learner.state"):
        whole = (copy / name).read_bytes()
        flip(copy / name, len(whole) - 3, 6)
        assert refused(lambda: learner_of(copy).load(copy / STEP))
        assert main(["fsck", str(copy)]) == 1
        said = capsys.readouterr().out
        assert f"{name}: it is damaged: its SHA-256 is" in said
        assert "hint: copy it back, or delete the checkpoint" in said
        (copy / name).write_bytes(whole)
    trace = copy / "traces" / "batch-000002.parquet"
    flip(trace, 200, 1)
    for read in (read_trace, read_index, lambda path: read_rollout(path, "g000000.0")):
        assert refused(lambda read=read: read(trace))  # type: ignore[misc]
    assert main(["ledger", "audit", str(copy)]) == 1


@pytest.mark.parametrize("folder", ["objects", "manifests"])
def test_a_flipped_bit_in_the_chain_of_weights_is_found(copy: Path, folder: str) -> None:
    for path in [path for path in (copy / "weights" / folder).rglob("*") if path.is_file()][:3]:
        whole = path.read_bytes()
        flip(path, len(whole) // 2, 2)
        assert found(copy, path.relative_to(copy).as_posix())
        path.write_bytes(whole)


def test_a_flipped_bit_in_the_pointer_is_found_unless_it_names_the_same_version(copy: Path) -> None:
    path, draw = copy / "weights" / "pointers" / "policy", random.Random(2)
    whole, before = path.read_bytes(), read_pointer(path.read_bytes())
    for _ in range(20):
        flip(path, draw.randrange(len(whole)), draw.randrange(8))
        assert found(copy, "weights/pointers/policy") or read_pointer(path.read_bytes()).head == before.head
        path.write_bytes(whole)


def contents(path: Path) -> list[Any]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return [
            connection.execute(f"SELECT * FROM {table} ORDER BY 1, 2").fetchall()
            for table in ("meta", "rollouts", "slots", "blobs", "transitions")
        ]


def test_a_flipped_bit_in_the_ledger_is_found_unless_no_value_changed(copy: Path) -> None:
    """SQLite has no checksums: of values that are flipped its own integrity check says nothing."""
    ledger, draw, harmless = copy / "ledger.sqlite", random.Random(1), 0
    whole, before = ledger.read_bytes(), contents(ledger)
    for _ in range(40):
        flip(ledger, draw.randrange(len(whole)), draw.randrange(8))
        if not refused(lambda: check_ledger(RunFolder.open(copy))):
            assert contents(ledger) == before
            harmless += 1
        for left in copy.glob("ledger.sqlite-*"):
            left.unlink()
        ledger.write_bytes(whole)
    assert harmless < 40


@pytest.mark.parametrize("value", [b"trained", b"in v", b"as its number", b'{"batch_id'])
def test_a_value_of_the_ledger_that_changed_is_found_and_named(copy: Path, value: bytes) -> None:
    ledger = copy / "ledger.sqlite"
    at = ledger.read_bytes().rindex(value)
    flip(ledger, at, 0)
    proof = prove(copy)
    assert [one.place for one in proof.problems] == ["ledger.sqlite"]
    assert main(["ledger", "audit", str(copy)]) == 1
    assert main(["run", "--resume", str(copy)]) == 1


def test_a_row_of_the_ledger_that_is_gone_is_found(copy: Path) -> None:
    with contextlib.closing(sqlite3.connect(copy / "ledger.sqlite")) as connection:  # not through the ledger
        connection.execute("DELETE FROM transitions WHERE number = 3")
        connection.execute("UPDATE rollouts SET reward = 0.5 WHERE position = 2")
        connection.commit()
    (problem,) = prove(copy).problems
    assert "row 2 of rollouts is not what was written" in problem.what
    assert "row 3 of transitions is missing" in problem.what


def test_a_flipped_bit_in_the_ledgers_log_does_not_drop_what_was_committed_behind_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite", capacity=4)
    ledger.rows()
    made = (tmp_path / "ledger.sqlite-wal").stat().st_size
    for i in range(50):
        ledger.remember("n", i)
    log = tmp_path / "ledger.sqlite-wal"
    killed = tmp_path / "killed"
    killed.mkdir()
    for path in (tmp_path / "ledger.sqlite", log):
        shutil.copy(path, killed / path.name)  # as a kill leaves them
    ledger.close()
    reading = Ledger.open_readonly(killed / "ledger.sqlite")
    reading.verify()
    reading.close()
    flip(killed / log.name, made + 5000, 3)
    reading = Ledger.open_readonly(killed / "ledger.sqlite")
    with contextlib.closing(reading), pytest.raises(EtudeError, match=r"more frames"):
        reading.verify()


def test_a_line_of_the_events_is_found_and_left_out(copy: Path) -> None:
    path = copy / "events" / "conductor.jsonl"
    number = len(RunView(copy).events("rl.step"))
    lines = path.read_bytes().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if b"rl.step" in line)
    lines[at] = lines[at].replace(b'"reward_mean": 0', b'"reward_mean": 1', 1)
    path.write_bytes(b"".join(lines))
    (problem,) = prove(copy).problems
    assert str(problem).startswith(f"events/conductor.jsonl: line {at + 1} is damaged\n  hint: ")
    assert len(RunView(copy).events("rl.step")) == number - 1


def test_a_sound_run_has_no_problem_and_is_left_as_it_was(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in sound.rglob("*")}
    assert main(["fsck", str(sound)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert "0 problems, 0 notices" in said
    assert {path: path.stat().st_mtime_ns for path in sound.rglob("*")} == before


def test_files_left_by_a_killed_process_are_no_problem(copy: Path) -> None:
    with (copy / "events" / "conductor.jsonl").open("ab") as file:
        file.write(b'{"t": 1.0, "pro')
    (copy / "checkpoints" / ".step-000006.ab12").mkdir()
    (copy / "traces" / "batch-000009.tmp").write_bytes(b"PAR1")
    proof = prove(copy)
    assert not proof.problems
    assert len(proof.notices) == 2


def test_fsck_lists_unknown_files_and_reports_missing_checksums(copy: Path) -> None:
    (copy / "notes").write_text("mine")
    (copy / STEP / "SHA256SUMS").unlink()
    (copy / "checkpoints" / "mid" / "tokenizer.json").unlink()
    proof = prove(copy)
    assert {one.place for one in proof.problems} == {STEP, "checkpoints/mid/tokenizer.json"}
    assert [one.place for one in proof.notices] == ["notes"]


def test_a_run_of_an_earlier_etude_has_notices_and_no_problem(copy: Path) -> None:
    identity = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({k: v for k, v in identity.items() if k not in ("sums", "sha256")}))
    for sums in copy.rglob("SHA256SUMS"):
        sums.unlink()
    with contextlib.closing(sqlite3.connect(copy / "ledger.sqlite")) as connection:
        connection.execute("DROP TABLE row_sums")
        connection.commit()
    proof = prove(copy)
    assert not proof.problems
    assert {one.place for one in proof.notices} >= {STEP, "tokenizer", "corpus", "checkpoints/mid"}
    ledger = Ledger(copy / "ledger.sqlite", capacity=Ledger.open_readonly(copy / "ledger.sqlite")._capacity)
    ledger.verify()  # from now on its rows have sums
    ledger.close()


def test_fsck_of_a_run_in_progress_reports_no_problem(game: Any, tmp_path: Path) -> None:
    this = PlayedRun.create(tmp_path / "r", game, "rl.checkpoint_every=1", "rl.steps=6", "evals.every=50")
    ended, proofs = threading.Event(), list[FsckReport]()

    def look() -> None:
        while not ended.is_set():
            proofs.append(prove(this.folder.path))

    async def play() -> None:
        this.folder.lock()
        watcher = threading.Thread(target=look)
        try:
            async with this.conductor() as conductor:
                await conductor.resume()
                watcher.start()
                await conductor.reinforce()
        finally:
            ended.set()
            watcher.join()
            this.folder.unlock()

    asyncio.run(play())
    assert len(proofs) > 1
    assert [str(one) for proof in proofs for one in proof.problems] == []
