"""Rounding to block-scaled formats (`numerics.formats`).

Rounding is IEEE's: to nearest, ties to even, with subnormals, saturating at the largest number. Any scale is a valid
encoding; a decoder need not know how it was chosen. The scale of an MX block is the smallest power of two with which
nothing saturates. The specification's own rule (section 6.3: the exponent of the largest number minus that of the
largest element) cuts up to an eighth (E4M3) or a quarter (E2M1) off a block's largest numbers. The global scale of
NVFP4 is the smallest power of two with which no block scale saturates. (Others take largest / (6 · 448).) A power of
two loses nothing, since block scales carry the mantissa. Every product of element and scales then has six significant
bits, which bf16 and fp16 represent exactly.

Numbers that share a scale with NaN or infinity become NaN: in MX a block, in NVFP4 a token or a matrix. A block of
zeros stays zeros, with their signs.

Results depend on one token or one matrix only. Shapes: K the last dimension, B numbers of a block."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from etude.errors import ConfigError
from etude.numerics.formats import E4M3, Element, Format

_EXPONENT, _MANTISSA_BITS, _BIAS = 0x7F800000, 23, 127  # of float32
_SMALLEST_SCALE = 0x00400000  # bits of 2**-127, which E8M0 writes as 0


@dataclass(frozen=True)
class Scaled:
    """Rounded numbers, represented as elements times scales: `elements` · `scale`.

    `elements`: float32 [..., K/B, B], each a value of the format's element. `block_scale`: float32 [..., K/B, 1], a
    power of two or a value of E4M3. `global_scale`: float32 [..., 1, 1], for a matrix [..., 1, 1, 1], a power of two.
    """

    elements: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor | None

    @property
    def scale(self) -> torch.Tensor:
        """float32 [..., K/B, 1]: the product of both scales."""
        return self.block_scale if self.global_scale is None else self.block_scale * self.global_scale


def round_to_format(x: torch.Tensor, format: Format, *, matrix: bool = False) -> torch.Tensor:
    """Round `x` to values of a block-scaled format. The result has the shape and dtype of `x`.

    The last dimension must consist of full blocks; otherwise `ConfigError` is raised. A format with a global scale
    (NVFP4) has one for each row or, with `matrix`, one for the last two dimensions. bf16 represents all values of the
    formats exactly; fp16 only those within its range.

    >>> from etude.numerics.formats import FORMATS, Quantise
    >>> round_to_format(torch.tensor([[1.0, 1.1, -5.0, 100.0] * 8]), FORMATS[Quantise.MXFP8])[0, :4].tolist()
    [1.0, 1.125, -5.0, 96.0]
    """
    done = to_scaled(x, format, matrix=matrix)
    return done.elements.mul_(done.scale).view(x.shape).to(x.dtype)


def to_scaled(x: torch.Tensor, format: Format, *, matrix: bool = False) -> Scaled:
    """Return `x` as elements and scales. Arguments and errors are those of `round_to_format`."""
    if x.shape[-1] % format.block:
        raise ConfigError(
            f"a matrix of width {x.shape[-1]} cannot be multiplied in {format.name}",
            f"the width is not a multiple of the block size {format.block}",
            hint=f'use model widths that are multiples of {format.block}, or set numerics.quantise = "none"',
        )
    blocks = x.float().reshape(*x.shape[:-1], -1, format.block)
    largest = blocks.abs().amax(-1, keepdim=True)
    if not format.has_global_scale:
        scale = power_of_two(largest, format.element.largest)
        return Scaled(to_element_(blocks / scale, format.element), scale, None)
    most = E4M3.largest * format.element.largest
    outer = power_of_two(largest.amax((-3, -2) if matrix else -2, keepdim=True), most)
    block_scale = to_element_(largest / format.element.largest / outer, E4M3)
    divisor = (block_scale * outer).masked_fill_(block_scale == 0, torch.inf)
    return Scaled(to_element_(blocks / divisor, format.element), block_scale, outer)


def to_element_(y: torch.Tensor, element: Element) -> torch.Tensor:
    """Round float32 numbers to an element's values, in place: nearest, ties to even, saturating; NaN stays NaN.

    Adding and subtracting 1.5 · 2^(23 - mantissa) times a number's power of two leaves `mantissa` bits.

    >>> from etude.numerics.formats import E2M1
    >>> to_element_(torch.tensor([0.2, 0.25, 0.26, 2.5, 5.0, -9.0]), E2M1).tolist()
    [0.0, 0.0, 0.5, 2.0, 4.0, -6.0]
    """
    y.clamp_(-element.largest, element.largest)
    power = (y.view(torch.int32) & _EXPONENT).clamp_(min=(element.min_exponent + _BIAS) << _MANTISSA_BITS)
    power += ((_MANTISSA_BITS - element.mantissa) << _MANTISSA_BITS) + (1 << (_MANTISSA_BITS - 1))
    magic = power.view(torch.float32)
    return (y + magic).sub_(magic).copysign_(y)


def power_of_two(largest: torch.Tensor, most: float) -> torch.Tensor:
    """Return the smallest power of two p ≥ 2^-127 with `largest` ≤ `most` · p.

    `most` · p does not overflow in float32. The result is NaN where `largest` is not finite.

    >>> power_of_two(torch.tensor([448.0, 449.0, 0.0, torch.inf]), 448.0).tolist()
    [1.0, 2.0, 5.877471754111438e-39, nan]
    """
    mantissa, exponent = math.frexp(most)  # most = mantissa · 2^exponent, 0.5 <= mantissa < 1
    carry = (1 << _MANTISSA_BITS) - 1 - int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))  # past it: one power more
    bits = (largest.view(torch.int32) + carry) & _EXPONENT
    bits = (bits - ((exponent - 1) << _MANTISSA_BITS)).clamp_(_SMALLEST_SCALE, (255 - exponent) << _MANTISSA_BITS)
    return bits.view(torch.float32).add_(largest - largest)
