"""Losses and estimators against closed forms: small categorical policies, every outcome enumerated, in float64.

A policy gives a first word, and a second one that depends on it: the least in which a token changes what comes after.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from etude.records import Graded
from etude.records.reward import K1, Term
from etude.records.task import Trust
from etude.rewards import Composition
from etude.training.losses import cispo_loss, entropy, k1, k2, k2_loss, k3, ppo_loss

V = 5


def keyed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LOGITS, REFERENCE = keyed(0, 1 + V, V), keyed(0, 1 + V, V) + 0.5 * keyed(1, 1 + V, V)
FIRST, SECOND = (part.flatten() for part in torch.meshgrid(torch.arange(V), torch.arange(V), indexing="ij"))
REWARD = keyed(2, V * V)  # of each pair of words


def tokens(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of both words of each of the V² outcomes, [V², 2]."""
    logprobs = logits.log_softmax(-1)
    return torch.stack([logprobs[0, FIRST], logprobs[1 + FIRST, SECOND]], 1)


def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    logits = LOGITS.clone().requires_grad_()
    (found,) = torch.autograd.grad(of(logits), logits)
    return found


def expected(per_outcome: Callable[[torch.Tensor], torch.Tensor], sampler: torch.Tensor = LOGITS) -> torch.Tensor:
    """The expectation, over what `sampler` samples, of the gradient of a loss per outcome [V²]: what training sees."""
    chance = tokens(sampler).sum(1).exp().detach()
    return gradient(lambda logits: (chance * per_outcome(logits)).sum())


