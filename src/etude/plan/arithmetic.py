"""Operations and bytes of a model: what a token costs, what a rank holds. Pure functions of its sizes.

Every one has its source in its docstring. N: parameters; L: layers; T: tokens; B: sequences in a batch.
"""

from __future__ import annotations

from math import log2

from etude.models.config import ModelConfig

FLOAT32_BYTES, BF16_BYTES = 4, 2


def active_parameters(model: ModelConfig) -> int:
    """Parameters that a token meets: all but the experts that it is not sent to; the embedding is a look-up, the output
    layer is not. Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), section 2.

    >>> active_parameters(ModelConfig())
    544832
    """
    idle = model.num_moe_layers * (model.num_experts - model.top_k) * 3 * model.hidden_size * model.expert_size
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return model.num_parameters - idle - lookup


def attention_flops(model: ModelConfig, context: float) -> float:
    """Of one token that attends to `context` keys: 2 products of 2 operations each for every head and layer. Chowdhery
    et al. 2022, "PaLM" (arXiv 2204.02311), appendix B."""
    kept = model.kept
    width = model.head_dim + (kept.value_width if model.latent is None else model.latent.value_dim)
    return 2.0 * model.num_layers * model.num_heads * width * context


def forward_flops(model: ModelConfig, context: float) -> float:
    """Of one token: 2 for each parameter that it meets, and its attention. Kaplan et al. 2020, "Scaling Laws"
    (arXiv 2001.08361), section 2.1."""
    return 2.0 * active_parameters(model) + attention_flops(model, context)


def training_flops(model: ModelConfig, context: float, *, recomputed: bool = True) -> float:
    """Of one token: forward, twice that backward, and once more where activations are computed again. Kaplan et al.
    2020; Korthikanti et al. 2022, "Reducing Activation Recomputation" (arXiv 2205.05198), section 4."""
    return (4.0 if recomputed else 3.0) * forward_flops(model, context)


def kv_bytes_token(model: ModelConfig, width: int = BF16_BYTES) -> int:
    """Keys and values of one token in all layers. Shazeer 2019 (arXiv 1911.02150); latents: DeepSeek-AI 2024,
    "DeepSeek-V2" (arXiv 2405.04434), table 1."""
    kept = model.kept
    values = 0 if kept.shared else kept.heads * kept.value_width
    return model.num_layers * (kept.heads * kept.key_width + values) * width


def experts_met(model: ModelConfig, batch: float) -> float:
    """Share of a layer's experts that a batch of so many tokens is sent to, if each token's are drawn evenly:
    1 - (1 - k/E)^B, the expected share of boxes that are not empty."""
    if not model.num_experts:
        return 1.0
    return float(1.0 - (1.0 - model.top_k / model.num_experts) ** batch)


def read_bytes(model: ModelConfig, batch: float, width: int = BF16_BYTES) -> float:
    """Weights that a decoding step reads: all but the experts that nobody in the batch is sent to."""
    experts = model.num_moe_layers * model.num_experts * 3 * model.hidden_size * model.expert_size
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return width * (model.num_parameters - lookup - experts * (1.0 - experts_met(model, batch)))


def learner_state_bytes(model: ModelConfig, ranks: int) -> float:
    """Weights, gradients and optimiser of one of so many ranks that share everything: bf16 weights, float32 masters,
    float32 gradients, two float32 moments; 18 bytes a parameter. Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054),
    section 3.1, with gradients in float32."""
    return model.num_parameters * (BF16_BYTES + 4 * FLOAT32_BYTES) / ranks


def activation_bytes(model: ModelConfig, tokens: int, *, width: int = BF16_BYTES) -> float:
    """Of one forward of so many tokens on a rank, with every layer computed again in the backward pass: each layer's
    input, the inside of one layer, and a float32 row of logits and its gradient a token. Korthikanti et al. 2022
    (arXiv 2205.05198), section 4.1; the inside is counted for these blocks."""
    d, k = model.hidden_size, max(1, model.top_k + model.num_shared)
    mlp = k * (3 * model.expert_size + d) if model.num_moe_layers else 3 * model.dense_width
    inside = 6 * d + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim + 2 * mlp
    return float(tokens) * (width * (model.num_layers * d + inside) + 2 * FLOAT32_BYTES * model.vocab_size)


def delta_bytes(model: ModelConfig, changed: float, width: int = BF16_BYTES) -> float:
    """A version's delta where a share `changed` of the weights differs from the version before: which ones (the entropy
    of a place, Shannon 1948), a sign, and about one bit of how far; not more than the weights themselves.

    >>> model = ModelConfig()
    >>> round(delta_bytes(model, 0.02) / (2 * model.num_parameters), 3)
    0.011
    """
    if changed <= 0.0:
        return 0.0
    if changed >= 1.0:
        return float(width * model.num_parameters)
    place = -(changed * log2(changed) + (1 - changed) * log2(1 - changed))
    return min(float(width), (place + 2.0 * changed) / 8.0) * model.num_parameters
