"""The smallest model of each family."""

from __future__ import annotations

from dataclasses import replace

from etude.models import ModelConfig
from etude.models.components import ClampedSwiglu, GatedDelta, Indexer, Latent, Llama3, Routing, Scores, Yarn

MOE = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, expert_size=12,
    num_experts=4, top_k=2, context_tokens=64, dense_layers=(0,), routing=Routing(normalise=False),
)  # fmt: skip
DENSE = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, dense_size=20,
    num_experts=0, top_k=0, context_tokens=64, family="qwen3", yarn=Yarn(original_tokens=16), tie_embeddings=True,
)  # fmt: skip
DEEPSEEK = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=12, expert_size=12,
    num_experts=6, top_k=2, context_tokens=64, family="deepseek_v3", dense_layers=(0,), dense_size=20,
    num_shared=1, routing=Routing(Scores.SIGMOID, scaling=2.5, num_groups=3, top_groups=2),
    latent=Latent(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6, q_rank=10),
    yarn=Yarn(original_tokens=16, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
OLMOE = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, expert_size=12,
    num_experts=4, top_k=2, context_tokens=64, family="olmoe", routing=Routing(normalise=False), rms_eps=1e-5,
)  # fmt: skip
MIXTRAL = ModelConfig(
    vocab_size=24, hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, expert_size=12,
    num_experts=4, top_k=2, context_tokens=64, family="mixtral", rms_eps=1e-5,
)  # fmt: skip
LLAMA = replace(
    DENSE, family="llama", yarn=None, tie_embeddings=False,
    llama3=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_tokens=16),
)  # fmt: skip
QWEN2 = replace(DENSE, family="qwen2", yarn=None)
GLM = replace(
    MOE, family="glm4_moe", num_experts=6, dense_size=20, num_shared=1, attention_bias=True, rotary_dim=4,
    rms_eps=1e-5, routing=Routing(Scores.SIGMOID, scaling=2.5),
)  # fmt: skip
MINIMAX = replace(
    MOE, family="minimax_m2", dense_layers=(), num_experts=6, rotary_dim=4, routing=Routing(Scores.SIGMOID),
)  # fmt: skip
GPT_OSS = replace(
    MOE, family="gpt_oss", dense_layers=(), num_experts=6, attention_bias=True, sliding_layers=(0,), sliding_window=6,
    routing=Routing(), swiglu=ClampedSwiglu(limit=0.5), yarn=Yarn(original_tokens=16, truncate=False), rms_eps=1e-5,
)  # fmt: skip
NEXT = replace(
    MOE, family="qwen3_next", num_layers=3, num_shared=1, rotary_dim=4, linear_layers=(0, 2),
    linear=GatedDelta(key_heads=2, value_heads=4, key_dim=11, value_dim=7, kernel=3),
)  # fmt: skip
QWEN35 = replace(
    NEXT, family="qwen3_5_moe_text", dense_layers=(), routing=Routing(),
    linear=GatedDelta(key_heads=2, value_heads=2, key_dim=11, value_dim=7, kernel=4, by_head=False),
)  # fmt: skip
DEEPSEEK32 = replace(
    DEEPSEEK, family="deepseek_v32",
    latent=Latent(
        kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6, q_rank=10, indexer=Indexer(heads=3, width=6, top_k=64)
    ),
)  # fmt: skip
FAMILIES = {
    "qwen3-moe": MOE, "qwen3": DENSE, "deepseek-v3": DEEPSEEK, "olmoe": OLMOE, "mixtral": MIXTRAL,
    "glm4-moe": GLM, "minimax-m2": MINIMAX, "llama": LLAMA, "qwen2": QWEN2,
    "gpt-oss": GPT_OSS, "qwen3-next": NEXT, "qwen3.5-moe": QWEN35,
    "deepseek-v3.2": DEEPSEEK32,
}  # fmt: skip
