"""Credit from hints: the same tokens, scored again with a hint in their context."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.unit.training.test_learner import CONFIG, SIZES, batch, sampled

from etude.errors import NotFinite
from etude.models import Transformer, save_model
from etude.records import Sample
from etude.records.sample import PlacedHint
from etude.training import TorchLearner
from etude.training.hints import with_hint_credit

HINT = np.array([7, 3, 11], np.int32)


@pytest.fixture
def learner(tmp_path: Path) -> TorchLearner:
    save_model(Transformer(SIZES, seed=4), tmp_path / "start", dtype="f32")
    learner = TorchLearner(CONFIG)
    learner.load(tmp_path / "start")
    return learner


def hinted(sample: Sample, at: int = 3, stop: int = 7, weight: float = 0.5) -> Sample:
    hint = PlacedHint(at=at, stop=stop, token_ids=HINT, weight=weight)
    return replace(sample, hints=(*sample.hints, hint))


@torch.no_grad()
def logprobs(learner: TorchLearner, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Of each token but the first, one sequence on its own."""
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    logits, _ = learner.model.train()(tokens[:-1])
    found: np.ndarray = (logits / temperature).log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    return found


def gain(learner: TorchLearner, sample: Sample, at: int, stop: int, temperature: float = 1.0) -> np.ndarray:
    """By how much the hint raises the log-probabilities of the path's tokens in at:stop."""
    ids = sample.path.token_ids
    after = logprobs(learner, np.concatenate([ids[:at], HINT, ids[at:stop]]), temperature)[at + len(HINT) - 1 :]
    return after - logprobs(learner, ids, temperature)[at - 1 : stop - 1]


def test_only_the_tokens_of_the_turn_get_what_the_hint_changes_times_its_weight(learner: TorchLearner) -> None:
    first, other = sampled(learner, 0, 0.25), sampled(learner, 1, -1.0)
    done = with_hint_credit([hinted(first), other], learner.passes.score, bound=20.0)
    credited = done.samples
    own = gain(learner, first, 3, 7)[1:]  # its tokens with loss are 4, 5 and 6
    expected = np.full(len(first.advantages), 0.25)
    expected[:3] += 0.5 * own
    assert credited[0].advantages == pytest.approx(expected, abs=1e-5)
    assert (done.kl, done.clip_share) == (pytest.approx(-own.mean(), abs=1e-6), 0.0)
    assert abs(own).max() > 1e-3, "the hint changes something"
    assert credited[1] is other
    assert not credited[0].hints


def test_hints_of_several_turns_are_scored_each_in_its_own_context(learner: TorchLearner) -> None:
    one = sampled(learner, 2, 0.0)
    end = len(one.path.mask)
    given = hinted(hinted(one, weight=1.0), at=8, stop=end, weight=2.0)
    [credited] = with_hint_credit([given], learner.passes.score, bound=20.0).samples
    expected = np.concatenate([gain(learner, one, 3, 7)[1:], 2.0 * gain(learner, one, 8, end)[1:]])
    assert credited.advantages == pytest.approx(expected, abs=1e-5)


def test_tokens_are_scored_at_the_temperature_at_which_they_were_sampled(learner: TorchLearner) -> None:
    one = sampled(learner, 3, 0.0, temperature=0.5)
    own = replace(one, temperatures=np.full(len(one.advantages), 0.5, np.float32))
    [credited] = with_hint_credit([hinted(own, weight=1.0)], learner.passes.score, bound=20.0).samples
    assert credited.advantages[:3] == pytest.approx(gain(learner, one, 3, 7, 0.5)[1:], abs=1e-5)


def test_a_token_that_the_hint_makes_nearly_impossible_counts_for_no_more_than_the_bound(
    learner: TorchLearner,
) -> None:
    one = replace(sampled(learner, 0, 0.0), hints=())
    logprobs = [[-1.0, -0.5, -9.0], [-60.0, -1.5, -2.0]]  # of the three tokens of the turn: without the hint, with it
    done = with_hint_credit(
        [hinted(one)], lambda scored: [np.array(own, np.float32) for own in logprobs[: len(scored)]], bound=6.0
    )
    assert done.samples[0].advantages[:3].tolist() == [-3.0, -0.5, 3.0]
    assert done.clip_share == pytest.approx(2 / 3)
    assert done.kl == pytest.approx((59.0 + 1.0 - 7.0) / 3), "the estimate of the divergence is not clipped"


def test_a_step_with_hints_is_a_step_with_their_credit_as_advantages_to_the_bit(learner: TorchLearner) -> None:
    given = [hinted(sampled(learner, 0, 0.0)), sampled(learner, 1, -1.0)]
    credited = with_hint_credit(given, learner.passes.score, bound=math.log(SIZES.vocab_size))
    gradients, reports = [], []
    for samples in (given, credited.samples):
        reports.append(learner.forward_backward(batch(*samples)))
        gradients.append(learner.optimizer.grad.clone())
        learner.optimizer.clear()
    assert torch.equal(*gradients)
    assert gradients[0].any()
    assert [one.loss for one in reports] == [reports[0].loss] * 2
    assert [one.hint_kl for one in reports] == [credited.kl, None]
    assert [one.hint_clip_share for one in reports] == [credited.clip_share, None]


def test_a_step_moves_each_token_towards_its_probability_with_the_hint(learner: TorchLearner) -> None:
    one = sampled(learner, 0, 0.0)
    own = gain(learner, one, 3, 7)[1:]
    before = logprobs(learner, one.path.token_ids)[3:6]
    learner.forward_backward(batch(hinted(one)))
    learner.optim_step()
    assert float(own @ (logprobs(learner, one.path.token_ids)[3:6] - before)) > 0.0


def test_a_hinted_context_that_is_not_finite_is_an_error_that_names_the_rollout(learner: TorchLearner) -> None:
    one = hinted(sampled(learner, 0))
    with torch.no_grad():
        learner.model.embedding[int(HINT[0])] = float("nan")
    clean = ~np.isin(one.path.token_ids, HINT[:1])
    assert clean.all(), "only the hint has the token"
    with pytest.raises(NotFinite, match=r"g\.0"):
        learner.forward_backward(batch(one))
    assert not learner.optimizer.grad.any()


def test_a_hint_without_a_token_with_loss_is_refused(learner: TorchLearner) -> None:
    with pytest.raises(ValueError, match=r"a hint of the sample of rollout .* has no token with loss"):
        hinted(sampled(learner, 0), at=2, stop=4)
