"""A part of a delta by range reads: what a rank of a sharded engine fetches of an object in a store.

Given the header, which whoever fetched it has proven, it fetches the pages that hold the tiles of some rows and columns
of a tensor; each page is proven by its digest in the header. The old tensors must be at hand whole: a tile is coded by
the exponents of the old codes in all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from etude.errors import WeightsError
from etude.weights.delta import wholes
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
    table_of,
)
from etude.weights.delta.streams import damaged
from etude.weights.delta.tiles import scattered
from etude.weights.tensors import DTYPES, Codes, Spec, Tensor, to_items

Read = Callable[[int, int], bytes]
"""So many bytes of the object from an offset: (offset, count)."""


class Parts:
    """The parts of one object, whose `header` is believed: it says where everything is, and proves it.

    Raises `WeightsError` for bytes no writer wrote for these specs, and what `read` raises.
    """

    def __init__(self, read: Read, header: bytes, specs: Sequence[Spec], *, kernels: Kernels = KERNELS) -> None:
        self._read, self._specs, self._kernels = read, specs, kernels
        if header_bytes(header) != len(header):
            raise damaged(f"a header of {header_bytes(header)} bytes where there should be one of {len(header)}")
        self._header = read_header(header, specs)
        self._pages = np.array([start for start, _ in page_bounds(self._header.offsets)], np.int64)

    def needs_old(self, tensor: int) -> frozenset[int]:
        """The tensors whose old codes make a tensor's new ones: itself and those that share its tile; none where it
        goes in whole."""
        form = self._header.layout.forms[tensor]
        if form in (SAME, WHOLE):
            return frozenset({tensor} if form == SAME else ())
        return frozenset({tensor, *(piece.tensor for _, tile in self._over(tensor) for piece in tile.pieces)})

    def tensors(self, wanted: Sequence[int], old: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Some of the new tensors, by their numbers; no page is fetched twice. `old` as for `changes`."""
        layout = self._header.layout
        over = {i: self._over(i) for i in wanted if layout.forms[i] not in (SAME, WHOLE)}
        numbers = {number for tiles in over.values() for number, _ in tiles}
        numbers |= {n for i in wanted if layout.forms[i] == WHOLE for n, _, _ in layout.wholes(i)}
        payloads = self._fetch(sorted(numbers))
        return {i: self._tensor(i, old, over.get(i, []), payloads) for i in wanted}

    def _over(self, tensor: int) -> list[tuple[int, Tile]]:
        """All delta tiles of a tensor."""
        rows, cols = table_of(self._specs[tensor])
        return list(self._header.layout.tiles_over(tensor, range(rows), range(cols)))

    def _tensor(
        self, i: int, old: Sequence[Tensor | None], over: Sequence[tuple[int, Tile]], payloads: Mapping[int, memoryview]
    ) -> Tensor:
        spec, before, form = self._specs[i], old[i], self._header.layout.forms[i]
        if form == WHOLE:
            codes = np.empty(spec.size, DTYPES[spec.dtype].codes)
            for number, first, last in self._header.layout.wholes(i):
                wholes.read(payloads[number], codes[first:last])
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
        """What changes in some rows and columns of a tensor (all dimensions but the last are rows); None: in all.

        Positions are those of the whole tensor. Of a tensor that goes in whole, every element of the part. `old` is
        what the object applies to, for every spec; only the asked tensor's and those that share its tile are looked at.
        """
        spec, form = self._specs[tensor], self._header.layout.forms[tensor]
        parts, (num_rows, num_cols) = DTYPES[spec.dtype].parts, table_of(spec)
        rows = range(num_rows) if rows is None else rows
        cols = range(num_cols // parts) if cols is None else cols
        if not (0 <= rows.start <= rows.stop <= num_rows and 0 <= cols.start <= cols.stop <= num_cols // parts):
            raise WeightsError(
                f"tensor {tensor} has no rows {rows.start} to {rows.stop} or columns {cols.start} to {cols.stop}",
                f"it is {spec.dtype} {list(spec.shape)}",
                hint="rows are all dimensions but the last",
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
            row, col = np.divmod(positions, table_of(self._specs[tensor])[1])
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
        """What tiles say of a tensor's items, and its old items."""
        kind = DTYPES[self._specs[tensor].dtype]
        numbered = [(number, tile) for number, tile in over if number in payloads]
        tiles = [tile for _, tile in numbered]
        needed = {tensor, *(piece.tensor for tile in tiles for piece in tile.pieces)}
        held = [self._held(old, i) if i in needed else np.empty(0, kind.items) for i in range(len(self._specs))]
        given = [for_kernels(payloads[number], tile, kind) for number, tile in numbered]
        found: list[Found] = []
        for tile, (places, items) in zip(tiles, self._kernels.changes(kind, tiles, held, given), strict=True):
            found += [(positions, part) for of, positions, part in scattered(tile, places, items) if of == tensor]
        return found, held[tensor]

    def _of_whole(self, tensor: int, rows: range, cols: range) -> Changes:
        width = max(1, table_of(self._specs[tensor])[1] // DTYPES[self._specs[tensor].dtype].parts)
        start, stop = rows.start * width, rows.stop * width
        covering = [t for t in self._header.layout.wholes(tensor) if t[1] < stop and t[2] > start]
        payloads = self._fetch([number for number, _, _ in covering])
        codes: npt.NDArray[np.unsignedinteger[npt.NBitBase]] = np.empty(
            covering[-1][2] - covering[0][1] if covering else 0, DTYPES[self._specs[tensor].dtype].codes
        )
        for number, first, last in covering:
            wholes.read(payloads[number], codes[first - covering[0][1] : last - covering[0][1]])
        positions = (np.arange(rows.start, rows.stop)[:, None] * width + np.arange(cols.start, cols.stop)).reshape(-1)
        found = codes[positions - (covering[0][1] if covering else 0)]
        return Changes(narrow(positions, self._specs[tensor].size), found)

    def _held(self, old: Sequence[Tensor | None], tensor: int) -> Codes:
        known, spec = old[tensor], self._specs[tensor]
        if known is None or known.spec != spec:
            raise damaged("a tensor refers to an old one that is not held")
        return to_items(known.codes, DTYPES[spec.dtype])

    def _fetch(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """The bytes of those tiles that have any, by number; pages that follow each other in one read."""
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
