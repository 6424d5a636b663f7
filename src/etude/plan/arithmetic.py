"""FLOPs per token and bytes per rank of a model, computed from its sizes.

Each docstring has the source of the formula."""

from __future__ import annotations

import functools
from math import log2, prod

from etude.models.config import ModelConfig
from etude.models.headers import weight_shapes
from etude.models.quantised_storage import is_quantised
from etude.plan.shape import Training

FLOAT32_BYTES, BF16_BYTES = 4, 2
CODE_BYTES = 1 + 4 / 256
"""Bytes of a number of an 8-bit moment: a code, and its share of a block's float32 scale (`training.moments`)."""


def active_parameters(model: ModelConfig) -> int:
    """Count the parameters used for one token: all except unchosen experts and the embedding, which is a look-up.

    Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), section 2.

    >>> active_parameters(ModelConfig())
    544832
    """
    idle = model.num_moe_layers * (model.num_experts - model.top_k) * 3 * model.hidden_size * model.expert_size
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return model.num_parameters - idle - lookup


def attention_flops(model: ModelConfig, context: float) -> float:
    """Compute the FLOPs of attention for one token that attends to `context` keys, in all layers.

    There are 2 products with 2 FLOPs per element in each head and layer: Chowdhery et al. 2022, "PaLM" (arXiv
    2204.02311), appendix B. A gated delta layer decays, reads and changes each number of its state, and reads it again:
    8 FLOPs per number, whatever the context (Yang et al. 2024, arXiv 2412.06464, eq. 10)."""
    width, linear = model.head_dim + model.value_dim, model.linear
    full = model.num_layers - len(model.linear_layers)
    states = 0 if linear is None else len(model.linear_layers) * linear.value_heads * linear.key_dim * linear.value_dim
    return 2.0 * full * model.num_heads * width * context + 8.0 * states


def forward_flops(model: ModelConfig, context: float) -> float:
    """Compute the FLOPs of the forward pass for one token after `context` tokens.

    They are 2 per active parameter, plus attention: Kaplan et al. 2020, "Scaling Laws" (arXiv 2001.08361), section 2.1.
    """
    return 2.0 * active_parameters(model) + attention_flops(model, context)


def training_flops(model: ModelConfig, context: float, training: Training) -> float:
    """Compute the FLOPs of training on one token: forward, twice that for backward, and again forward if recomputed.

    Kaplan et al. 2020; Korthikanti et al. 2022, "Reducing Activation Recomputation" (arXiv 2205.05198), section 4. With
    LoRA the frozen matrices need no weight gradient, which is half of their backward pass; the cost of the adapters is
    ignored. Hu et al. 2021, "LoRA" (arXiv 2106.09685), section 4.2."""
    frozen = 2.0 * active_parameters(model) if training.lora_rank else 0.0
    return (4.0 if training.recompute else 3.0) * forward_flops(model, context) - frozen


def kv_bytes_token(model: ModelConfig, width: int = BF16_BYTES) -> int:
    """Compute the bytes of the KV cache for one token, in all layers. `width` is the bytes per number.

    Shazeer 2019 (arXiv 1911.02150); latents: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv 2405.04434), table 1. Keys of an
    indexer are float32."""
    indexer = None if model.latent is None else model.latent.indexer
    of_indexer = 0 if indexer is None else FLOAT32_BYTES * indexer.width
    layers = model.num_layers - len(model.linear_layers)
    return layers * (model.cache_layout.numbers * width + of_indexer)


