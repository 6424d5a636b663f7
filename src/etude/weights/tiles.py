"""The kernels in numpy: a tile of items to its coded bytes, and those bytes to a list of changes.

They serve where the native kernels are not, and check them: both make the same bytes. Items are put in order of their
class, so that each class is one range and a pass over the tile is a pass over all classes; a list (which items changed,
which steps are long) is a Rice number for each gap. `docs/formats/delta.md` has every field and its reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from etude.weights import streams
from etude.weights.layout import Counts, Piece, Tile
from etude.weights.steps import exponents, step_from, steps_between
from etude.weights.streams import Bytes, Flags, Longs, Numbers, Reader, damaged
from etude.weights.tensors import Codes, DType

CODED, RAW = 1, 2
"""Modes of a tile as kernels take them; a raw one is its new items."""

_INVERTED = 32  # beside the Rice parameter of the gaps
_MOST_LOW_BITS = 31


class NumpyKernels:
    """`layout.Kernels` without any native code."""

    def sample(self, old: Codes, new: Codes, kind: DType, stride: int) -> tuple[Counts, Counts]:
        if stride > 1:
            whole = old.size - old.size % 64
            old, new = (items[:whole].reshape(-1, 64)[::stride].reshape(-1) for items in (old, new))
        exponent = exponents(old, kind)
        return np.bincount(exponent, minlength=256), np.bincount(exponent[old != new], minlength=256)

    def encode(self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], new: Sequence[Codes]) -> list[bytes]:
        return [_encode(kind, tile, gather(tile, old), gather(tile, new)) for tile in tiles]

    def changes(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Codes], payloads: Sequence[memoryview]
    ) -> list[tuple[Numbers, Codes]]:
        return [_changes(kind, tile, gather(tile, old), payload) for tile, payload in zip(tiles, payloads, strict=True)]

    def apply(
        self,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Codes],
        new: Sequence[Codes],
        payloads: Sequence[memoryview],
    ) -> None:
        for tile, payload in zip(tiles, payloads, strict=True):
            places, items = _changes(kind, tile, gather(tile, old), payload)
            for tensor, positions, part in scattered(tile, places, items):
                new[tensor][positions] = part


def gather(tile: Tile, arrays: Sequence[Codes]) -> Codes:
    """A tile's items, in its order; a view where they are one range."""
    parts = [_rectangle(piece, arrays[piece.tensor]) for piece in tile.pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rice_parameter(universe: int, listed: int) -> int:
    """The low bits of gaps between `listed` of `universe` items: about log2 of the median gap.

    >>> [rice_parameter(1000, n) for n in (0, 1, 100, 500, 1000)]
    [0, 9, 2, 0, 0]
    """
    if not listed:
        return 0
    return min(_MOST_LOW_BITS, max(0, (universe * 128 // (listed * 181)).bit_length() - 1))


def size_parameter(values: Numbers) -> int:
    """The low bits of step sizes: about log2 of their mean, or fewer where a few long ones raised that.

    >>> [size_parameter(np.array(v, np.uint32)) for v in ([0, 1], [5, 9], [3] * 99 + [30000])]
    [0, 2, 1]
    """
    doubled = 2 * int(values.sum(dtype=np.int64)) + values.size
    low = min(_MOST_LOW_BITS, max(0, (doubled // (2 * values.size)).bit_length() - 1))
    bits = _rice_bits(values, low)
    while low and (fewer := _rice_bits(values, low - 1)) < bits:
        low, bits = low - 1, fewer
    return low


def _rice_bits(values: Numbers, low: int) -> int:
    """Bits of a Rice code, but for the one that every number ends its quotient with."""
    quotients = values >> np.uint32(low)
    escapes = int(np.count_nonzero(quotients >= streams.LONGEST_RUN))
    short = int(np.minimum(quotients, streams.LONGEST_RUN).sum(dtype=np.int64))
    return low * values.size + short + 32 * escapes


def scattered(tile: Tile, places: Numbers, items: Codes) -> Iterator[tuple[int, Longs, Codes]]:
    """For each tensor of a tile where in it the items are that change, and what they become."""
    ends = np.cumsum([0, *(piece.size for piece in tile.pieces)])
    splits = np.searchsorted(places, ends).tolist()
    for piece, base, (first, last) in zip(tile.pieces, ends.tolist(), itertools.pairwise(splits), strict=False):
        if first == last:
            continue
        positions = places[first:last].astype(np.int64) + (piece.start - base)
        if piece.rows > 1 and piece.cols < piece.stride:
            positions += (positions - piece.start) // piece.cols * (piece.stride - piece.cols)
        yield piece.tensor, positions, items[first:last]


def _rectangle(piece: Piece, items: Codes) -> Codes:
    if piece.rows == 1 or piece.cols == piece.stride:
        return items[piece.start : piece.start + piece.size]
    rows = np.lib.stride_tricks.as_strided(
        items[piece.start :], (piece.rows, piece.cols), (piece.stride * items.itemsize, items.itemsize), writeable=False
    )
    return rows.reshape(-1)


@dataclass
class _Class:
    """What the header of a class says."""

    items: int = 0
    changed: int = 0
    gap_bits: int = 0
    inverted: bool = False
    exceptions: int = 0
    size_bits: int = 0

    @property
    def listed(self) -> int:
        """Items that the gaps list."""
        return self.items - self.changed if self.inverted else self.changed

    @property
    def exceptions_inverted(self) -> bool:
        return 2 * self.exceptions > self.changed

    @property
    def exceptions_listed(self) -> int:
        return self.changed - self.exceptions if self.exceptions_inverted else self.exceptions

    @property
    def exception_gap_bits(self) -> int:
        return rice_parameter(self.changed, self.exceptions_listed)


def _in_classes(tile: Tile, kind: DType, old: Codes) -> tuple[Longs | None, list[_Class]]:
    """Items in order of their class, then of their place (None: as they are); and a class for each range of them."""
    if tile.classes == 1:
        return None, [_Class(items=old.size)]
    of_exponent = np.clip(tile.high - np.arange(256), 0, tile.classes - 1).astype(np.uint8)
    of_item = of_exponent[exponents(old, kind)]
    counts = np.bincount(of_item, minlength=tile.classes)
    return np.argsort(of_item, kind="stable"), [_Class(items=int(count)) for count in counts]


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """[start, stop) of ranges that follow each other."""
    ends = np.cumsum([0, *sizes]).tolist()
    return list(itertools.pairwise(ends))


def _encode(kind: DType, tile: Tile, old: Codes, new: Codes) -> bytes:
    changed = old != new
    if not changed.any():
        return b""
    order, classes = _in_classes(tile, kind, old)
    changed = changed if order is None else changed[order]
    ranges = _bounds([c.items for c in classes])
    where = np.flatnonzero(changed)
    splits = np.searchsorted(where, [start for start, _ in ranges] + [changed.size]).tolist()
    there = where if order is None else order[where]
    down, size = steps_between(old[there], new[there], kind)
    gaps, exceptions, sizes = _Rice(), _Rice(), _Rice()
    for c, (start, stop), (first, last) in zip(classes, ranges, itertools.pairwise(splits), strict=True):
        if first == last:
            continue
        c.changed = last - first
        c.inverted = 2 * c.changed > c.items
        c.gap_bits = rice_parameter(c.items, c.listed)
        if c.listed:
            gaps.listed(changed[start:stop] ^ c.inverted, c.gap_bits)
        long = size[first:last] > 1
        c.exceptions = int(np.count_nonzero(long))
        if c.exceptions:
            if c.exceptions_listed:
                exceptions.listed(long ^ c.exceptions_inverted, c.exception_gap_bits)
            values = size[first:last][long] - np.uint32(2)
            c.size_bits = size_parameter(values)
            sizes.numbers(values, c.size_bits)
    return bytes((CODED,)) + b"".join(map(_header, classes)) + _planes(down, (gaps, exceptions, sizes))


@dataclass
class _Rice:
    """Numbers that go into a pair of planes."""

    quotients: list[Numbers] = field(default_factory=list)
    low: list[Bytes] = field(default_factory=list)

    def listed(self, flags: Flags, low: int) -> None:
        """The gaps before each of the items that are flagged."""
        self.numbers(streams.gaps(np.flatnonzero(flags)).astype(np.uint32), low)

    def numbers(self, values: Numbers, low: int) -> None:
        self.quotients.append(values >> np.uint32(low))
        if low:
            self.low.append(streams.low_bits(values, low))


def _planes(down: Flags, rices: Sequence[_Rice]) -> bytes:
    quotients = [np.concatenate([np.empty(0, np.uint32), *rice.quotients]) for rice in rices]
    unaries = [streams.unary(q) for q in quotients]
    fields = [streams.varint(flags.size) for flags in unaries]
    fields.append(streams.bits(down))
    for rice, flags in zip(rices, unaries, strict=True):
        fields += streams.bits(flags), streams.bits(np.concatenate(rice.low)) if rice.low else b""
    return b"".join((*fields, *(streams.words(q[q >= streams.LONGEST_RUN]) for q in quotients)))


def _header(c: _Class) -> bytes:
    head = streams.varint(c.changed)
    if not c.changed:
        return head
    head += bytes((c.gap_bits | _INVERTED * c.inverted,))
    if c.inverted:
        head += streams.varint(c.listed)
    return head + streams.varint(c.exceptions) + (bytes((c.size_bits,)) if c.exceptions else b"")


def _changes(kind: DType, tile: Tile, old: Codes, payload: memoryview) -> tuple[Numbers, Codes]:
    reader = Reader(payload)
    mode = reader.byte()
    if mode == RAW:
        return _raw_changes(kind, old, reader)
    if mode != CODED:
        raise damaged(f"a tile of mode {mode}")
    order, classes = _in_classes(tile, kind, old)
    for c in classes:
        _read_header(reader, c)
    down, listed, size = _read_planes(reader, classes)
    reader.end()
    if size.size and int(size.max()) > 1 << (kind.width - 1):
        raise damaged("a step is longer than the scale")
    where = _unlisted(listed, [(c.items, c.listed, c.inverted) for c in classes])
    if order is None:
        return where.astype(np.uint32), step_from(old[where], down, size.astype(np.uint32), kind)
    where = order[where]
    return _in_place_order(where, step_from(old[where], down, size.astype(np.uint32), kind), old.size)


def _raw_changes(kind: DType, old: Codes, reader: Reader) -> tuple[Numbers, Codes]:
    new = np.frombuffer(reader.take(old.nbytes), old.dtype.newbyteorder("<")).astype(old.dtype, copy=False)
    reader.end()
    if kind.width < 8 * old.itemsize and new.size and int(new.max()) >> kind.width:
        raise damaged(f"an item has more than {kind.width} bits")
    where = np.flatnonzero(old != new)
    return where.astype(np.uint32), new[where]


def _in_place_order(where: Longs, items: Codes, count: int) -> tuple[Numbers, Codes]:
    if 16 * where.size < count:
        order = np.argsort(where)
        return where[order].astype(np.uint32), items[order]
    flags, spread = np.zeros(count, np.bool_), np.empty(count, items.dtype)
    flags[where], spread[where] = True, items
    places = np.flatnonzero(flags)
    return places.astype(np.uint32), spread[places]


def _read_header(reader: Reader, c: _Class) -> None:
    c.changed = reader.varint(c.items)
    if not c.changed:
        return
    flags = reader.byte(_MOST_LOW_BITS | _INVERTED)
    c.gap_bits, c.inverted = flags & _MOST_LOW_BITS, bool(flags & _INVERTED)
    if c.inverted and reader.varint(c.items) + c.changed != c.items:
        raise damaged("a class lists more or fewer items than it has")
    c.exceptions = reader.varint(c.changed)
    if c.exceptions:
        c.size_bits = reader.byte(_MOST_LOW_BITS)


def _read_planes(reader: Reader, classes: Sequence[_Class]) -> tuple[Flags, Longs, Longs]:
    """Which steps go down, the gaps between the listed items, and the sizes of the steps, class after class."""
    groups = [
        [(c.listed, c.gap_bits) for c in classes],
        [(c.exceptions_listed, c.exception_gap_bits) for c in classes],
        [(c.exceptions, c.size_bits) for c in classes],
    ]
    counts = [sum(count for count, _ in group) for group in groups]
    lengths = [reader.varint((streams.LONGEST_RUN + 1) * count) for count in counts]
    num_changed = sum(c.changed for c in classes)
    down = reader.bits(num_changed)
    numbers = []
    for group, count, length in zip(groups, counts, lengths, strict=True):
        quotients = streams.runs(reader.bits(length), count)
        numbers.append((quotients, reader.low_bits(group)))
    gaps, exception_gaps, sizes = (
        _with_escapes(reader, quotients, low, group) for (quotients, low), group in zip(numbers, groups, strict=True)
    )
    size = np.ones(num_changed, np.int64)
    long = _unlisted(exception_gaps, [(c.changed, c.exceptions_listed, c.exceptions_inverted) for c in classes])
    size[long] = sizes + 2
    return down, gaps, size


def _with_escapes(reader: Reader, quotients: Longs, low: Numbers, group: Sequence[tuple[int, int]]) -> Longs:
    """Whole numbers from their quotients, the escapes in place of the longest, and low bits."""
    if not quotients.size:
        return quotients
    escaped = np.flatnonzero(quotients == streams.LONGEST_RUN)
    quotients[escaped] = reader.words(escaped.size)
    for (start, stop), (_, bits) in zip(_bounds([count for count, _ in group]), group, strict=True):
        quotients[start:stop] <<= bits
    if int(quotients.max()) >> 32:
        raise damaged("a number has more than 32 bits")
    quotients |= low
    return quotients


def _unlisted(gaps: Longs, lists: Sequence[tuple[int, int, bool]]) -> Longs:
    """Places of the items that lists name, in ranges that follow each other.

    A list is (items of the range, gaps that it has, whether it names the items that are *not* meant).
    """
    through = np.cumsum(gaps + 1)
    places = np.empty_like(through)
    flags = np.zeros(sum(items for items, _, _ in lists), np.bool_) if any(last for _, _, last in lists) else None
    at = 0
    for (start, stop), (items, _, inverted) in zip(_bounds([listed for _, listed, _ in lists]), lists, strict=True):
        part = places[start:stop]
        if start < stop:
            part[:] = through[start:stop] + (at - 1 - (int(through[start - 1]) if start else 0))
            if int(part[-1]) >= at + items:
                raise damaged("an item lies past the end of its class")
        if flags is not None:
            flags[at : at + items] = inverted
            flags[part] = not inverted
        at += items
    return places if flags is None else np.flatnonzero(flags)
