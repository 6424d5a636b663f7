"""What bears signs of cheating is noted in the transaction that finishes it, and is trained on with a reward of 0."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.experience import Ledger, advantages, make_batch
from etude.experience.config import ExperienceConfig
from etude.experience.looking import Quarantined
from etude.loop.apart import InOrder
from etude.loop.config import RunConfig
from etude.loop.rolling import Rolling, siblings, unearned
from etude.loop.room import Limit
from etude.records import Graded, Rollout, RolloutSpec, Task, Version
from etude.records.rollout import Ending, Trace
from etude.records.task import Split, Trust
from etude.telemetry import Telemetry
from etude.testing import FakeCrew

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


def fooled(rollout: Rollout) -> Graded:
    return Graded(reward=1.0, terms={"tests": 1.0}, trust=Trust.CODE, reason="all pass")


def rolled(folder: Path, **experience: Any) -> tuple[Ledger, list[dict[str, Any]]]:
    config = replace(RunConfig(), experience=ExperienceConfig(**experience))
    ledger = Ledger(folder / "ledger.sqlite", capacity=4)
    for spec in siblings("g000000", TASK, 4, seed=0, temperature=1.0):
        ledger.admit(spec)
    telemetry = Telemetry(folder / "events.jsonl", process="test")
    crew = FakeCrew(config, Limit(4), play=play, judge=fooled)
    rolling = Rolling(ledger, InOrder("ledger"), crew, telemetry)  # type: ignore[arg-type]

    async def main() -> None:
        running = asyncio.create_task(rolling.run(asyncio.Event()))
        settled = asyncio.create_task(rolling.progress())
        await asyncio.wait([running, settled], timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert settled.done(), running
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    telemetry.close()
    lines = (folder / "events.jsonl").read_text().splitlines()
    return ledger, [event for event in map(json.loads, lines) if event["kind"] == "rollout.signs"]


def test_a_flagged_rollout_earns_nothing_and_stays_in_the_baseline_and_the_gradient(tmp_path):
    ledger, events = rolled(tmp_path)
    sign = "exit: ends the process by os._exit (calc.py:3)"
    assert ledger.states() == {"graded": 4}
    assert ledger.ready_groups(["g000000"]) == ledger.with_signal(["g000000"]) == {"g000000"}
    group = ledger.group("g000000")
    assert group.rewards == [0.0, 1.0, 1.0, 1.0]
    assert ledger.row("g000000.0").reward == 0.0
    batch = make_batch([group], batch_id="b000001", step=1, max_lag=0)
    assert batch.rollout_ids == tuple(f"g000000.{i}" for i in range(4))
    assert advantages(group.rewards) == [-0.75, 0.25, 0.25, 0.25], "the cheat is what the others are better than"
    ledger.batch(batch)
    ledger.commit(batch.rollout_ids, Version(1, "0" * 8, "1" * 64))
    assert ledger.prune(1) > 0
    assert ledger.quarantined() == {"g000000.0": Quarantined(reason=sign, graded=1.0)}, "for good"
    assert [(event["rollout_id"], event["state"], event["graded"]) for event in events] == [
        ("g000000.0", "quarantined", 1.0)
    ]
    assert ledger.slots()[0] == 0


def test_what_the_grader_gave_and_why_it_does_not_count_are_kept_with_the_grade(tmp_path):
    ledger, _ = rolled(tmp_path)
    _, graded = ledger.group("g000000").valid[0]
    assert graded.terms == {"tests": 1.0, "graded": 1.0}
    assert graded.reason == ("quarantined: exit: ends the process by os._exit (calc.py:3); the grader said: all pass")


def test_quarantine_never_pays():
    worse = Graded(reward=-1.0, terms={"tests": -1.0}, trust=Trust.CODE, reason="broke it")
    assert unearned(worse, "exit: it ends").reward == -1.0


def test_quarantine_can_be_turned_off(tmp_path):
    ledger, events = rolled(tmp_path, quarantine=False)
    assert ledger.group("g000000").rewards == [1.0] * 4
    assert ledger.quarantined() == {}
    assert events == []


@pytest.mark.parametrize(("share", "shown"), [(0.0, 0), (1.0, 3)])
def test_a_share_of_the_clean_ones_is_marked_for_a_person(tmp_path, share, shown):
    ledger, events = rolled(tmp_path, review_share=share)
    assert ledger.states() == {"graded": 4}
    assert sum(event["state"] == "review" for event in events) == shown
