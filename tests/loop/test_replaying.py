"""A step is redone from what its run left on disk: the real conductor and learner, with rollouts that are made up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.played_run import PlayedRun

from etude import cli
from etude.errors import CheckpointError, EtudeError, InputError, LedgerError, RunError, RunRefused, WeightsError
from etude.experience import Finished, Ledger, read_trace
from etude.experience.ledger_queries import FINISHED
from etude.experience.traces import SCHEMA, batch_digest, trace_path
from etude.loop.replay import replay_step
from etude.loop.retention import delete_oldest, replayable_after
from etude.records import Graded
from etude.records.wire import pack, unpack
from etude.run import RunFolder
from etude.stores import DirectoryStore
from etude.telemetry import read_events
from etude.training import TorchLearner
from etude.training.config import CorrectionKind
from etude.weights import lineage
from etude.weights.chain.history import stored

pytestmark = pytest.mark.timeout(1800)
STEPS = 5
SETS = (f"rl.steps={STEPS}", "rl.checkpoint_every=2", "evals.every=50", "experience.max_lag=0")


@pytest.fixture(scope="module")
def done(game: Any, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A finished run of five steps with checkpoints at 2, 4 and 5. Tests that change it copy it."""
    run = PlayedRun.create(tmp_path_factory.mktemp("played") / "r", game, *SETS)

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    return run.folder


@pytest.fixture
def copied(done: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(done.path, tmp_path / "copy")
    return RunFolder.open(tmp_path / "copy")


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], *, sealed: bool) -> None:
    """Write a trace anew with its first sample's row or its facts changed; `sealed`: under a digest that fits."""
    table = pq.read_table(path)
    rows, facts = table.to_pylist(), json.loads(table.schema.metadata[b"etude.batch"])
    change(next(row for row in rows if row["row"] == "sample"), facts)

    def write() -> None:
        told = SCHEMA.with_metadata({b"etude.batch": json.dumps(facts).encode()})
        pq.write_table(pa.Table.from_pylist(rows, told), path, compression="zstd", write_page_checksum=True)

    digest = facts.pop("digest")
    write()
    facts["digest"] = batch_digest(read_trace(path).batch) if sealed else digest
    write()


def flip_the_sign(row: dict[str, Any], facts: dict[str, Any]) -> None:
    row["advantages"] = [-one for one in row["advantages"]]


def test_every_step_is_redone_to_the_bit_from_any_checkpoint_before_it(done: RunFolder) -> None:
    whole = replay_step(done, STEPS, start=Path("mid"))
    assert [one.step for one in whole.steps] == [1, 2, 3, 4, 5]
    assert all(one.equal and one.num_samples for one in whole.steps)
    assert len({one.found for one in whole.steps}) == STEPS, "every step changed the weights"
    assert whole.computed_by == {}
    for one in whole.steps:
        assert {"loss", "ratio_max", "k3", "grad_norm", "lr"} <= set(one.numbers)
        assert all(recorded == redone for recorded, redone in one.numbers.values()), one.numbers
    nearest = replay_step(done, STEPS)
    assert (nearest.start.name, len(nearest.steps)) == ("step-000004", 1)
    assert nearest.last == whole.last


