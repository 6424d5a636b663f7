"""gpt-oss (arXiv 2508.10925): sliding windows, attention sinks, biases everywhere, clamped SwiGLU, stacked experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import AttentionKind, ClampedSwiglu, GroupedQueries, QkNorm, Yarn
from etude.models.config import FIXED, MOE, WIDTH, ModelConfig, ModelFamily
from etude.models.config_json import boolean, positive_float, positive_int

FULL, SLIDING = "full_attention", "sliding_attention"


class GptOss(ModelFamily):
    """gpt-oss (arXiv 2508.10925)."""

    model_type = "gpt_oss"
    hf_class = "GptOssForCausalLM"
    sizes = {**MOE, "expert_size": WIDTH, "num_experts": "num_local_experts"}
    fixed = {"hidden_act": FIXED["hidden_act"]}
    each = {}
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1.5e5, "head_dim": 64, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    options = frozenset({"attention_bias", "sliding_window", "sliding_layers", "swiglu"})
    varies = "layer_types, sliding_window, attention_bias, swiglu_alpha, swiglu_limit, tie_word_embeddings"
    qk_norm = QkNorm.NONE
    expert_bias = True
    stacks_experts = True
    renamed = {".mlp.gate.": ".mlp.router."}

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read({**raw, "norm_topk_prob": True})
        usual = [FULL if i % 2 else SLIDING for i in range(found["num_layers"])]
        kinds = usual if raw.get("layer_types") is None else raw["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != len(usual) or not all(k in (FULL, SLIDING) for k in kinds):
            raise ValueError(f"layer_types = {kinds!r:.80}, expected {FULL!r} or {SLIDING!r} for each layer")
        layers = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
        alpha, limit = (positive_float(raw[key], key) for key in ("swiglu_alpha", "swiglu_limit"))
        yarn = Yarn(factor=32.0, truncate=False)
        return {
            **found,
            **({} if raw.get("rope_scaling") or raw.get("rope_parameters") else {"yarn": yarn}),
            "attention_bias": boolean(raw, "attention_bias", default=True),
            "sliding_layers": layers,
            "sliding_window": positive_int(raw, "sliding_window", default=128) if layers else 0,
            "swiglu": ClampedSwiglu(alpha, limit),
        }

    def write(self, c: ModelConfig) -> dict[str, Any]:
        assert c.swiglu is not None
        return {
            **{key: value for key, value in super().write(c).items() if key != "norm_topk_prob"},
            "attention_bias": c.attention_bias,
            "layer_types": [SLIDING if i in c.sliding_layers else FULL for i in range(c.num_layers)],
            "sliding_window": c.sliding_window or None,
            "swiglu_alpha": c.swiglu.alpha,
            "swiglu_limit": c.swiglu.limit,
        }

    def attention(self, c: ModelConfig) -> AttentionKind:
        return GroupedQueries(QkNorm.NONE, bias=c.attention_bias, out_bias=c.attention_bias, sinks=True)

    def check(self, c: ModelConfig) -> None:
        super().check(c)
        self.check_routers(c)
        if not c.routing.normalise:
            raise ValueError(f"routing.normalise = false, but in family {self.name!r} gates sum to 1")
        if c.swiglu is None:
            raise ValueError(f"family = {self.name!r} needs `swiglu`, the experts' activation")

    def tiny(self) -> ModelConfig:
        sizes = {**self.tiny_sizes, "expert_size": 12, "num_experts": 4, "top_k": 2}
        own: dict[str, Any] = {"sliding_layers": (0,), "sliding_window": 5, "swiglu": ClampedSwiglu(limit=0.7)}
        return ModelConfig(**sizes, **own, attention_bias=True, family=self.name)
