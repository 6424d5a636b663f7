"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.families.deepseek_v3 import DeepseekV3


class DeepseekV32(DeepseekV3):
    """DeepSeek-V3.2 (arXiv 2512.02556)."""

    model_type = "deepseek_v32"
    hf_class = "DeepseekV32ForCausalLM"
    fixed = {**DeepseekV3.fixed, "rope_interleave": (True, True)}
    each = {"layer_types": "indexed_attention"}
    renamed = {".indexer.weights.": ".indexer.weights_proj."}
    varies = (
        "indexer, norm_topk_prob, groups, routed_scaling_factor, shared experts, first_k_dense_replace,"
        " num_nextn_predict_layers, tie_word_embeddings"
    )
    indexed = True
    no_external_engines = "was not tested with weights of this family"

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read(raw)
        dense, kinds = len(found["dense_layers"]), raw.get("mlp_layer_types")
        usual = ["dense"] * dense + ["sparse"] * (found["num_layers"] - dense)
        if kinds is not None and kinds != usual:
            expected = f"{dense} times 'dense', then 'sparse' (first_k_dense_replace = {dense})"
            raise ValueError(f"mlp_layer_types = {kinds!r:.80}, expected {expected}")
        return found
