"""OLMoE (arXiv 2409.02060): queries and keys normalised over all heads, a softmax router in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import QkNorm
from etude.models.config import FIXED, MOE, WIDTH, ModelConfig, ModelFamily


class Olmoe(ModelFamily):
    """OLMoE (arXiv 2409.02060)."""

    model_type = "olmoe"
    hf_class = "OlmoeForCausalLM"
    sizes = {**MOE, "expert_size": WIDTH}
    fixed = {**FIXED, "clip_qkv": (None, None)}
    defaults = {"rms_norm_eps": 1e-5}
    varies = "norm_topk_prob, tie_word_embeddings"
    qk_norm = QkNorm.WIDTH

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if raw.get("num_key_value_heads") is None:
            raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
        return super().read(raw)

    def check(self, c: ModelConfig) -> None:
        super().check(c)
        self.check_routers(c)
        if c.num_heads * c.head_dim != c.hidden_size:
            raise ValueError(f"num_heads · head_dim = {c.num_heads * c.head_dim}, but hidden_size = {c.hidden_size}")
