"""A model family: Qwen3-MoE with the tensor names of another publisher.

Set it in a config with `model.family = "model_family:AcmeMoe"`, or for checkpoints with the environment variable
ETUDE_MODEL_FAMILIES=model_family:AcmeMoe. `etude.testing.model_family` has the contract suite.
"""

from etude.models.families.qwen3_moe import Qwen3Moe


class AcmeMoe(Qwen3Moe):
    model_type = "acme_moe"  # in config.json
    hf_class = "AcmeMoeForCausalLM"
    sizes = {**Qwen3Moe.sizes, "top_k": "experts_per_token"}  # another key in config.json
    renamed = {"model.layers.": "decoder.blocks.", ".mlp.gate.": ".mlp.router.", ".mlp.experts.": ".moe."}
    foreign = "has no model of this name"  # why vLLM and SGLang cannot serve it
