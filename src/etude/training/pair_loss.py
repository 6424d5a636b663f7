"""Computes the loss of direct preference optimisation (DPO) over pairs of rollouts, in two passes.

The loss of a pair is −log σ(β m) with the margin m = h(better) − h(worse). The log-ratio h of a rollout is
Σ (log π − log π_ref) over its tokens with loss (Rafailov et al. 2023, arXiv 2305.18290, eq. 7). These tokens may be in
several paths, forward passes and ranks, but the gradient depends on all of them through m only:

    ∇ −log σ(β m) = −β σ(−β m) (Σ ∇log π of the better rollout − Σ ∇log π of the worse one)

The first pass computes h of each rollout, without gradient. The pairs then give each rollout a weight. The second pass
is a token loss with these weights. Its gradient is exactly that of the loss of the pairs.

With `DpoReference.START` the reference is the starting checkpoint, fixed for the run. The probabilities of the sampler
are then not in the loss, so stale samples need no importance weights: lag only changes which pairs there are. This is
DPO on samples of the policy itself (Guo et al. 2024, arXiv 2402.04792).

With `SAMPLER` the reference of each token is the version that sampled it. This is similar to iterated DPO, whose
reference is the policy of the last iteration (Pang et al. 2024, arXiv 2404.19733). On fresh samples all margins are 0.
A step is then a policy gradient with wins minus losses as advantage, and nothing bounds the distance to the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch.nn.functional import logsigmoid

from etude.records import Sample
from etude.records.sample import StepReport
from etude.training.losses import PolicyLoss


@dataclass(frozen=True)
class PairLoss:
    """The DPO loss of a batch, a mean over its pairs, and the weight of each rollout in its gradient.

    `weights`: rollout id → the negative derivative of `loss` with respect to the sum of the rollout's
    log-probabilities. `accuracy`: the share of pairs in which the better rollout has the higher log-ratio to the
    reference; equal ones count half. `margin`: the mean of beta times the difference of these log-ratios. Both are None
    without pairs."""

    loss: float
    weights: Mapping[str, float]
    num_pairs: int
    accuracy: float | None
    margin: float | None

    def weighted(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return copies of the samples in which each advantage is the rollout's weight; 0.0 for one without a pair."""
        return [
            msgspec.structs.replace(
                sample, advantages=np.full_like(sample.advantages, self.weights.get(sample.rollout_id, 0.0))
            )
            for sample in samples
        ]

    def added_to(self, report: StepReport) -> StepReport:
        """Return a copy of `report` (metrics of the second pass) with the loss and the metrics of the pairs added."""
        return msgspec.structs.replace(
            report,
            loss=report.loss + self.loss,
            num_pairs=self.num_pairs,
            pair_accuracy=self.accuracy,
            pair_margin=self.margin,
        )


def pair_loss(pairs: Sequence[tuple[str, str]], log_ratios: Mapping[str, float], *, beta: float) -> PairLoss:
    """Compute the DPO loss of pairs (better, worse) of rollout ids.

    `log_ratios`: by rollout id, Σ (log π − log π_ref) over its tokens with loss, in nats. It must contain every rollout
    of the pairs. The computation is in float64.

    >>> found = pair_loss([("a", "b")], {"a": 1.0, "b": 1.0}, beta=0.1)
    >>> round(found.loss, 4), found.weights, found.accuracy
    (0.6931, {'a': 0.05, 'b': -0.05}, 0.5)
    """
    if not pairs:
        return PairLoss(0.0, {}, 0, None, None)
    number = {rollout_id: i for i, rollout_id in enumerate(log_ratios)}
    better, worse = torch.tensor([[number[one], number[other]] for one, other in pairs]).T
    log_ratio = torch.tensor(list(log_ratios.values()), dtype=torch.float64)
    margin = beta * (log_ratio[better] - log_ratio[worse])
    share = beta * torch.sigmoid(-margin) / len(pairs)
    weight = torch.zeros_like(log_ratio).index_add_(0, better, share).index_add_(0, worse, -share)
    return PairLoss(
        loss=-float(logsigmoid(margin).mean()),
        weights=dict(zip(number, weight.tolist(), strict=True)),
        num_pairs=len(pairs),
        accuracy=float((margin.sign().mean() + 1) / 2),
        margin=float(margin.mean()),
    )


def weighted_tokens_loss(
    logprobs_R: torch.Tensor, sampler_logprobs_R: torch.Tensor, weight_R: torch.Tensor
) -> PolicyLoss:
    """Compute the loss of the second pass. Its gradient is −Σ weight · ∇log π. Its value is 0: use `PairLoss.loss`.

    Shapes: R rows, one per sampled token. Ratios are not clipped, since the weight of a pair is at most beta."""
    now = logprobs_R.detach()
    ratio = (now - sampler_logprobs_R).exp()
    loss = -(weight_R * (logprobs_R - now)).sum()
    return PolicyLoss(loss=loss, ratio_R=ratio, clipped_R=torch.zeros_like(ratio, dtype=torch.bool))
