"""The small codes a delta is made of: blocks, numbers and sets of positions, each in the shortest of a few forms.

A geometric gap is within 3 % of its entropy in a Rice code without any table; a dense set is a bitmap that zstd's
Huffman stage takes to its entropy; a wide magnitude is a byte that the same stage takes. The writer tries and the
reader is told which. `docs/formats/delta.md` has every field. Readers take any bytes: they raise `WeightsError`, and
need memory in proportion to the number of items the caller expects. Knows nothing of tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from etude.errors import WeightsError

Numbers = npt.NDArray[np.uint32]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

ZERO, RICE, WIDE, PEELED = 0, 1, 2, 3  # forms of numbers
NONE, ALL, BITMAP, SET, UNSET = 0, 1, 2, 3, 4  # forms of a set of positions
_ESCAPE = 255
_MAX_LOW_BITS = 24
_PEEL_SHARE = 0.3  # a Huffman code gives a symbol at least one bit: one this common is better taken out first
_MAX_PEELS = 64
_HUFFMAN = zstandard.ZstdCompressionParameters(  # matches in such bytes are accidents: the entropy stage is wanted
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=18, write_content_size=True
)


def damaged(what: str) -> WeightsError:
    """The error of every reader here: the bytes are not a delta that a writer made."""
    return WeightsError("delta is damaged", what, hint="fetch it again; the follower heals from the nearest anchor")


class Writer:
    """Appends to one growing buffer. Not safe between threads."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._zstd = zstandard.ZstdCompressor(compression_params=_HUFFMAN)

    def varint(self, value: int) -> None:
        """LEB128: seven bits a byte, lowest first."""
        while value >= 0x80:
            self.data.append(value & 0x7F | 0x80)
            value >>= 7
        self.data.append(value)

    def block(self, raw: Bytes) -> None:
        """Bytes of a length the reader knows: a zstd frame where that is shorter, else as they are."""
        frame = self._zstd.compress(raw.data) if raw.size > 16 else b""
        if frame and len(frame) < raw.size:
            self.varint(len(frame))
            self.data += frame
        else:
            self.varint(0)
            self.data += raw.data

    def bits(self, flags: Bools) -> None:
        """Flags, eight a byte, the first in the lowest bit; as they are."""
        self.data += np.packbits(flags, bitorder="little").data

    def numbers(self, values: Numbers, peels: int = _MAX_PEELS) -> None:
        """Numbers of a count the reader knows. At most `peels` times are the zeros taken out as a set of positions."""
        num_zeros = values.size - int(np.count_nonzero(values))
        if num_zeros == values.size:
            self.data.append(ZERO)
        elif peels and num_zeros > _PEEL_SHARE * values.size:
            some = values > 0
            self.data.append(PEELED)
            self.positions(some)
            self.numbers(values[some] - np.uint32(1), peels - 1)
        else:
            rice_low, rice_bits = _best_rice(values)
            wide_low, wide_bits = _best_wide(values)
            if rice_bits <= min(wide_bits, 32 * values.size + 64):
                self._rice(values, rice_low)
            else:
                self._wide(values, wide_low)

    def positions(self, flags: Bools) -> None:
        """Which of a number of items, known to the reader, are in the set."""
        count = int(np.count_nonzero(flags))
        if count == 0 or count == flags.size:
            self.data.append(ALL if count else NONE)
            return
        rare = flags if 2 * count <= flags.size else ~flags
        gaps = _gaps(np.flatnonzero(rare)).astype(np.uint32)
        bitmap, listed = Writer(), Writer()
        bitmap.data.append(BITMAP)
        bitmap.block(np.packbits(flags, bitorder="little"))
        listed.data.append(SET if rare is flags else UNSET)
        listed.varint(gaps.size)
        listed.numbers(gaps, peels=0)
        self.data += min(bitmap.data, listed.data, key=len)

    def _rice(self, values: Numbers, low_bits: int) -> None:
        ends = np.cumsum((values >> np.uint32(low_bits)).astype(np.int64) + 1) - 1
        unary = np.zeros(int(ends[-1]) + 1, np.bool_)
        unary[ends] = True
        self.data += bytes((RICE, low_bits))
        self.varint((unary.size + 7) // 8)
        self.bits(unary)
        self._low(values, low_bits)

    def _wide(self, values: Numbers, low_bits: int) -> None:
        high = values >> np.uint32(low_bits)
        self.data += bytes((WIDE, low_bits))
        self.block(np.minimum(high, _ESCAPE).astype(np.uint8))
        self.planes(high[high >= _ESCAPE])
        self._low(values, low_bits)

    def _low(self, values: Numbers, low_bits: int) -> None:
        for bit in range(low_bits):
            self.bits((values >> np.uint32(bit) & np.uint32(1)).astype(np.bool_))

    def planes(self, values: npt.NDArray[Any]) -> None:
        """Unsigned integers of any width, one block for each byte of the width, the lowest first."""
        octets = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).view(np.uint8)
        for plane in range(values.dtype.itemsize):
            self.block(np.ascontiguousarray(octets[plane :: values.dtype.itemsize]))


