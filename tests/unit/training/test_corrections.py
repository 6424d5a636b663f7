"""Corrections on synthetic mismatch: a sampler whose logits are the learner's and noise. Small vocabularies, so that
every expectation is a sum; one Monte Carlo run shows that the sums are of what is sampled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from etude.training.config import CorrectionKind, LearnerConfig
from etude.training.corrections import (
    Corrected,
    correct,
    decoupled,
    effective_share,
    masked,
    masked_sequences,
    truncated,
    truncated_sequences,
)
from etude.training.losses import cispo_loss, ppo_loss

V, CAP, LOW, HIGH = 12, 1.5, 0.8, 1.8


def keyed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LEARNER = keyed(0, V).softmax(-1)  # p
SAMPLER = (keyed(0, V) + 0.7 * keyed(1, V)).softmax(-1)  # q
VALUE = keyed(2, V)  # of what is sampled: an advantage times a gradient
RATIO = LEARNER / SAMPLER
TRUTH = (LEARNER * VALUE).sum()

CUT: dict[str, Callable[[torch.Tensor], Corrected]] = {
    "truncated": lambda log_ratio: truncated(log_ratio, cap=CAP),
    "masked": lambda log_ratio: masked(log_ratio, low=LOW, high=HIGH),
    "uncut": lambda log_ratio: truncated(log_ratio, cap=float("inf")),
}
BIAS = {
    "truncated": -((LEARNER - CAP * SAMPLER).clamp(min=0) * VALUE).sum(),
    "masked": -(LEARNER * VALUE * ((RATIO < LOW) | (RATIO > HIGH))).sum(),
    "uncut": torch.zeros((), dtype=torch.float64),
}


def mean_and_variance(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of weight times value, over what the sampler samples."""
    mean = (SAMPLER * weight * VALUE).sum()
    return mean, (SAMPLER * (weight * VALUE - mean).square()).sum()


def test_the_mismatch_is_one_that_every_correction_feels() -> None:
    assert 0 < int((RATIO > CAP).sum()) < V
    assert int((RATIO > HIGH).sum()) > 0
    assert int((RATIO < LOW).sum()) > 0


@pytest.mark.parametrize("name", CUT)
def test_the_bias_is_its_closed_form(name: str) -> None:
    mean, _ = mean_and_variance(CUT[name](RATIO.log()).weight_R)
    assert torch.allclose(mean - TRUTH, BIAS[name], atol=1e-12)


@pytest.mark.parametrize("name", CUT)
def test_what_is_sampled_has_that_mean_and_that_variance(name: str) -> None:
    number = 40_000
    drawn = torch.multinomial(SAMPLER, number, replacement=True, generator=torch.Generator().manual_seed(3))
    terms = CUT[name](RATIO.log()[drawn]).weight_R * VALUE[drawn]
    mean, variance = mean_and_variance(CUT[name](RATIO.log()).weight_R)
    fourth = (SAMPLER * (CUT[name](RATIO.log()).weight_R * VALUE - mean).pow(4)).sum()
    assert abs(terms.mean() - mean) < 4 * (variance / number).sqrt()
    assert abs(terms.var() - variance) < 4 * ((fourth - variance.square()) / number).sqrt()


def test_without_weights_the_sampler_is_trained_and_with_them_the_learner() -> None:
    plain = (SAMPLER * VALUE).sum()
    assert abs(plain - TRUTH) > 0.05
    assert torch.allclose(mean_and_variance(RATIO)[0], TRUTH)


def test_cutting_only_ever_lowers_the_second_moment() -> None:
    moments = {name: float((SAMPLER * (cut(RATIO.log()).weight_R * VALUE).square()).sum()) for name, cut in CUT.items()}
    assert moments["truncated"] < moments["uncut"]
    assert moments["masked"] < moments["uncut"]


# sequences: three tokens each, every token's distribution depending on the one before

T, WORDS = 3, 4
P, Q = keyed(4, WORDS, WORDS).softmax(-1), (keyed(4, WORDS, WORDS) + 0.3 * keyed(5, WORDS, WORDS)).softmax(-1)
ALL = list(itertools.product(range(WORDS), repeat=T))
STEPS = torch.tensor([[(0, *s)[t] * WORDS + s[t] for t in range(T)] for s in ALL])  # into a flat P or Q
LOG_P, LOG_Q = P.log().flatten()[STEPS], Q.log().flatten()[STEPS]  # [sequences, T]
PROBABILITY_Q = LOG_Q.sum(1).exp()
REWARD = keyed(6, len(ALL))  # of the whole sequence
OF = torch.arange(len(ALL)).repeat_interleave(T)


