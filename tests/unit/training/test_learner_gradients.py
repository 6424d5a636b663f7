"""The learner's whole gradient, by finite differences of the loss that it reports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.models import Transformer, hf_views, save_model
from etude.models.attention import Packed
from etude.numerics import Mode, NumericsConfig
from etude.records import Sample
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import LiveWeights
from etude.training.flat_batch import flatten_samples
from etude.training.reference import Reference
from etude.training.routes import RouteReplay

from .test_learner import SIZES, batch, changed, sampled

CONFIG = LearnerConfig(weights=LiveWeights.F32, budget_tokens=30, replay_routes=True)


def learner_of(tmp_path: Path, config: LearnerConfig, reference: Reference | None = None) -> TorchLearner:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")
    learner = TorchLearner(config, numerics=NumericsConfig(Mode.NATIVE), reference=reference)
    learner.load(tmp_path / "start")
    return learner


def stale(learner: TorchLearner, seed: int, advantage: float) -> Sample:
    """A sample of other weights, whose experts are not those that the live routers would choose."""
    sample, draw = sampled(learner, seed, advantage), np.random.default_rng(seed)
    routes = sample.path.routes.copy()
    routes[:-1] = (routes[:-1] + draw.integers(0, 2, routes[:-1].shape[:2])[..., None]) % SIZES.num_experts
    logprobs = sample.path.logprobs + 0.1 * draw.standard_normal(sample.path.logprobs.shape) * sample.path.mask
    steps = np.where(sample.path.mask, 5, -1)
    return changed(sample, routes=routes, logprobs=logprobs.astype(np.float32), steps=steps.astype(np.int32))


@pytest.mark.parametrize("what", ["everything", "the routers"])
def test_the_gradient_under_replay_is_the_slope_of_the_loss(tmp_path: Path, what: str) -> None:
    learner = learner_of(tmp_path, CONFIG)
    both = batch(*(stale(learner, seed, seed - 1.5) for seed in range(4)))
    report = learner.forward_backward(both)
    assert report.flipped_share > 0.3
    direction, live = learner.optimizer.grad.clone(), learner.optimizer.live
    if what == "the routers":
        only = torch.zeros_like(direction)
        for name, view in hf_views(learner.model).items():
            if name.endswith("mlp.gate.weight"):
                part = slice(view.storage_offset(), view.storage_offset() + view.numel())
                only[part] = direction[part]
        direction = only
    slope = float(direction.norm())
    assert slope > 1e-3
    direction /= slope
    before, losses = live.clone(), []
    for step in (1e-2, -1e-2):
        live.copy_(before + step * direction)
        losses.append(learner.forward_backward(both).loss)
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(slope, rel=0.02)


def test_the_k2_loss_is_taken_to_the_reference_weighed_by_each_tokens_ratio(tmp_path: Path) -> None:
    save_model(Transformer(SIZES, seed=9), tmp_path / "other", dtype="f32")
    reference = Reference(tmp_path / "other")
    learner = learner_of(tmp_path, replace(CONFIG, kl=0.3), reference)
    samples = [stale(learner, seed, 0.0) for seed in range(3)]
    report = learner.forward_backward(batch(*samples))
    replay = RouteReplay(learner.model.config, step=learner.step, max_lag=CONFIG.replay_max_lag)
    rows = flatten_samples(samples, replay)
    for parameter in learner.model.parameters():
        parameter.grad = None
    flat, plausible = Packed(rows.lengths, learner.model.operators), CONFIG.replay_plausible
    done = learner.model.run(rows.tokens_N, flat, rows.routes_NLK, rows.rows_R, plausible=plausible)
    now = done.logits.log_softmax(-1).gather(1, rows.targets_R[:, None])[:, 0]
    weight = (now.detach() - rows.sampler_logprobs_R).exp()
    loss = 0.3 * (weight * (now - reference.logprobs(rows)).square() / 2).sum() / len(now)
    loss.backward()  # type: ignore[no-untyped-call]
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    manual = torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])
    assert manual.norm() > 1e-2
    assert torch.allclose(learner.optimizer.grad, manual, atol=1e-5)


def test_a_learner_without_a_coefficient_asks_no_reference(tmp_path: Path) -> None:
    save_model(Transformer(SIZES, seed=9), tmp_path / "other", dtype="f32")
    gradients = []
    for reference in (None, Reference(tmp_path / "other")):
        learner = learner_of(tmp_path, CONFIG, reference)
        learner.forward_backward(batch(stale(learner, 0, 1.0)))
        gradients.append(learner.optimizer.grad.clone())
    assert torch.equal(*gradients)
