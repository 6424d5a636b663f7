"""The delta codec: new codes from old ones, exact for every bit pattern.

Codes are put into their monotone order first (sign and magnitude become one scale), so a change is a small number of
ULP steps and a zero crossing is no jump. Elements are grouped by the *old* code's exponent, which both sides hold:
the chance of a change doubles with every octave down, and knowing that is worth 36-43 % of the bytes (measured). In a
class go: which elements changed and by how many steps; and one raw bit for each sign.
Tensors of one dtype are pooled, so that a hundred small ones cost no hundred headers. A tensor without an old of its
own dtype and shape goes in whole, as byte planes: an anchor is a delta against nothing.

An object says nothing of names: it belongs to an ordered list of specs that its manifest holds, and so do the digests
that prove the result. `docs/formats/delta.md` has every field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.streams import Numbers, Reader, Writer, damaged
from etude.weights.tensors import DTYPES, Codes, DType, Spec, Tensor, same_bits

MAGIC = b"etd\x01"
"""First four bytes; the last of them is the format."""

SAME, DELTA, WHOLE = 0, 1, 2  # forms of a tensor
TILE_ELEMENTS = 1 << 22
"""Elements coded together: bounds both sides' working memory to about 45 bytes an element of one tile."""

_RARE_SHARE = 1 << 10  # exponents that hold less than this part of a tile join their neighbour's class

Index = npt.NDArray[np.intp]


