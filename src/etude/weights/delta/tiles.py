"""The numpy kernels: encode a tile of items, and decode it to a list of changes.

They are used where the native kernels are not available, and to test them: both produce the same bytes. Items are
sorted by class, so that each class is one range and one pass over the tile handles all classes. A list (which items
changed, which steps are long) is coded as a Rice number for each gap. `docs/formats/delta.md` defines every field and
gives the reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from etude.weights.delta import streams
from etude.weights.delta.layout import Counts, Piece, Tile
from etude.weights.delta.streams import Flags, Longs, Numbers, Reader, damaged
from etude.weights.delta.ulp_steps import exponents, step_from, steps_between
from etude.weights.tensors import Codes, DType

CODED, RAW = 1, 2
"""Modes of a tile that kernels handle: coded changes, or its raw new items."""

_INVERTED = 32  # a flag beside the Rice parameter of the gaps
_MOST_LOW_BITS = 31
_SAMPLE = 1024  # number of values of a class that its parameter is chosen by


class NumpyKernels:
    """The inner loops of the codec in numpy: an implementation of `layout.Kernels`."""

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
            for tensor, positions, part in split_by_tensor(tile, places, items):
                new[tensor][positions] = part


def gather(tile: Tile, arrays: Sequence[Codes]) -> Codes:
    """Return the items of a tile, in order; a view if they are one range. `arrays`: the items of each tensor."""
    parts = [_rectangle(piece, arrays[piece.tensor]) for piece in tile.pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def rice_parameter(universe: int, listed: int) -> int:
    """Return the Rice parameter for coding the gaps between `listed` of `universe` items.

    It is about log2 of the median gap.

    >>> [rice_parameter(1000, n) for n in (0, 1, 100, 500, 1000)]
    [0, 9, 2, 0, 0]
    """
    if not listed:
        return 0
    return min(_MOST_LOW_BITS, max(0, (universe * 128 // (listed * 181)).bit_length() - 1))


def size_parameters(values: Numbers, counts: Longs) -> Longs:
    """Return the Rice parameter with which the step sizes of each class are coded.

    It is about log2 of their mean, or less if a few large values raised the mean. The first `_SAMPLE` values of a class
    are used. `values`: the sizes, class after class; `counts`: the number of values of each class.

    >>> size_parameters(np.array([0, 1, 5, 9] + [3] * 99 + [30000], np.uint32), np.array([2, 2, 0, 100])).tolist()
    [0, 2, 0, 1]
    """
    low = np.zeros(counts.size, np.int64)
    some = counts > 0
    taken = np.minimum(counts, _SAMPLE)[some]
    sample = values[np.arange(taken.sum()) + np.repeat(_starts(counts)[some] - _starts(taken), taken)].astype(np.int64)
    means = (2 * _sums(sample, taken) + taken) // (2 * taken)
    chosen = np.array([min(_MOST_LOW_BITS, max(1, mean).bit_length() - 1) for mean in means.tolist()], np.int64)
    bits = _rice_bits(sample, taken, chosen)
    falling = chosen > 0
    while falling.any():
        fewer = _rice_bits(sample, taken, np.maximum(chosen - 1, 0))
        falling &= fewer < bits
        chosen, bits = chosen - falling, np.where(falling, fewer, bits)
        falling &= chosen > 0
    low[some] = chosen
    return low


def _rice_bits(values: Longs, counts: Longs, low: Longs) -> Longs:
    """Return the number of bits of each group's Rice code, without the final one-bit of each quotient."""
    quotients = values >> np.repeat(low, counts)
    quotients[quotients >= streams.LONGEST_RUN] = streams.LONGEST_RUN + 32
    return low * counts + _sums(quotients, counts)


def _sums(values: Longs, counts: Longs) -> Longs:
    return np.add.reduceat(values, _starts(counts)) if counts.size else counts


def split_by_tensor(tile: Tile, places: Numbers, items: Codes) -> Iterator[tuple[int, Longs, Codes]]:
    """Yield, for each tensor of a tile: its number, the changed positions in the tensor, and the new items there.

    `places`: the changed positions in the tile, ascending. `items`: the new items there.
    """
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
class _Classes:
    """The header fields of a tile's classes; arrays of shape [classes]."""

    items: Longs
    changed: Longs
    gap_bits: Longs
    inverted: Flags
    exceptions: Longs
    size_bits: Longs

    @classmethod
    def of(cls, items: Longs) -> _Classes:
        zeros = np.zeros((4, items.size), np.int64)
        return cls(items, zeros[0], zeros[1], np.zeros(items.size, np.bool_), zeros[2], zeros[3])

    @property
    def changes(self) -> _Lists:
        return _Lists(self.items, np.where(self.inverted, self.items - self.changed, self.changed), self.inverted)

    @property
    def long(self) -> _Lists:
        """Which of the changed items are exceptions (steps longer than 1)."""
        others = 2 * self.exceptions > self.changed
        return _Lists(self.changed, np.where(others, self.changed - self.exceptions, self.exceptions), others)


