"""Stochastic rounding with keyed random numbers: the same bits on any number of ranks, and after a restart.

Rounding to the nearest bf16 number loses every update below half the distance between two numbers. Stochastic rounding
goes up or down with probabilities that keep the expectation (Gupta et al., arXiv 1502.02551; for bf16 weights: Zamirai
et al., arXiv 2010.06192), so small updates add up without float32 copies of the weights.

A random number is a hash of (seed, step, parameter, block, place in the block). The block counts in the full parameter,
so it is the same whichever rank has it. There is no generator with a state. Shapes: B blocks of S numbers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

_GOLDEN = 0x9E3779B9
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)  # lowbias32: C. Wellons, "Prospecting for hash functions", 2018
_ANOTHER = 0x2C1B3C6D
_LOW = 0xFFFF


@dataclass(frozen=True)
class Noise:
    """Random bits for the numbers of some blocks: 16 for each of three roundings. `bits`: int32 [B, S]."""

    bits: torch.Tensor

    @property
    def weights(self) -> torch.Tensor:
        """Bits in the low half of int32 [B, S], for `round_to_bf16`."""
        return self.bits & _LOW

    @property
    def first(self) -> torch.Tensor:
        """Uniform numbers in [0, 1), float32 [B, S], for the first moment."""
        return _uniform(self.bits)

    @property
    def second(self) -> torch.Tensor:
        """Uniform numbers in [0, 1), float32 [B, S], for the second moment."""
        return _uniform(self.bits * _ANOTHER)


def noise_key(seed: int, step: int, name: str) -> int:
    """Return the 64-bit key of one parameter's random numbers at one step."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {name}".encode()).digest()[:8])


def noise(key: int, first_block: int, num_blocks: int, size: int, device: torch.device) -> Noise:
    """Return the random bits of the blocks [first_block, first_block + num_blocks) with `size` numbers each.

    >>> cpu = torch.device("cpu")
    >>> torch.equal(noise(7, 0, 4, 3, cpu).bits[2:], noise(7, 2, 2, 3, cpu).bits)
    True
    """
    block = torch.arange(first_block, first_block + num_blocks, device=device)
    low, high = (block ^ (key >> 32)).to(torch.int32), ((block >> 31) ^ (key & 0x7FFFFFFF)).to(torch.int32)
    of_block = _mix(_mix(low) ^ high)
    place = torch.arange(size, device=device, dtype=torch.int32) * _signed(_GOLDEN)
    return Noise(_mix(of_block[:, None] + place))


def round_to_bf16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers stochastically to numbers of bf16, in place, and return them as float32.

    `bits`: int32 in [0, 65536), independent and uniform. A number goes to its upper neighbour with a probability equal
    to its distance from the lower one, so the expectation is the number itself, exactly. Numbers of bf16 stay."""
    values.view(torch.int32).add_(bits).bitwise_and_(~_LOW)
    return values


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return ((bits >> 16) & _LOW).float().mul_(2.0**-16)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash int32 numbers."""
    first, second = map(_signed, _MULTIPLIERS)
    x = x ^ ((x >> 16) & _LOW)
    x.mul_(first)
    x.bitwise_xor_((x >> 15) & 0x1FFFF)
    x.mul_(second)
    return x.bitwise_xor_((x >> 16) & _LOW)


def _signed(number: int) -> int:
    """Return a 32-bit number as the int32 with the same bits."""
    return number - (1 << 32) if number >> 31 else number