def divergence(logits: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL of one policy to another, over whole outcomes."""
    mine, theirs = tokens(logits).sum(1), tokens(other).sum(1)
    return (mine.exp() * (mine - theirs)).sum()


TRUE_REWARD = gradient(lambda logits: (tokens(logits).sum(1).exp() * REWARD).sum())
TRUE_KL = gradient(lambda logits: divergence(logits, REFERENCE))
REVERSE_KL = gradient(lambda logits: divergence(REFERENCE, logits))


def log_ratio(logits: torch.Tensor) -> torch.Tensor:
    """log π_ref − log π of each word, as k1, k2 and k3 take it."""
    return tokens(REFERENCE) - tokens(logits)


def same(found: torch.Tensor, true: torch.Tensor) -> bool:
    return torch.allclose(found, true, atol=1e-12)


# the policy's gradient


@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss])
def test_on_policy_the_expected_gradient_is_that_of_the_expected_reward(loss: Callable[..., object]) -> None:
    old = tokens(LOGITS)

    def per_outcome(logits: torch.Tensor) -> torch.Tensor:
        now, advantages = tokens(logits), REWARD[:, None].expand(-1, 2)
        parts = [loss(n, o, a, normaliser=1.0).loss for n, o, a in zip(now, old, advantages, strict=True)]  # type: ignore[attr-defined]
        return torch.stack(parts)

    assert same(-expected(per_outcome), TRUE_REWARD)


def test_a_baseline_changes_nothing_in_expectation() -> None:
    baseline = expected(lambda logits: -7.0 * tokens(logits).sum(1))
    assert same(baseline, torch.zeros_like(baseline))


def test_off_policy_ppo_is_the_gradient_of_its_own_clipped_surrogate_by_finite_differences() -> None:
    sampler, advantages = keyed(3, 40) * 0.3 - 1.0, keyed(4, 40)
    now = (sampler + 0.4 * keyed(5, 40)).requires_grad_()
    ratio = (now.detach() - sampler).exp()
    assert ((ratio < 0.8) & (advantages < 0)).any()
    assert ((ratio > 1.28) & (advantages > 0)).any()
    assert torch.autograd.gradcheck(lambda x: ppo_loss(x, sampler, advantages, normaliser=3.0).loss, (now,))


def test_cispo_is_the_capped_ratio_times_the_gradient_of_the_log_probability() -> None:
    sampler, advantages = keyed(3, 40) * 0.3 - 1.0, keyed(4, 40)
    now = (sampler + 0.8 * keyed(5, 40)).requires_grad_()
    (found,) = torch.autograd.grad(cispo_loss(now, sampler, advantages, normaliser=3.0, cap=1.5).loss, now)
    ratio = (now.detach() - sampler).exp()
    assert (ratio > 1.5).any()
    assert same(found, -ratio.clamp(max=1.5) * advantages / 3.0)


def test_entropys_gradient_is_its_closed_form() -> None:
    found = gradient(lambda logits: entropy(logits.log_softmax(-1)).sum())
    logprobs = LOGITS.log_softmax(-1)
    assert same(found, -logprobs.exp() * (logprobs + entropy(logprobs)[:, None]))


# a divergence to a reference: which of the three estimators may be a loss


def test_k1_as_a_loss_has_no_gradient_in_expectation() -> None:
    found = expected(lambda logits: k1(log_ratio(logits)).sum(1))
    assert same(found, torch.zeros_like(found))
    assert TRUE_KL.norm() > 0.1


def test_k1_in_the_reward_has_the_gradient_of_the_divergence() -> None:
    total = k1(log_ratio(LOGITS)).sum(1)
    graded = Graded.of(0.0, trust=Trust.DATA, reason="")
    rewards = [Composition(kl=1.0).of(graded.with_terms(Term(name=K1, value=float(k)))) for k in total]
    penalised = torch.tensor([reward.value for reward in rewards], dtype=torch.float64)
    assert same(expected(lambda logits: -penalised * tokens(logits).sum(1)), TRUE_KL)


def test_k2_of_whole_outcomes_as_a_loss_has_the_gradient_of_the_divergence_too() -> None:
    assert same(expected(lambda logits: k2(log_ratio(logits).sum(1))), TRUE_KL)


def test_k2_token_by_token_leaves_out_what_a_word_does_to_the_divergence_after_it() -> None:
    found = expected(lambda logits: k2(log_ratio(logits)).sum(1))
    after = k1(log_ratio(LOGITS))[:, 1]  # of the second word
    assert same(found + expected(lambda logits: after * tokens(logits)[:, 0]), TRUE_KL)
    assert same(found[1:], TRUE_KL[1:])
    assert not torch.allclose(found[0], TRUE_KL[0], atol=1e-3)


def test_k3_as_a_loss_has_the_gradient_of_the_other_direction() -> None:
    found = expected(lambda logits: k3(log_ratio(logits).sum(1)))
    assert same(found, REVERSE_KL)
    assert not torch.allclose(found, TRUE_KL, atol=1e-2)


def test_the_values_of_k1_and_k3_are_unbiased_and_that_of_k2_is_not() -> None:
    chance = tokens(LOGITS).sum(1).exp()
    values = {k: (chance * k(log_ratio(LOGITS).sum(1))).sum() for k in (k1, k2, k3)}
    true = divergence(LOGITS, REFERENCE)
    assert torch.allclose(values[k1], true)
    assert torch.allclose(values[k3], true)
    assert not torch.allclose(values[k2], true, rtol=1e-2)


def test_a_stale_samplers_ratio_makes_the_k2_loss_that_of_the_policy() -> None:
    sampler = LOGITS + 0.3 * keyed(6, 1 + V, V)

    def per_outcome(logits: torch.Tensor, weigh: bool) -> torch.Tensor:
        mine = tokens(logits).sum(1)
        weight = (mine.detach() - tokens(sampler).sum(1)).exp() if weigh else torch.ones(V * V)
        there = tokens(REFERENCE).sum(1)
        return torch.stack([k2_loss(m, t, w, normaliser=1.0) for m, t, w in zip(mine, there, weight, strict=True)])

    assert same(expected(lambda logits: per_outcome(logits, True), sampler), TRUE_KL)
    assert not torch.allclose(expected(lambda logits: per_outcome(logits, False), sampler), TRUE_KL, atol=1e-3)


# what one token may weigh


@pytest.mark.parametrize("loss", [ppo_loss, cispo_loss])
def test_no_tokens_weight_passes_the_cap_however_far_the_policy_has_moved(loss: Callable[..., object]) -> None:
    ratio = torch.logspace(-4, 60, 200, dtype=torch.float64)
    for advantage in (-2.0, 2.0):
        sampler = torch.full_like(ratio, -1.0)
        now = (sampler + ratio.log()).requires_grad_()
        done = loss(now, sampler, torch.full_like(ratio, advantage), normaliser=1.0, cap=3.0)
        (found,) = torch.autograd.grad(done.loss, now)  # type: ignore[attr-defined]
        assert (found.abs() <= 3.0 * abs(advantage) * (1 + 1e-12)).all(), "of a log-probability: ratio times advantage"


def test_beyond_the_cap_a_negative_advantage_is_ppos_dual_clip() -> None:
    sampler, advantages = keyed(3, 400) * 0.3 - 1.0, keyed(4, 400)
    now = (sampler + 1.5 * keyed(5, 400)).requires_grad_()
    ratio = (now - sampler).exp()
    clipped = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    dual = torch.where(advantages < 0, torch.maximum(clipped, 3.0 * advantages), clipped)  # arXiv 1912.09729, eq. 5
    found = ppo_loss(now, sampler, advantages, normaliser=1.0, cap=3.0).loss
    assert ((ratio > 3.0) & (advantages < 0)).any()
    assert torch.allclose(found, -dual.sum())
    assert same(*(torch.autograd.grad(one, now, retain_graph=True)[0] for one in (found, -dual.sum())))


def test_a_ratio_that_overflows_float32_teaches_nothing_and_spoils_nothing() -> None:
    now = torch.tensor([-0.1, -0.2, -0.3], requires_grad=True)
    sampler, advantages = torch.tensor([-200.0, -200.0, -0.3]), torch.tensor([1.0, -1.0, 1.0])
    done = ppo_loss(now, sampler, advantages, normaliser=1.0)
    done.loss.backward()
    assert now.grad is not None
    assert now.grad.tolist() == [0.0, 0.0, -1.0]
    assert done.ratio_R.isinf().tolist() == [True, True, False]
