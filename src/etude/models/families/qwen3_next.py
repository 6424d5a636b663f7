"""Qwen3-Next: gated delta layers in three of four layers, gated attention with partial RoPE in the others, gated shared
experts, norms whose weights are distances from 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from etude.models.components import AttentionKind, GatedDelta, GroupedQueries, QkNorm, Routing
from etude.models.config import FIXED, ModelConfig
from etude.models.config_json import positive_int, positive_ints, rotary_dim
from etude.models.families.qwen3_moe import Qwen3Moe

LINEAR, FULL = "linear_attention", "full_attention"
INTERVAL = "full_attention_interval"
SHARED = "shared_expert_intermediate_size"
_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}


class Qwen3Next(Qwen3Moe):
    """Qwen3-Next."""

    model_type = "qwen3_next"
    hf_class = "Qwen3NextForCausalLM"
    fixed = FIXED
    each = {}
    defaults = {
        "norm_topk_prob": True, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    options = frozenset({"rotary_dim", "linear", "linear_layers"})
    varies = (
        "layer_types, linear attention's sizes, partial_rotary_factor, norm_topk_prob, shared experts,"
        " decoder_sparse_step, mlp_only_layers, tie_word_embeddings"
    )
    renamed = {".self_attn.linear.": ".linear_attn.", ".shared_experts.": ".shared_expert."}
    skipped: ClassVar[tuple[str, ...]] = ("mtp.",)  # a head that predicts further tokens
    shared_gate = True
    centred_norms = True
    no_external_engines = "was not tested with weights of this family"
    by_head = True
    """How the rows of the gated delta layers' first projection are ordered (`GatedDelta.by_head`)."""

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        found = super().read(raw)
        width, of_shared = found["head_dim"], positive_int(raw, SHARED)
        if of_shared % (size := found["expert_size"]):
            raise ValueError(f"{SHARED} = {of_shared} is not a multiple of {self.sizes['expert_size']} = {size}")
        every = positive_int(raw, INTERVAL, default=4)
        usual = [LINEAR if (i + 1) % every else FULL for i in range(found["num_layers"])]
        kinds = usual if raw.get("layer_types") is None else raw["layer_types"]
        if not isinstance(kinds, list) or len(kinds) != len(usual) or not all(k in (LINEAR, FULL) for k in kinds):
            raise ValueError(f"layer_types = {kinds!r:.80}, expected {LINEAR!r} or {FULL!r} for each layer")
        return {
            **found,
            "num_shared": of_shared // found["expert_size"],
            "rotary_dim": rotary_dim(raw, width, default=0.25),
            "linear": GatedDelta(**positive_ints(raw, _SIZES), by_head=self.by_head),
            "linear_layers": tuple(i for i, kind in enumerate(kinds) if kind == LINEAR),
        }

    def write(self, c: ModelConfig) -> dict[str, Any]:
        assert c.linear is not None
        return {
            **super().write(c),
            **{key: getattr(c.linear, name) for name, key in _SIZES.items()},
            SHARED: c.num_shared * c.expert_size,
            "layer_types": [LINEAR if i in c.linear_layers else FULL for i in range(c.num_layers)],
        }

    def attention(self, c: ModelConfig) -> AttentionKind:
        return GroupedQueries(QkNorm.HEAD, gated=True)

    def check(self, c: ModelConfig) -> None:
        self.check_experts(c)
        if c.latent is not None:
            raise ValueError(f"family = {self.name!r} has no latent attention: leave out `latent`")
        if not c.num_shared or c.routing != Routing(normalise=c.routing.normalise):
            raise ValueError(
                f"family = {self.name!r} needs num_shared > 0, and supports of `routing` only the setting `normalise`"
            )
        if c.linear is None or c.linear.by_head != self.by_head:
            raise ValueError(f"family = {self.name!r} needs `linear` with by_head = {str(self.by_head).lower()}")

    def tiny(self) -> ModelConfig:
        sizes = {**self.tiny_sizes, "expert_size": 12, "num_experts": 4, "top_k": 2, "num_shared": 1}
        linear = GatedDelta(key_heads=2, value_heads=4, key_dim=12, value_dim=10, kernel=3, by_head=self.by_head)
        own: dict[str, Any] = {"linear": linear, "linear_layers": (0,), "rotary_dim": 4}
        return ModelConfig(**sizes, **own, family=self.name)
