"""Direct preference optimisation (DPO) of pairs of rollouts, in two passes.

The loss of a pair is −log σ(β m), with the margin m = h(better) − h(worse), where h = Σ log π − log π_ref over all
tokens with loss of a rollout (Rafailov et al. 2023, arXiv 2305.18290, eq. 7). The tokens of a pair are in several
paths, forward passes and ranks. Its gradient needs only one number from all of them:

    ∇ −log σ(β m) = −β σ(−β m) (Σ ∇log π of the better rollout − Σ ∇log π of the worse one)

The first pass, without gradient, computes h of each rollout. Then the pairs give each rollout a weight, and the second
pass is a plain token loss with these weights. This is the gradient of the pairs, not an approximation.

The reference of `DpoReference.START` is fixed. Then no probability of the sampler is in the loss, and stale samples
need no importance weights: lag only decides which pairs there are. This is DPO on samples of the policy itself (Guo et
al. 2024, arXiv 2402.04792). With `SAMPLER` the reference of each token is the version that sampled it, as where DPO is
repeated with the last policy as reference (Pang et al. 2024, arXiv 2404.19733). On fresh samples all margins are 0, so
each step is a policy gradient with wins minus losses as advantage, and nothing bounds the distance to the start."""

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
    """The DPO loss of a batch: the mean over its pairs, and how it depends on each rollout.

    `weights`: by rollout id, minus the derivative of `loss` by the sum of the rollout's log-probabilities. `accuracy`,
    `margin`: as in `StepReport`; None without pairs."""

    loss: float
    weights: Mapping[str, float]
    num_pairs: int
    accuracy: float | None
    margin: float | None

    def weighted(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the weights of their rollouts as advantages."""
        return [
            msgspec.structs.replace(
                sample, advantages=np.full_like(sample.advantages, self.weights.get(sample.rollout_id, 0.0))
            )
            for sample in samples
        ]

    def added_to(self, report: StepReport) -> StepReport:
        """Return the report of the second pass with the loss and the metrics of the pairs."""
        return msgspec.structs.replace(
            report,
            loss=report.loss + self.loss,
            num_pairs=self.num_pairs,
            pair_accuracy=self.accuracy,
            pair_margin=self.margin,
        )


def pair_loss(pairs: Sequence[tuple[str, str]], log_ratios: Mapping[str, float], *, beta: float) -> PairLoss:
    """Compute the DPO loss of pairs (better, worse) of rollout ids.

    `log_ratios`: by rollout id, log π − log π_ref in nats, summed over the tokens with loss. Computed in float64.

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
    """Compute the loss of the second pass: its gradient is −Σ weight · ∇log π, and its value 0.

    The value of the loss is `PairLoss.loss`. Shapes: R rows, one per sampled token. Nothing is clipped: a pair weighs
    at most beta."""
    now = logprobs_R.detach()
    ratio = (now - sampler_logprobs_R).exp()
    loss = -(weight_R * (logprobs_R - now)).sum()
    return PolicyLoss(loss=loss, ratio_R=ratio, clipped_R=torch.zeros_like(ratio, dtype=torch.bool))
