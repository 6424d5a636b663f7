"""A model family: Qwen3-MoE under the names of another publisher.

Name it in a config: `model.family = "examples.plugins.model_family:AcmeMoe"`. To load checkpoints of this family,
name it in the environment variable ETUDE_MODEL_FAMILIES.
"""

from etude.models.families.qwen3_moe import Qwen3Moe


class AcmeMoe(Qwen3Moe):
    model_type = "acme_moe"  # of its checkpoints' config.json
    hf_class = "AcmeMoeForCausalLM"
    sizes = {**Qwen3Moe.sizes, "top_k": "experts_per_token"}  # a key of config.json that has another name
    renamed = {"model.layers.": "decoder.blocks.", ".mlp.gate.": ".mlp.router.", ".mlp.experts.": ".moe."}
    no_external_engines = "has no model of this name"  # why vLLM and SGLang cannot serve it
