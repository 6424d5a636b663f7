"""The delta codec: encodes new codes relative to old ones, exact for every bit pattern.

A change is coded as a number of ULP steps (`ulp_steps.py`). Items are grouped into classes by the exponent of the *old*
code, which both sides know: the probability of a change doubles with every lower exponent, and using that saves 36-43 %
of the bytes (measured). Tensors are cut into tiles of about 32 KiB of delta (`layout.py`). Each tile is coded
independently (`tiles.py`, and the same in native code), so tiles are processed in parallel and a reader can fetch only
the tiles that it needs. A tensor without an old tensor of the same dtype and shape is stored in full, as compressed
byte planes.

A delta object contains no names. It belongs to an ordered list of specs, which its manifest contains together with the
digests that verify the result. `docs/formats/delta.md` defines every field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.weights.delta import layout, native, streams
from etude.weights.delta.changes import Changes, Found, Listed, narrow, of_items, sort_by_position
from etude.weights.delta.checksums import as_text
from etude.weights.delta.choices import Mode, choose
from etude.weights.delta.layout import SAME, WHOLE, Header, Kernels, Tile, table_shape
from etude.weights.delta.native import NativeKernels
from etude.weights.delta.streams import damaged
from etude.weights.delta.tiles import RAW, NumpyKernels, gather, split_by_tensor
from etude.weights.tensors import DTYPES, Codes, DType, Spec, Tensor, from_items, same_bits, to_items

__all__ = ["Changes", "changes", "decode", "encode", "for_kernels", "object_spans"]

OBJECT_ELEMENTS = 1 << 26
"""Maximum number of elements per delta object (or one larger tensor). An object is the unit of fetching, and limits the
memory that encoding and decoding need."""

BATCH_ITEMS = 1 << 26
"""Number of items that are passed to the kernels at a time. Most objects fit in one batch: at the end of a batch cores
may idle."""

BATCH_TILES = 1024
"""Maximum number of tiles that are passed to the kernels at a time, even if they are small."""

_PLANES = 2
"""Mode of a tile that contains its new items as byte planes instead of a list of changes. The other modes are in
`tiles`."""

KERNELS: Kernels = native.load() or NumpyKernels()
"""The default kernels: native if available, else numpy. Both produce the same bytes."""


def object_spans(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Group tensors into delta objects of limited size. Return [start, stop) of each group of `tensors`, in order."""
    found: list[tuple[int, int]] = []
    start = size = 0
    for i, tensor in enumerate(tensors):
        if i > start and size + tensor.codes.size > OBJECT_ELEMENTS:
            found.append((start, i))
            start, size = i, 0
        size += tensor.codes.size
    return [*found, (start, len(tensors))] if tensors else []


