"""Computes time, memory and cost of a training step from model sizes and hardware, and finds the bottleneck.

On accelerators, learner and engines have separate devices and run concurrently, so a step takes as long as the slower
of them. Gathering the learner's weights overlaps with its computation, so the longer of the two counts. Sending tokens
to experts, and the all-reduces of an engine, do not overlap with computation. On the CPU of one machine, learner and
engines share the cores: a step takes the sum of their work divided by the cores, or the time of a learner rank, which
is one thread, if that is longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from etude.models.config import ModelConfig
from etude.plan import arithmetic
from etude.plan.hardware import MATRIX_BYTES, Device, Measured
from etude.plan.shape import Layout, Shape, Training

ROUNDS = 60
ENCODE_BYTES_S = 2e9  # speed of encoding a snapshot on one rank: docs/concepts/deltas.md


@dataclass(frozen=True)
class Memory:
    """Memory use of one learner rank or one engine device, in bytes.

    `optimiser` includes gradients, and separate master weights and moments unless they are offloaded. `cache` is the KV
    cache. `capacity` is the device's memory. `host`: bytes in the memory of the host, which are not part of `total`."""

    weights: float
    optimiser: float
    activations: float
    cache: float
    capacity: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.weights + self.optimiser + self.activations + self.cache

    @property
    def fits(self) -> bool:
        """Whether all parts fit into the memory of the device."""
        return self.total <= self.capacity


@dataclass(frozen=True)
class Plan:
    """The estimate for one training step, which `plan` returns. Fields in `_s` are seconds of wall time unless noted.

    - `batch`: mean number of sequences that an engine decodes together; `critical_batch`: from this number on, decoding
      is compute-bound (0 for a CPU).
    - `decode_tokens_s`: tokens per second of one engine.
    - `learner_s`, `engines_s`, `machines_s`: how long learner, engines and machines (sandboxes) are busy; `bound_by`
      names the one that takes longest.
    - `rollout_s`: the time from the start of a rollout to its grade.
    - `sync_s`, `sync_bytes`: the time until every engine has loaded a new version of the weights, and the bytes that
      are sent to each.
    - `learner_device_s`, `engine_device_s`: device seconds of learner and engines, summed over devices (CPU: CPU
      seconds); `inference_to_training` is the second divided by the first.
    - `parameter_bytes`: bytes of a trained parameter in the learner's memory, by part (`arithmetic.parameter_bytes`).
    - `communication_s`: how long one learner rank communicates.
    - `dollars`: cost of a step by part: "learner" and "engines", or "machine" for a CPU; `step_dollars` is the sum.
    - `million_tokens_dollars`: cost of a million sampled tokens."""

    learner_memory: Memory
    engine_memory: Memory
    parameter_bytes: Mapping[str, float]
    batch: float
    critical_batch: float
    decode_tokens_s: float
    learner_s: float
    engines_s: float
    machines_s: float
    rollout_s: float
    sync_s: float
    sync_bytes: float
    step_s: float
    bound_by: str
    learner_device_s: float
    engine_device_s: float
    inference_to_training: float
    communication_s: float
    dollars: Mapping[str, float]
    step_dollars: float
    million_tokens_dollars: float

    def plain(self) -> dict[str, Any]:
        """Return the plan as dicts, lists and numbers, for JSON."""
        memory = {"learner_memory": self.learner_memory, "engine_memory": self.engine_memory}
        return {**asdict(self), **{k: {**asdict(m), "total": m.total, "fits": m.fits} for k, m in memory.items()}}

    @property
    def fits(self) -> bool:
        """Whether learner and engines have enough memory."""
        return self.learner_memory.fits and self.engine_memory.fits


def plan(
    model: ModelConfig, shape: Shape, layout: Layout, hardware: Device | Measured, engines_on: Device | None = None
) -> Plan:
    """Estimate one training step of a model on `hardware`: accelerators, or this machine's measured CPU.

    `shape` describes the rollouts of a step, and `layout` how many devices learner and engines have.

    `engines_on` is the device of the engines, if it differs from the learner's."""
    if isinstance(hardware, Measured):
        return _on_cpu(model, shape, layout, hardware)
    return _on_devices(model, shape, layout, hardware, engines_on or hardware)


def critical_batch(model: ModelConfig, device: Device) -> float:
    """Compute the batch size at which a decoding step spends as much time on computing as on reading weights: the
    roofline's ridge point.

    Williams et al. 2009, "Roofline"; Pope et al. 2022 (arXiv 2211.05102), section 3, counting only the chosen experts.
    """

    def is_compute_bound(batch: float) -> bool:
        flops = 2.0 * arithmetic.active_parameters(model) * batch
        return flops / device.flops >= arithmetic.read_bytes(model, batch) / device.bytes_s

    low, high = 1.0, 2.0
    while not is_compute_bound(high) and high < 1e9:
        low, high = high, 2 * high
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_compute_bound(middle) else (middle, high)
    return high


