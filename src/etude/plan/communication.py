"""Bytes that devices send each other, and how long they take. Pure.

A group of devices within a node talks over NVLink; a larger one also over the network, of which every device has its
node's share. What overlaps with arithmetic is decided in `planning`.
"""

from __future__ import annotations

from etude.models.config import ModelConfig
from etude.plan import arithmetic
from etude.plan.hardware import Device
from etude.plan.shape import Training

STEP_S, HOP_S = 10e-6, 30e-6
"""Latency of a collective within a node and across nodes: assumptions of the size that NCCL's tests print."""


def gathered_s(num_bytes: float, ranks: int, device: Device) -> float:
    """An all-gather of a tensor of so many bytes by ranks that each have a share (a reduce-scatter takes as long). Each
    rank receives what it lacks over NVLink; each node receives what it lacks over its network cards, which share it.
    Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 7; rings: Patarasuk and Yuan 2009."""
    if ranks == 1:
        return 0.0
    inside = num_bytes * (1 - 1 / ranks) / device.nvlink_bytes_s
    if ranks <= device.node_devices:
        return inside
    lacking = num_bytes * (1 - device.node_devices / ranks)
    return max(inside, lacking / (device.node_devices * device.network_bytes_s))


def sharing_s(model: ModelConfig, training: Training, ranks: int, device: Device) -> float:
    """Seconds of communication in one forward and backward pass of a learner's rank under full sharding: all weights
    are gathered for the forward pass and for the backward one, and gradients of what trains are scattered. Rajbhandari
    et al. 2019, section 7.2.2: three times the weights. Experts are gathered among the ranks that have the same
    ones."""
    experts = arithmetic.expert_parameters(model)
    parts = (
        (model.num_parameters - experts, ranks),
        (experts / training.expert_parallel, ranks // training.expert_parallel),
    )
    times = 2 * training.gathered_bytes + (0 if training.lora_rank else arithmetic.FLOAT32_BYTES)
    return sum(gathered_s(times * parameters, among, device) for parameters, among in parts)


def dispatch_s(model: ModelConfig, training: Training, tokens: float, device: Device) -> float:
    """Sending so many tokens to their experts and back, forward and backward, and forward once more where activations
    are computed again. Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section 3.3."""
    degree = training.expert_parallel
    if degree == 1 or not model.num_moe_layers:
        return 0.0
    passes = 3 if training.recompute else 2
    sent = 2.0 * passes * tokens * model.top_k * model.hidden_size * training.dtype_bytes * model.num_moe_layers
    speed = device.nvlink_bytes_s if degree <= device.node_devices else device.network_bytes_s
    return sent * (1 - 1 / degree) / speed


def tensor_parallel_s(model: ModelConfig, batch: float, devices: int, device: Device) -> float:
    """Seconds of communication in one forward of `batch` tokens on devices that share every matrix: two all-reduces a
    layer. Shoeybi et al. 2019 (arXiv 1909.08053), section 3."""
    if devices == 1:
        return 0.0
    within = devices <= device.node_devices
    one = batch * model.hidden_size * arithmetic.BF16_BYTES
    speed = device.nvlink_bytes_s if within else device.network_bytes_s
    return 2 * model.num_layers * (2 * (1 - 1 / devices) * one / speed + (STEP_S if within else HOP_S))