def encode(
    new: Sequence[Tensor], old: Sequence[Tensor | None], mode: Mode = "best", *, kernels: Kernels = KERNELS
) -> bytes:
    """Encode the delta from the tensors `old` to the tensors `new` as one delta object, which has no names.

    `new[i]` and `old[i]` are one tensor before and after. If `old[i]` is None or has another dtype or shape, `new[i]`
    is stored in full. `mode`: "best", or "fast" for faster encoding to about a third more bytes. `kernels`: the inner
    loops, in Rust or numpy.

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
            for number, start, stop in plan.full_tiles(i):
                payloads[number] = streams.encode_planes(new[i].codes[start:stop])
    return layout.write(plan, payloads)


def decode(
    data: bytes, specs: Sequence[Spec], old: Sequence[Tensor | None], *, kernels: Kernels = KERNELS
) -> list[Tensor]:
    """Decode a delta object to the new tensors, one per spec. An unchanged tensor is the same object as its old one.

    `old[i]`: the old tensor of `specs[i]`; None if the object stores it in full. Raises `WeightsError` for malformed
    bytes, and for bytes that do not fit these specs and old tensors. Well-formed bytes that were altered decode to
    wrong codes: the caller must compare digests.
    """
    header, held = _open(data, specs, old)
    made = [items.copy() for items in held]
    for kind, batch, payloads in changed_tiles(header, data, BATCH_ITEMS):
        kernels.apply(kind, batch, made, made, payloads)
    tensors = []
    for i, (spec, form) in enumerate(zip(specs, header.layout.forms, strict=True)):
        known = old[i]
        if form == SAME and known is not None:
            tensors.append(known)
        else:
            codes = decode_full(header, data, i) if form == WHOLE else from_items(made[i], DTYPES[spec.dtype])
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
    """Decode a delta object. Return, per spec, its `Changes` (empty if nothing changes) or the full new tensor.

    The full new tensor is returned if the object stores it in full. Unlike `decode`, this needs memory in proportion to
    the changes. `in_order`: whether positions must ascend, as `Changes` promises. With False, the positions of a matrix
    with very long rows may be unordered, which saves a copy. Raises `WeightsError`.
    """
    header, held = _open(data, specs, old)
    made: dict[int, Changes | Tensor] = {}
    if isinstance(kernels, NativeKernels):
        made |= _native_changes(header, data, held, kernels, in_order)
    found: list[list[Found]] = [[] for _ in specs]
    for kind, batch, payloads in changed_tiles(
        header, data, BATCH_ITEMS, lambda tile: tile.pieces[0].tensor not in made
    ):
        _collect(batch, kernels.changes(kind, batch, held, payloads), held, found)
    for i, spec in enumerate(specs):
        if header.layout.forms[i] == WHOLE:
            made[i] = Tensor(spec.dtype, spec.shape, decode_full(header, data, i))
        elif i not in made:
            parts, found[i] = found[i], []  # free memory tensor by tensor
            made[i] = of_items(parts, held[i], DTYPES[spec.dtype])
    return [made[i] for i in range(len(specs))]


def _native_changes(
    header: Header, data: bytes | memoryview, held: Sequence[Codes], kernels: NativeKernels, in_order: bool
) -> Iterator[tuple[int, Changes]]:
    """Decode with the native kernels what they support: changes of tensors, with checksums, in one pass per tensor."""
    view, offsets, layout = memoryview(data), header.offsets, header.layout
    for kind in DTYPES.values():
        if kind.parts > 1:
            continue
        tiles = [(n, t) for n, t in layout.tiles(kind) if held[t.pieces[0].tensor].size < 1 << 32]
        payloads = [for_kernels(view[offsets[n] : offsets[n + 1]], tile, kind) for n, tile in tiles]
        found = kernels.changes_of_tensors(kind, [tile for _, tile in tiles], held, payloads)
        for tensor, positions, codes, sums in found:
            one = Changes(positions, codes, (as_text(sums[:2]), as_text(sums[2:])))
            cut = tensor in layout.grids and layout.grids[tensor].tile_cols < table_shape(layout.specs[tensor])[1]
            yield tensor, sort_by_position(one) if cut and in_order else one


def _collect(batch: Sequence[Tile], listed: Iterable[Listed], held: Sequence[Codes], found: list[list[Found]]) -> None:
    for tile, (places, items) in zip(batch, listed, strict=True):
        for tensor, positions, part in split_by_tensor(tile, places, items):
            found[tensor].append((narrow(positions, held[tensor].size), part))


def _sides(new: Sequence[Tensor], old: Sequence[Tensor | None]) -> tuple[list[Codes | None], list[Codes | None]]:
    """Return the new items of each tensor (None: nothing changed) and the old ones (None: nothing to compare with)."""
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
    """Group tiles (parts of tensors that are coded alone), each with its number, into batches.

    A batch has about `most` items or `BATCH_TILES` tiles at most.
    """
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
    """Return the shorter of two encodings of a tile, which is a part of a tensor that is coded alone.

    They are `coded`, the changes of the tile, and the new values of all its items as compressed byte planes. `new`
    returns these values; it is called only if `coded` has at least 3/4 of their uncompressed size."""
    if len(coded) * 4 < tile.size * kind.items.itemsize * 3:
        return coded
    return min(coded, bytes((_PLANES,)) + streams.encode_planes(new()), key=len)


def for_kernels(payload: memoryview, tile: Tile, kind: DType) -> memoryview:
    """Return the encoded bytes of a tile in a form that `Kernels` accept, with byte planes decoded to raw items."""
    if not payload or payload[0] != _PLANES:
        return payload
    items = np.empty(tile.size, kind.items)
    streams.decode_planes(payload[1:], items)
    return memoryview(bytes((RAW,)) + items.astype(kind.items.newbyteorder("<"), copy=False).tobytes())


def parse_object(data: bytes | memoryview, specs: Sequence[Spec]) -> Header:
    """Parse the header of a complete delta object. `specs`: dtype and shape of its tensors. Raises `WeightsError`."""
    header = layout.read_header(data, specs)
    if len(data) != int(header.offsets[-1]):
        raise damaged(f"it has {len(data)} bytes, its header states {header.offsets[-1]}")
    return header


def _open(data: bytes | memoryview, specs: Sequence[Spec], old: Sequence[Tensor | None]) -> tuple[Header, list[Codes]]:
    """Parse the header, and return it with the old items of the tensors that change. Raises if one is missing."""
    header = parse_object(data, specs)
    held: list[Codes | None] = []
    for form, spec, known in zip(header.layout.forms, specs, old, strict=True):
        if form != WHOLE and (known is None or known.spec != spec):
            raise damaged("a tensor refers to an old one that is not held")
        needed = known is not None and form not in (SAME, WHOLE)
        held.append(to_items(known.codes, DTYPES[spec.dtype]) if needed and known is not None else None)
    return header, _or_empty(held)


def changed_tiles(
    header: Header,
    data: bytes | memoryview,
    most: int,
    wanted: Callable[[Tile], bool] = lambda _: True,
) -> Iterator[tuple[DType, list[Tile], list[memoryview]]]:
    """Yield the tiles of a delta object in which something changes, in batches of about `most` items of one dtype.

    A tile is a part of a tensor that is coded alone. A batch has the dtype, the tiles, and the encoded bytes of each.
    `wanted` selects tiles; by default all are wanted.
    """
    view, offsets = memoryview(data), header.offsets
    for kind in DTYPES.values():
        found = ((n, tile) for n, tile in header.layout.tiles(kind) if offsets[n] < offsets[n + 1] and wanted(tile))
        for batch in batches(found, most):
            payloads = [for_kernels(view[offsets[n] : offsets[n + 1]], tile, kind) for n, tile in batch]
            yield kind, [tile for _, tile in batch], payloads


def decode_full(header: Header, data: bytes | memoryview, tensor: int) -> npt.NDArray[Any]:
    """Decode a tensor that the object stores in full, given its number, and return its codes. Raises `WeightsError`."""
    spec = header.layout.specs[tensor]
    codes = np.empty(spec.size, DTYPES[spec.dtype].codes)
    for number, start, stop in header.layout.full_tiles(tensor):
        streams.decode_planes(memoryview(data)[header.offsets[number] : header.offsets[number + 1]], codes[start:stop])
    return codes