def fixed_point(guess: float, step: Callable[[float], float]) -> float:
    """Compute x with x = step(x), by damped iteration from `guess`."""
    for _ in range(ROUNDS):
        guess = (guess + step(guess)) / 2
    return guess


def memory_of(model: ModelConfig, layout: Layout, capacity: float, engine_capacity: float) -> tuple[Memory, Memory]:
    """Compute the memory use of one learner rank and of one engine device.

    `capacity` and `engine_capacity` are the bytes that each of them has."""
    training, shared = layout.training, layout.learner_ranks
    weights = arithmetic.weights_bytes(model, training, shared)
    optimiser = arithmetic.optimiser_bytes(model, training, shared)
    activations = arithmetic.activation_bytes(model, layout.budget_tokens, training)
    activations += arithmetic.rounded_bytes(model, training)
    host = arithmetic.base_bytes(model, training, shared)
    if training.offload:
        host += arithmetic.optimiser_state_bytes(model, training, shared)
    learner = Memory(weights, optimiser, activations, 0.0, capacity, host=host)
    cache = arithmetic.kv_bytes_device(model, layout.engine_ranks, layout.dtype_bytes) * layout.kv_tokens
    cache += arithmetic.state_bytes(model) * layout.max_sequences
    engine_weights = arithmetic.engine_bytes(model, layout.dtype_bytes, layout.matrix_bytes) / layout.engine_ranks
    return learner, Memory(engine_weights, 0.0, 0.0, cache, engine_capacity)


def _learner_s(model: ModelConfig, shape: Shape, layout: Layout, device: Device) -> tuple[float, float, float]:
    """(device seconds, wall seconds, communication seconds per rank) of the learner in a step."""
    training, ranks = layout.training, layout.learner_ranks
    trained = shape.rollouts * shape.signal_share * shape.context
    flops = arithmetic.training_flops(model, shape.context / 2, training) * trained
    device_s = flops / (device.flops * device.training_share)
    forwards = math.ceil(trained / ranks / layout.budget_tokens) if trained else 0
    shared_s = forwards * sharing_s(model, training, ranks, device)
    sent_s = dispatch_s(model, training, trained / ranks, device)
    return device_s, max(device_s / ranks, shared_s) + sent_s, shared_s + sent_s


def _sync_s(layout: Layout, num_bytes: float, snapshot: float) -> float:
    """Time until the slowest region has a new version: the learner's ranks encode it, and each region reads the
    pointer, the manifest and the objects one after another."""
    transfer_s = max(num_bytes / one.bytes_s + 3 * one.round_trip_s for one in layout.places)
    return transfer_s + snapshot / layout.learner_ranks / ENCODE_BYTES_S


def prompt_token_s(model: ModelConfig, context: float, device: Device) -> float:
    """Compute the device seconds of an engine for one token of a prompt, after `context` tokens on average."""
    return arithmetic.forward_flops(model, context) / (device.flops * device.training_share)


def decoding_step_s(model: ModelConfig, context: float, layout: Layout, device: Device) -> Callable[[float], float]:
    """Return a function from the number of sequences to the seconds of one decoding step of an engine.

    The sequences have `context` tokens on average. A step takes as long as the roofline says (Williams et al. 2009),
    and the all-reduces in addition."""
    ranks = layout.engine_ranks
    kv = arithmetic.kv_bytes_device(model, ranks, layout.dtype_bytes) * context + 2.0 * arithmetic.state_bytes(model)
    weight_bytes = arithmetic.engine_bytes(model, layout.dtype_bytes, layout.matrix_bytes) / model.num_parameters

    def step_s(batch: float) -> float:
        compute = arithmetic.forward_flops(model, context) * batch / device.flops / ranks
        read = (arithmetic.read_bytes(model, batch, weight_bytes) / ranks + kv * batch) / device.bytes_s
        return max(compute, read) / device.decoding_share + tensor_parallel_s(model, batch, ranks, device)

    return step_s