@dataclass(frozen=True)
class _Lists:
    """A subset of the items of each of several consecutive ranges, coded as the gaps between listed items.

    Arrays of shape [ranges].
    """

    items: Longs
    listed: Longs
    inverted: Flags  # the list contains the items that are not in the subset

    @property
    def low_bits(self) -> Longs:
        pairs = zip(self.items.tolist(), self.listed.tolist(), strict=True)
        return np.array([rice_parameter(items, listed) for items, listed in pairs])

    def gaps(self, places: Longs) -> Numbers:
        """Return the gaps of all lists. `places`: the subset."""
        starts = _starts(self.items)
        if self.inverted.any():
            flags = np.repeat(self.inverted, self.items)
            flags[places] ^= True
            places = np.flatnonzero(flags)
        gaps = streams.gaps(places)
        some = self.listed > 0
        firsts = _starts(self.listed)[some]
        gaps[firsts] = places[firsts] - starts[some]
        return gaps.astype(np.uint32)

    def places(self, gaps: Longs) -> Longs:
        """Return the subset, from the gaps: the inverse of `gaps`. Raises `WeightsError`."""
        starts, ends = _starts(self.items), np.cumsum(self.listed)
        places = gaps + 1
        np.cumsum(places, out=places)
        before = np.concatenate([[0], places])[_starts(self.listed)]
        places += np.repeat(starts - 1 - before, self.listed)
        some = self.listed > 0
        if (places[ends[some] - 1] >= (starts + self.items)[some]).any():
            raise damaged("an item is past the end of its class")
        if not self.inverted.any():
            return places
        flags = np.repeat(self.inverted, self.items)
        flags[places] ^= True
        return np.flatnonzero(flags)


def _starts(sizes: Longs) -> Longs:
    """Return the start of each of several consecutive ranges of these sizes."""
    return np.cumsum(sizes) - sizes


def _in_classes(tile: Tile, kind: DType, old: Codes) -> tuple[Longs | None, Longs]:
    """Return the order that sorts items by class, then position (None: they are sorted), and the size of each class."""
    if tile.classes == 1:
        return None, np.array([old.size])
    lowest = max(0, tile.high - tile.classes + 1)
    of_item = np.uint8(tile.high) - np.clip(exponents(old, kind), lowest, tile.high)
    return np.argsort(of_item, kind="stable"), np.bincount(of_item, minlength=tile.classes)


def _encode(kind: DType, tile: Tile, old: Codes, new: Codes) -> bytes:
    changed = old != new
    if not changed.any():
        return b""
    order, items = _in_classes(tile, kind, old)
    where = np.flatnonzero(changed if order is None else changed[order])
    there = where if order is None else order[where]
    return pack(items, where, *steps_between(old[there], new[there], kind))


def pack(items: Longs, where: Longs, down: Flags, size: Numbers) -> bytes:
    """Encode the changes of a tile, whose items are grouped into classes.

    `items` [classes]: number of items of each class. `where` [changes]: the changed items, numbered by class, then by
    position. `down`, `size` [changes]: whether each change goes down, and its number of ULP steps.
    """
    c = _Classes.of(items)
    c.changed = _counts(where, c.items)
    c.inverted = 2 * c.changed > c.items
    c.gap_bits = c.changes.low_bits
    exceptions = np.flatnonzero(size > 1)
    c.exceptions = _counts(exceptions, c.changed)
    values = size[exceptions] - np.uint32(2)
    c.size_bits = size_parameters(values, c.exceptions)
    numbers = (
        (c.changes.gaps(where), c.changes.listed, c.gap_bits),
        (c.long.gaps(exceptions), c.long.listed, c.long.low_bits),
        (values, c.exceptions, c.size_bits),
    )
    return bytes((CODED,)) + _headers(c) + _planes(down, numbers)


def _counts(places: Longs, sizes: Longs) -> Longs:
    return np.diff(np.searchsorted(places, np.concatenate([[0], np.cumsum(sizes)])))


def _headers(c: _Classes) -> bytes:
    head = bytearray()
    columns = (c.changed, c.gap_bits + _INVERTED * c.inverted, c.changes.listed, c.exceptions, c.size_bits)
    for changed, gap_bits, listed, exceptions, size_bits in np.stack(columns, 1).tolist():
        head += streams.varint(changed)
        if changed:
            head.append(gap_bits)
            head += streams.varint(listed) if gap_bits & _INVERTED else b""
            head += streams.varint(exceptions)
            head += bytes((size_bits,)) if exceptions else b""
    return bytes(head)


def _planes(down: Flags, numbers: Sequence[tuple[Numbers, Longs, Longs]]) -> bytes:
    """Encode all fields after the headers. `numbers`: values, counts per class, and Rice parameters of each list."""
    quotients = [values >> np.repeat(low.astype(np.uint32), counts) for values, counts, low in numbers]
    unaries = [streams.unary(each) for each in quotients]
    fields = [streams.varint(flags.size) for flags in unaries]
    fields.append(streams.bits(down))
    for flags, (values, counts, low) in zip(unaries, numbers, strict=True):
        fields += streams.bits(flags), streams.low_bits(values, counts, low)
    return b"".join((*fields, *(streams.words(each[each >= streams.LONGEST_RUN]) for each in quotients)))


