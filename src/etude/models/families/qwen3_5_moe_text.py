"""Qwen3.5-MoE: Qwen3-Next with other matrices in gated delta layers, inside a model for images and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.models.components import Routing
from etude.models.config import ModelConfig
from etude.models.families.qwen3_next import Qwen3Next


class Qwen35MoeText(Qwen3Next):
    """The text model of Qwen3.5-MoE."""

    model_type = "qwen3_5_moe_text"
    hf_class = "Qwen3_5MoeForCausalLM"
    defaults = {**Qwen3Next.defaults, "norm_topk_prob": True}
    varies = "layer_types, linear attention's sizes, partial_rotary_factor, shared experts, tie_word_embeddings"
    by_head = False
    plain_stacks = True
    wrappers = ("qwen3_5_moe",)
    wrapped = {"model.language_model.": "model."}
    skipped = (*Qwen3Next.skipped, "model.visual.")

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        without = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
        return super().read({key: value for key, value in raw.items() if key not in without} | {"norm_topk_prob": True})

    def write(self, c: ModelConfig) -> dict[str, Any]:
        without = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")
        return {key: value for key, value in super().write(c).items() if key not in without}

    def check(self, c: ModelConfig) -> None:
        super().check(c)
        self.check_routers(c)
        if c.routing != Routing():
            raise ValueError(
                f"routing.normalise = false, but in family {self.name!r} the gates of a token always sum to 1"
            )
