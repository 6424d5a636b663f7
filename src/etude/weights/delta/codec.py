"""The delta codec: new codes from old ones, exact for every bit pattern.

A change is coded as what it is: a small number of steps on the codes' own scale (`steps.py`). Elements are grouped by
the *old* code's exponent, which both sides hold: the chance of a change doubles with every octave down, and knowing
that is worth 36-43 % of the bytes (measured). Tensors are cut into tiles of about 32 KiB of delta (`layout.py`), each
coded by itself (`tiles.py`, and the same in native code): tiles go over all cores, and a reader may fetch only those
that it needs. A tensor without an old of its own dtype and shape goes in whole (`wholes.py`).

An object says nothing of names: it belongs to an ordered list of specs that its manifest holds, and so do the digests
that prove the result. `docs/formats/delta.md` has every field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import layout, native, wholes
from etude.weights.delta.changes import Changes, Found, Listed, narrow, of_items, rising
from etude.weights.delta.checksums import as_text
from etude.weights.delta.choices import Mode, choose
from etude.weights.delta.layout import SAME, WHOLE, Header, Kernels, Tile, table_of
from etude.weights.delta.native import NativeKernels
from etude.weights.delta.streams import damaged
from etude.weights.delta.tiles import RAW, NumpyKernels, gather, scattered
from etude.weights.tensors import DTYPES, Codes, DType, Spec, Tensor, from_items, same_bits, to_items

__all__ = ["Changes", "changes", "decode", "encode", "for_kernels"]

BATCH_ITEMS = 1 << 26
"""Items that go to the kernels at a time: of most objects all, as where a batch ends a core may wait for the others."""

BATCH_TILES = 1024
"""Tiles that go to them at a time, however small."""

_PLANES = 2
"""Mode of a tile that is no list of changes but its new items; the other is `tiles.CODED`."""

KERNELS: Kernels = native.load() or NumpyKernels()
"""What tiles are coded with here, unless a caller says otherwise: both kinds make the same bytes."""


def encode(
    new: Sequence[Tensor], old: Sequence[Tensor | None], mode: Mode = "best", *, kernels: Kernels = KERNELS
) -> bytes:
    """The bytes that turn `old` into `new`, element by element of the two lists; None: there is no old one.

    >>> old = Tensor("bf16", (4,), np.array([0x3F80, 0x3F80, 0x0000, 0x7FC1], np.uint16))
    >>> new = Tensor("bf16", (4,), np.array([0x3F80, 0x3F7F, 0x8000, 0xFFFF], np.uint16))
    >>> same_bits(decode(encode([new], [old]), [new.spec], [old])[0], new)
    True
    """
    after, before = _sides(new, old)
    plan = choose(after, before, [tensor.spec for tensor in new], kernels, mode)
    payloads = [b""] * plan.num_tiles
    olds, news = _or_empty(before), _or_empty(after)
    for kind in DTYPES.values():
        for batch in batches(plan.tiles(kind), BATCH_ITEMS):
            coded = kernels.encode(kind, [tile for _, tile in batch], olds, news)
            for (number, tile), payload in zip(batch, coded, strict=True):
                payloads[number] = shorter(payload, tile, kind, partial(gather, tile, news))
    for i, form in enumerate(plan.forms):
        if form == WHOLE:
            for number, start, stop in plan.wholes(i):
                payloads[number] = wholes.write(new[i].codes[start:stop])
    return layout.write(plan, payloads)


def decode(
    data: bytes, specs: Sequence[Spec], old: Sequence[Tensor | None], *, kernels: Kernels = KERNELS
) -> list[Tensor]:
    """The new tensors, one for each spec. Unchanged ones are the old objects themselves.

    Raises `WeightsError` for bytes no `encode` made for these specs and this old. Bytes that are well formed but
    were altered give other codes: the caller compares digests.
    """
    header, held = _open(data, specs, old)
    made = [items.copy() for items in held]
    for kind, batch, payloads in changing(header, data, BATCH_ITEMS):
        kernels.apply(kind, batch, made, made, payloads)
    tensors = []
    for i, (spec, form) in enumerate(zip(specs, header.layout.forms, strict=True)):
        known = old[i]
        if form == SAME and known is not None:
            tensors.append(known)
        else:
            codes = whole(header, data, i) if form == WHOLE else from_items(made[i], DTYPES[spec.dtype])
            tensors.append(Tensor(spec.dtype, spec.shape, codes))
    return tensors


def changes(
    data: bytes | memoryview,
    specs: Sequence[Spec],
    old: Sequence[Tensor | None],
    *,
    kernels: Kernels = KERNELS,
    in_order: bool = True,
) -> list[Changes | Tensor]:
    """For each spec what changes in the old tensor (nothing, where nothing does), or the whole new one.

    What `decode` does without making the tensors: memory in proportion to the changes. `in_order`: positions rise, as
    `Changes` promises; without it those of a matrix of long rows may not, which saves a copy. Raises `WeightsError`.
    """
    header, held = _open(data, specs, old)
    made: dict[int, Changes | Tensor] = {}
    if isinstance(kernels, NativeKernels):
        made |= _listed(header, data, held, kernels, in_order)
    found: list[list[Found]] = [[] for _ in specs]
    for kind, batch, payloads in changing(header, data, BATCH_ITEMS, lambda tile: tile.pieces[0].tensor not in made):
        _collect(batch, kernels.changes(kind, batch, held, payloads), held, found)
    for i, spec in enumerate(specs):
        if header.layout.forms[i] == WHOLE:
            made[i] = Tensor(spec.dtype, spec.shape, whole(header, data, i))
        elif i not in made:
            parts, found[i] = found[i], []  # let go of, tensor by tensor
            made[i] = of_items(parts, held[i], DTYPES[spec.dtype])
    return [made[i] for i in range(len(specs))]


def _listed(
    header: Header, data: bytes | memoryview, held: Sequence[Codes], kernels: NativeKernels, in_order: bool
) -> Iterator[tuple[int, Changes]]:
    """What changes in tensors whose items are codes that 32 bits count, with their checksums: one pass over each."""
    view, offsets, layout = memoryview(data), header.offsets, header.layout
    for kind in DTYPES.values():
        if kind.parts > 1:
            continue
        tiles = [(n, t) for n, t in layout.tiles(kind) if held[t.pieces[0].tensor].size < 1 << 32]
        payloads = [for_kernels(view[offsets[n] : offsets[n + 1]], tile, kind) for n, tile in tiles]
        found = kernels.changes_of_tensors(kind, [tile for _, tile in tiles], held, payloads)
        for tensor, positions, codes, sums in found:
            one = Changes(positions, codes, (as_text(sums[:2]), as_text(sums[2:])))
            cut = tensor in layout.grids and layout.grids[tensor].tile_cols < table_of(layout.specs[tensor])[1]
            yield tensor, rising(one) if cut and in_order else one


def _collect(batch: Sequence[Tile], listed: Iterable[Listed], held: Sequence[Codes], found: list[list[Found]]) -> None:
    """What tiles list, to the tensors that it is of."""
    for tile, (places, items) in zip(batch, listed, strict=True):
        for tensor, positions, part in scattered(tile, places, items):
            found[tensor].append((narrow(positions, held[tensor].size), part))


def _sides(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> tuple[list[Codes | None], list[Codes | None]]:
    """The items of both: no new ones where nothing changed, no old ones where there is nothing to compare with."""
    after: list[Codes | None] = []
    before: list[Codes | None] = []
    for n, o in zip(new, old, strict=True):
        known = o is not None and o.spec == n.spec
        same = known and o is not None and same_bits(n, o)
        after.append(None if same else to_items(n.codes, DTYPES[n.dtype]) if known else n.codes)
        before.append(to_items(o.codes, DTYPES[o.dtype]) if known and o is not None and not same else None)
    return after, before


def _or_empty(arrays: Iterable[Codes | None]) -> list[Codes]:
    return [np.empty(0, np.uint8) if array is None else array for array in arrays]


def batches(tiles: Iterable[tuple[int, Tile]], most: int) -> Iterator[list[tuple[int, Tile]]]:
    """Numbered tiles as they go to kernels: until they have `most` items, or are many."""
    batch: list[tuple[int, Tile]] = []
    size = 0
    for number, tile in tiles:
        batch.append((number, tile))
        size += tile.size
        if size >= most or len(batch) >= BATCH_TILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def shorter(coded: bytes, tile: Tile, kind: DType, new: Callable[[], Codes]) -> bytes:
    """A tile's coded form, or byte planes of its `new` items where that form is long and they are shorter."""
    if len(coded) * 4 < tile.size * kind.items.itemsize * 3:
        return coded
    return min(coded, bytes((_PLANES,)) + wholes.write(new()), key=len)


