"""A run whose learner is a group of ranks, one of which is killed: named, replaced, and a step repeats by one process.

What must hold is what `test_run` holds of any run: it ends, its audit finds nothing lost and nothing trained twice, and
no process is left.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.running import Running, event_of

from etude.stores import DirectoryStore
from etude.weights import lineage


@pytest.fixture
def running(game: Any, tmp_path: Path, cli_in: Callable[[Path], Any]) -> Iterator[Running]:
    run = Running(cli_in(tmp_path), game.config)
    yield run
    run.stop()


def told(run: Running, name: str) -> list[dict[str, Any]]:
    """What the learner said of one of its ranks."""
    path = run.path / "events" / "learner.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [event for event in map(event_of, lines) if event.get("kind") == "process" and event["name"] == name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_from_its_last_commit(running: Running) -> None:
    running.begin("rl.steps=6", "learner.ranks=2", "learner.expert_parallel=2").at_step(3)
    first = told(running, "learner rank 1")[-1]
    assert first["state"] == "start"
    os.kill(first["pid"], signal.SIGKILL)
    assert running.end() == 0, running.said
    running.assert_sound()
    lost = [event for event in told(running, "learner rank 1") if event["state"] == "lost"]
    assert "rank 1 of the learner ended" in lost[0]["reason"]
    assert "exit code -9" in lost[0]["reason"]
    assert "rank 1 of the learner ended" in (running.path / "logs" / "learner.log").read_text()
    assert [e["state"] for e in running.events("lineage")].count("lost") == 1
    begun = [e["step"] for e in running.events("lineage") if e["state"] == "begin"]
    assert begun[-1] in (2, 4), "the steps up to the last checkpoint stand"
    redone = running.cli("replay", running.path, "6", "--json")
    assert redone.returncode == 0, redone.stdout + redone.stderr
    assert json.loads(redone.stdout)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_rank_that_is_stopped_is_named_and_the_run_goes_on_from_its_last_commit(running: Running) -> None:
    running.begin("rl.steps=6", "learner.ranks=2", "learner.expert_parallel=2", "fleet.hung_s=2.0").at_step(3)
    os.kill(told(running, "learner rank 1")[-1]["pid"], signal.SIGSTOP)
    assert running.end() == 0, running.said
    running.assert_sound()
    lost = [event for event in told(running, "learner") if event["state"] == "lost"]
    assert "learner rank 1 is silent" in lost[0]["reason"]
    assert [e["state"] for e in running.events("lineage")].count("lost") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_adapters_over_ranks_is_sound_and_a_step_repeats_by_one_process(running: Running) -> None:
    sets = ("rl.steps=4", "learner.ranks=2", "learner.expert_parallel=2", "learner.lora_rank=3", "learner.lr=4e-3")
    running.begin(*sets).at_step(3)
    os.kill(told(running, "learner rank 1")[-1]["pid"], signal.SIGKILL)
    assert running.end() == 0, running.said
    running.assert_sound()
    assert len(lineage(DirectoryStore(running.path / "weights"), "base")) == 1, "the base is published once"
    redone = running.cli("replay", running.path, "4", "--json")
    assert redone.returncode == 0, redone.stdout + redone.stderr