class Reader:
    """Takes from a buffer what a `Writer` appended, in the same order. Raises `WeightsError` for anything else."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = memoryview(data), 0
        self._zstd = zstandard.ZstdDecompressor()

    def end(self) -> None:
        """Raises where bytes are left over."""
        if self._at != len(self._data):
            raise damaged(f"{len(self._data) - self._at} bytes too many")

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self._at:
            raise damaged(f"it ends {count - len(self._data) + self._at} bytes early")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, limit: int) -> int:
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
        length = self.varint(size)
        if length == 0:
            return np.frombuffer(self.take(size), np.uint8)
        frame = self.take(length)
        try:
            if zstandard.get_frame_parameters(frame).content_size != size:
                raise damaged("a block's content has another size than expected")
            raw = self._zstd.decompress(frame, max_output_size=size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise damaged(f"a block is no zstd frame: {error}") from None
        if len(raw) != size:
            raise damaged("a block's content is shorter than it says")
        return np.frombuffer(raw, np.uint8)

    def bits(self, count: int) -> Bools:
        packed = np.frombuffer(self.take((count + 7) // 8), np.uint8)
        return np.unpackbits(packed, count=count, bitorder="little").view(np.bool_)

    def numbers(self, count: int, peels: int = _MAX_PEELS) -> Numbers:
        form = self.byte()
        if form == ZERO:
            return np.zeros(count, np.uint32)
        if form == RICE:
            return self._rice(count)
        if form == WIDE:
            return self._wide(count)
        if form == PEELED and peels:
            values = np.zeros(count, np.uint32)
            some = np.flatnonzero(self.positions(count))
            values[some] = self.numbers(some.size, peels - 1) + np.uint32(1)
            return values
        raise damaged(f"numbers of form {form}")

    def positions(self, size: int) -> Bools:
        form = self.byte()
        if form in (NONE, ALL):
            return np.full(size, form == ALL)
        if form == BITMAP:
            packed = self.block((size + 7) // 8)
            return np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
        if form not in (SET, UNSET):
            raise damaged(f"positions of form {form}")
        gaps = self.numbers(self.varint(size), peels=0)
        listed = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if listed.size and listed[-1] >= size:
            raise damaged("a position lies past the end")
        flags = np.full(size, form == UNSET)
        flags[listed] = form == SET
        return flags

    def _rice(self, count: int) -> Numbers:
        low_bits = self._low_bits()
        ends = np.flatnonzero(self.bits(8 * self.varint(4 * count + 9)))
        if ends.size != count:
            raise damaged(f"{ends.size} numbers where {count} are expected")
        return self._with_low(_gaps(ends), low_bits)

    def _wide(self, count: int) -> Numbers:
        low_bits = self._low_bits()
        high = self.block(count).astype(np.int64)
        escaped = np.flatnonzero(high == _ESCAPE)
        high[escaped] = self.planes(escaped.size, np.dtype(np.uint32))
        return self._with_low(high, low_bits)

    def _low_bits(self) -> int:
        low_bits = self.byte()
        if low_bits > _MAX_LOW_BITS:
            raise damaged(f"{low_bits} low bits")
        return low_bits

    def _with_low(self, high: npt.NDArray[np.int64], low_bits: int) -> Numbers:
        if high.size and int(high.max()) << low_bits >> 32:
            raise damaged("a number has more than 32 bits")
        values = high.astype(np.uint32) << np.uint32(low_bits)
        for bit in range(low_bits):
            values |= self.bits(high.size).view(np.uint8).astype(np.uint32) << np.uint32(bit)
        return values

    def planes(self, count: int, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        """Inverse of `Writer.planes`: `count` unsigned integers of dtype `kind`, native byte order."""
        octets = np.empty((count, kind.itemsize), np.uint8)
        for plane in range(kind.itemsize):
            octets[:, plane] = self.block(count)
        return octets.view(kind.newbyteorder("<")).reshape(count).astype(kind, copy=False)


def _gaps(positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Unset items before each position since the one before."""
    return np.diff(positions, prepend=-1) - 1


def _best_rice(values: Numbers) -> tuple[int, int]:
    """The Rice parameter with the shortest code, and that code's length in bits."""
    typical = float(values.mean()) * 0.69  # the mean times ln 2: the median of a geometric number
    guess = min(_MAX_LOW_BITS, int(np.log2(typical))) if typical >= 1 else 0
    lengths = {
        k: (k + 1) * values.size + int((values >> np.uint32(k)).sum(dtype=np.int64))
        for k in range(max(0, guess - 2), min(_MAX_LOW_BITS, guess + 2) + 1)
    }
    best = min(lengths, key=lambda k: lengths[k])
    return best, lengths[best]


def _best_wide(values: Numbers) -> tuple[int, float]:
    """How many low bits to leave raw below a byte, and about how many bits that takes."""
    reach = 7 * float(values.mean()) / _ESCAPE  # 7 means hold 99.9 % of a geometric number
    guesses = {0, min(_MAX_LOW_BITS, int(np.ceil(np.log2(reach))))} if reach > 1 else {0}
    lengths = {k: _wide_bits(values >> np.uint32(k)) + k * values.size for k in guesses}
    best = min(lengths, key=lambda k: lengths[k])
    return best, lengths[best]


def _wide_bits(values: Numbers) -> float:
    """The entropy of the bytes, about what their table takes, and the escapes."""
    counts = np.bincount(np.minimum(values, _ESCAPE), minlength=_ESCAPE + 1)
    used = counts[counts > 0]
    entropy = float(-(used * np.log2(used / values.size)).sum())
    return max(entropy, values.size) + 4.0 * used.size + 100 + 32.0 * int(counts[_ESCAPE])
