"""MiniMax-M2: queries and keys normalised over all heads, partial RoPE, sigmoid routers with a selection bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import QkNorm, Scores
from etude.models.config import FIXED, MOE, WIDTH, ModelConfig, ModelFamily
from etude.models.config_json import positive_int, rotary_dim


class MinimaxM2(ModelFamily):
    """MiniMax-M2."""

    model_type = "minimax_m2"
    hf_class = "MiniMaxM2ForCausalLM"
    sizes = {**MOE, "expert_size": WIDTH, "num_experts": "num_local_experts"}
    fixed = {
        **FIXED,
        "scoring_func": ("sigmoid", "sigmoid"),
        "use_routing_bias": (True, True),
        "use_qk_norm": (True, True),
        "qk_norm_type": ("per_layer", "per_layer"),
        "shared_intermediate_size": (0, 0),
        "sliding_window": (None, None),
        "router_jitter_noise": (0.0, 0.0),
    }
    each = {"attn_type_list": 1}  # 1: full attention
    defaults = {"rope_theta": 5e6}
    options = frozenset({"rotary_dim"})
    varies = "rotary_dim, tie_word_embeddings"
    qk_norm = QkNorm.WIDTH
    scores = Scores.SIGMOID
    renamed = {
        ".mlp.gate.e_score_": ".block_sparse_moe.e_score_",
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".down_proj.": ".w2.",
        ".up_proj.": ".w3.",
    }

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read({**raw, "norm_topk_prob": True})
        width = found["head_dim"]
        whole = 1.0 if raw.get("rotary_dim") is None else positive_int(raw, "rotary_dim") / width
        return {**found, "rotary_dim": rotary_dim(raw, width, default=whole)}

    def write(self, c: ModelConfig) -> dict[str, Any]:
        found = {key: value for key, value in super().write(c).items() if key != "norm_topk_prob"}
        return {**found, "rotary_dim": c.rope_dim}

    def check(self, c: ModelConfig) -> None:
        super().check(c)
        self.check_routers(c)
        if not c.routing.normalise:
            raise ValueError(f"routing.normalise = false, but in family {self.name!r} gates sum to 1")