def _on_devices(model: ModelConfig, shape: Shape, layout: Layout, learners: Device, device: Device) -> Plan:
    mean, ranks = shape.context / 2, layout.engine_ranks
    learner_device_s, learner_s, communication_s = _learner_s(model, shape, layout, learners)
    prefill_s = prompt_token_s(model, mean, device) * shape.prefill_tokens
    decode_s = decoding_step_s(model, mean, layout, device)
    in_flight = min(layout.max_running, (layout.max_lag + 1) * shape.rollouts) / layout.engines
    round_trip_s = sum(one.engines * one.round_trip_s for one in layout.places) / layout.engines
    waiting_s = shape.turns * (shape.tool_s + round_trip_s)

    def batch_of(batch: float) -> float:
        """Little's law: the share of rollouts in flight that are decoding."""
        decoding = shape.sampled_tokens * decode_s(batch) + prefill_s / ranks
        return max(1.0, in_flight * decoding / (decoding + waiting_s))

    batch = fixed_point(max(1.0, in_flight), batch_of)
    a_rollout_s = shape.sampled_tokens * decode_s(batch) / batch + prefill_s / ranks
    rollouts = shape.rollouts + layout.evaluated
    rollout_s = shape.sampled_tokens * decode_s(batch) + prefill_s / ranks + waiting_s
    published = arithmetic.trained_parameters(model, layout.training)
    sync_bytes, snapshot = arithmetic.delta_bytes(published, layout.changed_share), arithmetic.BF16_BYTES * published
    sync_s = _sync_s(layout, sync_bytes, snapshot)
    parts = {
        "the learner": learner_s,
        "the engines": a_rollout_s * rollouts / layout.engines,
        "one rollout's length": rollout_s / (layout.max_lag + 1),
        "publishing": sync_s / (layout.max_lag + 1),
    }
    found = {**parts, "learner device": learner_device_s, "communication": communication_s}
    kinds = (learners, device)
    return _plan_of(model, shape, layout, kinds, found, batch, decode_s(batch), rollout_s, (sync_s, sync_bytes), 0.0)


def _on_cpu(model: ModelConfig, shape: Shape, layout: Layout, cpu: Measured) -> Plan:
    trained = shape.rollouts * shape.signal_share * shape.context
    rank_s = cpu.training_s + cpu.training_s_token * trained / layout.learner_ranks + cpu.publish_s
    learner_s = rank_s * layout.learner_ranks
    machine_s = cpu.turn_s * shape.turns + cpu.grade_s * shape.fresh_grades
    in_flight = min(layout.max_running, (layout.max_lag + 1) * shape.rollouts) / layout.engines

    def engine_s(batch: float) -> float:
        """CPU seconds of an engine for one rollout, with `batch` sequences in the decoding batch."""
        decoded = shape.sampled_tokens * (cpu.decode_s / batch + cpu.decode_s_sequence)
        return decoded + shape.prefill_tokens * cpu.prefill_s_token + shape.turns * cpu.request_s

    def batch_of(batch: float) -> float:
        """On shared cores, the engine's share of a rollout's time equals its share of the work."""
        return max(1.0, in_flight * engine_s(batch) / (engine_s(batch) + machine_s + cpu.conductor_s))

    batch, rollouts = fixed_point(in_flight, batch_of), shape.rollouts + layout.evaluated
    engines_s = engine_s(batch) * rollouts + cpu.follow_s * layout.engines
    machines_s = (machine_s + cpu.conductor_s) * rollouts
    all_s = (learner_s + engines_s + machines_s) / cpu.cores
    parts = {
        "the cores": all_s,
        "the learner": rank_s,
        "an engine": engines_s / layout.engines,
        "waiting for tools": shape.turns * shape.tool_s / (layout.max_lag + 1),
    }
    decode_s = cpu.decode_s + cpu.decode_s_sequence * batch
    rollout_s = all_s * min(layout.max_running, (layout.max_lag + 1) * shape.rollouts) / max(1.0, rollouts)
    published = arithmetic.trained_parameters(model, layout.training)
    sync = (cpu.publish_s + cpu.follow_s, arithmetic.delta_bytes(published, layout.changed_share))
    priced = Device("cpu", 0.0, 0.0, cpu.memory_bytes, cpu.dollars_h, 0.0)
    found = {**parts, "learner device": learner_s, "engines device": engines_s}
    return _plan_of(model, shape, layout, (priced, priced), found, batch, decode_s, rollout_s, sync, machines_s)


