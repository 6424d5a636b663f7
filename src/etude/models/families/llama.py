"""Llama: a dense model without norms of queries and keys. Other models of the architecture are Llama models, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import QkNorm
from etude.models.config import FIXED
from etude.models.families.qwen3 import Qwen3


class Llama(Qwen3):
    """Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

    model_type = "llama"
    hf_class = "LlamaForCausalLM"
    fixed = {**FIXED, "mlp_bias": (False, False)}
    qk_norm = QkNorm.NONE
    no_external_engines = "was not tested with weights of this family"

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        if raw.get("num_key_value_heads") is None:
            raw = {**raw, "num_key_value_heads": raw.get("num_attention_heads")}
        return super().read(raw)