def kv_bytes_device(model: ModelConfig, devices: int, width: int = BF16_BYTES) -> int:
    """Compute the bytes of the KV cache for one token on each of `devices` devices under tensor parallelism.

    Heads are divided over the devices; with more devices than heads, heads are copied. Latents (MLA) belong to all
    heads, so every device has a full copy. `width` is the bytes per number. Shoeybi et al. 2019, "Megatron-LM" (arXiv
    1909.08053), section 3; vLLM's `MLAAttention` for latents."""
    kept = model.cache_layout
    if kept.shared:
        return kv_bytes_token(model, width)
    layers = model.num_layers - len(model.linear_layers)
    return layers * -(-kept.heads // devices) * (kept.key_width + kept.value_width) * width


def state_bytes(model: ModelConfig) -> int:
    """Compute the bytes of the states of one sequence in all gated delta layers. States are float32.

    Their size does not depend on the context: Yang et al. 2024 (arXiv 2412.06464), section 3."""
    if model.linear is None:
        return 0
    return FLOAT32_BYTES * len(model.linear_layers) * sum(map(prod, model.linear.state_shapes()))


def used_experts(model: ModelConfig, batch: float) -> float:
    """Compute the expected share of a layer's experts that a batch of B tokens uses: 1 - (1 - k/E)^B.

    It assumes that each token chooses its k of E experts uniformly."""
    if not model.num_experts:
        return 1.0
    return float(1.0 - (1.0 - model.top_k / model.num_experts) ** batch)


def read_bytes(model: ModelConfig, batch: float, width: float = BF16_BYTES) -> float:
    """Compute the bytes of weights that a decoding step of `batch` sequences reads. `width` is the bytes per weight.

    It reads all weights except the experts that no sequence uses."""
    idle = expert_parameters(model) * (1.0 - used_experts(model, batch))
    lookup = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return width * (model.num_parameters - lookup - idle)


def engine_bytes(model: ModelConfig, dtype_bytes: float, matrix_bytes: float) -> float:
    """Compute the bytes of an engine's weights.

    The weight matrices of attention and MLPs take `matrix_bytes` per number, and all other weights `dtype_bytes`."""
    rounded = sum(map(prod, matrices(model)))
    return matrix_bytes * rounded + dtype_bytes * (model.num_parameters - rounded)


def expert_parameters(model: ModelConfig) -> int:
    """Count the parameters of all experts in all layers, without shared experts."""
    return model.num_moe_layers * model.num_experts * 3 * model.hidden_size * model.expert_size


@functools.lru_cache(maxsize=8)
def matrices(model: ModelConfig, on: str = "all") -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the matrices that Muon trains and LoRA adapts: the weights of attention and MLPs, with one
    entry for each expert.

    `on` selects them: "all", "attention" or "mlp"."""
    found = ((".mlp." in name, shape) for name, shape in weight_shapes(model) if is_quantised(name))
    return tuple(shape for is_mlp, shape in found if on == "all" or is_mlp == (on == "mlp"))


def expert_adapters(model: ModelConfig, training: Training) -> int:
    """Count the parameters of the LoRA adapters of all experts."""
    if training.lora_on == "attention" or not model.num_moe_layers:
        return 0
    found = (shape for name, shape in weight_shapes(model) if is_quantised(name) and ".experts." in name)
    return training.lora_rank * sum(map(sum, found))


def adapter_parameters_per_rank(model: ModelConfig, training: Training) -> int:
    """Count the LoRA parameters on one rank.

    Adapters of dense matrices are replicated, and those of experts are divided among the expert-parallel ranks."""
    of_experts = expert_adapters(model, training)
    return trained_parameters(model, training) - of_experts + of_experts // training.expert_parallel


def trained_parameters(model: ModelConfig, training: Training) -> int:
    """Return the number of trained parameters: all, or with LoRA those of the matrices A [r, I] and B [O, r].

    Hu et al. 2021 (arXiv 2106.09685), section 4.1."""
    if not training.lora_rank:
        return model.num_parameters
    return training.lora_rank * sum(map(sum, matrices(model, training.lora_on)))


def parameter_bytes(training: Training, ranks: int) -> dict[str, float]:
    """Return the bytes of one trained parameter on a learner with `ranks` ranks, by part. AdamW has two moments.

    Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 3.1, with gradients in float32. Weights that are bf16
    masters are stored in the dtype in which operators read them. Ranks that share float32 weights keep a float32 vector
    beside their shards, from which the fused kernel writes them."""
    copied = ranks > 1 and not training.lora_rank and training.moment_bytes == FLOAT32_BYTES
    masters = not training.bf16_masters and (training.masters or copied)
    return {
        "weights": float(training.gathered_bytes if training.bf16_masters else FLOAT32_BYTES),
        "masters": float(FLOAT32_BYTES) if masters else 0.0,
        "gradients": float(FLOAT32_BYTES),
        "moments": 2 * training.moment_bytes,
    }


def weights_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Compute the bytes of the weights in the device memory of one of `ranks` fully sharded learner ranks.

    With LoRA, the frozen model is kept once, in the dtype in which ranks exchange it. Adapters are counted as in
    `adapter_parameters_per_rank`."""
    each = parameter_bytes(training, ranks)["weights"]
    if not training.lora_rank:
        return each * model.num_parameters / ranks
    frozen = training.gathered_bytes * model.num_parameters / ranks
    return frozen + each * adapter_parameters_per_rank(model, training)


def base_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Compute the bytes of the matrices below LoRA adapters in the host memory of one of `ranks` learner ranks.

    They are in the published dtype, and each optimiser step merges the adapters into them."""
    if not training.lora_rank:
        return 0.0
    width = BF16_BYTES if training.masters or training.bf16_masters else FLOAT32_BYTES
    return float(width) * sum(map(prod, matrices(model, training.lora_on))) / ranks


def optimiser_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Compute the bytes of gradients, separate masters and moments in the device memory of one of `ranks` fully sharded
    learner ranks. Masters and moments that are offloaded to the host do not count. See also `parameter_bytes`."""
    state = 0.0 if training.offload else optimiser_state_bytes(model, training, ranks)
    return parameter_bytes(training, ranks)["gradients"] * _trained_on_rank(model, training, ranks) + state


def optimiser_state_bytes(model: ModelConfig, training: Training, ranks: int) -> float:
    """Compute the bytes of separate masters and moments of one of `ranks` fully sharded learner ranks, on the device or
    offloaded.

    Muon has no second moment for matrices: Jordan et al. 2024."""
    each, trained = parameter_bytes(training, ranks), _trained_on_rank(model, training, ranks)
    less = sum(map(prod, matrices(model))) / ranks if training.muon else 0.0
    return each["masters"] * trained + each["moments"] * trained - training.moment_bytes * less


def _trained_on_rank(model: ModelConfig, training: Training, ranks: int) -> float:
    """Count the trained parameters of a rank. Adapters are counted as in `adapter_parameters_per_rank`."""
    return adapter_parameters_per_rank(model, training) if training.lora_rank else model.num_parameters / ranks


def activation_bytes(model: ModelConfig, tokens: int, training: Training) -> float:
    """Compute the bytes of the activations that a forward pass of `tokens` tokens keeps on a learner rank.

    These are the input and the inner activations of each layer, and for each token a float32 row of logits and its
    gradient. With recomputation, only one layer's inner activations are kept at a time. Korthikanti et al. 2022 (arXiv
    2205.05198), section 4.1, with the inner activations of the blocks used here."""
    d, k = model.hidden_size, max(1, model.top_k + model.num_shared)
    mlp = k * (3 * model.expert_size + d) if model.num_moe_layers else 3 * model.dense_width
    inside = 6 * d + 2 * (model.num_heads + model.num_kv_heads) * model.head_dim + 2 * mlp
    kept = model.num_layers * d + (1 if training.recompute else model.num_layers) * inside
    return float(tokens) * (training.dtype_bytes * kept + 2 * FLOAT32_BYTES * model.vocab_size)


def rounded_bytes(model: ModelConfig, training: Training) -> float:
    """Compute the bytes of the rounded matrices that a forward pass keeps for its backward pass on a learner rank.

    Each product with a quantised format rounds the full matrix, and the backward pass needs the result. So a rank keeps
    all dense matrices and those of its experts, whatever the number of ranks; with recomputation one layer's."""
    if not training.quantised:
        return 0.0
    experts = expert_parameters(model)
    here = sum(map(prod, matrices(model))) - experts + experts / training.expert_parallel
    return training.gathered_bytes * here / (model.num_layers if training.recompute else 1)


def delta_bytes(parameters: int, changed: float, width: int = BF16_BYTES) -> float:
    """Estimate the bytes of a delta, the compressed difference between two versions of `parameters` weights.

    `changed` is the share of weights that differ. For each, its position (entropy, Shannon 1948), a sign, and about one
    bit for the size of the change are stored. The result is at most the bytes of the weights, with `width` bytes each.

    >>> round(delta_bytes(1_000_000, 0.02) / 2_000_000, 3)
    0.011
    """
    if changed <= 0.0:
        return 0.0
    if changed >= 1.0:
        return float(width * parameters)
    place = -(changed * log2(changed) + (1 - changed) * log2(1 - changed))
    return min(float(width), (place + 2.0 * changed) / 8.0) * parameters
