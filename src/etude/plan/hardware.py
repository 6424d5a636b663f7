"""Hardware as a few numbers: from data sheets for accelerators, measured for this machine.

Dense bf16 peaks without sparsity, memory and bandwidths are from data sheets (NVIDIA H100 SXM, H200 SXM and DGX B200;
NVLink in one direction; one 400 Gbit/s network card per device, 8 devices per node). Default prices are assumptions of
2026. The achieved share of the peak is an assumption, too: 0.4 of the peak in training, 0.6 of the roofline in decoding
(goals of this project on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import ConfigError, nearest
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS

MATRIX_BYTES: dict[Quantise, float] = {name: form.bits_per_number / 8 for name, form in FORMATS.items()}
"""Bytes per number in quantised matrices, including the block scales."""


@dataclass(frozen=True)
class Device:
    """One kind of accelerator, from data sheets; `device` returns those that are known.

    - `flops`: dense bf16 FLOPs per second; `bytes_s`: memory bandwidth.
    - `dollars_h`: price per hour.
    - `nvlink_bytes_s`: bandwidth to the other devices of its node; `network_bytes_s`: to other nodes.
    - `node_devices`: devices per node.
    - `training_share`, `decoding_share`: achieved share of `flops` in training, and of the roofline in decoding."""

    name: str
    flops: float
    bytes_s: float
    memory_bytes: float
    dollars_h: float
    nvlink_bytes_s: float
    network_bytes_s: float = 50e9
    node_devices: int = 8
    training_share: float = 0.4
    decoding_share: float = 0.6


DEVICES = {
    "h100": Device("h100", 989e12, 3.35e12, 80e9, 2.5, 450e9),
    "h200": Device("h200", 989e12, 4.8e12, 141e9, 3.5, 450e9),
    "b200": Device("b200", 2250e12, 8.0e12, 180e9, 5.5, 900e9),
}


@dataclass(frozen=True)
class Measured:
    """Measurements of this computer for one model, which `etude.loop.calibration` makes. Times are CPU seconds in one
    thread.

    - `training_s`, `training_s_token`: a learner step takes `training_s`, plus `training_s_token` for each token.
    - `prefill_s_token`: time of an engine for each token of a prompt.
    - `decode_s`, `decode_s_sequence`: a decoding step takes `decode_s`, plus `decode_s_sequence` for each sequence in
      the batch.
    - `publish_s`, `follow_s`: time to publish a version of the weights (learner), and to load it (each engine).
    - `request_s`: time of an engine for each turn of an agent, besides the model's computation.
    - `turn_s`: time of worker and machines for each turn: the request and the tool.
    - `grade_s`: time of grader and machines for each rollout whose files were not graded before.
    - `conductor_s`: time of the main process for each rollout."""

    cores: int
    memory_bytes: float
    training_s: float
    training_s_token: float
    prefill_s_token: float
    decode_s: float
    decode_s_sequence: float
    publish_s: float
    follow_s: float
    request_s: float
    turn_s: float
    grade_s: float
    conductor_s: float
    dollars_h: float = 0.0


def device(name: str) -> Device:
    """Return the accelerator with this name, such as "h200". Raises `ConfigError` for an unknown name.

    >>> device("h200").bytes_s
    4800000000000.0
    """
    if name not in DEVICES:
        raise ConfigError(f"unknown hardware {name!r}", hint=nearest(name, [*DEVICES, "cpu"]))
    return DEVICES[name]
