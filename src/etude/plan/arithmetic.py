"""Operations and bytes of a model: what a token costs, what a rank holds. Pure functions of its sizes.

Every one has its source in its docstring. N: parameters; L: layers; T: tokens; B: sequences in a batch.
"""

from __future__ import annotations

from math import log2, prod

from etude.models.config import ModelConfig
from etude.models.headers import weight_shapes
from etude.models.quantised_storage import is_quantised
from etude.plan.shape import Training

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
    """FLOPs of one token's attention to `context` keys: 2 products of 2 FLOPs each for every head and layer. Chowdhery
    et al. 2022, "PaLM" (arXiv 2204.02311), appendix B."""
    width = model.head_dim + model.value_dim
    return 2.0 * model.num_layers * model.num_heads * width * context


def forward_flops(model: ModelConfig, context: float) -> float:
    """FLOPs of one token's forward: 2 for each parameter that it uses, and its attention. Kaplan et al. 2020, "Scaling
    Laws" (arXiv 2001.08361), section 2.1."""
    return 2.0 * active_parameters(model) + attention_flops(model, context)


def training_flops(model: ModelConfig, context: float, training: Training) -> float:
    """FLOPs of one token in training: forward, twice that backward, and once more with recomputation. Kaplan et al.
    2020; Korthikanti et al. 2022, "Reducing Activation Recomputation" (arXiv 2205.05198), section 4. A frozen matrix
    has no gradient, which is half of its backward pass; what adapters cost beside it is left out. Hu et al. 2021,
    "LoRA" (arXiv 2106.09685), section 4.2."""
    frozen = 2.0 * active_parameters(model) if training.lora_rank else 0.0
    return (4.0 if training.recompute else 3.0) * forward_flops(model, context) - frozen


def kv_bytes_token(model: ModelConfig, width: int = BF16_BYTES) -> int:
    """Keys and values of one token in all layers. Shazeer 2019 (arXiv 1911.02150); latents: DeepSeek-AI 2024,
    "DeepSeek-V2" (arXiv 2405.04434), table 1."""
    kept = model.cache_layout
    values = 0 if kept.shared else kept.heads * kept.value_width
    return model.num_layers * (kept.heads * kept.key_width + values) * width