def test_a_flipped_bit_in_an_advantage_is_found_and_its_step_is_named(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(trace_path(copied / "traces", 3), flip_the_sign, sealed=True)
    assert cli.main(["replay", str(copied.path), "4"]) == 1
    said = capsys.readouterr()
    assert "the first step that differs is 3" in said.out
    assert "grad_norm: recorded" in said.out
    assert "step 3: " in said.err, "one line a step, where no terminal is"
    assert cli.main(["replay", str(copied.path), "4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["first_different"]) == (False, 3)
    assert told["found"] != told["published"]
    assert told["steps"][0]["different"]
    assert cli.main(["replay", str(copied.path), "5", "--from", "step-000004"]) == 0, "a later step does not need it"
    assert "identical to the bit" in capsys.readouterr().out


def test_a_changed_record_is_told_by_its_digest(copied: RunFolder) -> None:
    path = trace_path(copied / "traces", 2)
    rewrite(path, flip_the_sign, sealed=False)
    with pytest.raises(LedgerError, match=r"its digest is .*, recorded was"):
        replay_step(copied, 2)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with pytest.raises(LedgerError, match="not a valid trace"):
        replay_step(copied, 2)


def test_another_torch_or_chip_is_told_and_the_step_is_redone_all_the_same(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    def elsewhere(row: dict[str, Any], facts: dict[str, Any]) -> None:
        facts["computed_by"]["torch"] = "1.13.1"

    rewrite(trace_path(copied / "traces", 1), elsewhere, sealed=True)
    assert replay_step(copied, 1).computed_by.keys() == {"torch"}
    assert cli.main(["replay", str(copied.path), "1"]) == 0
    said = capsys.readouterr().out
    assert "torch: 1.13.1 in the run," in said
    assert "identical to the bit" in said


def test_a_step_of_a_release_that_shared_no_prefix_is_redone_without_sharing(copied: RunFolder) -> None:
    def earlier(row: dict[str, Any], facts: dict[str, Any]) -> None:
        assert facts["computed_by"].pop("prefixes") == "shared"

    now = replay_step(copied, 1).last
    assert now.numbers["num_forwarded"][1] < now.numbers["num_tokens"][1], "siblings share their prompt"
    rewrite(trace_path(copied / "traces", 1), earlier, sealed=True)
    then = replay_step(copied, 1).last
    assert then.numbers["num_forwarded"][1] == then.numbers["num_tokens"][1]
    assert then.computed_by == {}


def test_steps_on_preference_pairs_are_redone_to_the_bit_with_their_metrics(game: Any, tmp_path: Path) -> None:
    sets = ("learner.policy_loss=dpo", "experience.credit=all-pairs", "experience.max_lag=1", "rl.checkpoint_every=5")
    run = PlayedRun.create(tmp_path / "r", game, *SETS, *sets)

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    found = replay_step(run.folder, STEPS)
    assert [one.equal for one in found.steps] == [True] * STEPS
    assert len({one.found for one in found.steps}) == STEPS, "every step changed the weights"
    for one in found.steps:
        assert all(recorded == redone for recorded, redone in one.numbers.values()), one.numbers
        assert one.numbers["num_pairs"][0]
    assert found.steps[0].numbers["pair_margin"] == (0.0, 0.0), "the first step is at the reference"
    assert found.last.numbers["pair_margin"] != (0.0, 0.0)


def test_a_step_that_was_trained_twice_is_the_one_of_the_current_lineage_with_the_settings_it_had(
    game: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("policy_loss=cispo", "weights=f32", "correction=truncated", "kl=0.01")
    run = PlayedRun.create(tmp_path / "r", game, *SETS, *(f"learner.{kind}" for kind in kinds))

    async def first() -> None:
        async with run.conductor() as conductor:
            work = asyncio.create_task(conductor.reinforce())
            await run.until(4, ("end", "published"))  # what it began with, and steps 1 to 3
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def again() -> None:
        async with PlayedRun(run.folder, run.config).conductor() as conductor:
            for row in conductor.ledger.rows():
                data = conductor.ledger.get(row.rollout_id, FINISHED)
                if data is not None:  # no checkpoint has learned from it
                    one = unpack(data, Finished)
                    assert isinstance(one.outcome, Graded)
                    other = Graded.of(1.0 - one.outcome.grade, trust=one.outcome.trust, reason="")
                    changed = msgspec.structs.replace(one, outcome=other)
                    conductor.ledger.put(row.rollout_id, FINISHED, pack(changed))
            await conductor.reinforce()

    step = TorchLearner.optim_step

    def then_mask(learner: TorchLearner) -> dict[str, float]:
        done = step(learner)
        if learner.step >= 2:
            learner.config = dataclasses.replace(learner.config, correction=CorrectionKind.MASKED)
        return done

    with monkeypatch.context() as patched:
        patched.setattr(TorchLearner, "optim_step", then_mask)
        asyncio.run(first())
        asyncio.run(again())
    settings = [read_trace(trace_path(run.folder / "traces", at)).settings for at in range(1, 6)]
    assert settings == [{}, {}, {}, {"correction": "masked"}, {"correction": "masked"}], "its successor began anew"
    store = DirectoryStore(run.folder / "weights")
    of_three = {m.version.digest for _, m in stored(store, "policy") if m.version.step == 3}
    assert len(of_three) == 2
    [current] = {m.version.digest for m in lineage(store, "policy") if m.version.step == 3}
    found = replay_step(run.folder, 5, start=Path("mid"))
    assert [one.step for one in found.steps if not one.equal] == []
    assert found.steps[2].found == current


def test_the_oldest_stretches_are_deleted_to_keep_within_the_budget_and_are_missed_by_name(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(copied / "ledger.sqlite", capacity=12)
    traces = copied / "traces"
    assert delete_oldest(copied, ledger, traces, disk_gb=1.0) == 0
    assert (replayable_after(ledger), len(list((copied / "traces").iterdir()))) == (0, STEPS)
    (copied / "checkpoints" / ".step-000001.gone").mkdir()  # by one that was killed
    assert delete_oldest(copied, ledger, traces, disk_gb=0.0) > 0
    assert delete_oldest(copied, ledger, traces, disk_gb=0.0) == 0
    assert replayable_after(ledger) == 4
    ledger.close()
    assert sorted(path.name for path in (copied / "checkpoints").iterdir())[-3:] == [
        "mid",
        "step-000004",
        "step-000005",
    ]
    assert [path.name for path in (copied / "traces").iterdir()] == ["batch-000005.parquet"]
    assert replay_step(copied, 5).equal
    with pytest.raises(RunError, match=r"batch of step 1 was deleted to keep within retention.disk_gb") as caught:
        replay_step(copied, 3)
    assert "replay a step after 4" in caught.value.hint
    assert cli.main(["ledger", "audit", str(copied.path)]) == 0
    assert "by 5 steps" in capsys.readouterr().out
    trace_path(copied / "traces", 5).unlink()
    with pytest.raises(LedgerError, match="batch of step 5 is missing"):
        replay_step(copied, 5)
    assert cli.main(["ledger", "audit", str(copied.path)]) == 1, "nobody deleted that one on purpose"


def test_a_run_keeps_within_its_budget_by_itself_and_says_so(game: Any, tmp_path: Path) -> None:
    run = PlayedRun.create(tmp_path / "r", game, *SETS, "rl.checkpoint_every=1", "rl.steps=3", "retention.disk_gb=0")

    async def main() -> None:
        async with run.conductor() as conductor:
            await conductor.reinforce()

    asyncio.run(main())
    told = [event for event in read_events(run.folder / "events") if event["kind"] == "retention"]
    assert [(event["step"], event["kept_from"]) for event in told] == [(2, 1), (3, 2)]
    assert all(event["freed_bytes"] > 0 for event in told)
    assert [path.name for path in (run.folder / "traces").iterdir()] == ["batch-000003.parquet"]
    assert replay_step(run.folder, 3).equal


def without_checkpoints(run: RunFolder) -> None:
    shutil.rmtree(run / "checkpoints")


def with_other_weights(run: RunFolder) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.copytree(run / "checkpoints" / "step-000004", run / "checkpoints" / "step-000002")
    about = run / "checkpoints" / "step-000002" / "learner.json"
    about.write_text(about.read_text().replace('"step": 4', '"step": 2'))
    (about.parent / "SHA256SUMS").unlink()


def with_half_a_checkpoint(run: RunFolder) -> None:
    (run / "checkpoints" / "step-000002" / "learner.state").write_bytes(b"half")


def with_other_settings(run: RunFolder) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace("lr = 0.001", "lr = 0.002"))


def with_a_batch_of_another_step(run: RunFolder) -> None:
    shutil.copy(trace_path(run / "traces", 1), trace_path(run / "traces", 3))


def without_a_manifest(run: RunFolder) -> None:
    [path] = (run / "weights" / "manifests" / "policy").glob("v000003-*")
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "step", "start", "kind", "what"),
    [
        (None, 0, None, InputError, "has no step 0: its current weights come from steps 1 to 5"),
        (None, 6, None, InputError, "has no step 6"),
        (None, 3, "step-000004", InputError, "is not before step 3: it is of step 4\n.*one of mid, step-000002$"),
        (None, 3, "final", InputError, "is not before step 3: it is of step 5"),
        (None, 3, "step-000099", CheckpointError, "no checkpoint at .*step-000099\n.*one of mid, step-000002$"),
        (without_checkpoints, 3, None, CheckpointError, "no checkpoint at .*mid"),
        (with_other_weights, 3, None, CheckpointError, "does not have the weights that step 2 published"),
        (with_half_a_checkpoint, 3, None, CheckpointError, "is damaged.*\n.*--from one of mid$"),
        (with_other_settings, 3, None, RunRefused, "config.toml was changed"),
        (with_a_batch_of_another_step, 3, None, LedgerError, "is not that of the current weights"),
        (without_a_manifest, 2, None, WeightsError, "the version of step 2 is no longer known"),
    ],
)
def test_missing_and_damaged_files_are_named(
    copied: RunFolder,
    damage: Callable[[RunFolder], None] | None,
    step: int,
    start: str | None,
    kind: type[EtudeError],
    what: str,
) -> None:
    if damage is not None:
        damage(copied)
    with pytest.raises(kind, match=f"(?s){what}"):
        replay_step(copied, step, start=Path(start) if start else None)


def test_a_missing_step_is_refused_without_loading_torch(done: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import sys; from etude.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    for words, code, what in (
        (["999"], 2, "has no step 999"),
        (["3", "--from", "no"], 1, "no checkpoint at"),
        (["3", "--from", "step-000004"], 2, "is not before step 3"),
    ):
        words = [sys.executable, "-c", program, "replay", str(done.path), *words]
        ended = subprocess.run(words, check=True, capture_output=True, text=True)
        assert ended.stdout.split() == [str(code), "False"]
        assert what in ended.stderr
    with pytest.raises(SystemExit):
        cli.main(["replay", str(done.path), "-1"])
    assert "'-1' is not an integer of at least 1" in capsys.readouterr().err
