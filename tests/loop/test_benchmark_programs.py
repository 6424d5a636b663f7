"""The benchmarks' variants of worker and learner run the real programs, with the change that they are named after."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benchmarks.learning import shuffled_learner, slow_worker
from benchmarks.learning.reinforcing import reinforce

from etude.config import load
from etude.dashboard.run_view import RunView
from etude.loop.config import RunConfig

LATE_S = 0.5
NEVER = ("rl.checkpoint_every=100", "evals.every=100")


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, LATE_S])
def test_steps_are_trained_by_a_shuffled_learner_from_a_worker_with_late_tools(
    game: Any, tmp_path: Path, late_s: float
) -> None:
    config = load(game.config, RunConfig, ["rl.steps=2", *NEVER])
    instead = {"etude.loop.worker": slow_worker.__name__, "etude.loop.learner": shuffled_learner.__name__}
    notes = {slow_worker.LATENCY: str(late_s)}
    asyncio.run(reinforce(tmp_path / "run", config, instead=instead, notes=notes, deadline_s=100.0))
    view = RunView(tmp_path / "run")
    assert [step["step"] for step in view.by_step("rl.step")] == [1, 2]
    rollouts = [r for r in view.events("rollout") if r["turns"]]
    assert rollouts
    assert all(r["wall_s"] >= late_s * r["turns"] for r in rollouts)
