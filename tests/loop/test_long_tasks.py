"""A whole run whose rollouts are summarised: it trains, its samples are what the learner computes, and steps replay."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.experience import read_trace
from etude.experience.traces import trace_path
from etude.run import RunFolder
from etude.telemetry import read_events

ROOT = Path(__file__).parents[2]
SMALL = (
    "corpus.num_demonstrations=60", "corpus.sources=[]", "mid_training.num_tokens=30000",
    "experience.groups_per_step=4", "experience.group_size=4", "rl.steps=2", "rl.checkpoint_every=1",
    "evals.heldout_tasks=4", "evals.during_tasks=2", "evals.baseline_tasks=4", "model.hidden_size=64",
    "model.head_dim=16", "model.expert_size=32", "harness.max_turns=14", "harness.require_submit=false",
    'rewards.terms=[{name = "spread", weight = 1.0, kind = "spread:Spread"}]',
)  # fmt: skip
SPREAD = """
from etude.records.reward import Score

class Spread:
    '''Gives each rollout of a group another value below 0, which no gate changes, so that each has a gradient.'''
    version = "1"

    async def score(self, rollout, graded):
        return Score(value=-1.0 - float(rollout.rollout_id.rpartition(".")[2]), evidence="no gate changes it")
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_with_summaries_trains_exactly_and_replays(
    cli_in: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spread.py").write_text(SPREAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    etude = cli_in(tmp_path)
    sets = [part for one in SMALL for part in ("--set", one)]
    ran = etude("run", ROOT / "examples/long/config.toml", "--name", "r", *sets)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = RunFolder.open(tmp_path / "runs" / "r")
    steps = [e for e in read_events(run / "events") if e["kind"] == "rl.step"]
    assert [e["step"] for e in steps] == [1, 2]
    assert steps[0]["fresh_ratio_max"] == 0.0, "the learner computes what the engine sampled, to the bit"
    batch = read_trace(trace_path(run / "traces", 1)).batch
    conversations = Counter(sample.rollout_id for sample in batch.samples)
    assert max(conversations.values()) > 1, "a summarised rollout has several samples"
    assert sum(int(s.path.mask.sum()) for s in batch.samples) <= batch.num_loss_tokens
    replayed = etude("replay", "runs/r", "2")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_with_forks_trains_exactly_and_replays(
    cli_in: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spread.py").write_text(SPREAD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "src"), str(tmp_path)]))
    etude = cli_in(tmp_path)
    forks = ("harness.forks=3", "experience.credit=fork", "experience.group_size=2", "experience.max_lag=0")
    sets = [part for one in (*SMALL, *forks) for part in ("--set", one)]
    ran = etude("run", ROOT / "examples/long/config.toml", "--name", "r", *sets)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    run = RunFolder.open(tmp_path / "runs" / "r")
    events = list(read_events(run / "events"))
    steps = [e for e in events if e["kind"] == "rl.step"]
    assert [e["step"] for e in steps] == [1, 2]
    assert steps[0]["fresh_ratio_max"] == 0.0, "the learner computes what the engine sampled, to the bit"
    assert all(e["invalid"] == {} for e in steps)
    origins = Counter(e["forked_from"] for e in events if e["kind"] == "rollout" and "forked_from" in e)
    assert set(origins.values()) == {3}
    batch = read_trace(trace_path(run / "traces", 1)).batch
    assert sum(int(s.path.mask.sum()) for s in batch.samples) <= batch.num_loss_tokens
    assert {i for i in batch.rollout_ids if i.count(".") == 2}
    replayed = etude("replay", "runs/r", "2")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