def per_token(corrected: Corrected) -> torch.Tensor:
    """[sequences, T]: what each token weighs in the expected gradient, times the reward."""
    return PROBABILITY_Q[:, None] * corrected.weight_R.view(-1, T) * REWARD[:, None]


def gradient(weights: torch.Tensor) -> torch.Tensor:
    """Σ weights · ∇ log p over tokens, with respect to the learner's logits."""
    logits = keyed(4, WORDS, WORDS).requires_grad_()
    (weights.detach() * logits.log_softmax(-1).flatten()[STEPS]).sum().backward()
    assert logits.grad is not None
    return logits.grad


def true_gradient() -> torch.Tensor:
    logits = keyed(4, WORDS, WORDS).requires_grad_()
    (logits.log_softmax(-1).flatten()[STEPS].sum(1).exp() * REWARD).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_weights_of_sequences_are_unbiased_for_a_reward_of_sequences_and_those_of_tokens_are_not() -> None:
    log_ratio = (LOG_P - LOG_Q).flatten()
    whole = gradient(per_token(truncated_sequences(log_ratio, OF, cap=float("inf"))))
    single = gradient(per_token(truncated(log_ratio, cap=float("inf"))))
    assert torch.allclose(whole, true_gradient(), atol=1e-12)
    assert (single - true_gradient()).norm() > 0.01 * true_gradient().norm()


def test_a_cut_sequence_is_biased_by_what_was_cut_off() -> None:
    log_ratio = (LOG_P - LOG_Q).flatten()
    cut = truncated_sequences(log_ratio, OF, cap=1.2)
    missing = per_token(Corrected(cut.uncut_R - cut.weight_R, cut.uncut_R))
    assert (missing != 0).any()
    assert torch.allclose(gradient(per_token(cut)) + gradient(missing), true_gradient(), atol=1e-12)


def test_the_variance_of_whole_weights_is_the_product_of_the_tokens_chi_squares() -> None:
    length, ratio = 5, RATIO.repeat(1)
    second = (SAMPLER * ratio.square()).sum()  # 1 + χ²
    sequences = torch.tensor(list(itertools.product(range(3), repeat=length)))
    q = SAMPLER[:3] / SAMPLER[:3].sum()
    r = LEARNER[:3] / LEARNER[:3].sum() / q
    of = torch.arange(len(sequences)).repeat_interleave(length)
    weight = truncated_sequences(r.log()[sequences].flatten(), of, cap=float("inf")).weight_R.view(-1, length)[:, 0]
    moment = (q[sequences].prod(1) * weight.square()).sum()
    assert torch.allclose(moment, (q * r.square()).sum() ** length)
    assert second > 1


def test_a_sequence_is_masked_by_its_geometric_mean_however_long_it_is() -> None:
    drift = torch.tensor(0.02, dtype=torch.float64)
    for length in (2, 50, 1000):
        log_ratio = torch.cat([drift.expand(length), torch.zeros(3, dtype=torch.float64)])
        of = torch.tensor([0] * length + [1] * 3)
        kept = masked_sequences(log_ratio, of, low=0.99, high=1.01).weight_R != 0
        assert kept.tolist() == [False] * length + [True] * 3
        assert (masked_sequences(log_ratio, of, low=0.97, high=1.03).weight_R != 0).all()


def test_the_worst_token_vetoes_its_sequence_and_no_other() -> None:
    ratio = torch.tensor([1.0] * 9 + [1e-5] + [1.0] * 3)
    of = torch.tensor([0] * 10 + [1] * 3)
    assert masked_sequences(ratio.log(), of, low=0.1, high=10).weight_R.tolist() == [0.0] * 10 + [1.0] * 3
    assert masked_sequences(ratio.log(), of, low=0.1, high=10, veto=1e-6).weight_R[:9].tolist() == [1.0] * 9


def test_an_endless_ratio_is_cut_or_masked_and_never_a_nan() -> None:
    log_ratio, of = torch.tensor([500.0, -500.0]), torch.tensor([0, 1])
    for kind in [kind for kind in CorrectionKind if kind is not CorrectionKind.NONE]:
        low, high = LearnerConfig(correction=kind).correction_bounds
        weight = correct(kind, log_ratio, of, low=low, high=high).weight_R
        assert torch.isfinite(weight).all(), kind
        assert weight.max() <= high


