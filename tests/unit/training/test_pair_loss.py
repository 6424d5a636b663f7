"""The DPO loss in two passes has the gradient of its pairs, as autograd computes it from all of them at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from etude.errors import InputError, NotFinite
from etude.models import Transformer, hf_views, save_model
from etude.models.attention import Packed
from etude.numerics import Mode, NumericsConfig
from etude.records import Batch, Sample
from etude.training import LearnerConfig, TorchLearner
from etude.training.config import CorrectionKind, DpoReference, LiveWeights, PolicyLossKind
from etude.training.flat_batch import flatten_samples
from etude.training.pair_loss import pair_loss
from etude.training.reference import Reference
from etude.training.routes import RouteReplay

from .test_learner import SIZES, batch
from .test_learner_gradients import stale

BETA = 0.3
CONFIG = LearnerConfig(
    policy_loss=PolicyLossKind.DPO, dpo_beta=BETA, weights=LiveWeights.F32, replay_routes=True, budget_tokens=64
)
PAIRS = (("g.0", "g.1"), ("g.0", "g.2"), ("g.3", "g.1"), ("g.2", "g.1"))
TEMPERATURE = 0.8


def learner_of(tmp_path: Path, config: LearnerConfig) -> TorchLearner:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")
    save_model(Transformer(SIZES, seed=9), tmp_path / "other", dtype="f32")
    reference = Reference(tmp_path / "other", temperature=TEMPERATURE)
    numerics = NumericsConfig(Mode.NATIVE)
    learner = TorchLearner(config, numerics=numerics, reference=reference, temperature=TEMPERATURE)
    learner.load(tmp_path / "start")
    return learner


def branch(sample: Sample, seed: int) -> Sample:
    """Another path of the same rollout: the same first tokens, of which none has a loss again, then others."""
    draw, path = np.random.default_rng(seed), sample.path
    token_ids, mask = path.token_ids.copy(), path.mask.copy()
    token_ids[10:] = draw.integers(0, SIZES.vocab_size, len(token_ids) - 10)
    mask[:10] = False
    fields = {"token_ids": token_ids, "mask": mask, "logprobs": np.where(mask, path.logprobs, 0).astype(np.float32)}
    return Sample.uniform(sample.rollout_id, msgspec.structs.replace(path, **fields), 1.0)


def pairs_of(learner: TorchLearner) -> Batch:
    """Four rollouts, of which two have several paths. Older weights sampled them, with other experts."""
    samples = [stale(learner, seed, 0.0) for seed in range(4)]
    samples[1:1] = [branch(samples[0], 10), branch(samples[0], 11)]
    samples += [branch(samples[-1], 12), branch(samples[-1], 13)]
    return msgspec.structs.replace(batch(*samples), pairs=PAIRS)


def by_autograd(learner: TorchLearner, given: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean over pairs of −log σ(β m), and its gradient: one graph of all paths, without passes or weights."""
    replay = RouteReplay(SIZES, step=learner.step, max_lag=CONFIG.replay_max_lag)
    rows = flatten_samples(given.samples, replay)
    flat, plausible = Packed(rows.lengths, learner.model.operators), CONFIG.replay_plausible
    done = learner.model.run(rows.tokens_N, flat, rows.routes_NLK, rows.rows_R, plausible=plausible)
    now = (done.logits / TEMPERATURE).log_softmax(-1).gather(1, rows.targets_R[:, None])[:, 0]
    other = rows.sampler_logprobs_R
    if learner.config.dpo_reference is DpoReference.START:
        assert learner._reference is not None
        other = learner._reference.logprobs(rows)
    of = [given.samples[i].rollout_id for i in rows.sample_R.tolist()]

    def log_ratio(rollout_id: str) -> torch.Tensor:
        return torch.stack([now[r] - other[r] for r, one in enumerate(of) if one == rollout_id]).sum()

    losses = [-logsigmoid(BETA * (log_ratio(better) - log_ratio(worse))) for better, worse in given.pairs]
    loss = torch.stack(losses).mean()
    parameters = list(learner.model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.detach(), torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, found, strict=True)]
    )


