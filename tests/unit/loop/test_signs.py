"""What bears signs of cheating is quarantined in the transaction that finishes it, and does not train."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.experience import Ledger, RolloutFiles
from etude.experience.config import ExperienceConfig
from etude.loop.apart import InOrder
from etude.loop.config import RunConfig
from etude.loop.played import Played, hand_over
from etude.loop.rolling import Rolling, siblings
from etude.loop.room import Limit
from etude.records import Graded, Rollout, RolloutSpec, Task
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


def fooled(rollout: Played) -> Graded:
    return Graded(reward=1.0, terms={"tests": 1.0}, trust=Trust.CODE, reason="all pass")


def rolled(folder: Path, **experience: Any) -> tuple[Ledger, list[dict[str, Any]]]:
    config = replace(RunConfig(), experience=ExperienceConfig(**experience))
    ledger = Ledger(folder / "ledger.sqlite", capacity=4)
    for spec in siblings("g000000", TASK, 4, seed=0, temperature=1.0):
        ledger.admit(spec)
    telemetry = Telemetry(folder / "events.jsonl", process="test")
    files, looks = RolloutFiles(folder / "rollouts"), config.experience.quarantine

    def played(spec: RolloutSpec) -> Played:
        return hand_over(play(spec), files, looks=looks).of(spec.task)

    crew = FakeCrew(config, Limit(4), play=played, judge=fooled)
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


def test_a_flagged_rollout_is_quarantined_with_its_reason_and_trains_nobody(tmp_path):
    ledger, events = rolled(tmp_path)
    assert ledger.states() == {"graded": 3, "quarantined": 1}
    assert ledger.row("g000000.0").reason == "exit: ends the process by os._exit (calc.py:3)"
    assert ledger.ready_groups(["g000000"]) == {"g000000"}
    assert "g000000.0" not in [rollout.rollout_id for rollout, _ in ledger.group("g000000").valid]
    assert [(event["rollout_id"], event["state"]) for event in events] == [("g000000.0", "quarantined")]
    assert ledger.slots()[0] == 3


def test_quarantine_can_be_turned_off(tmp_path):
    ledger, events = rolled(tmp_path, quarantine=False)
    assert ledger.states() == {"graded": 4}
    assert events == []


@pytest.mark.parametrize(("share", "shown"), [(0.0, 0), (1.0, 3)])
def test_a_share_of_the_clean_ones_is_marked_for_a_person(tmp_path, share, shown):
    ledger, events = rolled(tmp_path, review_share=share)
    assert ledger.states() == {"graded": 3, "quarantined": 1}
    assert sum(event["state"] == "review" for event in events) == shown
