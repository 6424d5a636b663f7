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
    """The numbers of one accelerator."""

    name: str
    flops: float  # per second, dense bf16
    bytes_s: float  # memory bandwidth
    memory_bytes: float
    dollars_h: float
    nvlink_bytes_s: float  # to the other devices of the node
    network_bytes_s: float = 50e9  # per device
    node_devices: int = 8
    training_share: float = 0.4  # achieved share of `flops` in training
    decoding_share: float = 0.6  # achieved share of the roofline in decoding


DEVICES = {
    "h100": Device("h100", 989e12, 3.35e12, 80e9, 2.5, 450e9),
    "h200": Device("h200", 989e12, 4.8e12, 141e9, 3.5, 450e9),
    "b200": Device("b200", 2250e12, 8.0e12, 180e9, 5.5, 900e9),
}


@dataclass(frozen=True)
class Measured:
    """Measurements of this machine by `etude.loop.calibration`: CPU seconds in one thread, for a given model.

    Measured separately, within seconds: learner steps of two sizes, an engine with two batch sizes and with prompts
    only, scripts that solve tasks on machines, publishing and loading a version.
    """

    cores: int
    memory_bytes: float
    training_s: float  # per step, independent of its tokens
    training_s_token: float
    prefill_s_token: float
    decode_s: float  # per decoding step, independent of the batch size
    decode_s_sequence: float  # and per sequence in the batch
    publish_s: float  # learner, per version
    follow_s: float  # engine, per version
    request_s: float  # engine, per turn, besides the computation
    turn_s: float  # worker and machines, per turn: request and tool
    grade_s: float  # grader and machines, per new exports
    conductor_s: float  # conductor, per rollout
    dollars_h: float = 0.0


def device(name: str) -> Device:
    """The accelerator with this name. Raises `ConfigError`.

    >>> device("h200").bytes_s
    4800000000000.0
    """
    if name not in DEVICES:
        raise ConfigError(f"unknown hardware {name!r}", hint=nearest(name, [*DEVICES, "cpu"]))
    return DEVICES[name]
