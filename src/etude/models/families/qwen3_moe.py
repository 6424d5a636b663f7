"""Qwen3-MoE: grouped-query attention, RMS norms of each head's query and key, softmax routers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.config import FIXED, WIDTH, ModelConfig, ModelFamily
from etude.models.config_json import positive_int


class Qwen3Moe(ModelFamily):
    """Mixture-of-experts Qwen3 models (arXiv 2505.09388)."""

    model_type = "qwen3_moe"
    hf_class = "Qwen3MoeForCausalLM"
    fixed = {**FIXED, "use_sliding_window": (False, False)}
    options = frozenset({"mtp_heads"})
    varies = (
        "norm_topk_prob, decoder_sparse_step, mlp_only_layers, tie_word_embeddings, num_nextn_predict_layers (of"
        " etude's own models)"
    )
    no_external_engines = ""

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read(raw)
        every = positive_int(raw, "decoder_sparse_step", default=1)
        named = raw.get("mlp_only_layers") or []
        if not isinstance(named, list) or not all(type(i) is int for i in named):
            raise ValueError(f"mlp_only_layers = {named!r:.80}, expected a list of integers")
        without = set(named)
        dense = tuple(i for i in range(found["num_layers"]) if i in without or (i + 1) % every)
        width = found["expert_size"] if raw.get(WIDTH) is None and not dense else positive_int(raw, WIDTH)
        return {**found, "dense_layers": dense, "dense_size": 0 if width == found["expert_size"] else width}

    def write(self, c: ModelConfig) -> dict[str, Any]:
        return {**super().write(c), "decoder_sparse_step": 1, "mlp_only_layers": list(c.dense_layers)}
