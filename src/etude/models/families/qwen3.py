"""Qwen3 (dense): Qwen3-MoE with an MLP in place of every router and its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.config import FIXED, SIZES, WIDTH, ModelConfig, ModelFamily
from etude.models.config_json import head_dim, positive_int, positive_ints


class Qwen3(ModelFamily):
    """Dense Qwen3 models (arXiv 2505.09388)."""

    model_type = "qwen3"
    hf_class = "Qwen3ForCausalLM"
    sizes = SIZES
    fixed = {**FIXED, "use_sliding_window": (False, False)}
    options = frozenset({"mtp_heads"})
    varies = "tie_word_embeddings, num_nextn_predict_layers (of etude's own models)"
    no_external_engines = ""

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        sizes = positive_ints(raw, self.sizes)
        dense = {"num_experts": 0, "top_k": 0, "dense_size": positive_int(raw, WIDTH)}
        return {**sizes, "head_dim": head_dim(raw, sizes), **dense}

    def write(self, c: ModelConfig) -> dict[str, Any]:
        return {key: getattr(c, name) for name, key in self.sizes.items()} | {"head_dim": c.head_dim}

    def check(self, c: ModelConfig) -> None:
        if c.num_experts:
            raise ValueError(f"family = {self.name!r} needs num_experts = 0 and top_k = 0, not {c.num_experts} experts")
        self.check_plain(c)

    def tiny(self) -> ModelConfig:
        return ModelConfig(**self.tiny_sizes, num_experts=0, top_k=0, dense_size=20, family=self.name)
