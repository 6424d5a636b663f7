"""A step with NaN or Inf: the learner's process refuses it, the run ends and names the tensor, its state is saved.

Conductor, ledger and learner are the real ones; rollouts are made up, and those of step 3 hold what is no number.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.played_run import PlayedRun, Players

from etude.errors import Exit, NotFinite
from etude.harness import ChatFormat
from etude.loop.conductor import Conductor
from etude.loop.config import open_tasks
from etude.loop.processes import Child, Supervisor
from etude.records import Rollout, RolloutSpec, Trace
from etude.telemetry import Telemetry
from etude.training import LearnerConfig, TorchLearner


class Poisoned(Players):
    """Run processes whose engines compute no numbers any more from step 3 on."""

    def made(self, spec: RolloutSpec) -> Rollout:
        rollout = super().made(spec)
        if int(spec.group_id[1:]) < 2 * self.config.experience.groups_per_step:
            return rollout
        (turn,) = rollout.trace.turns
        logprobs = turn.completion.logprobs.copy()
        logprobs[2] = np.nan
        return replace(rollout, trace=Trace((replace(turn, completion=replace(turn.completion, logprobs=logprobs)),)))


def test_nan_in_the_learner_ends_the_run_names_the_tensor_and_saves_the_state(game: Any, tmp_path: Path) -> None:
    run = PlayedRun.create(tmp_path / "r", game, "rl.checkpoint_every=50", "evals.every=50", "rl.steps=4")
    folder, config = run.folder, run.config

    async def main() -> NotFinite:
        telemetry = Telemetry(folder / "events" / "conductor.jsonl", process="conductor")
        players = Poisoned(folder, config, telemetry, Supervisor(telemetry))
        argv = ["-m", "etude.loop.learner", "--run", str(folder.path), "--name", "learner"]
        learner = Child("learner", argv, logs=folder / "logs", telemetry=telemetry)
        await learner.start(with_socket=True)
        assert learner.caller is not None
        players.learners.join(learner.caller)
        chat = ChatFormat.load(folder / "tokenizer")
        conductor = Conductor(folder, config, telemetry, players, source=open_tasks(config), chat=chat)
        try:
            with pytest.raises(NotFinite) as caught:
                await conductor.reinforce()
            assert (conductor.step, conductor.ledger.states()["trained"]) == (2, 24)
            return caught.value
        finally:
            learner.caller.close()
            await learner.exited()
            conductor.close()
            telemetry.close()

    error = asyncio.run(main())
    saved = folder / "checkpoints" / "step-000002"
    assert error.exit_code is Exit.HELD
    assert error.what == "a sampled token's log-probability is nan at step 3"
    assert "rollout g000006.0 at position 6" in error.facts
    assert str(saved) in error.facts
    assert f"--set start={saved}" in error.hint
    left = TorchLearner(LearnerConfig())
    left.load(saved)
    assert left.version is not None
    assert (left.step, left.version.step, left.optimizer.num_steps) == (2, 2, 2)
