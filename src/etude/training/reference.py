"""The reference policy: a frozen model to which a KL penalty, in the reward or in the loss, compares the policy.

It chooses experts with its own routers, since routes that the policy recorded have no meaning in another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from etude import progress
from etude.models.checkpoint import load_model
from etude.models.lora import round_parameters
from etude.numerics.operators import Operators
from etude.records import Sample
from etude.training.config import LiveWeights
from etude.training.flat_batch import FlatBatch, flatten_samples, microbatches


class Reference:
    """The reference policy: the frozen model of a checkpoint, at the sampling temperature of rollouts.

    `operators`: the operators of the policy (None: exact, in float32). `weights`: the precision of the policy's live
    weights. Weights of the checkpoint are rounded to it, so that the reference equals the policy of step 0 bit for bit.
    `budget_tokens`: tokens of one forward pass in `k1`.

    Raises `CheckpointError` when the checkpoint cannot be loaded."""

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        temperature: float = 1.0,
        operators: Operators | None = None,
        weights: LiveWeights = LiveWeights.F32,
        budget_tokens: int = 8192,
        device: torch.device | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._model = load_model(checkpoint, operators=operators).eval().to(self._device)
        if weights is LiveWeights.BF16:
            with torch.no_grad():
                round_parameters(self._model, torch.bfloat16)
        self._temperature, self._budget_tokens = temperature, budget_tokens

    @torch.no_grad()
    def logprobs(self, rows: FlatBatch) -> torch.Tensor:
        """Return the log-probability of each sampled token, float32 [R], on the device of the rows."""
        logits, _ = self._model(rows.tokens_N, rows.cache(self._model.operators), rows=rows.rows_R)
        logprobs_RV = self._model.operators.log_softmax(logits, rows.temperature(self._temperature))
        return logprobs_RV.gather(1, rows.targets_R[:, None])[:, 0]

    def k1(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the k1 estimate of each rollout by id: Σ log π − log π_ref over its sampled tokens.

        π is the probability that the sampler recorded."""
        sums = {sample.rollout_id: 0.0 for sample in samples}
        for some in microbatches(samples, budget_tokens=self._budget_tokens):
            rows = flatten_samples(some).to(self._device)
            k1_R = (rows.sampler_logprobs_R - self.logprobs(rows)).double().cpu()
            per_sample = torch.zeros(len(some), dtype=torch.float64).index_add_(0, rows.sample_R.cpu(), k1_R)
            for sample, total in zip(some, per_sample.tolist(), strict=True):
                sums[sample.rollout_id] += total
            progress.tick()
        return sums