def _changes(kind: DType, tile: Tile, old: Codes, payload: memoryview) -> tuple[Numbers, Codes]:
    reader = Reader(payload)
    mode = reader.byte()
    if mode == RAW:
        return _raw_changes(kind, old, reader)
    if mode != CODED:
        raise damaged(f"a tile of mode {mode}")
    order, of_class = _in_classes(tile, kind, old)
    where, down, size = unpack(kind, of_class, reader)
    there = where if order is None else order[where]
    items = step_from(old[there], down, size, kind)
    return (where.astype(np.uint32), items) if order is None else in_place_order(there, items, old.size)


def unpack(kind: DType, items: Longs, reader: Reader) -> tuple[Longs, Flags, Numbers]:
    """Decode the result of `pack`, and return (`where`, `down`, `size`), the arguments that `pack` got. The caller
    has read the first byte from `reader` already.

    `items` [classes]: number of items of each class. Raises `WeightsError` for bytes that no encoder wrote.
    """
    c = _Classes.of(items)
    _read_headers(reader, c)
    down, where, size = _read_planes(reader, c)
    if size.size and int(size.max()) > 1 << (kind.width - 1):
        raise damaged("a step is longer than the scale")
    return where, down, size.astype(np.uint32)


def _raw_changes(kind: DType, old: Codes, reader: Reader) -> tuple[Numbers, Codes]:
    new = read_raw(kind, old.size, reader)
    where = np.flatnonzero(old != new)
    return where.astype(np.uint32), new[where]


def read_raw(kind: DType, count: int, reader: Reader) -> Codes:
    """Decode the `count` new items of a tile that is stored raw. `reader` has taken its first byte already.

    Raises `WeightsError` for bytes that no encoder wrote.
    """
    new = np.frombuffer(reader.take(count * kind.items.itemsize), kind.items.newbyteorder("<"))
    reader.end()
    if kind.width < 8 * kind.items.itemsize and new.size and int(new.max()) >> kind.width:
        raise damaged(f"an item has more than {kind.width} bits")
    return new.astype(kind.items, copy=False)


def in_place_order(where: Longs, items: Codes, count: int) -> tuple[Numbers, Codes]:
    """Sort the changes of a tile by position. Return the positions, and the new items there.

    `where`: the positions, `items`: the new items, `count`: the number of items of the tile.
    """
    if 16 * where.size < count:
        order = np.argsort(where)
        return where[order].astype(np.uint32), items[order]
    flags, spread = np.zeros(count, np.bool_), np.empty(count, items.dtype)
    flags[where], spread[where] = True, items
    places = np.flatnonzero(flags)
    return places.astype(np.uint32), spread[places]


def _read_headers(reader: Reader, c: _Classes) -> None:
    for i, items in enumerate(c.items.tolist()):
        c.changed[i] = changed = reader.varint(items)
        if not changed:
            continue
        flags = reader.byte(_MOST_LOW_BITS | _INVERTED)
        c.gap_bits[i], c.inverted[i] = flags & _MOST_LOW_BITS, flags & _INVERTED
        if flags & _INVERTED and reader.varint(items) + changed != items:
            raise damaged("a class lists more or fewer items than it has")
        c.exceptions[i] = exceptions = reader.varint(changed)
        if exceptions:
            c.size_bits[i] = reader.byte(_MOST_LOW_BITS)


def _read_planes(reader: Reader, c: _Classes) -> tuple[Flags, Longs, Longs]:
    """Decode the fields after the headers: which steps go down, which items change, and by how many steps."""
    lists, long = c.changes, c.long
    groups = [(lists.listed, c.gap_bits), (long.listed, long.low_bits), (c.exceptions, c.size_bits)]
    counts = [int(each.sum()) for each, _ in groups]
    lengths = [reader.varint((streams.LONGEST_RUN + 1) * count) for count in counts]
    down = reader.bits(int(c.changed.sum()))
    halves = []
    for count, length, group in zip(counts, lengths, groups, strict=True):
        quotients = streams.runs(reader.bits(length), count)
        halves.append((quotients, *reader.low_bits(*group)))
    gaps, exception_gaps, sizes = (_with_escapes(reader, *half) for half in halves)
    reader.end()
    size = np.ones(down.size, np.int64)
    size[long.places(exception_gaps)] = sizes + 2
    return down, lists.places(gaps), size


def _with_escapes(reader: Reader, quotients: Longs, low: Longs, widths: Longs) -> Longs:
    """Combine quotients, escapes and low bits to numbers. Raises `WeightsError` for a number above 32 bits."""
    escaped = np.flatnonzero(quotients == streams.LONGEST_RUN)
    quotients[escaped] = reader.words(escaped.size)
    quotients <<= widths
    if quotients.size and int(quotients.max()) >> 32:
        raise damaged("a number has more than 32 bits")
    quotients |= low
    return quotients
