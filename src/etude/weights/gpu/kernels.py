"""The inner loops of the codec (`layout.Kernels`) for device memory. They produce the bytes of the host's kernels.

The device does what needs its bandwidth: it compares, sorts by class, numbers items by prefix sums, and maps numbers
back to positions. Only the changes are copied to the host, once. The host packs them into the coded form and unpacks
that form: a few per cent of the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.weights.delta.layout import MAX_CLASSES, Counts, Tile
from etude.weights.delta.streams import Flags, Longs, Numbers, Reader, damaged
from etude.weights.delta.tiles import CODED, RAW, in_place_order, pack, read_raw, unpack
from etude.weights.gpu import blocks, programs
from etude.weights.gpu.blocks import Blocks
from etude.weights.gpu.memory import Items
from etude.weights.tensors import Codes, DType

BLOCK = 2048
"""Items per block: at most 16384, which fit in 16-bit counters; small enough for the registers of its warps."""

WARPS = 4
"""Warps per program that reads a block. `BLOCK` is the largest size at which prefix sums do not spill registers."""

CHUNK = 128
"""Changes that a program sorts at a time."""

SPREAD = 1024
"""Changes that a program scatters."""

_EXPECTED = 16  # buffers hold one change per so many items; if there are more, the scan runs again
_WORD = 32

Unpacked = tuple[Longs, Flags, Numbers]
"""The content of a coded tile: which items change, which steps go down, and their sizes."""


@dataclass(frozen=True, eq=False)
class Lists:
    """The changes of some tiles (parts of tensors), on the device.

    `splits` [tiles + 1]: where each tile's changes start. `places` [changes] int32: positions in their tile, unordered.
    `codes` [changes]: the new items, one integer each.
    """

    kind: DType
    tiles: Sequence[Tile]
    splits: Longs
    places: torch.Tensor
    codes: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Device memory that it uses, in bytes."""
        return sum(part.numel() * part.element_size() for part in (self.places, self.codes))