def encode(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> bytes:
    """The bytes that turn `old` into `new`, element by element of the two lists; None: there is no old one.

    >>> old = Tensor("bf16", (4,), np.array([0x3F80, 0x3F80, 0x0000, 0x7FC1], np.uint16))
    >>> new = Tensor("bf16", (4,), np.array([0x3F80, 0x3F7F, 0x8000, 0xFFFF], np.uint16))
    >>> same_bits(decode(encode([new], [old]), [new.spec], [old])[0], new)
    True
    """
    forms = [_form(n, o) for n, o in zip(new, old, strict=True)]
    writer = Writer()
    writer.data += MAGIC
    writer.varint(len(forms))
    writer.numbers(np.array(forms, np.uint32))
    for kind in DTYPES.values():
        chosen = [i for i, form in enumerate(forms) if form == DELTA and new[i].dtype == kind.name]
        after, before = _pool([new[i] for i in chosen], kind), _pool([o for i in chosen if (o := old[i])], kind)
        for start in range(0, after.size, TILE_ELEMENTS):
            _write_tile(writer, kind, before[start : start + TILE_ELEMENTS], after[start : start + TILE_ELEMENTS])
    for kind in DTYPES.values():
        whole = _pool([t for t, form in zip(new, forms, strict=True) if form == WHOLE and t.dtype == kind.name], kind)
        for start in range(0, whole.size, TILE_ELEMENTS):
            writer.planes(whole[start : start + TILE_ELEMENTS])
    return bytes(writer.data)


def decode(data: bytes, specs: Sequence[Spec], old: Sequence[Tensor | None]) -> list[Tensor]:
    """The new tensors, one for each spec. Unchanged ones are the old objects themselves.

    Raises `WeightsError` for bytes no `encode` made for these specs and this old. Bytes that are well formed but
    were altered give other codes: the caller compares digests.
    """
    reader = Reader(data)
    if bytes(reader.take(len(MAGIC))) != MAGIC:
        raise damaged("it does not start as a delta of format 1 does")
    if reader.varint(len(specs)) != len(specs):
        raise damaged(f"it is not for these {len(specs)} tensors")
    forms = reader.numbers(len(specs)).tolist()
    for form, spec, held in zip(forms, specs, old, strict=True):
        if form > WHOLE or (form != WHOLE and (held is None or held.spec != spec)):
            raise damaged("a tensor refers to an old one that is not held")
    codes: list[Codes | None] = [None] * len(specs)
    for form in (DELTA, WHOLE):
        for kind in DTYPES.values():
            chosen = [i for i, f in enumerate(forms) if f == form and specs[i].dtype == kind.name]
            before = _pool([o for i in chosen if (o := old[i])], kind) if form == DELTA else None
            pooled = _read_pool(reader, kind, sum(specs[i].size for i in chosen), before)
            ends = np.cumsum([specs[i].size for i in chosen])[:-1]
            for i, part in zip(chosen, np.split(pooled, ends) if chosen else (), strict=True):
                codes[i] = part.copy()  # of its own, so that a tensor that stays does not keep the pool
    reader.end()
    return [
        held if part is None and held is not None else Tensor(spec.dtype, spec.shape, part)  # type: ignore[arg-type]
        for spec, held, part in zip(specs, old, codes, strict=True)
    ]


def to_order(codes: Codes, kind: DType) -> Codes:
    """Codes on a monotone scale of the same width: -inf lowest, then -0 right below +0, +inf highest; NaNs outside.

    >>> to_order(np.array([0x8001, 0x8000, 0x0000, 0x0001], np.uint16), DTYPES["bf16"]).tolist()
    [32766, 32767, 32768, 32769]
    """
    if kind.exponent_shift is None:
        return codes
    top = codes.dtype.type(1 << (kind.bits - 1))
    negative = (codes.view(f"i{codes.itemsize}") >> (kind.bits - 1)).view(codes.dtype)
    return codes ^ (negative | top)


def from_order(ordered: Codes, kind: DType) -> Codes:
    """Inverse of `to_order`."""
    if kind.exponent_shift is None:
        return ordered
    top = ordered.dtype.type(1 << (kind.bits - 1))
    positive = (ordered.view(f"i{ordered.itemsize}") >> (kind.bits - 1)).view(ordered.dtype)
    return ordered ^ (~positive | top)


def exponents(codes: Codes, kind: DType) -> npt.NDArray[np.uint8]:
    """The exponent bits of each code; 0 for an unsigned integer."""
    if kind.exponent_shift is None:
        return np.zeros(codes.size, np.uint8)
    mask = codes.dtype.type((1 << (kind.bits - 1 - kind.exponent_shift)) - 1)
    return (codes >> codes.dtype.type(kind.exponent_shift) & mask).astype(np.uint8)


def steps_between(old: Codes, new: Codes, kind: DType) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Which steps go down, and each one's size in ULP, the shorter way around the scale. [N] bool, [N] uint32."""
    steps = (to_order(new, kind) - to_order(old, kind)).view(f"i{old.itemsize}")
    return steps < 0, np.abs(steps).view(old.dtype).astype(np.uint32)


def _form(new: Tensor, old: Tensor | None) -> int:
    if old is None or old.spec != new.spec:
        return WHOLE
    return SAME if same_bits(new, old) else DELTA


def _pool(tensors: Sequence[Tensor], kind: DType) -> Codes:
    return np.concatenate([np.empty(0, kind.codes), *(t.codes for t in tensors)])


def _write_tile(writer: Writer, kind: DType, old: Codes, new: Codes) -> None:
    exponent = exponents(old, kind)
    counts = np.bincount(exponent, minlength=256)
    low, high = _class_range(counts)
    order, bounds = _classes(exponent, counts, low, high)
    changed = (old != new)[order]
    writer.data += bytes((low, high))
    for start, stop in bounds:
        writer.positions(changed[start:stop])
    places = np.flatnonzero(changed)
    where = order[places]
    down, size = steps_between(old[where], new[where], kind)
    writer.bits(down)
    for first, last in np.searchsorted(places, bounds):
        if first < last:
            writer.numbers(size[first:last] - np.uint32(1))


def _read_pool(reader: Reader, kind: DType, count: int, before: Codes | None) -> Codes:
    tiles: list[Any] = [np.empty(0, kind.codes)]
    for start in range(0, count, TILE_ELEMENTS):
        size = min(TILE_ELEMENTS, count - start)
        old = None if before is None else before[start : start + size]
        tiles.append(reader.planes(size, kind.codes) if old is None else _read_tile(reader, kind, old))
    return np.concatenate(tiles)


def _read_tile(reader: Reader, kind: DType, old: Codes) -> Codes:
    low, high = reader.byte(), reader.byte()
    if low > high:
        raise damaged(f"a tile has exponents from {low} to {high}")
    exponent = exponents(old, kind)
    order, bounds = _classes(exponent, np.bincount(exponent, minlength=256), low, high)
    where, counts = [], []
    for start, stop in bounds:
        of_class = order[start:stop][np.flatnonzero(reader.positions(stop - start))]
        where.append(of_class)
        counts.append(of_class.size)
    changed = np.concatenate(where)
    down = reader.bits(changed.size)
    size = np.concatenate([np.empty(0, np.uint32), *(reader.numbers(count) for count in counts if count)])
    if size.size and int(size.max()) >= 1 << (kind.bits - 1):
        raise damaged("a step is longer than the scale")
    step = size.astype(kind.codes) + kind.codes.type(1)
    ordered = to_order(old[changed], kind)
    new = old.copy()
    new[changed] = from_order(np.where(down, ordered - step, ordered + step), kind)
    return new


def _class_range(counts: Index) -> tuple[int, int]:
    """The lowest and the highest exponent that have a class of their own; what lies outside joins them.

    `counts`: [256] elements by exponent.
    """
    below = np.cumsum(counts)
    spare = int(below[-1]) // _RARE_SHARE
    low = int(np.searchsorted(below, spare, side="right"))
    high = int(np.searchsorted(below, below[-1] - spare, side="left"))
    return low, max(low, high)


def _classes(
    exponent: npt.NDArray[np.uint8], counts: Index, low: int, high: int
) -> tuple[Index, list[tuple[int, int]]]:
    """Elements in order of their class, then of their place; and where each class that has any starts and stops."""
    ends = [*np.cumsum(counts)[low:high].tolist(), exponent.size]
    bounds = [(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True) if a < b]
    if len(bounds) == 1:
        return np.arange(exponent.size), bounds
    return np.argsort(np.clip(exponent, low, high), kind="stable"), bounds
