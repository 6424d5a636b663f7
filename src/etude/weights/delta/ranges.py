"""Decodes a part of a delta object by range reads: for example the rows that one rank of a sharded engine needs.

The caller supplies the verified header. This module fetches only the pages (runs of tiles) that contain the needed
tiles, and verifies each page by its digest in the header. The full old tensors must be available: a tile is coded by
the exponents of all of its old codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.weights.delta import streams
from etude.weights.delta.changes import Changes, Found, narrow, of_items
from etude.weights.delta.codec import KERNELS, for_kernels
from etude.weights.delta.layout import (
    SAME,
    WHOLE,
    Kernels,
    Tile,
    header_bytes,
    page_bounds,
    read_header,
    table_shape,
)
from etude.weights.delta.streams import damaged
from etude.weights.delta.tiles import split_by_tensor
from etude.weights.tensors import DTYPES, Codes, Spec, Tensor, to_items

Read = Callable[[int, int], bytes]
"""Reads bytes of the object: (offset, count) -> bytes."""


class Parts:
    """Reads the changes of some tensors, or of some rows, from one delta object without fetching all of it.

    `read(offset, count)` returns bytes of the object. `header`: its verified header. `specs`: those of its tensors; a
    tensor is named by its index in them. Raises `WeightsError` for bytes that no encoder wrote for these specs, and the
    errors of `read`.
    """

    def __init__(self, read: Read, header: bytes, specs: Sequence[Spec], *, kernels: Kernels = KERNELS) -> None:
        self._read, self._specs, self._kernels = read, specs, kernels
        if header_bytes(header) != len(header):
            raise damaged(f"a header of {header_bytes(header)} bytes where there should be one of {len(header)}")
        self._header = read_header(header, specs)
        self._pages = np.array([start for start, _ in page_bounds(self._header.offsets)], np.int64)

    def needs_old(self, tensor: int) -> frozenset[int]:
        """Return the numbers of the tensors whose old values are needed to decode the tensor with number `tensor`.

        They are that tensor and those that share its tile, the unit of coding. If the tensor is stored in full, no old
        values are needed.
        """
        form = self._header.layout.forms[tensor]
        if form in (SAME, WHOLE):
            return frozenset({tensor} if form == SAME else ())
        return frozenset({tensor, *(piece.tensor for _, tile in self._over(tensor) for piece in tile.pieces)})

    def tensors(self, wanted: Sequence[int], old: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Decode the new tensors with the numbers `wanted`, and return them by number. No byte is fetched twice.

        `old`: the old tensors, one per spec; None for tensors that are not in the result of `needs_old`.
        """
        layout = self._header.layout
        over = {i: self._over(i) for i in wanted if layout.forms[i] not in (SAME, WHOLE)}
        numbers = {number for tiles in over.values() for number, _ in tiles}
        numbers |= {n for i in wanted if layout.forms[i] == WHOLE for n, _, _ in layout.full_tiles(i)}
        payloads = self._fetch(sorted(numbers))
        return {i: self._tensor(i, old, over.get(i, []), payloads) for i in wanted}

    def _over(self, tensor: int) -> list[tuple[int, Tile]]:
        rows, cols = table_shape(self._specs[tensor])
        return list(self._header.layout.tiles_over(tensor, range(rows), range(cols)))

    def _tensor(
        self, i: int, old: Sequence[Tensor | None], over: Sequence[tuple[int, Tile]], payloads: Mapping[int, memoryview]
    ) -> Tensor:
        spec, before, form = self._specs[i], old[i], self._header.layout.forms[i]
        if form == WHOLE:
            codes = np.empty(spec.size, DTYPES[spec.dtype].codes)
            for number, first, last in self._header.layout.full_tiles(i):
                streams.decode_planes(payloads[number], codes[first:last])
            return Tensor(spec.dtype, spec.shape, codes)
        if before is None or before.spec != spec:
            raise damaged("a tensor refers to an old one that is not held")
        if form == SAME:
            return before
        found, items = self._found(i, old, over, payloads)
        changes = of_items(found, items, DTYPES[spec.dtype])
        codes = before.codes.copy()
        codes[changes.positions] = changes.codes
        return Tensor(spec.dtype, spec.shape, codes)

    def changes(
        self, tensor: int, old: Sequence[Tensor | None], *, rows: range | None = None, cols: range | None = None
    ) -> Changes:
        """Decode what changes in a range of rows and columns of one tensor. None: all of them.

        All dimensions but the last are rows. Positions are relative to the complete tensor. For a tensor that is stored
        in full, the result has every element of the part. `old`: the old tensors, one per spec; only the requested
        tensor and those that share its tile are read. Raises `WeightsError`.
        """
        spec, form = self._specs[tensor], self._header.layout.forms[tensor]
        parts, (num_rows, num_cols) = DTYPES[spec.dtype].parts, table_shape(spec)
        rows = range(num_rows) if rows is None else rows
        cols = range(num_cols // parts) if cols is None else cols
        if not (0 <= rows.start <= rows.stop <= num_rows and 0 <= cols.start <= cols.stop <= num_cols // parts):
            raise WeightsError(
                f"tensor {tensor} has no rows {rows.start} to {rows.stop} or columns {cols.start} to {cols.stop}",
                f"it is {spec.dtype} {list(spec.shape)}",
                hint="the last dimension is the columns, all others together are the rows",
            )
        if form == WHOLE:
            return self._of_whole(tensor, rows, cols)
        return self._of_delta(tensor, old, rows, range(cols.start * parts, cols.stop * parts))

    def _of_delta(self, tensor: int, old: Sequence[Tensor | None], rows: range, cols: range) -> Changes:
        layout, kind = self._header.layout, DTYPES[self._specs[tensor].dtype]
        numbered = [] if layout.forms[tensor] == SAME else list(layout.tiles_over(tensor, rows, cols))
        payloads = self._fetch([number for number, _ in numbered])
        found, held = self._found(tensor, old, numbered, payloads)
        inside: list[Found] = []
        for positions, items in found:
            row, col = np.divmod(positions, table_shape(self._specs[tensor])[1])
            keep = (row >= rows.start) & (row < rows.stop) & (col >= cols.start) & (col < cols.stop)
            inside.append((positions[keep], items[keep]))
        return of_items(inside, held, kind)

    def _found(
        self,
        tensor: int,
        old: Sequence[Tensor | None],
        over: Sequence[tuple[int, Tile]],
        payloads: Mapping[int, memoryview],
    ) -> tuple[list[Found], Codes]:
        """Return the changed items of a tensor according to its tiles, and its old items."""
        kind = DTYPES[self._specs[tensor].dtype]
        numbered = [(number, tile) for number, tile in over if number in payloads]
        tiles = [tile for _, tile in numbered]
        needed = {tensor, *(piece.tensor for tile in tiles for piece in tile.pieces)}
        held = [self._held(old, i) if i in needed else np.empty(0, kind.items) for i in range(len(self._specs))]
        given = [for_kernels(payloads[number], tile, kind) for number, tile in numbered]
        found: list[Found] = []
        for tile, (places, items) in zip(tiles, self._kernels.changes(kind, tiles, held, given), strict=True):
            found += [(positions, part) for of, positions, part in split_by_tensor(tile, places, items) if of == tensor]
        return found, held[tensor]

    def _of_whole(self, tensor: int, rows: range, cols: range) -> Changes:
        width = max(1, table_shape(self._specs[tensor])[1] // DTYPES[self._specs[tensor].dtype].parts)
        start, stop = rows.start * width, rows.stop * width
        covering = [t for t in self._header.layout.full_tiles(tensor) if t[1] < stop and t[2] > start]
        payloads = self._fetch([number for number, _, _ in covering])
        codes: npt.NDArray[np.unsignedinteger[npt.NBitBase]] = np.empty(
            covering[-1][2] - covering[0][1] if covering else 0, DTYPES[self._specs[tensor].dtype].codes
        )
        for number, first, last in covering:
            streams.decode_planes(payloads[number], codes[first - covering[0][1] : last - covering[0][1]])
        positions = (np.arange(rows.start, rows.stop)[:, None] * width + np.arange(cols.start, cols.stop)).reshape(-1)
        found = codes[positions - (covering[0][1] if covering else 0)]
        return Changes(narrow(positions, self._specs[tensor].size), found)

    def _held(self, old: Sequence[Tensor | None], tensor: int) -> Codes:
        known, spec = old[tensor], self._specs[tensor]
        if known is None or known.spec != spec:
            raise damaged("a tensor refers to an old one that is not held")
        return to_items(known.codes, DTYPES[spec.dtype])

    def _fetch(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """Return the payloads of the tiles that have any, by number. Consecutive pages are fetched in one read."""
        offsets = self._header.offsets
        wanted = [number for number in numbers if offsets[number] < offsets[number + 1]]
        page_of = np.searchsorted(self._pages, offsets[wanted], side="right") - 1
        ends = [*self._pages[1:].tolist(), int(offsets[-1])]
        pages = np.unique(page_of)
        payloads: dict[int, memoryview] = {}
        for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1) if pages.size else ():
            start, stop = int(self._pages[run[0]]), ends[run[-1]]
            data = memoryview(self._read(start, stop - start))
            if len(data) != stop - start:
                raise damaged(f"it ends before byte {stop}")
            self._header.check_pages(start, data)
            for number in (n for n, page in zip(wanted, page_of, strict=True) if run[0] <= page <= run[-1]):
                payloads[number] = data[offsets[number] - start : offsets[number + 1] - start]
        return payloads
