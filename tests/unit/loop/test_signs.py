"""What bears signs of cheating is noted in the transaction that finishes it, and is trained on with a reward of 0; an
evaluation counts it as not solved."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import load, to_toml
from etude.evals import read_rows
from etude.experience import Ledger, RolloutFiles, make_batch, plan_batch
from etude.experience.config import ExperienceConfig
from etude.experience.ledger_queries import Quarantined
from etude.loop import worker
from etude.loop.adjustable_semaphore import Limit
from etude.loop.config import RunConfig
from etude.loop.evaluation import evaluate
from etude.loop.rollout_result import RolloutReply, RolloutResult, store_rollout
from etude.loop.rollout_scheduler import RolloutScheduler, siblings
from etude.loop.run_in_thread import SerialExecutor
from etude.records import Graded, Rollout, RolloutSpec, Task, Version
from etude.records.rollout import Ending, Trace
from etude.records.task import Split, Trust
from etude.rewards import Composition
from etude.run import RunFolder
from etude.telemetry import Telemetry
from etude.testing import FakeRunProcesses

HONEST, CHEAT = b"def f(n):\n    return n + 1\n", b"import os\ndef f(n):\n    os._exit(0)\n"
TASK = Task(
    source="s",
    split=Split.TRAIN,
    index=0,
    family="f",
    instruction="i",
    files={"calc.py": "def f(n):\n    return None\n"},
    exports=("calc.py",),
)


def play(spec: RolloutSpec) -> Rollout:
    """The first sibling cheats."""
    return Rollout(
        rollout_id=spec.rollout_id,
        group_id=spec.group_id,
        attempt=spec.attempt,
        task=spec.task,
        trace=Trace(()),
        ending=Ending.SUBMITTED,
        exports={"calc.py": CHEAT if spec.rollout_id.endswith(".0") else HONEST},
        wall_s=0.0,
        tool_s=0.0,
    )


def fooled(rollout: RolloutResult) -> Graded:
    return Graded.of(1.0, {"tests": 1.0}, trust=Trust.CODE, reason="all pass")


def rolled(folder: Path, **experience: Any) -> tuple[Ledger, list[dict[str, Any]]]:
    config = replace(RunConfig(), experience=ExperienceConfig(**experience))
    ledger = Ledger(folder / "ledger.sqlite", capacity=4)
    for spec in siblings("g000000", TASK, 4, seed=0, temperature=1.0):
        ledger.admit(spec)
    telemetry = Telemetry(folder / "events.jsonl", process="test")
    files, find_signs = RolloutFiles(folder / "rollouts"), config.experience.quarantine

    def played(spec: RolloutSpec) -> RolloutResult:
        return store_rollout(play(spec), files, find_signs=find_signs).with_task(spec.task)

    processes = FakeRunProcesses(config, Limit(4), play=played, judge=fooled)
    rolling = RolloutScheduler(ledger, SerialExecutor("ledger"), processes, telemetry)  # type: ignore[arg-type]

    async def main() -> None:
        running = asyncio.create_task(rolling.run(asyncio.Event()))
        settled = asyncio.create_task(rolling.progress())
        await asyncio.wait([running, settled], timeout=300, return_when=asyncio.FIRST_COMPLETED)
        assert settled.done(), running
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    telemetry.close()
    lines = (folder / "events.jsonl").read_text().splitlines()
    return ledger, [event for event in map(json.loads, lines) if event["kind"] == "rollout.signs"]


def rewards(ledger: Ledger, **settings: bool) -> list[float]:
    """The rewards of the only group, composed from its stored terms."""
    graded = [graded for _, graded in ledger.group("g000000").valid]
    return [reward.value for reward in Composition(**settings).rewards([one.terms for one in graded])]


def test_a_flagged_rollout_earns_nothing_and_stays_in_the_baseline_and_the_gradient(tmp_path):
    ledger, events = rolled(tmp_path)
    sign = "exit: ends the process by os._exit (calc.py:3)"
    assert ledger.states() == {"graded": 4}
    assert ledger.ready_groups(["g000000"]) == {"g000000"}
    group = ledger.group("g000000")
    assert rewards(ledger) == [0.0, 1.0, 1.0, 1.0]
    assert ledger.row("g000000.0").reward == 0.0
    plan = plan_batch([group], batch_id="b000001", step=1, max_lag=0)
    batch = make_batch(plan, RolloutFiles(tmp_path / "rollouts").read)
    assert batch.rollout_ids == tuple(f"g000000.{i}" for i in range(4))
    given = [member.advantage for member in plan.members]
    assert given == [-0.75, 0.25, 0.25, 0.25], "the cheat is what the others are better than"
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, Version(1, "0" * 8, "1" * 64))
    assert ledger.prune(1) > 0
    assert ledger.quarantined() == {"g000000.0": Quarantined(reason=sign, graded=1.0)}, "for good"
    assert [(event["rollout_id"], event["state"], event["graded"]) for event in events] == [
        ("g000000.0", "quarantined", 1.0)
    ]
    assert ledger.slots()[0] == 0


def test_a_grade_keeps_the_graders_reward_and_the_reason_it_does_not_count(tmp_path):
    ledger, _ = rolled(tmp_path)
    _, graded = ledger.group("g000000").valid[0]
    assert graded.values == {"grade": 1.0, "tests": 1.0, "submitted": 1.0, "signs": 1.0, "signs_if_rewarded": 0.0}
    assert (graded.grade, graded.reason) == (1.0, "all pass")
    reason = "quarantined: exit: ends the process by os._exit (calc.py:3); the grader said: all pass"
    assert ledger.row("g000000.0").reason == reason
    assert rewards(ledger, quarantine=False) == [1.0] * 4, "credit can be computed again under other settings"


def test_quarantine_can_be_turned_off(tmp_path):
    ledger, events = rolled(tmp_path, quarantine=False)
    assert rewards(ledger) == [1.0] * 4
    assert ledger.quarantined() == {}
    assert events == []


@pytest.mark.parametrize(("share", "shown"), [(0.0, 0), (1.0, 3)])
def test_a_share_of_the_clean_ones_is_marked_for_a_person(tmp_path, share, shown):
    ledger, events = rolled(tmp_path, review_share=share)
    assert ledger.states() == {"graded": 4}
    assert sum(event["state"] == "review" for event in events) == shown


def test_a_cheat_counts_as_not_solved_in_an_evaluation_and_is_reported_beside_the_rate(tmp_path):
    files, telemetry = RolloutFiles(tmp_path / "rollouts"), Telemetry(tmp_path / "events.jsonl", process="test")

    def played(spec: RolloutSpec) -> RolloutResult:
        return store_rollout(play(spec), files, kept=False, find_signs=True).with_task(spec.task)

    processes = FakeRunProcesses(RunConfig(), Limit(4), play=played, judge=fooled)
    processes.files = files  # type: ignore[attr-defined]
    settings: Any = {"step": 3, "tries": 4, "seed": 0, "temperature": 1.0, "telemetry": telemetry}
    out = tmp_path / "after.parquet"
    work = evaluate(processes, [TASK], name="after", split=Split.HELDOUT, out=out, **settings)  # type: ignore[arg-type]
    result = asyncio.run(work)
    telemetry.close()
    assert (result.solved, result.cheats, result.rate, result.best_of_k) == (3, 1, 0.75, 1.0)
    sign = "exit: ends the process by os._exit (calc.py:3)"
    rows = read_rows(tmp_path / "after.parquet")
    assert [(row.reward, row.solved, row.sign) for row in rows] == [(0.0, False, sign), *[(1.0, True, "")] * 3]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["cheats"] for event in events if event["kind"] == "eval.result"] == [1]


@pytest.mark.parametrize("kept", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("quarantine", [True, False])
def test_a_worker_looks_for_signs_in_training_and_in_evaluations(game, tmp_path, monkeypatch, kept, quarantine):
    config = load(game.config, RunConfig, [f"experience.quarantine={str(quarantine).lower()}"])
    run = RunFolder.create(tmp_path / "run", config_toml=to_toml(config), seed=0)
    shutil.copytree(game.start, run / "tokenizer")

    async def played(spec: RolloutSpec, **_: Any) -> Rollout:
        return play(spec)

    monkeypatch.setattr(worker, "run_rollout", played)
    monkeypatch.setattr(worker, "runtime_from_config", lambda _: None)

    async def main() -> RolloutReply:
        telemetry = Telemetry(tmp_path / "events.jsonl", process="worker-0")
        _, rollout = (await worker.handlers(run, "worker-0", telemetry))["rollout"]
        [spec] = siblings("g000000", TASK, 1, seed=0, temperature=1.0)
        return await rollout(spec, kept)  # type: ignore[return-value]

    handed = asyncio.run(main())
    assert [one.rule for one in handed.signs.found] == (["exit"] if quarantine else [])