def test_every_correction_gives_weight_1_for_equal_probabilities() -> None:
    for kind in CorrectionKind:
        low, high = LearnerConfig(correction=kind).correction_bounds
        assert (
            correct(kind, torch.zeros(4), torch.tensor([0, 0, 1, 1]), low=low, high=high).weight_R.tolist() == [1] * 4
        )


# together with a policy loss


def gradient_of(loss: str, own: bool, kind: CorrectionKind, advantage: float) -> torch.Tensor:
    """The gradient of each token's loss in its log-probability, where learner and sampler are LEARNER and SAMPLER."""
    logprobs, sampler = LEARNER.log().requires_grad_(), SAMPLER.log()
    low, high = LearnerConfig(correction=kind).correction_bounds
    weight = correct(kind, (LEARNER / SAMPLER).log(), torch.arange(V), low=low, high=high).weight_R
    anchor, factor = decoupled(weight, logprobs, sampler, torch.full((V,), own))
    policy = {"ppo": ppo_loss, "cispo": cispo_loss}[loss]
    policy(logprobs, anchor, advantage * factor, normaliser=1.0).loss.backward()
    assert logprobs.grad is not None
    return -logprobs.grad


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("kind", [kind for kind in CorrectionKind if kind is not CorrectionKind.NONE])
def test_where_all_of_the_ratio_is_mismatch_a_token_weighs_its_corrected_weight_and_is_never_clipped(
    loss: str, kind: CorrectionKind
) -> None:
    low, high = LearnerConfig(correction=kind).correction_bounds
    weight = correct(kind, RATIO.log(), torch.arange(V), low=low, high=high).weight_R
    for advantage in (1.0, -2.0):
        assert torch.allclose(gradient_of(loss, True, kind, advantage), advantage * weight)


def test_of_a_stale_token_the_loss_clips_the_whole_ratio_and_the_correction_cuts_what_it_leaves() -> None:
    kind = CorrectionKind.TRUNCATED
    up, down = gradient_of("ppo", False, kind, 1.0), gradient_of("ppo", False, kind, -1.0)
    assert torch.allclose(up, torch.where(RATIO > 1.28, 0.0, RATIO))
    assert torch.allclose(down, -torch.where((RATIO < 0.8) | (RATIO > 3.0), 0.0, RATIO.clamp(max=2.0)))
    assert (RATIO > 2.0).any()


def test_a_masked_tokens_ratio_may_be_infinite() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    sampler = torch.tensor([-1.0, -500.0])
    weight = masked(logprobs.detach() - sampler, low=0.5, high=5.0).weight_R
    anchor, factor = decoupled(weight, logprobs, sampler, torch.tensor([False, False]))
    ppo_loss(logprobs, anchor, -factor, normaliser=1.0).loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [1.0, 0.0]


def test_the_effective_share_of_ratios_is_one_over_one_plus_chi_square() -> None:
    drawn = torch.multinomial(SAMPLER, 40_000, replacement=True, generator=torch.Generator().manual_seed(7))
    expected = 1 / (SAMPLER * RATIO.square()).sum()
    assert effective_share(RATIO[drawn]) == pytest.approx(float(expected), rel=0.02)
    assert effective_share(torch.zeros(3)) == 0.0


def test_bounds_are_the_corrections_own_unless_given() -> None:
    config = LearnerConfig(correction=CorrectionKind.MASKED)
    assert config.correction_bounds == (0.5, 5.0)
    assert replace(config, correction_low=0.9).correction_bounds == (0.9, 5.0)


@pytest.mark.parametrize("kind", [kind for kind in CorrectionKind if kind is not CorrectionKind.NONE])
def test_no_token_of_a_long_sequence_weighs_more_than_the_corrections_cap(kind: CorrectionKind) -> None:
    """Of 2000 tokens that agree but for one: its ratio is 20,000, and the sequence's geometric mean is 1.005."""
    log_ratio = torch.zeros(2000, dtype=torch.float64)
    log_ratio[7] = 9.9
    low, high = LearnerConfig(correction=kind).correction_bounds
    corrected = correct(kind, log_ratio, torch.zeros(2000, dtype=torch.int64), low=low, high=high)
    assert float(corrected.weight_R.max()) <= max(2.0, high)