def kv_bytes_device(model: ModelConfig, devices: int, width: int = BF16_BYTES) -> int:
    """Keys and values of one token on each of `devices` that share a model by tensor parallelism. Heads are divided
    until each device has one; more devices hold copies. A latent belongs to all heads, so every device has it whole.
    Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), section 3; vLLM's `MLAAttention` for latents."""
    kept = model.cache_layout
    if kept.shared:
        return kv_bytes_token(model, width)
    return model.num_layers * -(-kept.heads // devices) * (kept.key_width + kept.value_width) * width


def experts_met(model: ModelConfig, batch: float) -> float:
    """Share of a layer's experts that a batch of so many tokens is sent to, if each token's are drawn evenly:
    1 - (1 - k/E)^B, the expected share of boxes that are not empty."""
    if not model.num_experts:
        return 1.0
    return float(1.0 - (1.0 - model.top_k / model.num_experts) ** batch)


def read_bytes(model: ModelConfig, batch: float, width: float = BF16_BYTES) -> float:
    """Bytes of weights that a decoding step reads: all but the experts that no sequence of the batch is sent to.
    `width`: bytes per weight."""
    idle = expert_parameters(model) * (1.0 - experts_met(model, batch))
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return width * (model.num_parameters - lookup - idle)


def engine_bytes(model: ModelConfig, dtype_bytes: float, matrix_bytes: float) -> float:
    """Weights of an engine: attention's and MLP's matrices may be in a format of fewer bits, the rest is not."""
    rounded = sum(map(prod, matrices(model)))
    return matrix_bytes * rounded + dtype_bytes * (model.num_parameters - rounded)


def expert_parameters(model: ModelConfig) -> int:
    """Number of parameters of all experts in all layers, without shared experts."""
    return model.num_moe_layers * model.num_experts * 3 * model.hidden_size * model.expert_size


def matrices(model: ModelConfig, on: str = "all") -> list[tuple[int, ...]]:
    """Shapes of attention's and MLP's matrices, experts one by one: what Muon moves and adapters are of."""
    found = ((".mlp." in name, shape) for name, shape in weight_shapes(model) if is_quantised(name))
    return [shape for is_mlp, shape in found if on == "all" or is_mlp == (on == "mlp")]


def expert_adapters(model: ModelConfig, training: Training) -> int:
    """Numbers in the adapters of experts."""
    if training.lora_on == "attention" or not model.num_moe_layers:
        return 0
    found = (shape for name, shape in weight_shapes(model) if is_quantised(name) and ".experts." in name)
    return training.lora_rank * sum(map(sum, found))


def adapters_held(model: ModelConfig, training: Training) -> int:
    """Of A and B what one rank has: those of dense matrices whole, those of experts on the ranks that share them."""
    of_experts = expert_adapters(model, training)
    return trained_parameters(model, training) - of_experts + of_experts // training.expert_parallel


def trained_parameters(model: ModelConfig, training: Training) -> int:
    """Parameters that an optimiser moves and versions are of: all, or A [r, I] and B [O, r] of each adapted matrix
    [O, I]. Hu et al. 2021 (arXiv 2106.09685), section 4.1."""
    if not training.lora_rank:
        return model.num_parameters
    return training.lora_rank * sum(map(sum, matrices(model, training.lora_on)))


def weights_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Live weights of one of so many ranks that share everything, in float32 whatever they are rounded to. Of an
    adapted matrix there are two, the frozen and the merged one; adapters as in `adapters_held`."""
    held = model.num_parameters / ranks
    if training.lora_rank:
        held += sum(map(prod, matrices(model, training.lora_on))) / ranks + adapters_held(model, training)
    return float(FLOAT32_BYTES) * held


def optimiser_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Gradients, masters and moments of one of so many ranks that share everything, all float32, of what is trained:
    with the weights 20 bytes a parameter. Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 3.1, with
    weights and gradients in float32. Muon has no second moment of matrices: Jordan et al. 2024. Of adapters a rank has
    what `adapters_held` counts."""
    trained = adapters_held(model, training) if training.lora_rank else trained_parameters(model, training)
    vectors = (4 if training.masters else 3) * trained - (sum(map(prod, matrices(model))) if training.muon else 0)
    return float(FLOAT32_BYTES) * vectors / (1 if training.lora_rank else ranks)


def activation_bytes(model: ModelConfig, tokens: int, training: Training) -> float:
    """Bytes of the activations of one forward of so many tokens on a rank: each layer's input and inside, and a float32
    row of logits and its gradient a token; the inside of one layer only where they are computed again in the backward
    pass. Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1; the inside is counted for these blocks."""
    d, k = model.hidden_size, max(1, model.top_k + model.num_shared)
    mlp = k * (3 * model.expert_size + d) if model.num_moe_layers else 3 * model.dense_width
    inside = 6 * d + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim + 2 * mlp
    kept = model.num_layers * d + (1 if training.recompute else model.num_layers) * inside
    return float(tokens) * (training.dtype_bytes * kept + 2 * FLOAT32_BYTES * model.vocab_size)


def delta_bytes(parameters: int, changed: float, width: int = BF16_BYTES) -> float:
    """A version's delta where a share `changed` of its weights differs from the version before: which ones (the entropy
    of a place, Shannon 1948), a sign, and about one bit of how far; not more than the weights themselves.

    >>> round(delta_bytes(1_000_000, 0.02) / 2_000_000, 3)
    0.011
    """
    if changed <= 0.0:
        return 0.0
    if changed >= 1.0:
        return float(width * parameters)
    place = -(changed * log2(changed) + (1 - changed) * log2(1 - changed))
    return min(float(width), (place + 2.0 * changed) / 8.0) * parameters
