"""A learner and its reference on batches of rollouts without sampled tokens."""

from __future__ import annotations

from pathlib import Path

from tests.unit.training.test_learner_gradients import CONFIG, learner_of

from etude.records import Batch
from etude.training.reference import Reference


def test_a_batch_without_a_sampled_token_changes_nothing_but_the_step(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, CONFIG)
    batch = Batch(batch_id="b", step=1, samples=(), rollout_ids=("g000000.0", "g000000.1"), num_loss_tokens=0)
    report = learner.forward_backward(batch)
    assert (report.num_tokens, report.num_sampled, report.loss, report.ratio_max) == (0, 0, 0.0, 0.0)
    assert learner.optim_step()["grad_norm"] == 0.0


def test_k1_of_no_samples_is_empty(tmp_path: Path) -> None:
    learner_of(tmp_path, CONFIG)
    assert Reference(tmp_path / "start").k1([]) == {}