def for_kernels(payload: memoryview, tile: Tile, kind: DType) -> memoryview:
    """A tile's bytes as kernels take them: coded, or raw where they are planes."""
    if not payload or payload[0] != _PLANES:
        return payload
    items = np.empty(tile.size, kind.items)
    wholes.read(payload[1:], items)
    return memoryview(bytes((RAW,)) + items.astype(kind.items.newbyteorder("<"), copy=False).tobytes())


def opened(data: bytes | memoryview, specs: Sequence[Spec]) -> Header:
    """The header of a whole object. Raises `WeightsError`."""
    header = layout.read_header(data, specs)
    if len(data) != int(header.offsets[-1]):
        raise damaged(f"it has {len(data)} bytes, its header says {header.offsets[-1]}")
    return header


def _open(data: bytes | memoryview, specs: Sequence[Spec], old: Sequence[Tensor | None]) -> tuple[Header, list[Codes]]:
    """The header, checked against what is there; and the old items of tensors that the delta changes."""
    header = opened(data, specs)
    held: list[Codes | None] = []
    for form, spec, known in zip(header.layout.forms, specs, old, strict=True):
        if form != WHOLE and (known is None or known.spec != spec):
            raise damaged("a tensor refers to an old one that is not held")
        needed = known is not None and form not in (SAME, WHOLE)
        held.append(to_items(known.codes, DTYPES[spec.dtype]) if needed and known is not None else None)
    return header, _or_empty(held)


def changing(
    header: Header,
    data: bytes | memoryview,
    most: int,
    wanted: Callable[[Tile], bool] = lambda _: True,
) -> Iterator[tuple[DType, list[Tile], list[memoryview]]]:
    """The wanted tiles in which something changes, and their bytes, for the kernels, about `most` items at a time."""
    view, offsets = memoryview(data), header.offsets
    for kind in DTYPES.values():
        found = ((n, tile) for n, tile in header.layout.tiles(kind) if offsets[n] < offsets[n + 1] and wanted(tile))
        for batch in batches(found, most):
            payloads = [for_kernels(view[offsets[n] : offsets[n + 1]], tile, kind) for n, tile in batch]
            yield kind, [tile for _, tile in batch], payloads


def whole(header: Header, data: bytes | memoryview, tensor: int) -> npt.NDArray[Any]:
    """The codes of a tensor of form WHOLE. Raises `WeightsError`."""
    spec = header.layout.specs[tensor]
    codes = np.empty(spec.size, DTYPES[spec.dtype].codes)
    for number, start, stop in header.layout.wholes(tensor):
        wholes.read(memoryview(data)[header.offsets[number] : header.offsets[number + 1]], codes[start:stop])
    return codes