def _plan_of(
    model: ModelConfig,
    shape: Shape,
    layout: Layout,
    devices: tuple[Device, Device],
    parts: dict[str, float],
    batch: float,
    decode_s: float,
    rollout_s: float,
    sync: tuple[float, float],
    machines_s: float,
) -> Plan:
    learners, device = devices
    on_cpu = not device.flops
    communication_s = parts.pop("communication", 0.0)
    learner_device_s = parts.pop("learner device")
    engines_s = parts.pop("engines device", parts.get("the engines", 0.0))
    bound_by = max(parts, key=lambda name: parts[name])
    step_s, hours = parts[bound_by], parts[bound_by] / 3600
    dollars = {
        "learner": learners.dollars_h * hours * layout.learner_ranks,
        "engines": device.dollars_h * hours * layout.engines * layout.engine_ranks,
    }
    dollars = {"machine": device.dollars_h * hours} if on_cpu else dollars
    learner_memory, engine_memory = memory_of(model, layout, learners.memory_bytes, device.memory_bytes)
    if on_cpu:  # one memory for both
        own = learner_memory
        learner_memory = replace(own, weights=own.weights + own.host, host=0.0)
    engine_device_s = engines_s * (1 if on_cpu else layout.engines * layout.engine_ranks)
    return Plan(
        learner_memory=learner_memory,
        engine_memory=engine_memory,
        parameter_bytes=arithmetic.parameter_bytes(layout.training, layout.learner_ranks),
        batch=batch,
        critical_batch=0.0 if on_cpu else critical_batch(model, device),
        decode_tokens_s=batch / decode_s,
        learner_s=learner_device_s if on_cpu else parts["the learner"],
        engines_s=engines_s,
        machines_s=machines_s,
        rollout_s=rollout_s,
        sync_s=sync[0],
        sync_bytes=sync[1],
        step_s=step_s,
        bound_by=bound_by,
        learner_device_s=learner_device_s,
        engine_device_s=engine_device_s,
        inference_to_training=engine_device_s / learner_device_s if learner_device_s else 0.0,
        communication_s=communication_s,
        dollars=dollars,
        step_dollars=sum(dollars.values()),
        million_tokens_dollars=1e6 * sum(dollars.values()) / (shape.rollouts * shape.sampled_tokens),
    )


# ------------------------------------------------------------------------------------------------------- communication
# Devices of one node use NVLink. A larger group also uses the network, whose bandwidth the devices of a node share.


STEP_S, HOP_S = 10e-6, 30e-6
"""Latency of a collective within a node and across nodes: assumptions, in the range of NCCL's tests."""


def all_gather_s(num_bytes: float, ranks: int, device: Device) -> float:
    """Compute the seconds of an all-gather of `num_bytes` that are sharded over `ranks`, or of a reduce-scatter.

    Each rank receives the shards that it lacks over NVLink; each node receives the shards that it lacks through all its
    network cards in parallel. Rajbhandari et al. 2019, "ZeRO" (arXiv 1910.02054), section 7; rings: Patarasuk and Yuan
    2009."""
    if ranks == 1:
        return 0.0
    inside = num_bytes * (1 - 1 / ranks) / device.nvlink_bytes_s
    if ranks <= device.node_devices:
        return inside
    missing = num_bytes * (1 - device.node_devices / ranks)
    return max(inside, missing / (device.node_devices * device.network_bytes_s))


