"""Tensors as raw bits: a dtype name, a shape, and one unsigned integer (the *code*) per element. So dtypes that numpy
lacks, such as bf16 and fp8, need no special handling.

This module also defines the digests. A tensor's digest is the SHA-256 of its dtype, shape and little-endian bytes. The
content digest of a set of tensors is the SHA-256 over its sorted names and their digests; it becomes `Version.digest`.
Knows nothing of deltas.
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
"""1-D array of uint8, uint16, uint32 or uint64: the bits of each element."""

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
_COMPARED = 1 << 16


@dataclass(frozen=True)
class DType:
    """A supported element type, described by the bits of one element. All instances are in `DTYPES`.

    The bits of one element, read as an unsigned integer, are called its *code*. `bits` is the number of bits of a code.
    `exponent_shift` is the number of mantissa bits of a float; the exponent is above them, then the sign. It is None
    for an integer. Deltas are computed on *items*. An item is a code, or, if `parts` is 2, one half of a code (low half
    first).
    """

    name: str
    bits: int
    exponent_shift: int | None = None
    parts: int = 1

    @property
    def codes(self) -> np.dtype[Any]:
        """The numpy dtype of the codes (elements as unsigned integers): unsigned, `bits` wide."""
        return np.dtype(f"u{self.bits // 8}")

    @property
    def width(self) -> int:
        """Number of bits of one item: of a code or of one half of it."""
        return self.bits // self.parts

    @property
    def items(self) -> np.dtype[Any]:
        """The numpy dtype of an array of items (codes or halves of codes). An item of 4 bits is stored in a uint8."""
        return np.dtype(f"u{max(8, self.width) // 8}")


DTYPES = {
    kind.name: kind
    for kind in (
        DType("bf16", 16, 7),
        DType("f16", 16, 10),
        DType("f32", 32, 23),
        DType("f8_e4m3", 8, 3),
        DType("f8_e5m2", 8, 2),
        DType("f8_e8m0", 8),  # a scale: an exponent without sign and mantissa, treated as an integer
        DType("f4_e2m1x2", 8, 1, parts=2),  # two 4-bit numbers per code, the first in the low nibble
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
"""All supported dtypes by name."""


def to_items(codes: Codes, kind: DType) -> Codes:
    """Split codes (elements as unsigned integers) into items: halves if `kind.parts` is 2, else the codes themselves.

    The order is kept. Return a view if no bit has to move, else a copy.

    >>> to_items(np.array([0x21, 0x43], np.uint8), DTYPES["f4_e2m1x2"]).tolist()
    [1, 2, 3, 4]
    """
    if kind.width >= 8:
        return codes if kind.parts == 1 else codes.astype("<u8", copy=False).view("<u4").astype(np.uint32, copy=False)
    return np.stack([codes & np.uint8(15), codes >> np.uint8(4)], 1).reshape(-1)


def from_items(items: Codes, kind: DType) -> Codes:
    """Join items into codes (elements as unsigned integers) of dtype `kind`: the inverse of `to_items`."""
    if kind.width >= 8:
        return items if kind.parts == 1 else items.astype("<u4", copy=False).view("<u8").astype(np.uint64, copy=False)
    return items[0::2] | items[1::2] << np.uint8(4)


@dataclass(frozen=True)
class Spec:
    """The dtype name (a key of `DTYPES`) and the shape of a tensor.

    Raises `ValueError` for an unknown dtype, a negative dimension, more than 8 dimensions or more than 2^40 elements.
    """

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
        """Size of the tensor in bytes."""
        return self.size * DTYPES[self.dtype].bits // 8


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor as raw bits: its dtype name, its shape, and one unsigned integer (the *code*) per element.

    `dtype`: a key of `DTYPES`, such as "bf16". `codes`: a 1-D array of the unsigned dtype `DTYPES[dtype].codes`, with
    the elements in C order. The tensor keeps a read-only view of the array, not a copy. Raises `ValueError` if dtype,
    shape and codes do not fit together.

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
        """The dtype and shape."""
        return Spec(self.dtype, self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return self.codes.nbytes

    def copy(self) -> Tensor:
        """Return a tensor with the same content in newly allocated memory."""
        return Tensor(self.dtype, self.shape, self.codes.copy())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits. NaN payloads and the sign of zero count."""
    if a.spec != b.spec:
        return False
    parts = range(0, a.codes.size, _COMPARED)  # most different tensors differ in the first part
    return all(np.array_equal(a.codes[at : at + _COMPARED], b.codes[at : at + _COMPARED]) for at in parts)


def tensor_digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor, as 64 hex characters.

    It is computed over the text ``"bf16 2,2\\n"`` (dtype and shape), then the codes as little-endian bytes.
    """
    return digest_of_parts(tensor.spec, (tensor.codes,))


def digest_of_parts(spec: Spec, parts: Iterable[Codes]) -> str:
    """Return the `tensor_digest` of a tensor of this dtype and shape, whose codes are passed in consecutive parts."""
    digest = hashlib.sha256(f"{spec.dtype} {','.join(map(str, spec.shape))}\n".encode())
    for codes in parts:
        digest.update(np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")).data)
        progress.tick()
    return digest.hexdigest()


def content_digest(digests: Mapping[str, str]) -> str:
    """Return the digest of a set of tensors, as 64 hex characters. `digests`: tensor name -> its `tensor_digest`.

    It is the SHA-256 over, for each name in sorted order: the name in UTF-8, a NUL byte, and the 32 bytes of the
    digest.

    >>> content_digest({})[:8]
    'e3b0c442'
    """
    content = hashlib.sha256()
    for name in sorted(digests):
        content.update(name.encode() + b"\0" + bytes.fromhex(digests[name]))
    return content.hexdigest()
