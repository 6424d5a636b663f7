"""Pack rounded numbers into bytes, and unpack them: exactly the values of `rounding.round_to_format`.

A code is the bits of one element; two E2M1 elements share a byte, the first in the lower nibble. Scales are one byte
per block. The global scale is stored as its reciprocal, like compressed-tensors' `weight_global_scale`; it is a power
of two here, so this loses nothing. Files from other tools may have any number there: value = element · (scale /
global)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from etude.numerics.formats import E2M1, E4M3, Element, Format
from etude.numerics.quantisation.rounding import to_scaled

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Packed:
    """A tensor in a low-precision format, from `pack` or from a file.

    `codes` and `scales` have the shape of the unpacked tensor, except for the last dimension. `codes`: the bits of
    the elements, uint8 [..., K], or [..., K/2] of four-bit elements. `scales`: uint8 [..., K/B], one E8M0 or E4M3
    number per block of B. `global_scale`: float32, one per row [...], or one per matrix; None in formats without it."""

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None


def pack(x: torch.Tensor, format: Format, *, matrix: bool = False) -> Packed:
    """Round `x` [..., K] to a format and pack it. Arguments and errors are those of `rounding.round_to_format`.

    >>> from etude.numerics.formats import FORMATS, Quantise
    >>> packed = pack(torch.tensor([[3.0, -1.0] * 16]), FORMATS[Quantise.MXFP4])
    >>> [hex(code) for code in packed.codes[0, :2].tolist()], packed.scales.tolist()
    (['0xc7', '0xc7'], [[126]])
    >>> unpack(packed, FORMATS[Quantise.MXFP4])[0, :2].tolist()
    [3.0, -1.0]
    """
    done = to_scaled(x, format, matrix=matrix)
    codes = _codes(done.elements.view(x.shape), format.element)
    if format.element is E2M1:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    block_scale = done.block_scale[..., 0]
    if done.global_scale is None:
        return Packed(codes, (block_scale.view(torch.int32) >> 23).to(torch.uint8), None)
    outer = done.global_scale.reshape(x.shape[: -2 if matrix else -1])
    return Packed(codes, _codes(block_scale, E4M3), outer.reciprocal())


def unpack(packed: Packed, format: Format) -> torch.Tensor:
    """Return the numbers of a packed tensor, float32 [..., K]."""
    blocks = _values(packed.codes, format.element).reshape(*packed.scales.shape, format.block)
    if packed.global_scale is None:
        scale = packed.scales.view(torch.float8_e8m0fnu).float()
    else:
        shared = packed.scales.dim() - packed.global_scale.dim()
        scale = _values(packed.scales, E4M3).view(packed.scales.shape)
        scale = scale / packed.global_scale.reshape(*packed.global_scale.shape, *[1] * shared)
    return blocks.mul_(scale[..., None]).flatten(-2)


def _codes(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the bits of element values, uint8. NaN is 0x7f in E4M3, and 0 in E2M1, where the scale is NaN."""
    if element is E4M3:
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    # scaled to float32's smallest numbers, E2M1's bits are the top bits of the mantissa and the bits below the sign
    bits = (values.nan_to_num(nan=0.0) * 2.0**-126).view(torch.int32)
    return ((bits >> 22) & 7 | (bits >> 28) & 8).to(torch.uint8)


def _values(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the values of element bits, float32; for E2M1 two per byte, in a new last dimension."""
    return _table(element).to(codes.device)[codes.int()]


@functools.cache
def _table(element: Element) -> torch.Tensor:
    """Return the values of every byte: [256], or [256, 2] for E2M1."""
    bits = torch.arange(256)
    if element is E4M3:
        return bits.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.stack([_E2M1[bits & 15], _E2M1[bits >> 4]], -1)
