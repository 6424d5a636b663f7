"""The primitives that a delta consists of: varints, compressed blocks, Rice codes, byte planes.

A Rice code is within 3 % of the entropy of a geometric distribution and needs no table. Skewed bytes go through zstd's
Huffman stage. `docs/formats/delta.md` defines every field. Readers accept any bytes: they raise `WeightsError`, and
need memory in proportion to the number of items that the caller expects. Knows nothing of tensors.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from etude.errors import WeightsError
from etude.weights.tensors import Codes

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.int64]

LONGEST_RUN = 24
"""Maximum run of zeros of a unary number. A run of this length means that the quotient is stored among the escapes."""

_HUFFMAN = (
    zstandard.ZstdCompressionParameters(  # only the entropy stage is useful: matches in such bytes are accidental
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=18, write_content_size=True
    )
)


def damaged(what: str) -> WeightsError:
    """Create the error for bytes that no encoder wrote. `what`: what is wrong with them."""
    hint = "fetch it again; a follower uses the nearest full snapshot instead"
    return WeightsError("the delta is damaged", what, hint=hint)


def varint(value: int) -> bytes:
    """Encode an integer as LEB128: seven bits per byte, lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def compress(raw: bytes | memoryview) -> bytes:
    """Compress bytes to a zstd frame that states the size of its content."""
    return zstandard.ZstdCompressor(compression_params=_HUFFMAN).compress(raw)


def decompress(frame: memoryview, *, limit: int) -> bytes:
    """Decompress a zstd frame. Raises `WeightsError` for a damaged one, or a content of more than `limit` bytes."""
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if not 0 <= size <= limit:
            raise damaged(f"a frame's content is over its limit of {limit} bytes")
        raw = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise damaged(f"a block is not a zstd frame: {error}") from None
    if len(raw) != size:
        raise damaged("a frame's content is shorter than stated")
    return raw


def block(raw: Bytes) -> bytes:
    """Encode bytes as a zstd frame if that is shorter, else raw. The reader must know the number of bytes."""
    frame = compress(raw.data) if raw.size > 16 else b""
    return varint(len(frame)) + frame if frame and len(frame) < raw.size else varint(0) + raw.tobytes()


