"""Low-precision number formats with block scales: MXFP8, MXFP4, NVFP4. Torch-free.

| format | elements | block | block scale | global scale |
| --- | --- | --- | --- | --- |
| mxfp8 | E4M3, largest 448 | 32 | E8M0: a power of two | – |
| mxfp4 | E2M1, largest 6 | 32 | E8M0 | – |
| nvfp4 | E2M1 | 16 | E4M3 | one float32 per token or matrix; in etude a power of two |

Elements and E8M0 are those of the OCP Microscaling specification v1.0; NVFP4 is NVIDIA's (arXiv 2509.25149). Blocks are
along the last dimension, over which a product sums. `quantisation.rounding` rounds to these formats."""

from __future__ import annotations

from dataclasses import dataclass

from etude.numerics.config import Quantise


@dataclass(frozen=True)
class Element:
    """A small float: sign, exponent, mantissa; no infinities.

    `bits`: all bits; `mantissa`: bits of the mantissa; `min_exponent`: the lowest exponent of normal numbers;
    `largest`: the largest number.
    """

    bits: int
    mantissa: int
    min_exponent: int
    largest: float


E4M3 = Element(bits=8, mantissa=3, min_exponent=-6, largest=448.0)
E2M1 = Element(bits=4, mantissa=1, min_exponent=0, largest=6.0)


@dataclass(frozen=True)
class Format:
    """A low-precision format: an element type, and scales that blocks of `block` elements share.

    `has_global_scale`: block scales are E4M3 with a global float32 scale; otherwise they are E8M0, powers of two."""

    name: Quantise
    element: Element
    block: int
    has_global_scale: bool

    @property
    def bits_per_number(self) -> float:
        """Bits per number of a packed tensor, block scales included.

        >>> [(str(f.name), f.bits_per_number) for f in FORMATS.values()]
        [('mxfp8', 8.25), ('mxfp4', 4.25), ('nvfp4', 4.5)]
        """
        return self.element.bits + 8 / self.block


FORMATS = {
    f.name: f
    for f in (
        Format(Quantise.MXFP8, E4M3, 32, has_global_scale=False),
        Format(Quantise.MXFP4, E2M1, 32, has_global_scale=False),
        Format(Quantise.NVFP4, E2M1, 16, has_global_scale=True),
    )
}
