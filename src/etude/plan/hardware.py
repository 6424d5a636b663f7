"""The hardware of a run as a few numbers: from data sheets for accelerators, measured for this machine.

Dense bf16 peaks without sparsity, memory and bandwidths are from the makers' data sheets (NVIDIA H100 SXM, H200 SXM and
DGX B200; NVLink in one direction; one network card of 400 Gbit/s per device, 8 devices per node). Prices are
assumptions of 2026, used where none are given. The share of the peak that is reached is an assumption too, and shown as
one: .4 of the peak in training, .6 of the roofline in decoding (this project's goals on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import ConfigError, nearest
from etude.numerics.config import Quantise
from etude.numerics.formats import FORMATS

MATRIX_BYTES: dict[Quantise, float] = {name: form.bits_per_number / 8 for name, form in FORMATS.items()}
"""Of a number in an engine's matrices where these are rounded, with its share of the scales of blocks."""


@dataclass(frozen=True)
class Device:
    """The numbers of one accelerator."""

    name: str
    flops: float  # a second, dense bf16
    bytes_s: float  # of its memory
    memory_bytes: float
    dollars_h: float
    nvlink_bytes_s: float  # of a device to the others of its node
    network_bytes_s: float = 50e9  # of a device's share of its node's network
    node_devices: int = 8
    training_share: float = 0.4  # of `flops`, forward and backward
    decoding_share: float = 0.6  # of the roofline


DEVICES = {
    "h100": Device("h100", 989e12, 3.35e12, 80e9, 2.5, 450e9),
    "h200": Device("h200", 989e12, 4.8e12, 141e9, 3.5, 450e9),
    "b200": Device("b200", 2250e12, 8.0e12, 180e9, 5.5, 900e9),
}


@dataclass(frozen=True)
class Measured:
    """Times of this machine's CPU, measured by `etude.loop.calibration`: CPU seconds in one thread, for the given
    model.

    Each is measured by itself in some seconds: the learner's step at two sizes, an engine at two numbers of sequences
    and with prompts alone, scripts that play tasks on machines, a version that is published and followed.
    """

    cores: int
    memory_bytes: float
    training_s: float  # a step, whatever its tokens
    training_s_token: float
    prefill_s_token: float
    decode_s: float  # an engine's step, whatever it decodes
    decode_s_sequence: float  # and for each sequence in it
    publish_s: float  # the learner's share of a version
    follow_s: float  # an engine's
    request_s: float  # an engine's, beside what it computes, of a turn
    turn_s: float  # worker and machines, of a turn: its request and its tool
    grade_s: float  # grader and machines, of exports that were not graded before
    conductor_s: float  # a rollout, its transitions among it
    dollars_h: float = 0.0


def device(name: str) -> Device:
    """The accelerator of a name. Raises `ConfigError`.

    >>> device("h200").bytes_s
    4800000000000.0
    """
    if name not in DEVICES:
        raise ConfigError(f"--hardware {name!r} is unknown", hint=nearest(name, [*DEVICES, "cpu"]))
    return DEVICES[name]