@pytest.mark.parametrize("reference", DpoReference)
@pytest.mark.parametrize(
    ("budget_tokens", "ranks", "shared"),
    [(8192, 1, True), (8192, 1, False), (64, 1, True), (40, 1, False), (1, 1, False), (64, 2, True), (40, 3, False)],
)
def test_the_gradient_is_that_of_the_pairs_however_they_are_split(
    tmp_path: Path, reference: DpoReference, budget_tokens: int, ranks: int, shared: bool
) -> None:
    learner = learner_of(tmp_path, replace(CONFIG, budget_tokens=budget_tokens, ranks=ranks, dpo_reference=reference))
    learner.share_prefixes, given = shared, pairs_of(learner)
    report = learner.forward_backward(given)
    assert (report.num_forwarded < report.num_tokens) is (shared and budget_tokens > 40)
    loss, gradient = by_autograd(learner, given)
    assert report.loss == pytest.approx(float(loss), rel=1e-5)
    assert float(gradient.norm()) > 1e-2
    torch.testing.assert_close(learner.optimizer.grad, gradient, rtol=1e-4, atol=2e-6)


def test_the_gradient_is_the_slope_of_the_loss_that_is_reported(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, CONFIG)
    given = pairs_of(learner)
    learner.forward_backward(given)
    direction, live, losses = learner.optimizer.grad.clone(), learner.optimizer.live, list[float]()
    slope = float(direction.norm())
    before = live.clone()
    for step in (1e-3, -1e-3):
        live.copy_(before + step * direction / slope)
        losses.append(learner.forward_backward(given).loss)
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=0.02)


def test_steps_prefer_the_better_rollouts_and_the_report_says_so(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, replace(CONFIG, lr=3e-3, dpo_reference=DpoReference.SAMPLER))
    given = pairs_of(learner)
    reports = []
    for _ in range(12):
        reports.append(learner.forward_backward(given))
        learner.optim_step()
    assert {report.num_pairs for report in reports} == {len(PAIRS)}
    assert reports[-1].pair_accuracy == 1.0
    first, last = reports[0].pair_margin, reports[-1].pair_margin
    assert first is not None
    assert last is not None
    assert last > first + 0.5
    assert reports[-1].loss < reports[0].loss < math.log(2) + abs(first) + 1e-3


def test_a_pair_weighs_less_the_clearer_it_is_and_at_most_beta() -> None:
    pairs = [("a", "b"), ("c", "b")]
    found = pair_loss(pairs, {"a": 30.0, "b": 0.0, "c": -2000.0}, beta=0.5)
    assert found.weights["a"] == pytest.approx(0.5 / (1 + math.exp(15.0)) / 2, rel=1e-9)
    assert found.weights["c"] == 0.5 / 2
    assert found.weights["b"] == -found.weights["a"] - found.weights["c"]
    assert found.loss == pytest.approx((math.log1p(math.exp(-15.0)) + 1000.0) / 2)
    assert (found.accuracy, found.margin) == (0.5, pytest.approx((15.0 - 1000.0) / 2))


def test_samples_without_a_pair_have_no_gradient(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, CONFIG)
    report = learner.forward_backward(msgspec.structs.replace(pairs_of(learner), pairs=()))
    assert (report.num_pairs, report.pair_accuracy, report.pair_margin, report.loss) == (0, None, None, 0.0)
    assert not learner.optimizer.grad.any()


def test_a_learner_without_the_reference_of_its_loss_says_what_it_needs(tmp_path: Path) -> None:
    given = pairs_of(learner_of(tmp_path, CONFIG))
    alone = TorchLearner(CONFIG, numerics=NumericsConfig(Mode.NATIVE))
    alone.load(tmp_path / "start")
    with pytest.raises(InputError, match="has no reference policy"):
        alone.forward_backward(given)


def test_logits_that_are_not_finite_are_named_by_their_operator(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, CONFIG)
    given = pairs_of(learner)
    hf_views(learner.model)["model.layers.1.self_attn.o_proj.weight"].fill_(3e38)
    with pytest.raises(NotFinite, match=r"layers\.1\.attention\.out is not finite at step 1"):
        learner.forward_backward(given)


def test_a_defence_truncates_no_weights_of_a_loss_that_has_none(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, replace(CONFIG, replay_routes=None))
    learner.defend(truncate=True)
    assert (learner.config.replay_routes, learner.config.correction) == (True, CorrectionKind.NONE)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"correction": CorrectionKind.TRUNCATED}, "set correction = 'none'"),
        ({"kl": 0.1}, "or dpo_reference = 'sampler'"),
        ({"context_parallel": 2, "ranks": 2}, "set dpo_reference = 'sampler'"),
    ],
)
def test_settings_that_do_not_fit_the_loss_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(CONFIG, **settings)  # type: ignore[arg-type]
    if "correction" not in settings:
        replace(CONFIG, dpo_reference=DpoReference.SAMPLER, **settings)  # type: ignore[arg-type]
