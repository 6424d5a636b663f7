"""Models that several tests of plans use."""

from __future__ import annotations

from etude.models.config import ModelConfig

QWEN = ModelConfig(  # Qwen3-30B-A3B as its maker describes it: 30.5B parameters, 3.3B active
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    expert_size=768,
    num_experts=128,
    top_k=8,
    context_tokens=32768,
)
