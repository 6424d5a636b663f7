"""GLM-4.5 to GLM-4.7: grouped-query attention with partial RoPE, routers and layers as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import Routing
from etude.models.config import FIXED, ModelConfig
from etude.models.config_json import boolean, head_dim, rotary_dim
from etude.models.families.deepseek_v3 import DeepseekV3


class Glm4Moe(DeepseekV3):
    """GLM-4.5 (arXiv 2508.06471)."""

    model_type = "glm4_moe"
    hf_class = "Glm4MoeForCausalLM"
    fixed = {"hidden_act": FIXED["hidden_act"]}
    defaults = {"rms_norm_eps": 1e-5}
    options = frozenset({"attention_bias", "qk_norm", "rotary_dim", "mtp_heads"})
    varies = (
        "attention_bias, use_qk_norm, partial_rotary_factor, norm_topk_prob, groups, routed_scaling_factor,"
        " shared experts, first_k_dense_replace, num_nextn_predict_layers, tie_word_embeddings"
    )
    no_external_engines = "was not tested with weights of this family"

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = self.read_layers(raw)
        width = head_dim(raw, found)
        return {
            **found,
            "head_dim": width,
            "attention_bias": boolean(raw, "attention_bias", default=False),
            "qk_norm": boolean(raw, "use_qk_norm", default=False),
            "rotary_dim": rotary_dim(raw, width, default=0.5),
        }

    def write(self, c: ModelConfig) -> dict[str, Any]:
        own = {"head_dim": c.head_dim, "attention_bias": c.attention_bias, "use_qk_norm": c.qk_norm}
        return {**self.write_layers(c), **own}

    def check(self, c: ModelConfig) -> None:
        self.check_layers(c)
        if c.latent is not None:
            raise ValueError(f"family = {self.name!r} has no latent attention: leave out `latent`")

    def tiny(self) -> ModelConfig:
        sizes = {**self.tiny_sizes, "expert_size": 12, "dense_size": 20, "num_experts": 6, "top_k": 2, "num_shared": 1}
        routing = Routing(self.scores, scaling=2.5)
        own: dict[str, Any] = {"dense_layers": (0,), "attention_bias": True, "rotary_dim": 4, "routing": routing}
        return ModelConfig(**sizes, **own, family=self.name)