class Reader:
    """Takes fields from the front of a buffer, and never reads past its end.

    Every method raises `WeightsError` for bytes that do not fit.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = memoryview(data), 0

    @property
    def left(self) -> int:
        """Number of bytes that were not taken yet."""
        return len(self._data) - self._at

    def end(self) -> None:
        """Raise `WeightsError` if bytes are left over."""
        if self.left:
            raise damaged(f"{self.left} bytes too many")

    def take(self, count: int) -> memoryview:
        """Take the next `count` bytes, as a view."""
        if count > self.left:
            raise damaged(f"it ends {count - self.left} bytes early")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self, limit: int = 255) -> int:
        """Take one byte as a number of at most `limit`."""
        value = self.take(1)[0]
        if value > limit:
            raise damaged(f"a field is {value}, over its limit of {limit}")
        return value

    def varint(self, limit: int) -> int:
        """Take a LEB128 integer of at most `limit`."""
        value = shift = 0
        while True:
            octet = self.byte()
            value |= (octet & 0x7F) << shift
            if value > limit or shift > 63:
                raise damaged(f"a count is over its limit of {limit}")
            if octet < 0x80:
                return value
            shift += 7

    def block(self, size: int) -> Bytes:
        """Take bytes that the function `block` encoded, and return them decoded. `size`: their number when decoded."""
        length = self.varint(size)
        if length == 0:
            return np.frombuffer(self.take(size), np.uint8)
        raw = decompress(self.take(length), limit=size)
        if len(raw) != size:
            raise damaged("a block's content has another size than expected")
        return np.frombuffer(raw, np.uint8)

    def bits(self, count: int) -> Flags:
        """Take `count` flags; the first is the lowest bit of the first byte."""
        packed = np.frombuffer(self.take((count + 7) // 8), np.uint8)
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def low_bits(self, counts: Longs, widths: Longs) -> tuple[Longs, Longs]:
        """Take the output of the function `low_bits` for the same `counts` and `widths`.

        Return the low bits of each number, and the width of each.
        """
        packed = self.take((int((counts * widths).sum()) + 7) // 8)
        width = np.repeat(widths, counts)
        at = np.cumsum(width)
        at -= width
        padded = np.zeros(len(packed) + 8, np.uint8)
        padded[: len(packed)] = packed
        low: Longs = np.ndarray((padded.size - 7,), "<i8", padded, 0, (1,))[at >> 3]  # a 64-bit window at every byte
        at &= 7
        low >>= at
        low &= np.repeat((1 << widths) - 1, counts)
        return low, width

    def words(self, count: int) -> Longs:
        """Take `count` unsigned 32-bit integers, and return them as int64."""
        return np.frombuffer(self.take(4 * count), "<u4").astype(np.int64)


def bits(flags: npt.NDArray[Any]) -> bytes:
    """Pack flags (bool, or 0 and 1) into bytes, the first in the lowest bit."""
    return np.packbits(flags, bitorder="little").tobytes()


def words(values: Numbers) -> bytes:
    """Encode 32-bit integers, little-endian."""
    return values.astype("<u4").tobytes()


def gaps(places: Longs) -> Longs:
    """Return, for each of some ascending positions, the number of positions between it and the one before.

    >>> gaps(np.array([0, 3, 4])).tolist()
    [0, 2, 0]
    """
    lengths = places.copy()
    lengths[1:] -= places[:-1] + 1
    return lengths


def unary(quotients: Numbers) -> Flags:
    """Encode numbers in unary, as flags: a number n becomes n zeros, followed by a one.

    A number over `LONGEST_RUN` becomes `LONGEST_RUN` zeros and a one. The caller must store its value elsewhere."""
    ones = np.minimum(quotients, LONGEST_RUN).astype(np.int64)
    ones += 1
    np.cumsum(ones, out=ones)
    ones -= 1
    flags = np.zeros(int(ones[-1]) + 1 if ones.size else 0, np.bool_)
    flags[ones] = True
    return flags


def runs(flags: Flags, count: int) -> Longs:
    """Decode `count` numbers from the flags that `unary` returned. Raises `WeightsError` for other flags.

    A number of `LONGEST_RUN` or more is returned as `LONGEST_RUN`; its true value is stored elsewhere.
    """
    ends = np.flatnonzero(flags)
    if ends.size != count or flags.size != (ends[-1] + 1 if count else 0):
        raise damaged(f"{ends.size} numbers where {count} are expected")
    lengths = gaps(ends)
    if count and int(lengths.max()) > LONGEST_RUN:
        raise damaged("a quotient is longer than any is written")
    return lengths


def low_bits(values: Numbers, counts: Longs, widths: Longs) -> bytes:
    """Encode the lowest bits of numbers. Group i has `counts[i]` numbers, of which `widths[i]` bits each are kept."""
    parts, start = [np.empty(0, np.uint8)], 0
    for count, width in zip(counts.tolist(), widths.tolist(), strict=True):
        if count and width:
            word = 8 if width <= 8 else 16 if width <= 16 else 32
            octets = values[start : start + count].astype(f"<u{word // 8}").view(np.uint8)
            parts.append(np.unpackbits(octets, bitorder="little").reshape(-1, word)[:, :width].reshape(-1))
        start += count
    return bits(np.concatenate(parts))


def encode_planes(codes: Codes) -> bytes:
    """Encode codes as compressed byte planes: first the lowest byte of every code, then the next, and so on."""
    octets = np.ascontiguousarray(codes, dtype=codes.dtype.newbyteorder("<")).view(np.uint8)
    width = codes.dtype.itemsize
    return b"".join(block(np.ascontiguousarray(octets[plane::width])) for plane in range(width))


def decode_planes(data: memoryview, out: npt.NDArray[Any]) -> None:
    """Decode the output of `encode_planes` into `out`, which has the right size and dtype. Raises `WeightsError`."""
    reader = Reader(data)
    octets = out.view(np.uint8).reshape(out.size, -1)
    for plane in range(octets.shape[1]) if sys.byteorder == "little" else reversed(range(octets.shape[1])):
        octets[:, plane] = reader.block(out.size)
    reader.end()
