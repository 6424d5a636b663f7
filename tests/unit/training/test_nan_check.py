"""A step with NaN or Inf is refused with the tensor's name, and the learner's state does not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.errors import CheckpointError, NotFinite
from etude.models import Transformer, hf_views, save_model
from etude.numerics import Mode, NumericsConfig
from etude.stores import MemoryStore
from etude.training import TorchLearner
from etude.weights import Channel

from .test_learner import CONFIG, SIZES, batch, changed, sampled

Learners = Callable[[], TorchLearner]


@pytest.fixture
def learners(tmp_path: Path) -> Learners:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")

    def make() -> TorchLearner:
        learner = TorchLearner(CONFIG, channel=Channel(MemoryStore()), numerics=NumericsConfig(Mode.NATIVE))
        learner.load(tmp_path / "start")
        return learner

    return make


def weight(learner: TorchLearner, name: str) -> torch.Tensor:
    return hf_views(learner.model)[name]


def test_logits_are_named_by_the_operator_the_rollout_and_the_step(learners: Learners) -> None:
    learner = learners()
    samples = [sampled(learner, seed) for seed in range(3)]
    learner.step = 6
    weight(learner, "model.layers.1.self_attn.o_proj.weight").fill_(3e38)
    with pytest.raises(NotFinite, match=r"layers\.1\.attention\.out is not finite at step 7") as caught:
        learner.forward_backward(batch(*samples))
    assert "rollout g.0 at position 0" in caught.value.facts
    assert not learner.optimizer.grad.any()


def test_the_token_that_overflows_is_named_by_its_rollout_and_position(learners: Learners) -> None:
    learner = learners()
    samples = [sampled(learner, seed) for seed in range(3)]
    token, where = int(samples[1].path.token_ids[5]), [s.path.token_ids[:-1].tolist() for s in samples]
    of = next(i for i, ids in enumerate(where) if token in ids)
    weight(learner, "model.embed_tokens.weight")[token] = float("inf")
    with pytest.raises(NotFinite, match=r"embedding is not finite at step 1") as caught:
        learner.forward_backward(batch(*samples))
    assert f"rollout g.{of} at position {where[of].index(token)}" in caught.value.facts


def test_what_an_engine_logged_and_what_a_reward_became_are_named_by_rollout_and_position(learners: Learners) -> None:
    learner = learners()
    good, bad = sampled(learner, 0), sampled(learner, 1)
    logprobs = bad.path.logprobs.copy()
    logprobs[10] = np.nan
    with pytest.raises(NotFinite, match="log-probability is nan at step 1") as caught:
        learner.forward_backward(batch(good, changed(bad, logprobs=logprobs)))
    assert "rollout g.1 at position 10" in caught.value.facts
    with pytest.raises(NotFinite, match="advantage is inf at step 1") as caught:
        learner.forward_backward(batch(good, sampled(learner, 1, float("inf"))))
    assert "rollout g.1 at position 4" in caught.value.facts


def test_a_ratio_that_overflows_is_named_by_its_rollout(learners: Learners) -> None:
    learner = learners()
    bad = sampled(learner, 1, -1.0)
    logprobs = bad.path.logprobs.copy()
    logprobs[11] = -200.0
    with pytest.raises(NotFinite, match="ratio of step 1 is inf") as caught:
        learner.forward_backward(batch(sampled(learner, 0), changed(bad, logprobs=logprobs)))
    assert "rollout g.1 at position 11" in caught.value.facts


def test_a_gradient_is_named_by_the_tensor_that_the_backward_pass_came_to_first(learners: Learners) -> None:
    learner = learners()
    learner.forward_backward(batch(sampled(learner, 0)))
    before = {name: view.clone() for name, view in hf_views(learner.model).items()}
    names = list(before)
    for name in names[: names.index("model.layers.1.mlp.experts.2.up_proj.weight") + 1]:
        view, live = hf_views(learner.model)[name], learner.optimizer.live
        assert view.untyped_storage().data_ptr() == live.untyped_storage().data_ptr()
        learner.optimizer.grad[view.storage_offset()] = float("nan")
    with pytest.raises(NotFinite, match=r"gradient of model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight .* step 1"):
        learner.optim_step()
    assert learner.step == 0
    assert all(torch.equal(view, before[name]) for name, view in hf_views(learner.model).items())


def test_a_gradient_whose_square_overflows_is_told_apart(learners: Learners) -> None:
    learner = learners()
    learner.optimizer.grad[3] = 1e30
    with pytest.raises(NotFinite, match="overflows"):
        learner.optim_step()


def test_weights_that_are_lost_are_neither_saved_nor_taken_for_a_step(learners: Learners, tmp_path: Path) -> None:
    learner = learners()
    learner.forward_backward(batch(sampled(learner, 0)))
    learner.optimizer.state()["master"][-1] = float("inf")
    with pytest.raises(NotFinite, match=r"experts\.3\.down_proj\.weight is not finite after step 1"):
        learner.optim_step()
    assert learner.step == 0
    with pytest.raises(NotFinite, match="is not finite at step 0"):
        learner.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_learner_loads_no_checkpoint_that_is_not_finite(learners: Learners, tmp_path: Path) -> None:
    learner = learners()
    with torch.no_grad():
        weight(learner, "lm_head.weight")[0, 0] = float("nan")
    save_model(learner.model, tmp_path / "bad", dtype="bf16")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .* is not finite"):
        learner.load(tmp_path / "bad")


def test_what_is_looked_for_is_what_the_step_computed_with_implausible_experts_replaced(learners: Learners) -> None:
    """The broken expert is no recorded one: it computes only where implausible ones are replaced."""
    learner = learners()
    sample = sampled(learner, 3)
    live = sample.path.routes[:-1, 1]
    broken = int(live[0, 0])
    others = [next(e for e in range(SIZES.num_experts) if e not in {broken, *row}) for row in live.tolist()]
    routes = sample.path.routes.copy()
    routes[:-1, 1] = np.where(live == broken, np.array(others, np.uint8)[:, None], live)
    weight(learner, f"model.layers.1.mlp.experts.{broken}.gate_proj.weight").fill_(3e38)
    learner.config = replace(CONFIG, replay_plausible=1.0)
    with pytest.raises(NotFinite, match=r"layers\.1\.experts\.gate_up is not finite at step 1") as caught:
        learner.forward_backward(batch(changed(sample, routes=routes)))
    assert "the first in rollout g.3 at position 0; all operators before it are finite" in caught.value.facts
    learner.config = replace(CONFIG, replay_plausible=0.0)
    assert learner.forward_backward(batch(changed(sample, routes=routes))).replaced_share == 0.0
