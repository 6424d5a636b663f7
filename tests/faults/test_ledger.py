"""kill -9 while the ledger writes: a rollout that was finished is never lost, and a half-made change never seen."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.small_disk import small_disk

from etude.errors import StoreError
from etude.experience import Ledger, RolloutFiles, audit
from etude.experience.transitions import State

CHILD = """
import os
import sys
from pathlib import Path
import numpy as np
from etude.experience import Ledger, RolloutFiles, plan_batch, record_batch
from etude.records import Completion, Graded, Rollout, RolloutSpec, Sampling, Task, Trace, Version
from etude.records.completion import StopReason, VersionSpan
from etude.records.rollout import Ending, Turn
from etude.records.summary import summary_of
from etude.records.task import Split, Trust

folder, place = Path(sys.argv[1]), sys.argv[2]
TASK = Task(source="t", split=Split.TRAIN, index=0, family="f", instruction="i", files={}, exports=())
ledger, files = Ledger(place, capacity=4), RolloutFiles(folder / "rollouts")
files.keep_only(files.names(), ledger.wanted_files())

def trace():  # one turn of two tokens
    said = Completion(request_id="r", token_ids=np.arange(2, dtype=np.int32), logprobs=np.full(2, -1.0, np.float32),
                      routes=np.zeros((0, 0, 0), np.uint8), routes_start=3,
                      spans=(VersionSpan(Version(0, "0" * 8, "0" * 64), 2),), stop_reason=StopReason.STOP, engine="e")
    sampling = Sampling(max_tokens=2, stop_token_ids=())
    return Trace((Turn(parent=None, prompt_ids=np.arange(2, dtype=np.int32), completion=said, sampling=sampling),))

def say(*words):  # one write: it is out before the next instruction
    os.write(1, (" ".join(words) + "\\n").encode())

while True:
    group = ledger.num_groups()
    ids = [f"g{group:06d}.{i}" for i in range(4)]
    def admit():
        for i in ids:
            ledger.admit(RolloutSpec(rollout_id=i, group_id=i[:7], attempt=0, task=TASK, seed=0, temperature=1.0))
        ledger.move_cursor("train", group + 1)
    if ledger.slots()[0] == 0:
        ledger.transaction(admit)
    for i in ledger.waiting():
        ledger.move(i, "running")
        rollout = Rollout(rollout_id=i, group_id=i[:7], attempt=ledger.row(i).attempt, task=TASK, trace=trace(),
                          ending=Ending.SUBMITTED, exports={}, wall_s=0.0, tool_s=0.0)
        graded = Graded(reward=float(i[-1] in "01"), terms={}, trust=Trust.DATA, reason="judged")
        assert ledger.finish(summary_of(rollout, files.write(rollout)), graded)
        say("finished", i)
    step = len((folder / "lineage").read_text().splitlines()) + 1
    groups = [ledger.group(g) for g in ledger.open_groups()]
    plan = plan_batch(groups, batch_id=f"b{step:06d}", step=step, max_lag=10**6)
    _, batch = record_batch(folder / "traces", plan, files.read)
    ledger.batch(batch)
    with (folder / "lineage").open("a") as lineage:  # the commit point, one write
        lineage.write(",".join(batch.rollout_ids) + "\\n")
    ledger.commit(batch.rollout_ids, Version(step, "0" * 8, "0" * 64))
"""


def lineage_of(folder: Path) -> list[list[str]]:
    return [line.split(",") for line in (folder / "lineage").read_text().splitlines()]


def run_and_kill(folder: Path, place: Path | str, after_lines: int, rng: random.Random) -> list[str]:
    """Start a conductor, let it finish some rollouts, kill it mid-instruction; what it said it finished."""
    with subprocess.Popen([sys.executable, "-c", CHILD, str(folder), str(place)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [child.stdout.readline().decode().split() for _ in range(after_lines)]
        for _ in range(rng.randrange(20_000)):  # somewhere in the next transactions, by instruction count and not time
            pass
        os.kill(child.pid, signal.SIGKILL)
        said += [line.decode().split() for line in child.stdout]
    assert child.returncode == -signal.SIGKILL
    return [words[1] for words in said if len(words) == 2]


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_kill_9_at_random_points_loses_no_finished_rollout_and_trains_none_twice(tmp_path, kind, request):
    rng = random.Random(7)
    server = request.getfixturevalue("postgres").url if kind == "postgres" else None
    place = f"{server}#{tmp_path.name}" if server else tmp_path / "ledger.sqlite"
    (tmp_path / "lineage").touch()
    finished: set[str] = set()
    for _ in range(8):
        finished |= set(run_and_kill(tmp_path, place, after_lines=rng.randint(1, 15), rng=rng))
        lineage = lineage_of(tmp_path)
        ledger = Ledger(place, capacity=4)
        consumed = [i for step in lineage for i in step]
        steps = [*enumerate(lineage, 1)]
        ledger.reconcile(steps)
        audit(ledger, tmp_path / "traces", steps, files=RolloutFiles(tmp_path / "rollouts")).require_sound()
        assert len(consumed) == len(set(consumed))
        for rollout_id in finished | set(consumed):
            assert ledger.row(rollout_id).state is (State.TRAINED if rollout_id in consumed else State.GRADED)
        assert {row.rollout_id for row in ledger.rows(states=[State.TRAINED])} == set(consumed)
        assert ledger.cursor("train") == ledger.num_groups()
        ledger.close()
    assert len(lineage) >= 4


def test_a_disk_that_fills_up_is_a_store_error_and_the_ledger_stays_whole(tmp_path):
    with small_disk(tmp_path, "512k") as disk:
        ledger = Ledger(disk / "ledger.sqlite", capacity=4)
        ledger.remember("note", "before")
        with pytest.raises(StoreError, match="cannot be written") as caught:
            ledger.remember("note", "x" * 2_000_000)
        assert "disk space" in caught.value.hint
        assert ledger.recall("note") == "before"
        ledger.remember("note", "after")
        assert ledger.recall("note") == "after"
        ledger.close()
