"""The native and the numpy kernels produce the same bytes, decode the same bytes, and refuse the same bytes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from tests.tiers import first_few

from etude.errors import WeightsError
from etude.weights.delta import native
from etude.weights.delta.changes import Changes
from etude.weights.delta.checksums import checksum
from etude.weights.delta.choices import Mode
from etude.weights.delta.codec import KERNELS, changes, encode
from etude.weights.delta.layout import MAX_CLASSES, Piece, Tile, read_header
from etude.weights.delta.native import LEVELS, NativeKernels
from etude.weights.delta.tiles import NumpyKernels
from etude.weights.tensors import DTYPES, Codes, DType, Spec, Tensor

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not() or "there")

NUMPY = NumpyKernels()
Generator = np.random.Generator


def levels() -> list[str]:
    """The instruction levels of this machine."""
    best = "" if native.why_not() else NativeKernels().level
    return list(LEVELS[: LEVELS.index(best) + 1]) if best else []


def codes(rng: Generator, kind: DType, size: int) -> Codes:
    """Arbitrary bits, most of them of numbers near zero."""
    near = rng.standard_normal(size).astype(np.float32) * np.float32(0.02)
    bits = near.view(np.uint32) >> np.uint32(32 - kind.width)
    wild = rng.integers(0, 1 << kind.width, size, np.uint64)
    return np.where(rng.random(size) < 0.9, bits, wild).astype(kind.items)


def moved(rng: Generator, kind: DType, old: Codes, share: float) -> Codes:
    """A share of the codes changed: most by a step or two, some arbitrarily."""
    size = old.size
    steps = rng.choice(np.array([1, -1, 2, -3, 40], np.int64), size)
    new = (old.astype(np.int64) + steps) % (1 << kind.width)
    wild = rng.integers(0, 1 << kind.width, size, np.uint64).astype(np.int64)
    new = np.where(rng.random(size) < 0.02, wild, new)
    return np.where(rng.random(size) < share, new, old.astype(np.int64)).astype(kind.items)


def tiles_of(rng: Generator, sizes: Sequence[int]) -> list[Tile]:
    """One-dimensional tiles, rectangles with a stride, and tiles of several pieces, in classes of any kind."""
    made = []
    for tensor, size in enumerate(sizes):
        rows = int(rng.integers(1, min(5, size) + 1))
        stride = size // rows
        start = int(rng.integers(0, stride))
        rectangle = Piece(tensor, start, rows, int(rng.integers(1, stride - start + 1)), stride)
        whole = Piece(tensor, 0, 1, size, size)
        for pieces in ((whole,), (rectangle,), (whole, Piece((tensor + 1) % len(sizes), 0, 1, 1, 1))):
            made.append(Tile(int(rng.integers(0, 256)), int(rng.integers(1, MAX_CLASSES + 1)), pieces))
            made.append(Tile(122, 1 if rng.random() < 0.3 else 16, pieces))
    return made


@functools.lru_cache(maxsize=1)
def by_numpy(name: str, share: float) -> Any:
    """Tiles, old and new items; and what numpy makes of them: their bytes, and (payloads, changes) of these and of raw
    ones. It is the same for every level, so it is made once."""
    rng, kind = np.random.default_rng(list(f"{name}{share}".encode())), DTYPES[name]
    sizes = [1, 63, 64, 65, 1000, 5000, 20_000]
    old = [codes(rng, kind, size) for size in sizes]
    new = [moved(rng, kind, part, share) for part in old]
    tiles = tiles_of(rng, sizes)
    made = NUMPY.encode(kind, tiles, old, new)
    raw = [bytes((2,)) + gathered(tile, new).tobytes() for tile in tiles]
    views = [[memoryview(p) for p in some] for some in ([p or r for p, r in zip(made, raw, strict=True)], raw)]
    return tiles, old, new, made, [(some, NUMPY.changes(kind, tiles, old, some)) for some in views]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("share", first_few([0.01, 0.6, 0.0, 0.2, 1.0], 2))
def test_both_kernels_make_the_same_bytes_and_read_them_to_the_same_codes(name: str, level: str, share: float) -> None:
    kind, kernels = DTYPES[name], NativeKernels(threads=2, level=level)
    tiles, old, new, theirs, read = by_numpy(name, share)
    assert kernels.encode(kind, tiles, old, new) == theirs
    for views, expected in read:
        for (places, items), (a, b) in zip(kernels.changes(kind, tiles, old, views), expected, strict=True):
            np.testing.assert_array_equal(places, a)
            np.testing.assert_array_equal(items, b)
        for tile, payload in zip(tiles, views, strict=True):
            live = [part.copy() for part in old]
            kernels.apply(kind, [tile], old, live, [payload])
            np.testing.assert_array_equal(gathered(tile, live), gathered(tile, new))


def gathered(tile: Tile, arrays: Sequence[Codes]) -> Codes:
    parts = [
        arrays[piece.tensor][piece.start + row * piece.stride :][: piece.cols]
        for piece in tile.pieces
        for row in range(piece.rows)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", ["bf16", "f32", "f8_e4m3", "u16"])
@pytest.mark.parametrize("stride", [1, 32])
def test_both_kernels_sample_the_same_items(name: str, level: str, stride: int) -> None:
    rng = np.random.default_rng(1)
    kind = DTYPES[name]
    for size in (1, 64, 100, 6401):
        old = codes(rng, kind, size)
        new = moved(rng, kind, old, 0.1)
        ours = NativeKernels(level=level).sample(old, new, kind, stride)
        for a, b in zip(ours, NUMPY.sample(old, new, kind, stride), strict=True):
            np.testing.assert_array_equal(a, b)


def outcome(work: Callable[[], list[tuple[npt.NDArray[np.uint32], Codes]]]) -> Any:
    """The result of a decode: lists, or that it was refused."""
    try:
        return [(places.tolist(), items.tolist()) for places, items in work()]
    except WeightsError:
        return "refused"


def mutated(rng: Generator, payload: bytes) -> bytes:
    """A few bytes changed, removed, duplicated, or truncated."""
    data = bytearray(payload)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(0, len(data) + 1))
        match int(rng.integers(0, 5)):
            case 0 | 1 if at < len(data):
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 2 if at < len(data):
                data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
            case 3:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                del data[at : at + int(rng.integers(1, 9))]
    return bytes(data)


def fuzz(level: str, count: int, compared: int) -> int:
    """Decode mutated tiles; compare both kernels on every `compared`-th one. Returns how many were refused."""
    kernels, refused = NativeKernels(threads=1, level=level), 0
    rng = np.random.default_rng(7)
    starts = []
    for name, share in (("bf16", 0.02), ("bf16", 0.7), ("f32", 1.0), ("f8_e4m3", 0.1), ("f4_e2m1x2", 0.3), ("u8", 0.1)):
        kind = DTYPES[name]
        old = codes(rng, kind, 700)
        tile = Tile(122 if kind.width >= 16 else 15, 1 if share == 0.1 else 16, (Piece(0, 0, 7, 90, 100),))
        payload = kernels.encode(kind, [tile], [old], [moved(rng, kind, old, share)])[0]
        starts.append((kind, tile, old, payload))
    for i in range(count):
        kind, tile, old, payload = starts[i % len(starts)]
        bad = [memoryview(mutated(rng, payload))]
        ours = outcome(lambda kind=kind, tile=tile, old=old, bad=bad: kernels.changes(kind, [tile], [old], bad))
        refused += ours == "refused"
        if i % compared == 0:
            assert ours == outcome(lambda kind=kind, t=tile, old=old, bad=bad: NUMPY.changes(kind, [t], [old], bad))
        live = old.copy()
        try:
            kernels.apply(kind, [tile], [old], [live], bad)
        except WeightsError:
            assert ours == "refused"
        else:
            assert ours != "refused"
    return refused


@pytest.mark.parametrize("level", levels())
def test_mutated_tiles_are_refused_or_read_the_same_by_both(level: str) -> None:
    assert 0 < fuzz(level, 3000, compared=1) < 3000


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("level", levels()[-1:])
def test_a_million_mutated_tiles_do_no_harm(level: str) -> None:
    assert 0 < fuzz(level, 1_000_000, compared=50) < 1_000_000


def test_a_request_for_memory_that_is_not_there_is_refused_before_the_kernels_see_it() -> None:
    kernels, items = NativeKernels(), np.zeros(64, np.uint16)
    for piece in (Piece(0, 1, 1, 64, 64), Piece(0, 0, 2, 32, 64), Piece(0, -1, 1, 8, 8), Piece(0, 0, 1 << 40, 1, 1)):
        with pytest.raises(ValueError, match="outside"):
            kernels.encode(DTYPES["bf16"], [Tile(120, 4, (piece,))], [items], [items])


def test_codes_are_scattered_as_numpy_does() -> None:
    rng = np.random.default_rng(0)
    rows, expected = [], []
    for dtype, size in ((np.uint8, 70_000), (np.uint16, 200_001), (np.uint32, 9), (np.uint64, 50_000), (np.uint16, 0)):
        memory = rng.integers(0, 200, size).astype(dtype)
        places = rng.permutation(size)[: size // 2].astype(np.uint32)
        new = rng.integers(0, 200, len(places)).astype(dtype)
        rows.append((memory, places, new))
        expected.append(memory.copy())
        expected[-1][places] = new
    write = NativeKernels().scatter(rows)
    write()
    write()
    assert all(np.array_equal(memory, right) for (memory, _, _), right in zip(rows, expected, strict=True))


def test_a_scatter_outside_of_its_memory_is_refused_and_writes_nothing() -> None:
    memory, codes = np.zeros(4, np.uint16), np.ones(2, np.uint16)
    for places, new in (([0, 4], codes), ([0, 1, 2], codes), ([0, 1], codes.astype(np.uint32))):
        with pytest.raises(ValueError):  # noqa: PT011
            NativeKernels().scatter([(memory, np.array(places, np.uint32), new)])
    with pytest.raises(ValueError, match="int64 places"):
        NativeKernels().scatter([(memory, np.array([0, 1]), codes)])  # type: ignore[list-item]
    assert not memory.any()


def test_kernels_accept_empty_lists_of_tiles() -> None:
    kernels, kind = NativeKernels(), DTYPES["bf16"]
    assert kernels.encode(kind, [], [], []) == []
    assert kernels.changes(kind, [], [], []) == []
    kernels.apply(kind, [], [], [], [])


def test_a_level_that_the_machine_lacks_is_an_error() -> None:
    missing = LEVELS[len(levels()) :]
    for level in missing:
        with pytest.raises(ValueError, match=level):
            NativeKernels(level=level)
    assert NativeKernels().level == levels()[-1]


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("name", ["bf16", "f32", "f8_e4m3", "u16"])
def test_lists_of_whole_tensors_come_with_the_checksums_before_and_after(name: str, level: str) -> None:
    """Complete rows and rows cut by tiles, small tensors that share a tile, and a tensor whose second half does not
    change."""
    rng, kind = np.random.default_rng(4), DTYPES[name]
    specs = [Spec(name, shape) for shape in ((9, 70_001), (900_000,), (50,), (7, 3), (0,), (400, 9), (3,))]
    old = [Tensor(spec.dtype, spec.shape, codes(rng, kind, spec.size)) for spec in specs]
    new = [Tensor(one.dtype, one.shape, moved(rng, kind, one.codes, 0.3)) for one in old]
    new[1] = Tensor(name, specs[1].shape, np.concatenate([new[1].codes[:450_000], old[1].codes[450_000:]]))
    new[-1] = old[-1]
    for mode in get_args(Mode):
        data = encode(new, old, mode)
        header = read_header(data, specs)
        cut, row = header.layout.grids[0], header.layout.grids[1]
        assert cut.tile_cols < 70_001
        assert row.tile_cols < 900_000
        assert (np.diff(header.offsets) == 0).any(), "a tile in which nothing changes"
        assert any(len(tile.pieces) > 1 for _, tile in header.layout.tiles(kind))
        for threads in (1, 3):
            kernels = NativeKernels(threads, level)
            found = changes(data, specs, old, kernels=kernels)
            unsorted = changes(data, specs, old, kernels=kernels, in_order=False)
            for before, after, one, other in zip(old, new, found, unsorted, strict=True):
                assert isinstance(one, Changes)
                assert isinstance(other, Changes)
                where = np.flatnonzero(before.codes != after.codes)
                np.testing.assert_array_equal(one.positions, where)
                np.testing.assert_array_equal(one.codes, after.codes[where])
                expected = checksum(before.codes), checksum(after.codes)
                assert (one.checksums or expected) == (other.checksums or expected) == expected
                assert (one.checksums is None) == (after is before or not after.codes.size)
                made = before.codes.copy()
                made[other.positions] = other.codes
                np.testing.assert_array_equal(made, after.codes)


@pytest.mark.parametrize("offset", [1, 2, 6])
def test_memory_that_starts_anywhere_is_listed_and_summed_alike(offset: int) -> None:
    rng, kind = np.random.default_rng(6), DTYPES["bf16"]
    room = np.zeros(2 * 30_000 + 64, np.uint8)
    start = -room.ctypes.data % 64 + 2 * offset
    live = room[start : start + 2 * 30_000].view(np.uint16)
    live[:] = codes(rng, kind, live.size)
    old = Tensor("bf16", (30_000,), live)
    new = Tensor("bf16", (30_000,), moved(rng, kind, live, 0.02))
    (found,) = changes(encode([new], [old]), [new.spec], [old])
    assert isinstance(found, Changes)
    assert found.checksums == (checksum(live.copy()), checksum(new.codes))
    np.testing.assert_array_equal(found.positions, np.flatnonzero(live != new.codes))


def test_the_number_of_threads_holds_for_the_kernels_in_use_and_can_be_set_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_threads", 0)
    kernels, own = native.load(), NativeKernels(threads=2)
    assert kernels is not None
    assert kernels is native.load() is KERNELS
    for threads in (3, 1):
        native.set_threads(threads)
        assert (kernels.threads, own.threads) == (threads, 2)
    native.set_threads(0)
    assert kernels.threads == len(os.sched_getaffinity(0))
