"""Mixtral (arXiv 2401.04088): grouped-query attention without norms, gates that sum to 1, other names of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import QkNorm
from etude.models.config import FIXED, MOE, WIDTH, ModelConfig, ModelFamily


class Mixtral(ModelFamily):
    """Mixtral (arXiv 2401.04088)."""

    model_type = "mixtral"
    hf_class = "MixtralForCausalLM"
    sizes = {**MOE, "expert_size": WIDTH, "num_experts": "num_local_experts"}
    fixed = {**FIXED, "sliding_window": (None, None), "router_jitter_noise": (0.0, 0.0)}
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    varies = "tie_word_embeddings"
    qk_norm = QkNorm.NONE
    renamed = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        return super().read({**raw, "norm_topk_prob": True})

    def write(self, c: ModelConfig) -> dict[str, Any]:
        return {key: value for key, value in super().write(c).items() if key != "norm_topk_prob"}

    def check(self, c: ModelConfig) -> None:
        super().check(c)
        self.check_routers(c)
        if not c.routing.normalise:
            raise ValueError(f"routing.normalise = false, but in family {self.name!r} gates sum to 1")
