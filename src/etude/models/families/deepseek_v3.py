"""DeepSeek-V3: multi-head latent attention, sigmoid routers with groups and a selection bias, shared experts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from etude.models.components import LATENT_EPS, Indexer, Latent, Routing, Scores
from etude.models.config import FIXED, MOE, WIDTH, ModelConfig, ModelFamily
from etude.models.config_json import boolean, positive_float, positive_int, positive_ints

_LATENT = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_INDEXER = {"heads": "index_n_heads", "width": "index_head_dim", "top_k": "index_topk"}
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")


class DeepseekV3(ModelFamily):
    """DeepSeek-V3 (arXiv 2412.19437)."""

    model_type = "deepseek_v3"
    hf_class = "DeepseekV3ForCausalLM"
    sizes = {**MOE, "num_experts": "n_routed_experts", "num_shared": "n_shared_experts"}
    fixed = {
        **FIXED,
        "scoring_func": ("sigmoid", "sigmoid"),
        "topk_method": ("noaux_tc", "noaux_tc"),
        "moe_layer_freq": (1, 1),
    }
    scores = Scores.SIGMOID
    options = frozenset({"mtp_heads"})
    copies_for_mtp = True
    indexed = False
    """Whether latent attention has an indexer."""
    varies = (
        "q_lora_rank, norm_topk_prob, groups, routed_scaling_factor, shared experts, first_k_dense_replace,"
        " rope_interleave, num_nextn_predict_layers, tie_word_embeddings"
    )
    no_external_engines = ""

    def unserved(self, c: ModelConfig, engine: str) -> str:
        if self.no_external_engines or c.latent is None:
            return self.no_external_engines
        if engine != "vllm":
            return "was not tested with latent attention"
        if c.rms_eps != LATENT_EPS:
            return f"normalises latents with rms_norm_eps, here {c.rms_eps:g}, and models of this family with 1e-06"
        if c.llama3 is not None:
            return "takes every scaling of RoPE for YaRN in this family, and here it is llama3's"
        return "" if c.latent.interleaved else "rotates neighbouring numbers, and here rope_interleave is false"

    def read(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        raw = {"num_key_value_heads": raw.get("num_attention_heads"), **raw}
        sizes: dict[str, Any] = {**positive_ints(raw, _LATENT)}
        if self.indexed:
            sizes["indexer"] = Indexer(**positive_ints(raw, _INDEXER))
        latent = Latent(
            **sizes,
            q_rank=None if raw.get("q_lora_rank") is None else positive_int(raw, "q_lora_rank"),
            interleaved=boolean(raw, "rope_interleave", default=True),
        )
        return {**self.read_layers(raw), "head_dim": latent.head_dim, "latent": latent}

    def read_layers(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Read the fields of a `ModelConfig` about sizes, experts and routers."""
        raw = {**raw, "n_routed_experts": raw.get("n_routed_experts", raw.get("num_local_experts"))}
        sizes = positive_ints(raw, self.sizes)
        first = raw.get("first_k_dense_replace", 0)
        if type(first) is not int or not 0 <= first <= sizes["num_layers"]:
            raise ValueError(f"first_k_dense_replace = {first!r}, expected 0 to {sizes['num_layers']}")
        return {
            **sizes,
            "dense_layers": tuple(range(first)),
            "dense_size": positive_int(raw, WIDTH),
            "routing": Routing(
                scores=self.scores,
                normalise=boolean(raw, "norm_topk_prob", default=True),
                scaling=positive_float(raw.get("routed_scaling_factor", 1.0), "routed_scaling_factor"),
                num_groups=positive_int(raw, "n_group", default=1),
                top_groups=positive_int(raw, "topk_group", default=1),
            ),
        }

    def write(self, c: ModelConfig) -> dict[str, Any]:
        assert c.latent is not None
        return {
            **self.write_layers(c),
            **{key: getattr(c.latent, name) for name, key in _LATENT.items()},
            "q_lora_rank": c.latent.q_rank,
            "rope_interleave": c.latent.interleaved,
            **{key: getattr(c.latent.indexer, name) for name, key in _INDEXER.items() if self.indexed},
        }

    def write_layers(self, c: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that `read_layers` reads."""
        return {
            **{key: getattr(c, name) for name, key in self.sizes.items()},
            "first_k_dense_replace": len(c.dense_layers),
            "norm_topk_prob": c.routing.normalise,
            "routed_scaling_factor": c.routing.scaling,
            "n_group": c.routing.num_groups,
            "topk_group": c.routing.top_groups,
        }

    def check(self, c: ModelConfig) -> None:
        self.check_layers(c)
        if c.latent is None:
            raise ValueError(f"family = {self.name!r} needs latent attention")
        if (c.latent.indexer is not None) != self.indexed:
            what = "needs an indexer: set" if self.indexed else "has no indexer: leave out"
            raise ValueError(f"family = {self.name!r} {what} `latent.indexer`")

    def check_layers(self, c: ModelConfig) -> None:
        """Raise `ValueError` for experts, routers and dense layers that no model of this family has."""
        self.check_experts(c)
        if c.dense_layers != tuple(range(len(c.dense_layers))):
            raise ValueError(
                f"dense_layers = {list(c.dense_layers)[:8]}, but in this family the first layers are dense"
            )
        if c.routing.scores is not self.scores:
            raise ValueError(f"routing.scores = {str(c.routing.scores)!r}, but family {self.name!r} has sigmoid")
        if not c.num_shared:
            raise ValueError(f"family = {self.name!r} needs num_shared > 0")

    def unused(self, names: Iterable[str], c: ModelConfig) -> set[str]:
        """Return the tensors of MTP heads beyond those of the model `c`. Such a layer has an `eh_proj`."""
        layers = [(_LAYER.match(name), name) for name in names]
        behind = {
            m[1]
            for m, name in layers
            if m and int(m[1]) >= c.num_layers + c.mtp_heads and name.endswith(".eh_proj.weight")
        }
        return {name for m, name in layers if m and m[1] in behind}

    def tiny(self) -> ModelConfig:
        indexer = Indexer(heads=3, width=6, top_k=56) if self.indexed else None
        latent = Latent(kv_rank=8, nope_dim=8, rope_dim=4, value_dim=6, q_rank=10, indexer=indexer)
        sizes = {**self.tiny_sizes, "num_kv_heads": 2, "head_dim": latent.head_dim, "expert_size": 12, "dense_size": 20}
        sizes |= {"num_experts": 6, "top_k": 2, "num_shared": 1, "dense_layers": (0,)}
        routing = Routing(self.scores, scaling=2.5, num_groups=3, top_groups=2)
        return ModelConfig(**sizes, routing=routing, latent=latent, family=self.name)
