"""Erasing a subject names the batches and versions of a run that hold its data: the real conductor and learner."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.played_run import PlayedRun
from tests.served_answers import served_answer

from etude import cli
from etude.experience import Ledger
from etude.experience.auditing import audit
from etude.experience.trace_reader import read_step
from etude.experience.traces import trace_path
from etude.experience.transitions import State
from etude.loop.locations import weights_store
from etude.privacy import CaptureWriter, Level, PrivacyFolder, Subject
from etude.rollouts.logs import FOLDER as LOGS
from etude.weights.chain.history import LineageSteps

pytestmark = pytest.mark.timeout(1800)
ACME, BOB = Subject.of("acme"), Subject.of("acme", "bob")


def test_an_erasure_names_every_batch_and_version_as_the_traces_do(
    game: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PlayedRun.create(tmp_path / "r", game, "rl.steps=2", "evals.every=50", "experience.max_lag=0")

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    ledger = Ledger.open_readonly(run.folder / "ledger.sqlite")
    rows = [row for row in ledger.rows() if row.state in (State.TRAINED, State.NO_SIGNAL)]
    ledger.close()
    bobs, eves = [rows[0], rows[-1]], rows[1]
    assert {row.step for row in bobs} == {1, 2}
    with PrivacyFolder(tmp_path / "privacy") as folder:
        folder.consent.set(ACME, Level.TRAIN)
        writer = CaptureWriter(tmp_path / "privacy")
        for user in ("bob", "bob", "eve"):
            writer.offer(served_answer(user))
        assert writer.close(60)
        records = folder.records.of(folder.keys.names(BOB))
        for record, row in zip(records, bobs, strict=True):
            folder.records.link(record.record_id, row.rollout_id)
        (other,) = folder.records.of(folder.keys.names(Subject.of("acme", "eve")))
        folder.records.link(other.record_id, eves.rollout_id)
    log = run.folder / LOGS / f"{bobs[0].rollout_id}.0.log"
    log.parent.mkdir(exist_ok=True)
    log.write_text("what bob said")
    words = ["privacy", "erase", "acme/bob", "--folder", str(tmp_path / "privacy"), "--run", str(run.folder.path)]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    for row in bobs:
        assert f"{row.rollout_id} ({row.state}) in the batch of step {row.step}, trained into {row.version}" in out
    assert f"{eves.rollout_id} " not in out
    for step in (1, 2):
        assert re.search(rf"tokens of \d+ rollouts deleted from the trace of step {step}: it cannot be replayed\n", out)
        found = read_step(trace_path(run.folder / "traces", step))
        read = {tree.rollout.rollout_id: len(tree.trace.turns) for tree in found.trees}
        groups = {row.group_id for row in bobs}
        assert [i for i, num in read.items() if not num] == [i for i in read if i.rpartition(".")[0] in groups]
        assert any(read.values())
    for row in bobs:
        assert not list((run.folder / "rollouts").glob(f"{row.rollout_id}.*"))
    with contextlib.closing(Ledger.open_readonly(run.folder / "ledger.sqlite")) as ledger:
        audit(ledger, run.folder / "traces", LineageSteps(weights_store(run.folder))).require_sound()
    assert "its traces hold 2; the ledger names all of them" in out
    assert not log.exists()
    path = str(run.folder.path)
    assert cli.main(["rollouts", "show", path, bobs[0].rollout_id]) == 0
    assert cli.main(["rewards", "recompute", path]) == 0
    assert "left out: steps from which rollouts were erased: 1, 2" in capsys.readouterr().err
    assert cli.main(["replay", path, "2"]) != 0
    assert "of its rollouts were erased from" in capsys.readouterr().err
    traces = run.folder / "traces"
    shutil.copy(traces / "batch-000001.parquet", traces / "batch-000003.parquet")  # a batch that the ledger forgot
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert f"{bobs[0].rollout_id} is also in the trace of step 3, which the ledger does not name" in out
    assert "the ledger lacks some of them" in out