class DeviceKernels:
    """The inner loops of the codec for one device: `layout.Kernels`, but with `Items` instead of numpy arrays.

    Not thread-safe.

    `block`: items that one program reads, a power of two up to 16384; `warps`: warps per program.
    """

    def __init__(self, block: int = BLOCK, warps: int = WARPS) -> None:
        self._block, self._warps = block, warps

    def sample(self, old: Items, new: Items, kind: DType, stride: int) -> tuple[Counts, Counts]:
        before, after = (_sampled(items, kind, stride) for items in (old, new))
        shift, mask = _exponents(kind)
        exponent = (before >> shift) & mask
        both = torch.cat([torch.bincount(each, minlength=256) for each in (exponent, exponent[before != after])])
        counts: Counts = both.cpu().numpy()
        return counts[:256], counts[256:]

    def encode(self, kind: DType, tiles: Sequence[Tile], old: Sequence[Items], new: Sequence[Items]) -> list[bytes]:
        if not any(tile.size for tile in tiles):
            return [b""] * len(tiles)
        of_class, splits, where, steps = self.changed(kind, tiles, old, new)
        packed = []
        for tile, items, (start, stop) in zip(tiles, of_class, itertools.pairwise(splits.tolist()), strict=True):
            down, size = steps[start:stop] < 0, np.abs(steps[start:stop]).view(np.uint32)
            here = where[start:stop].astype(np.int64)
            packed.append(pack(items[: tile.classes], here, down, size) if here.size else b"")
        return packed

    def changes(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Items], payloads: Sequence[memoryview]
    ) -> list[tuple[Numbers, Codes]]:
        found: dict[int, tuple[Numbers, Codes]] = {}
        for numbers, lists in self._listed(kind, tiles, old, payloads):
            places, new = lists.places.cpu().numpy(), _unsigned(lists.codes)
            held = _unsigned(self.read(lists, old).codes)
            for number, (start, stop) in zip(numbers, itertools.pairwise(lists.splits.tolist()), strict=True):
                differs = start + np.flatnonzero(new[start:stop] != held[start:stop])
                found[number] = in_place_order(places[differs].astype(np.int64), new[differs], tiles[number].size)
        return [found[i] for i in range(len(tiles))]

    def lists(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Items], payloads: Sequence[memoryview]
    ) -> list[Lists]:
        """Decode tiles to lists of changes on the device. `payloads`: the encoded bytes of each tile.

        Raises `WeightsError` for bytes that no encoder wrote.
        """
        return [lists for _, lists in self._listed(kind, tiles, old, payloads)]

    def writer(self, lists: Lists, new: Sequence[Items]) -> Callable[[], None]:
        """Return a function that writes the new items of `lists` to their positions in the tensors `new`.

        The function does nothing else. Its writes are absolute and safe to repeat.
        """
        return _scatter(lists, new, read=False)

    def read(self, lists: Lists, old: Sequence[Items]) -> Lists:
        """Return lists like `lists`, with the items that are in memory now instead of the new ones.

        Writing the result later undoes the update.
        """
        held = Lists(lists.kind, lists.tiles, lists.splits, lists.places, torch.empty_like(lists.codes))
        _scatter(held, old, read=True)()
        return held

    def apply(
        self,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Items],
        new: Sequence[Items],
        payloads: Sequence[memoryview],
    ) -> None:
        """Decode the tiles and write the changes into `new`, which contains the old items or *is* `old`.

        No list is created on the device. All bytes are checked before the first write: if it raises `WeightsError`,
        nothing was written. This cannot be undone. An update by lists (`lists`, then `writer`) can be undone, and
        pauses the engine for a shorter time if few items change.
        """
        by_mode = _Payloads(kind, payloads)
        if kind.width < 8:  # two programs could write items of one byte
            for lists in self.lists(kind, tiles, old, payloads):
                self.writer(lists, new)()
            return
        raw = self._raw(kind, tiles, by_mode, old)
        if by_mode.coded:
            self._place(kind, [tiles[i] for i in by_mode.coded], old, new, by_mode, listed=False)
        if raw:
            self.writer(raw, new)()

    def changed(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Items], new: Sequence[Items]
    ) -> tuple[Longs, Longs, Numbers, npt.NDArray[np.int32]]:
        """Find the changed items of tiles. Return four arrays, in the form in which the host packs them.

        They are: the number of items of each class [tiles, classes]; the position at which the changes of each tile
        start [tiles + 1]; the changed items [changes]; and the signed number of ULP steps of each change [changes].
        Changed items are numbered by class, then by position.
        """
        table = blocks.cut(tiles, old, new, kind.width, self._block)
        device = table.table.device
        counts = _ints(device, table.size, 2 * MAX_CLASSES)
        starts, total = _ints(device, table.size), _ints(device, 1)
        capacity = sum(tile.size for tile in tiles) // _EXPECTED + 1
        while True:
            total.zero_()
            found, steps = _ints(device, capacity), _ints(device, capacity)
            for which, full in _launches(table):
                programs.scan[(len(which),)](
                    table.table, which, counts, starts, total, found, steps, capacity,
                    **_constants(kind), GROUPS=_groups(tiles), FULL=full, BLOCK=self._block, num_warps=self._warps,
                )  # fmt: skip
            count = int(total)
            if count <= capacity:
                break
            capacity = count
        changed = counts[:, MAX_CLASSES:].contiguous()
        items = _Numbered(table, counts[:, :MAX_CLASSES] + changed, len(tiles))
        moves = _Numbered(table, changed, len(tiles))
        lists = torch.empty((2, count), dtype=torch.int32, device=device)
        if count:
            programs.sort_out[(table.size,)](
                counts, starts, items.in_classes, moves.in_tiles, found, steps, lists[0], lists[1], CHUNK=CHUNK
            )
        where, sizes = _host(lists)
        per_tile = moves.of_tile.sum(1).cpu().numpy()
        return items.of_tile.cpu().numpy(), np.cumsum([0, *per_tile]), where.view(np.uint32), sizes

    def _listed(
        self, kind: DType, tiles: Sequence[Tile], old: Sequence[Items], payloads: Sequence[memoryview]
    ) -> list[tuple[list[int], Lists]]:
        by_mode = _Payloads(kind, payloads)
        raw = self._raw(kind, tiles, by_mode, old)
        found = [(list(by_mode.raw), raw)] if raw else []
        if by_mode.coded:
            lists = self._place(kind, [tiles[i] for i in by_mode.coded], old, old, by_mode, listed=True)
            found.append((list(by_mode.coded), lists))
        return found

    def _raw(self, kind: DType, tiles: Sequence[Tile], by_mode: _Payloads, old: Sequence[Items]) -> Lists | None:
        if not by_mode.raw:
            return None
        mine = [tiles[i] for i in by_mode.raw]
        items = [read_raw(kind, tile.size, reader) for tile, reader in zip(mine, by_mode.raw.values(), strict=True)]
        places = np.concatenate([np.arange(tile.size, dtype=np.int32) for tile in mine])
        splits = np.cumsum([0, *(tile.size for tile in mine)])
        device = old[mine[0].pieces[0].tensor].codes.device
        new = _signed(np.concatenate(items))
        return Lists(kind, mine, splits, torch.from_numpy(places).to(device), new.to(device))

    def _place(
        self,
        kind: DType,
        tiles: Sequence[Tile],
        old: Sequence[Items],
        new: Sequence[Items],
        by_mode: _Payloads,
        *,
        listed: bool,
    ) -> Lists:
        """Unpack coded tiles and find their items; write them, or list them if `listed`."""
        table = blocks.cut(tiles, old, new, kind.width, self._block)
        device = table.table.device
        counts = _ints(device, table.size, MAX_CLASSES)
        for which, full in _launches(table):
            programs.count[(len(which),)](
                table.table, which, counts, **_constants(kind), FULL=full, BLOCK=self._block, num_warps=self._warps
            )  # fmt: skip
        items = _Numbered(table, counts, len(tiles))
        of_class = items.of_tile.cpu().numpy()
        parts = [
            unpack(kind, classes[: tile.classes], reader)
            for tile, classes, reader in zip(tiles, of_class, by_mode.coded.values(), strict=True)
        ]
        words = np.cumsum([0, *(-(-tile.size // _WORD) for tile in tiles)])
        where, steps = (torch.from_numpy(part).to(device) for part in _joined(parts, words[:-1] * _WORD))
        bits = _ints(device, int(words[-1]))
        if len(where):
            programs.mark[(-(-len(where) // SPREAD),)](where, bits, len(where), CHUNK=SPREAD)
        before = torch.searchsorted(where, torch.arange(len(bits), device=device, dtype=torch.int32) * _WORD).int()
        bases = items.in_classes + (torch.from_numpy(words[:-1]).to(device) * _WORD)[table.tile].int()[:, None]
        splits = np.cumsum([0, *(len(part[0]) for part in parts)])
        places = _ints(device, len(where) if listed else 0)
        codes = torch.empty(len(places), dtype=_SIGNED[kind.items.itemsize], device=device)
        for which, full in _launches(table):
            programs.place[(len(which),)](
                table.table, which, bases, bits, before, steps, places, codes,
                **_constants(kind), GROUPS=_groups(tiles), LISTED=listed, FULL=full, BLOCK=self._block,
                    num_warps=self._warps,
            )  # fmt: skip
        return Lists(kind, tiles, splits, places, codes)


class _Payloads:
    """Tiles by their mode, with readers of the bytes after the mode."""

    def __init__(self, kind: DType, payloads: Sequence[memoryview]) -> None:
        self.coded: dict[int, Reader] = {}
        self.raw: dict[int, Reader] = {}
        for i, payload in enumerate(payloads):
            reader = Reader(payload)
            mode = reader.byte()
            if mode not in (CODED, RAW):
                raise damaged(f"a tile of mode {mode}")
            (self.coded if mode == CODED else self.raw)[i] = reader


class _Numbered:
    """Counts of items by block and class, as running sums. int32: a batch has fewer than 2^31 items."""

    def __init__(self, table: Blocks, counts: torch.Tensor, num_tiles: int) -> None:
        self.of_tile = torch.zeros(num_tiles, MAX_CLASSES, dtype=torch.int64, device=counts.device)
        self.of_tile.index_add_(0, table.tile, counts.long())
        before = counts.cumsum(0) - counts
        in_tile = before - before[table.first.clamp(max=table.size - 1)][table.tile]
        starts = self.of_tile.cumsum(1) - self.of_tile
        flat = self.of_tile.view(-1)
        starts_of_all = (flat.cumsum(0) - flat).view(-1, MAX_CLASSES)
        self.in_classes = (starts[table.tile] + in_tile).int()
        """[blocks, classes] the number of a block's first item of each class, in its tile, in order of classes."""
        self.in_tiles = (starts_of_all[table.tile] + in_tile).int()
        """The same, over all tiles."""


def _scatter(lists: Lists, arrays: Sequence[Items], *, read: bool) -> Callable[[], None]:
    """Return a function that writes or reads the items at their positions. Tables are copied to the device now."""
    table, firsts = blocks.pieces(lists.tiles, arrays)
    chunks = [
        (first, min(first + SPREAD, stop), *firsts[tile : tile + 2].tolist())
        for tile, (start, stop) in enumerate(itertools.pairwise(lists.splits.tolist()))
        for first in range(start, stop, SPREAD)
    ]
    device, width = lists.places.device, lists.kind.width
    tables = [torch.from_numpy(rows).to(device) for rows in (np.array(chunks, np.int64), table)]

    def run(_held: Sequence[Items] = arrays) -> None:  # kept alive: the table has their addresses
        if not chunks:
            return
        for half in (0, 1) if width == 4 else (0,):
            programs.scatter[(len(chunks),)](
                *tables, lists.places, lists.codes, WIDTH=width, HALF=half, READ=read, CHUNK=SPREAD
            )

    return run


_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _launches(table: Blocks) -> list[tuple[torch.Tensor, bool]]:
    return [(which, full) for which, full in ((table.full, True), (table.partial, False)) if len(which)]


def _constants(kind: DType) -> dict[str, int]:
    shift, mask = _exponents(kind)
    return {"WIDTH": kind.width, "SHIFT": shift, "EXPONENTS": mask}


def _exponents(kind: DType) -> tuple[int, int]:
    if kind.exponent_shift is None:
        return 0, 0
    return kind.exponent_shift, (1 << kind.width - 1 - kind.exponent_shift) - 1


def _groups(tiles: Sequence[Tile]) -> int:
    most = max(tile.classes for tile in tiles)
    return 0 if most == 1 else -(-most // 4)


def _ints(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def _joined(parts: Sequence[Unpacked], firsts: Longs) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return where all tiles change, each offset by its first bit, and the signed steps, as the device needs them."""
    where = [where + first for (where, _, _), first in zip(parts, firsts.tolist(), strict=True)]
    steps = [np.where(down, -size.view(np.int32), size.view(np.int32)) for _, down, size in parts]
    return np.concatenate(where).astype(np.int32), np.concatenate(steps)


def _sampled(items: Items, kind: DType, stride: int) -> torch.Tensor:
    """Return every `stride`-th block of 64 items, as int64."""
    codes = items.codes
    if stride > 1:
        codes = codes[: items.size // 64 * 64 // items.per_code].view(-1, 64 // items.per_code)[::stride].reshape(-1)
    wide = codes.long() & ((1 << min(kind.width, 32)) - 1 if items.per_code == 1 else 255)
    return torch.stack([wide & 15, wide >> 4], 1).view(-1) if items.per_code == 2 else wide


def _host(lists: torch.Tensor) -> Any:
    pinned = torch.empty(lists.shape, dtype=lists.dtype, pin_memory=lists.is_cuda)
    return pinned.copy_(lists).numpy()


def _unsigned(codes: torch.Tensor) -> Codes:
    array: Codes = codes.cpu().numpy()
    return array.view(f"u{array.itemsize}")


def _signed(codes: Codes) -> torch.Tensor:
    signed = codes if codes.itemsize == 1 else codes.view(f"i{codes.itemsize}")
    return torch.from_numpy(np.require(signed, requirements=["C", "W"]))
