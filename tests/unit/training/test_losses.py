"""Losses against closed forms and finite differences."""

from __future__ import annotations

import pytest
import torch

from etude.training.losses import cispo_loss, entropy, k1, k3, ppo_loss

SAMPLER = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=torch.float64))


def loss_of(logprobs: torch.Tensor, advantages: list[float]) -> torch.Tensor:
    return ppo_loss(logprobs, SAMPLER, torch.tensor(advantages, dtype=torch.float64), normaliser=8).loss


def test_on_policy_the_gradient_is_reinforce_over_the_constant_normaliser() -> None:
    logprobs = SAMPLER.clone().requires_grad_()
    loss_of(logprobs, [1.0, -2.0, 0.5, 0.0]).backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64) / 8)


def test_a_clipped_ratio_has_no_gradient_where_it_would_go_further() -> None:
    logprobs = torch.log(torch.tensor([0.7, 0.7, 0.3, 0.3], dtype=torch.float64)).requires_grad_()  # r = 1.4, 0.6
    loss_of(logprobs, [1.0, -1.0, 1.0, -1.0]).backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [False, True, True, False]


def test_cispo_is_ppo_on_policy() -> None:
    grads = []
    for loss in (ppo_loss, cispo_loss):
        logprobs = SAMPLER.clone().requires_grad_()
        loss(logprobs, SAMPLER, torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64), normaliser=8).loss.backward()
        grads.append(logprobs.grad)
    assert torch.equal(grads[0], grads[1])


def test_cispo_weights_every_token_by_its_ratio_up_to_the_cap() -> None:
    ratios = torch.tensor([0.1, 1.4, 1.9, 1.9], dtype=torch.float64)
    logprobs = (SAMPLER + ratios.log()).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -2.0], dtype=torch.float64)
    done = cispo_loss(logprobs, SAMPLER, advantages, normaliser=1, cap=1.5)
    done.loss.backward()
    assert logprobs.grad is not None
    assert torch.allclose(logprobs.grad, -torch.tensor([0.1, 1.4, 1.5, -3.0], dtype=torch.float64))
    assert done.clipped_R.tolist() == [False, False, True, True]


def test_the_upper_clip_is_higher_than_the_lower() -> None:
    ratios = torch.tensor([1.27, 1.29, 0.81, 0.79], dtype=torch.float64)
    clipped = ppo_loss(SAMPLER + ratios.log(), SAMPLER, torch.ones(4), normaliser=1).clipped_R
    assert clipped.tolist() == [False, True, False, True]


def test_the_gradient_matches_finite_differences() -> None:
    logprobs = torch.log(torch.tensor([0.55, 0.45, 0.61, 0.2], dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(x, [1.0, -1.0, 2.0, -0.5]), (logprobs,))


def test_both_estimators_are_unbiased_and_k3_is_never_negative() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # sampler
    q = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)  # trainer
    exact = (p * (p / q).log()).sum()
    log_ratio = (q / p).log()
    assert torch.allclose((p * k1(log_ratio)).sum(), exact)
    assert torch.allclose((p * k3(log_ratio)).sum(), exact)
    assert (k3(log_ratio) >= 0).all()


def test_k3_keeps_its_precision_for_tiny_ratios() -> None:
    log_ratio = torch.tensor([1e-6])
    assert k3(log_ratio).item() == pytest.approx(5e-13, rel=0.2)


def test_k1_as_a_loss_has_no_gradient_on_policy() -> None:
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.exp().detach() * k1(logprobs - logprobs.detach())).sum().backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.zeros(6, dtype=torch.float64), atol=1e-12)


def test_entropy_of_even_and_of_certain_rows() -> None:
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]).log()
    assert entropy(rows).tolist() == pytest.approx([1.3862944, 0.0])
