"""Tensors as raw bits: the name of a dtype, a shape, and codes, one unsigned integer per element. So bf16, which numpy
lacks, needs no type of its own.

Digests are defined here: SHA-256 of a tensor's dtype, shape and little-endian bytes. The content digest of a set of
tensors is SHA-256 over its sorted names and their digests, and becomes `Version.digest`. Knows nothing of deltas.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude import progress

Codes = npt.NDArray[np.unsignedinteger[Any]]
"""1-D uint8, uint16, uint32 or uint64: the bits of each element."""

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
_COMPARED = 1 << 16


@dataclass(frozen=True)
class DType:
    """The bit layout of a code: sign, exponent, mantissa; or an unsigned integer where `exponent_shift` is None.

    Deltas are made of *items*: an item is a code, or one of the `parts` of a code, the lowest bits first.
    """

    name: str
    bits: int  # of a code
    exponent_shift: int | None = None  # width of the mantissa: the exponent is above it, below the sign
    parts: int = 1

    @property
    def codes(self) -> np.dtype[Any]:
        """The numpy dtype of a tensor's codes: unsigned, `bits` wide."""
        return np.dtype(f"u{self.bits // 8}")

    @property
    def width(self) -> int:
        """Number of bits of an item."""
        return self.bits // self.parts

    @property
    def items(self) -> np.dtype[Any]:
        """The numpy dtype that holds one item."""
        return np.dtype(f"u{max(8, self.width) // 8}")


DTYPES = {
    kind.name: kind
    for kind in (
        DType("bf16", 16, 7),
        DType("f16", 16, 10),
        DType("f32", 32, 23),
        DType("f8_e4m3", 8, 3),
        DType("f8_e5m2", 8, 2),
        DType("f8_e8m0", 8),  # an exponent and nothing else: a scale, as an integer
        DType("f4_e2m1x2", 8, 1, parts=2),  # two numbers of 4 bits a code, the first in the lower nibble
        DType("u8", 8),
        DType("u16", 16),
        DType("u32", 32),
        DType("i8", 8),
        DType("i16", 16),
        DType("i32", 32),
        DType("bool", 8),
        DType("u64", 64, parts=2),
        DType("i64", 64, parts=2),
        DType("f64", 64, parts=2),
    )
}
"""Every dtype a tensor may have, by name."""


def to_items(codes: Codes, kind: DType) -> Codes:
    """Split codes into items, in order; a view where no bit has to move.

    >>> to_items(np.array([0x21, 0x43], np.uint8), DTYPES["f4_e2m1x2"]).tolist()
    [1, 2, 3, 4]
    """
    if kind.width >= 8:
        return codes if kind.parts == 1 else codes.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)
    return np.stack([codes & np.uint8(15), codes >> np.uint8(4)], 1).reshape(-1)


def from_items(items: Codes, kind: DType) -> Codes:
    """Inverse of `to_items`."""
    if kind.width >= 8:
        return items if kind.parts == 1 else items.astype("<u4", copy=False).view("<u8").astype(np.uint64, copy=False)
    return items[0::2] | items[1::2] << np.uint8(4)


@dataclass(frozen=True)
class Spec:
    """The dtype and shape of a tensor. Raises `ValueError` for an unknown dtype, or a shape that is negative or too
    large."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; known: {', '.join(DTYPES)}")
        if len(self.shape) > MAX_DIMENSIONS or any(n < 0 for n in self.shape) or math.prod(self.shape) > MAX_ELEMENTS:
            raise ValueError(f"shape {self.shape} is not allowed")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.size * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor with its exact bits. Code that exports weights makes it; the codec and engines read it.

    `codes` is 1-D, in C order of `shape`, of the unsigned integer dtype `DTYPES[dtype].codes`; it becomes a read-only
    view. Raises `ValueError` where dtype, shape and codes do not fit together.

    >>> t = Tensor("bf16", (2, 2), np.array([0x3F80, 0xBF80, 0, 0x8000], np.uint16))  # 1, -1, 0, -0
    >>> t.spec
    Spec(dtype='bf16', shape=(2, 2))
    >>> tensor_digest(t)[:8]
    '4e7d0f1f'
    """

    dtype: str
    shape: tuple[int, ...]
    codes: Codes

    def __post_init__(self) -> None:
        spec = Spec(self.dtype, self.shape)
        expected = DTYPES[self.dtype].codes
        if self.codes.dtype != expected or self.codes.shape != (spec.size,):
            raise ValueError(
                f"{self.dtype} {self.shape} needs {spec.size} codes of {expected},"
                f" not {self.codes.shape} of {self.codes.dtype}"
            )
        codes = np.ascontiguousarray(self.codes).view()
        codes.flags.writeable = False
        object.__setattr__(self, "codes", codes)

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, self.shape)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes

    def copy(self) -> Tensor:
        """The same bits in memory of their own."""
        return Tensor(self.dtype, self.shape, self.codes.copy())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and all bits of two tensors are equal. NaN payloads and the sign of zero count."""
    if a.spec != b.spec:
        return False
    parts = range(0, a.codes.size, _COMPARED)  # most tensors that differ do so in the first part
    return all(np.array_equal(a.codes[at : at + _COMPARED], b.codes[at : at + _COMPARED]) for at in parts)


def tensor_digest(tensor: Tensor) -> str:
    """64 hex characters: SHA-256 of ``"bf16 2,2\\n"`` and the little-endian bytes of the codes."""
    return digest_of_parts(tensor.spec, (tensor.codes,))


def digest_of_parts(spec: Spec, parts: Iterable[Codes]) -> str:
    """As `tensor_digest`, of a tensor whose codes are given part by part, in order."""
    digest = hashlib.sha256(f"{spec.dtype} {','.join(map(str, spec.shape))}\n".encode())
    for codes in parts:
        digest.update(np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")).data)
        progress.tick()
    return digest.hexdigest()


def content_digest(digests: Mapping[str, str]) -> str:
    """64 hex characters over a set's names and tensor digests: each name in sorted order, a NUL, 32 digest bytes.

    >>> content_digest({})[:8]
    'e3b0c442'
    """
    content = hashlib.sha256()
    for name in sorted(digests):
        content.update(name.encode() + b"\0" + bytes.fromhex(digests[name]))
    return content.hexdigest()
