"""The device's kernels and numpy's make the same bytes, read the same bytes, and refuse the same bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install 'etude[gpu]')")

from etude.weights.gpu.kernels import DeviceKernels
from etude.weights.gpu.memory import Items
from etude.weights.layout import Piece, Tile
from etude.weights.tensors import DTYPES, Codes, DType, Spec, from_items
from etude.weights.tiles import NumpyKernels, gather

NUMPY = NumpyKernels()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 128  # so that a small tile has many
SIZES = (6, 128, 600)


def codes(rng: np.random.Generator, kind: DType, size: int) -> Codes:
    """Any bits, most of them of numbers near zero."""
    near = rng.standard_normal(size).astype(np.float32) * np.float32(0.02)
    bits = near.view(np.uint32) >> np.uint32(32 - kind.width)
    wild = rng.integers(0, 1 << kind.width, size, np.uint64)
    return np.where(rng.random(size) < 0.9, bits, wild).astype(kind.items)


def moved(rng: np.random.Generator, kind: DType, old: Codes, share: float) -> Codes:
    """A share of the codes changed: most by a step or two, some to anything."""
    steps = rng.choice(np.array([1, -1, 2, -3, 40], np.int64), old.size)
    new = (old.astype(np.int64) + steps) % (1 << kind.width)
    wild = rng.integers(0, 1 << kind.width, old.size, np.uint64).astype(np.int64)
    new = np.where(rng.random(old.size) < 0.02, wild, new)
    return np.where(rng.random(old.size) < share, new, old.astype(np.int64)).astype(kind.items)


def on_device(kind: DType, items: Codes) -> Items:
    held = from_items(items, kind)
    spec = Spec(kind.name, (held.size,))
    return Items.of("w", torch.from_numpy(held.view(f"i{held.itemsize}").copy()).to(DEVICE), spec)


def tiles_of(rng: np.random.Generator, kind: DType) -> list[Tile]:
    """One range, rectangles of short and of long rows, several tensors, in one class and in many."""
    high = 122 if kind.bits > 8 else 10
    shapes = [
        (Piece(0, 0, 1, 6, 6),),
        (Piece(2, 0, 1, 600, 600),),
        (Piece(2, 7, 6, 31, 100),),
        (Piece(2, 33, 2, 140, 300),),
        (Piece(1, 0, 2, 64, 64), Piece(0, 0, 1, 6, 6), Piece(2, 0, 1, 77, 600)),
    ]
    return [Tile(high, classes, pieces) for pieces in shapes for classes in (1, int(rng.integers(2, 17)))]


def pair(name: str, share: float) -> tuple[DType, list[Codes], list[Codes], list[Tile]]:
    rng = np.random.default_rng(list(f"{name}{share}".encode()))
    kind = DTYPES[name]
    old = [codes(rng, kind, size) for size in SIZES]
    return kind, old, [moved(rng, kind, part, share) for part in old], tiles_of(rng, kind)


def raw(kind: DType, tile: Tile, new: Sequence[Codes]) -> bytes:
    return bytes((2,)) + gather(tile, new).tobytes()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.03, 0.6])
def test_the_device_makes_the_bytes_of_numpy_and_reads_them_to_the_same_codes(name: str, share: float) -> None:
    kind, old, new, tiles = pair(name, share)
    kernels = DeviceKernels(BLOCK)
    before, after = ([on_device(kind, part) for part in side] for side in (old, new))
    made = kernels.encode(kind, tiles, before, after)
    assert made == NUMPY.encode(kind, tiles, old, new)
    payloads = [memoryview(p or raw(kind, tile, new)) for p, tile in zip(made, tiles, strict=True)]
    expected = NUMPY.changes(kind, tiles, old, payloads)
    for (places, items), (a, b) in zip(kernels.changes(kind, tiles, before, payloads), expected, strict=True):
        np.testing.assert_array_equal(places, a)
        np.testing.assert_array_equal(items, b)


@pytest.mark.parametrize("name", ["bf16", "f32", "f8_e4m3", "f4_e2m1x2", "f64"])
def test_live_memory_is_written_where_it_is_and_nowhere_else_and_taken_back(name: str) -> None:
    kind, old, new, tiles = pair(name, 0.2)
    kernels = DeviceKernels(BLOCK)
    for i, tile in enumerate(tiles):
        (payload,) = NUMPY.encode(kind, [tile], old, new)
        payload = raw(kind, tile, new) if i == 4 or not payload else payload
        expected = [part.copy() for part in old]
        NUMPY.apply(kind, [tile], old, expected, [memoryview(payload)])
        live = [on_device(kind, part) for part in old]
        addresses = [items.address for items in live]
        lists = kernels.lists(kind, [tile], live, [memoryview(payload)])
        undo = [kernels.read(each, live) for each in lists]
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in old]
        for each in lists:
            kernels.write(each, live)
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in expected]
        for each in undo:
            kernels.write(each, live)
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in old]
        kernels.apply(kind, [tile], live, live, [memoryview(payload)])
        assert [held.host(kind).tolist() for held in live] == [part.tolist() for part in expected]
        assert [items.address for items in live] == addresses