def sharing_s(model: ModelConfig, training: Training, ranks: int, device: Device) -> float:
    """Compute the seconds that one of `ranks` fully sharded learner ranks communicates in a forward and backward pass.

    All weights are gathered for the forward and for the backward pass, and gradients of trained weights are scattered:
    three times the weights (Rajbhandari et al. 2019, section 7.2.2). Experts are gathered among the ranks that share
    them."""
    experts = arithmetic.expert_parameters(model)
    parts = (
        (model.num_parameters - experts, ranks),
        (experts / training.expert_parallel, ranks // training.expert_parallel),
    )
    times = 2 * training.gathered_bytes + (0 if training.lora_rank else arithmetic.FLOAT32_BYTES)
    return sum(all_gather_s(times * parameters, among, device) for parameters, among in parts)


def dispatch_s(model: ModelConfig, training: Training, tokens: float, device: Device) -> float:
    """Compute the seconds to send `tokens` tokens to their experts and back, in the forward and in the backward pass.

    With activation recomputation they are sent once more. Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), section
    3.3."""
    degree = training.expert_parallel
    if degree == 1 or not model.num_moe_layers:
        return 0.0
    passes = 3 if training.recompute else 2
    sent = 2.0 * passes * tokens * model.top_k * model.hidden_size * training.dtype_bytes * model.num_moe_layers
    speed = device.nvlink_bytes_s if degree <= device.node_devices else device.network_bytes_s
    return sent * (1 - 1 / degree) / speed


def tensor_parallel_s(model: ModelConfig, batch: float, devices: int, device: Device) -> float:
    """Compute the seconds of communication in a forward pass of `batch` tokens on `devices` tensor-parallel devices.

    There are two all-reduces per layer: Shoeybi et al. 2019 (arXiv 1909.08053), section 3."""
    if devices == 1:
        return 0.0
    within = devices <= device.node_devices
    one = batch * model.hidden_size * arithmetic.BF16_BYTES
    speed = device.nvlink_bytes_s if within else device.network_bytes_s
    return 2 * model.num_layers * (2 * (1 - 1 / devices) * one / speed + (STEP_S if within else HOP_S))


# ------------------------------------------------------------------------------------------ settings that reduce memory


MAX_RANKS = 65_536
ADAPTER_RANK = 32
FITTED_SHARE = 0.95
"""Share of the memory that is used with a suggested smaller cache."""


def learner_remedies(model: ModelConfig, layout: Layout, capacity: float) -> Iterator[str]:
    """Yield settings, as text, with which a learner rank fits in `capacity` bytes, the cheapest first.

    Yields nothing if it fits already."""

    def memory(changed: Layout) -> Memory:
        return memory_of(model, changed, capacity, capacity)[0]

    if memory(layout).fits:
        return
    training = layout.training
    recomputing = replace(layout, training=replace(training, recompute=True))
    if not training.recompute and memory(recomputing).fits:
        yield "learner.recompute = true"
        return
    and_recompute = "" if training.recompute else " and learner.recompute = true"
    for settings, smaller in _smaller_states(recomputing.training):
        if memory(replace(recomputing, training=smaller)).fits:
            yield f"{settings}{and_recompute}"
            break
    if ranks := _fewest(layout.learner_ranks, lambda n: memory(replace(recomputing, learner_ranks=n)).fits):
        yield f"learner.ranks = {ranks}{and_recompute}"
    if not training.lora_rank:
        adapters = replace(recomputing, training=replace(recomputing.training, lora_rank=ADAPTER_RANK))
        if ranks := _fewest(layout.learner_ranks, lambda n: memory(replace(adapters, learner_ranks=n)).fits):
            more = f", learner.ranks = {ranks}" if ranks != layout.learner_ranks else ""
            yield f"adapters: learner.lora_rank = {ADAPTER_RANK}{more}{and_recompute}"
    if layout.budget_tokens > 1024:
        less = replace(recomputing, budget_tokens=layout.budget_tokens // 4)
        if memory(less).fits:
            yield f"fewer tokens per forward pass: learner.budget_tokens = {less.budget_tokens}{and_recompute}"


def _smaller_states(training: Training) -> Iterator[tuple[str, Training]]:
    """Yield smaller optimiser states of these settings, as text and settings, the cheapest first."""
    codes = replace(training, moment_bytes=arithmetic.CODE_BYTES)
    narrow = replace(codes, masters=False, bf16_masters=True)
    steps = [('learner.moments = "8bit"', codes)]
    if training.masters:
        steps.append(('learner.moments = "8bit", learner.masters = "bf16"', narrow))
    steps += [(f"{settings}, learner.offload = true", replace(found, offload=True)) for settings, found in steps[-1:]]
    yield from (step for step in steps if step[1] != training)


def engine_remedies(model: ModelConfig, layout: Layout, capacity: float) -> Iterator[str]:
    """Yield settings, as text, with which an engine device fits in `capacity` bytes. Yields nothing if it fits
    already."""

    def memory(changed: Layout) -> Memory:
        return memory_of(model, changed, capacity, capacity)[1]

    now = memory(layout)
    if now.fits:
        return
    left = FITTED_SHARE * capacity - now.weights
    if left > 0:
        tokens = int(left / now.cache * layout.kv_tokens)
        yield f"a KV cache of {tokens:,} tokens, not {layout.kv_tokens:,}: fewer engine.max_sequences, or kv_tokens"

    def fits_on(devices: int) -> bool:
        return model.num_heads % devices == 0 and memory(replace(layout, engine_ranks=devices)).fits

    if ranks := _fewest(layout.engine_ranks, fits_on):
        yield f"{ranks} devices per engine (--engine-ranks {ranks})"
    for name, width in MATRIX_BYTES.items():
        if width < layout.matrix_bytes and memory(replace(layout, matrix_bytes=width)).fits:
            yield f'quantised weights: numerics.quantise = "{name}"'


def _fewest(now: int, fits: Callable[[int], bool]) -> int:
    """The smallest of `now`, 2 `now`, 4 `now`, ... that fits; 0 if none does."""
    ranks = now
    while ranks <= MAX_RANKS:
        if fits(ranks):
            return ranks
        ranks *= 2
    return 0
