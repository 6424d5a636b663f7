"""KL in the reward: the reference is the starting checkpoint, and k1 is the sum of log-ratios."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.models import ModelConfig, Transformer, save_model
from etude.records import Sample
from etude.records.rollout import Path
from etude.training.reference import Reference

SIZES = ModelConfig(
    vocab_size=17,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    expert_size=16,
    num_experts=4,
    top_k=2,
    context_tokens=32,
)


def sample_of(model: Transformer, rollout_id: str, tokens: list[int], first: int, shift: float) -> Sample:
    """A path whose tokens from `first` on were sampled with the model's log-probabilities plus a shift each."""
    ids = np.array(tokens, np.int32)
    with torch.no_grad():
        logits, _ = model(torch.from_numpy(ids).long())
    logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
    mask = np.arange(len(ids)) >= first
    path = Path(
        token_ids=ids,
        mask=mask,
        logprobs=np.where(mask, np.concatenate([[0.0], logprobs]) + shift, 0.0).astype(np.float32),
        steps=np.where(mask, 0, -1).astype(np.int32),
        kv_epochs=np.zeros(len(ids), np.int32),
        routes=np.full((len(ids), 2, 2), 255, np.uint8),
    )
    return Sample.uniform(rollout_id, path, 0.0)


@pytest.mark.parametrize("budget_tokens", [4, 8192])
def test_k1_is_the_sum_of_log_ratios_over_sampled_tokens(tmp_path, budget_tokens):
    model = Transformer(SIZES, seed=1).eval()
    save_model(model, tmp_path / "mid", dtype="f32")
    samples = [
        sample_of(model, "g0.0", [1, 2, 3, 4, 5], 2, 0.0),
        sample_of(model, "g0.1", [1, 2, 3, 4], 1, 0.25),
        sample_of(model, "g0.2", [9, 8], 1, -0.5),
    ]
    found = Reference(tmp_path / "mid", budget_tokens=budget_tokens).k1(samples)
    assert found == pytest.approx({"g0.0": 0.0, "g0.1": 0.75, "g0.2": -0.5}, abs=1e-5)
