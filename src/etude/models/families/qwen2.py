"""Qwen2 and Qwen2.5 (dense): Llama with biases of the projections to queries, keys and values."""

from __future__ import annotations

from etude.models.config import FIXED
from etude.models.families.llama import Llama


class Qwen2(Llama):
    """Dense Qwen2 and Qwen2.5 models (arXiv 2407.10671)."""

    model_type = "qwen2"
    hf_class = "Qwen2ForCausalLM"
    fixed = {"hidden_act": FIXED["hidden_act"], "use_sliding_window": (False, False)}
    qkv_bias = True
